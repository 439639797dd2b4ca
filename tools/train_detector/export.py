"""Export weights for the package: the running average in float16, with the learnt vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from sam3_node.detection.detectors import VOCABULARY
from sam3_node.errors import ModelError
from sam3_node.models.yolo.network import WEIGHTS, save_yolo_world
from tools.train_nano.export import read_checkpoint

from .network import LearntDetector, begin_from
from .words import Words, vocabulary

MAX_BYTES = 10_000_000


def export(checkpoints: Sequence[Path], folder: Path, start: Path | None = None) -> Path:
    """Export the mean of training checkpoints for `load_detector("yolo-world", folder)`; return the weights' path.

    start: a folder of weights that the training began from; then the weights halfway between it and the mean are
    exported. Raises ModelError where a checkpoint is missing, damaged, or of other words than the first.
    """
    words, detector = _read(checkpoints[0])
    for i, checkpoint in enumerate(checkpoints[1:], start=1):
        other_words, other = _read(checkpoint)
        if (other_words.kinds, other_words.colours) != (words.kinds, words.colours):
            raise ModelError(f"{checkpoint}: expected the words of {checkpoints[0]}, found others")
        _go_towards(detector, other, 1 / (i + 1))
    if start is not None:
        begun = LearntDetector(words)
        begin_from(begun, words, start)
        _go_towards(detector, begun, 0.5)
    save_yolo_world(detector.net.half(), folder)
    vocabulary(words, detector.vectors).save(folder / VOCABULARY)
    path = folder / WEIGHTS
    if path.stat().st_size > MAX_BYTES:
        raise ModelError(f"{path} holds {path.stat().st_size} bytes, expected at most {MAX_BYTES}")
    return path


def _read(checkpoint: Path) -> tuple[Words, LearntDetector]:
    """Return the words of a checkpoint, and the running average of its weights."""
    held = read_checkpoint(checkpoint, by="tools.train_detector")
    words = Words(held["kinds"], held["colours"])
    detector = LearntDetector(words)
    detector.load_state_dict(held["average"])
    return words, detector


@torch.no_grad()
def _go_towards(detector: LearntDetector, other: LearntDetector, share: float) -> None:
    """Move weights and words by a share of the way to those of another detector."""
    for own, theirs in zip(detector.state_dict().values(), other.state_dict().values(), strict=True):
        if own.is_floating_point():
            own.lerp_(theirs, share)
