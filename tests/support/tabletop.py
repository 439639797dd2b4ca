"""Stretches of the bundled recording, with nano on them, held against its ground truth."""

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sam3_node.bags import RecordingReader, RecordingWriter
from sam3_node.replay.job import ObjectOnFrame
from sam3_node.types import Instance, MaskFrame
from sam3_node.wire import pack_masks
from tests.support.paths import ROOT

TABLETOP = ROOT / "sam3_node/assets/tabletop.mcap"
NANO: dict[str, dict[str, Any]] = {
    "model": {"name": "nano", "device": "cpu", "threads": 1},
    "detector": {"kind": "none"},
}


def cut(path: Path, first: int, stop: int, change: Callable[[MaskFrame], MaskFrame] | None = None) -> Path:
    """Write a recording of the frames from `first` to before `stop`; with `change`, also their truth as a node's masks.

    `change` returns the masks to write.
    """
    with RecordingWriter(path) as writer:
        for frame in RecordingReader([TABLETOP]).frames():
            if first <= frame.seq < stop:
                writer.write_frame(frame, frame.capture_ns)
                if change is not None:
                    write_masks(writer, change(truth()[frame.seq]))
    return path


def write_masks(writer: RecordingWriter, masks: MaskFrame) -> None:
    """Write masks into a recording as a recorder does."""
    writer.write_masks(pack_masks(masks)[1], masks, masks.capture_ns + 1)


@cache
def truth() -> dict[int, MaskFrame]:
    """Return the ground truth by seq."""
    return {masks.seq: masks for masks in RecordingReader([TABLETOP]).truth()}


def true_instance(seq: int, label: str) -> Instance:
    """Return an object as it is on a frame."""
    return next(instance for instance in truth()[seq].instances if instance.label == label)


def shown(label: str, seq: int) -> ObjectOnFrame:
    """Return a prompt with the true box of an object on a frame."""
    x0, y0, x1, y1 = true_instance(seq, label).box
    return ObjectOnFrame(seq=seq, box=(x0, y0, x1, y1), label=label)


def ious(results: Iterable[MaskFrame], label: str) -> dict[int, float]:
    """IoU with the truth by seq, of the frames where the object is in view; 0 where it has no mask."""
    pairs = {masks.seq: (masks, true_instance(masks.seq, label)) for masks in results}
    return {seq: _iou(masks, expected) for seq, (masks, expected) in pairs.items() if expected.area}


def iou(first: np.ndarray, second: np.ndarray) -> float:
    """Return the IoU of two masks [h, w]; 0 if both are empty."""
    return float((first & second).sum() / max(1, (first | second).sum()))


def _iou(masks: MaskFrame, expected: Instance) -> float:
    """Return the IoU of `expected` and the union of all instances with its label."""
    inside = np.zeros((masks.height, masks.width), np.bool_)
    for instance in masks.instances:
        if instance.label == expected.label:
            inside |= instance.mask.full()
    return iou(inside, expected.mask.full())
