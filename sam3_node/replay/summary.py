"""What a replay has done so far, counted, as it is kept with each part.

What came of a replay."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from ..errors import ReplayError
from ..types import MaskFrame


@dataclass(slots=True)
class Tally:
    """`counts` are those of a Player; `frames` have masks, by camera; `objects` are labels by camera and id; `work_s`
    is the time that it took, over all runs."""

    counts: Counter[str] = field(default_factory=Counter)
    frames: Counter[str] = field(default_factory=Counter)
    objects: dict[str, dict[str, str]] = field(default_factory=dict)
    work_s: float = 0.0

    def add(self, masks: MaskFrame) -> None:
        """Take note of one frame's masks."""
        self.frames[masks.camera] += 1
        known = self.objects.setdefault(masks.camera, {})
        for instance in masks.instances:
            known[str(instance.id)] = instance.label

    def plain(self) -> dict[str, Any]:
        """What `of` takes: maps, numbers and text."""
        return {
            "counts": dict(self.counts),
            "frames": dict(self.frames),
            "objects": self.objects,
            "work_s": round(self.work_s, 3),
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        """The tally that `plain` was asked of; an empty one of an empty map."""
        if not plain:
            return cls()
        return cls(
            Counter(plain["counts"]), Counter(plain["frames"]), dict(plain["objects"]), plain["work_s"]
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """One recording's. `frames` were stepped; `failed` of them raised, `refused` edits were not possible. `cameras` are
    frames with masks by camera, `objects` how many there were; `seconds` all runs together, without loading;
    `stages_ms` the mean of each stage, in the last run; `lost` what could not be read of the recording, `notes` what
    else is to be known; `resumed_from` after how many frames the last run went on."""

    bag: str
    mode: str
    strategy: str
    model: str
    device: str
    frames: int
    failed: int
    refused: int
    cameras: dict[str, int]
    objects: dict[str, int]
    seconds: float
    frames_per_s: float
    resumed_from: int
    lost: str | None = None
    notes: list[str] = field(default_factory=list)
    stages_ms: dict[str, float] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """As JSON, readable."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """That of `to_json`; ReplayError for anything else."""
        names = {one.name for one in fields(cls)}
        try:
            return cls(**{name: value for name, value in json.loads(text).items() if name in names})
        except (ValueError, TypeError, AttributeError) as error:
            raise ReplayError(
                f"summary.json: expected that of a replay, found {error}; use --again"
            ) from error

    def lines(self) -> list[str]:
        """For people."""
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
        return lines + self.notes


def of_tally(tally: Tally, **about: Any) -> Summary:
    """The summary of what was counted; `about` are its other fields."""
    frames = tally.counts["frames"]
    return Summary(
        frames=frames,
        failed=tally.counts["failed"],
        refused=tally.counts["refused"],
        cameras=dict(tally.frames),
        objects={camera: len(labels) for camera, labels in tally.objects.items()},
        seconds=round(tally.work_s, 3),
        frames_per_s=round(frames / tally.work_s, 2) if tally.work_s else 0.0,
        **about,
    )
