"""The results of a replay in numbers: counts that are kept with each shard, and the summary written at the end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from ..errors import ReplayError
from ..types import MaskFrame

WITH_DEPTH, NO_3D = "with_depth", "no_3d"
"""Begins of counts: of frames with depth (then the camera), and of those without 3-D (then camera and reason)."""


def _describe_unfound(name: str, score: float, limit: float) -> str:
    """Say that nothing was found for a prompt, with the best score of its detections and the limit, and what to do."""
    if score >= limit:
        return (
            f"nothing was found for {name!r}: its best detection had the score {score:.2f}, above {limit:g}, but was "
            "not confirmed, or all slots were taken (tracker.max_objects)"
        )
    best = (
        f"its best detection had the score {score:.2f}"
        if score
        else f"no detection had the score {limit / 2:g}"
    )
    return (
        f"nothing was found for {name!r}: {best}, and {limit:g} begins an object; use another name, or lower "
        "detector.score"
    )


@dataclass(slots=True)
class ReplayCounts:
    """Counts of a replay so far, over all its runs."""

    counts: Counter[str] = field(default_factory=Counter)
    """The counts of a Player."""
    frames: Counter[str] = field(default_factory=Counter)
    """Frames with masks, by camera."""
    objects: dict[str, dict[str, str]] = field(default_factory=dict)
    """Labels, by camera and id."""
    work_s: float = 0.0
    """Time spent, without loading the model."""
    notes: list[str] = field(default_factory=list)
    """The notes of a Player."""

    def add(self, masks: MaskFrame) -> None:
        """Count one frame's masks."""
        self.frames[masks.camera] += 1
        labels = self.objects.setdefault(masks.camera, {})
        for instance in masks.instances:
            labels[str(instance.id)] = instance.label

    def describe_missing_3d(self) -> list[str]:
        """Return why frames with depth have no 3-D fields or not all of them, a line for each camera and reason."""
        lines = []
        for name, count in self.counts.items():
            kind, _, rest = name.partition(" ")
            if kind == NO_3D:
                camera, _, reason = rest.partition(" ")
                total = self.counts[f"{WITH_DEPTH} {camera}"]
                lines.append(
                    f"{camera}: no 3-D, or not in the base, on {count} of {total} frames with depth: {reason}"
                )
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as maps, numbers and text, for `from_dict`."""
        return {
            "counts": dict(self.counts),
            "frames": dict(self.frames),
            "objects": self.objects,
            "work_s": round(self.work_s, 3),
            "notes": self.notes,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the counts that `to_dict` gave; an empty map gives zero counts."""
        if not values:
            return cls()
        return cls(
            Counter(values["counts"]),
            Counter(values["frames"]),
            dict(values["objects"]),
            values["work_s"],
            list(values.get("notes", ())),
        )

    @property
    def labels(self) -> set[str]:
        """Labels of all objects."""
        return {label for labels in self.objects.values() for label in labels.values()}

    def describe_unfound(self, status: Mapping[str, Any]) -> dict[str, str]:
        """Return a line for each prompt in the status of a node or Perception that began no object, by prompt."""
        scores, limits = status.get("prompt_scores", {}), status["prompt_limits"]["scores"]
        names = [name for name in status["prompts"] if name not in self.labels]
        return {name: _describe_unfound(name, scores.get(name, 0.0), limits[name]) for name in names}


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of one recording's replay."""

    bag: str
    mode: str
    strategy: str
    model: str
    device: str
    frames: int
    """Frames that were stepped."""
    failed: int
    """Frames whose step raised an exception."""
    refused: int
    """Edits that were not possible."""
    cameras: dict[str, int]
    """Frames with masks, by camera."""
    objects: dict[str, int]
    """Number of objects, by camera."""
    seconds: float
    """Time of all runs together, without loading the model."""
    frames_per_s: float
    resumed_from: int
    """Frames that earlier runs had done when the last run began."""
    lost: str | None = None
    """Parts of the recording that could not be read."""
    notes: list[str] = field(default_factory=list)
    unfound: dict[str, str] = field(default_factory=dict)
    """Prompts that began no object, each with a line that says why."""
    stages_ms: dict[str, float] = field(default_factory=dict)
    """Mean time of each stage in the last run."""
    outputs: list[str] = field(default_factory=list)
    complete: bool = True
    """False if the replay was stopped: outputs hold the frames until then, and the same command goes on."""

    @classmethod
    def from_counts(cls, totals: ReplayCounts, **others: Any) -> Self:
        """Build a summary from counts; `others` are the fields that counts do not have."""
        frames = totals.counts["frames"]
        return cls(
            frames=frames,
            failed=totals.counts["failed"],
            refused=totals.counts["refused"],
            cameras=dict(totals.frames),
            objects={camera: len(labels) for camera, labels in totals.objects.items()},
            seconds=round(totals.work_s, 3),
            frames_per_s=round(frames / totals.work_s, 2) if totals.work_s else 0.0,
            **others,
        )

    def to_json(self) -> str:
        """Return the summary as indented JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Read the JSON of `to_json`. Raises ReplayError for anything else."""
        names = {item.name for item in fields(cls)}
        try:
            return cls(**{name: value for name, value in json.loads(text).items() if name in names})
        except (ValueError, TypeError, AttributeError) as error:
            raise ReplayError(
                f"summary.json: expected the summary of a replay, found {error}; use --again"
            ) from error

    def lines(self) -> list[str]:
        """Return the summary as lines of text."""
        objects, cameras = sum(self.objects.values()), ", ".join(self.cameras) or "none"
        lines = [
            f"{self.bag}: {self.frames} frames of {len(self.cameras)} cameras ({cameras}), {objects} objects, "
            f"{self.frames_per_s:.1f} frames/s, {self.seconds:.1f} s, {self.model} on {self.device}"
        ]
        if self.failed:
            lines.append(f"{self.failed} frames failed")
        if self.refused:
            lines.append(f"{self.refused} edits were refused")
        if self.lost:
            lines.append(f"lost: {self.lost}")
        return [*lines, *self.notes, *self.unfound.values()]
