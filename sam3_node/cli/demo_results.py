"""Results of the demonstration: a table, a video, a contact sheet, a bag and a summary."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..bags import LabelledClip, RecordingWriter
from ..errors import OutputError
from ..types import NANOSECONDS, Image, MaskFrame
from ..visualization import VideoWriter, contact_sheet, overlay, write_image
from ..wire import pack_masks

SHEET_IMAGES, SHEET_COLUMNS = 9, 3


@dataclass(slots=True)
class DemoResults:
    """The received masks, in order, and the recording with the true masks.

    `truth_ids` maps object ids of the node to those of the recording. `prompted_at` maps the latter to the seq of their
    first prompt. `events` are pairs (seq, text).
    """

    recording: LabelledClip
    frames: list[MaskFrame]
    truth_ids: dict[int, int]
    prompted_at: dict[int, int]
    events: list[tuple[int, str]]
    status: dict[str, Any]
    ious: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def ids(self) -> list[int]:
        """Ids of all tracked objects."""
        return sorted({instance.id for masks in self.frames for instance in masks.instances})

    def score(self, masks: MaskFrame) -> None:
        """Compute the IoU with the truth of each object that is in view and was prompted on an earlier frame.

        An object without a mask scores 0.
        """
        predicted = {self.truth_ids.get(instance.id): instance.mask for instance in masks.instances}
        for truth, inside in self.recording.truth(masks.seq).items():
            if masks.seq > self.prompted_at.get(truth, masks.seq):
                mask = predicted[truth].full() if truth in predicted else np.zeros_like(inside)
                self.ious[truth].append(float((mask & inside).sum() / (mask | inside).sum()))

    def latencies_ms(self) -> npt.NDArray[np.float64]:
        """Return the time from capture to publishing of each message, in milliseconds."""
        return np.array([masks.published_ns - masks.age_origin_ns for masks in self.frames]) / 1e6

    def summary(self) -> dict[str, Any]:
        """Return the figures. Each IoU is the mean over the frames on which the object is in view."""
        p50, p99 = np.percentile(self.latencies_ms(), [50, 99])
        span_s = (self.frames[-1].published_ns - self.frames[0].published_ns) / NANOSECONDS
        per_object = {truth: float(np.mean(values)) for truth, values in self.ious.items()}
        return {
            "frames": len(self.frames),
            "frames_per_s": round((len(self.frames) - 1) / span_s, 2) if span_s > 0 else 0.0,
            "skipped": sum(masks.skipped for masks in self.frames[1:]),
            "age_p50_ms": round(float(p50), 2),
            "age_p99_ms": round(float(p99), 2),
            "ids": self.ids,
            "mean_iou": round(float(np.mean(list(per_object.values()))), 4) if per_object else None,
            "objects": [self._summarise_object(truth, per_object) for truth in sorted(self.prompted_at)],
            "events": [{"seq": seq, "what": what} for seq, what in self.events],
            "model": self.status["model"],
            "stages_p50_us": self._compute_stages_us(),
        }

    def _summarise_object(self, truth: int, ious: dict[int, float]) -> dict[str, Any]:
        """Return the figures of one object. It has several ids if it was lost and detected again."""
        ids = [object_id for object_id in self.ids if self.truth_ids.get(object_id) == truth]
        count = sum(instance.id in ids for masks in self.frames for instance in masks.instances)
        iou = round(ious[truth], 4) if truth in ious else None
        return {"ids": ids, "label": self.recording.labels[truth], "frames": count, "mean_iou": iou}

    def _compute_stages_us(self) -> dict[str, int]:
        names = dict.fromkeys(name for masks in self.frames for name in masks.stages_us)
        return {
            name: int(np.median([masks.stages_us[name] for masks in self.frames if name in masks.stages_us]))
            for name in names
        }

    def table(self) -> str:
        """Return the figures as text for the terminal."""
        figures = self.summary()
        lines = ["", f"{'id':>4}  {'label':<24} {'frames':>6}  {'mean IoU':>8}"]
        for row in figures["objects"]:
            iou = "-" if row["mean_iou"] is None else f"{row['mean_iou']:.3f}"
            ids = ",".join(map(str, row["ids"])) or "-"
            lines.append(f"{ids:>4}  {row['label']:<24} {row['frames']:>6}  {iou:>8}")
        stages = ", ".join(f"{name} {us / 1000:.1f}" for name, us in figures["stages_p50_us"].items())
        lines += [
            "",
            f"{figures['frames']} frames, {figures['frames_per_s']:.1f}/s, {figures['skipped']} skipped",
            f"capture to publish: p50 {figures['age_p50_ms']:.1f} ms, p99 {figures['age_p99_ms']:.1f} ms",
            f"stages (p50, ms): {stages}",
            f"model {figures['model']}",
        ]
        return "\n".join(lines)


def write_results(out: Path, results: DemoResults) -> None:
    """Score the masks and write overlay.mp4, contact.png, masks.mcap and summary.json to the folder `out`.

    Raises OutputError when that folder cannot be written.
    """
    frames = results.frames
    sampled = set(
        np.linspace(0, len(frames) - 1, min(SHEET_IMAGES, len(frames))).round().astype(int).tolist()
    )
    pictures: list[Image] = []
    rate = max(1.0, float(results.summary()["frames_per_s"]))
    with (
        VideoWriter(out / "overlay.mp4", rate) as video,
        RecordingWriter(out / "masks.mcap", overwrite=True) as bag,
    ):
        for number, (masks, picture) in enumerate(_draw(results)):
            video.write(picture)
            bag.write_masks(pack_masks(masks, "rle")[1], masks, masks.age_origin_ns)
            if number in sampled:
                pictures.append(picture)
    captions = [f"frame {frames[number].seq}: {_list_objects(frames[number])}" for number in sorted(sampled)]
    write_image(out / "contact.png", contact_sheet(pictures, captions, SHEET_COLUMNS))
    try:
        (out / "summary.json").write_text(json.dumps(results.summary(), indent=2) + "\n")
    except OSError as error:
        raise OutputError(f"cannot write {out / 'summary.json'}: {error.strerror}") from error


def _draw(results: DemoResults) -> Iterator[tuple[MaskFrame, Image]]:
    """Score each message, and yield it with its overlay on the recorded frame."""
    for masks in results.frames:
        results.score(masks)
        yield masks, overlay(results.recording.image(masks.seq), masks)


def _list_objects(masks: MaskFrame) -> str:
    return ", ".join(f"{instance.id} {instance.label}" for instance in masks.instances) or "no objects"
