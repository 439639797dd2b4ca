"""Export weights for the package: the running average in float16, with the learnt vocabulary."""

from __future__ import annotations

from pathlib import Path

import torch

from sam3_node.detection.load import VOCABULARY
from sam3_node.errors import ModelError
from sam3_node.models.yolo.weights import WEIGHTS, save_yolo_world
from tools.train_nano.export import read_checkpoint

from .network import LearntDetector, begin_from
from .words import Words, vocabulary

MAX_BYTES = 10_000_000


def export(checkpoint: Path, folder: Path, start: Path | None = None) -> Path:
    """Export a training checkpoint for `load_detector("yolo-world", folder)`; return the weights' path.

    start: a folder of weights that the training began from; then the weights halfway between both are exported.
    Raises ModelError where there is no checkpoint, or a damaged one.
    """
    held = read_checkpoint(checkpoint, by="tools.train_detector")
    words = Words(held["kinds"], held["colours"])
    detector = LearntDetector(words)
    detector.load_state_dict(held["average"])
    if start is not None:
        _go_halfway(detector, words, start)
    save_yolo_world(detector.net.half(), folder)
    vocabulary(words, detector.vectors).save(folder / VOCABULARY)
    path = folder / WEIGHTS
    if path.stat().st_size > MAX_BYTES:
        raise ModelError(f"{path} holds {path.stat().st_size} bytes, expected at most {MAX_BYTES}")
    return path


@torch.no_grad()
def _go_halfway(detector: LearntDetector, words: Words, start: Path) -> None:
    """Change weights and words to the mean with those in a folder."""
    begun = LearntDetector(words)
    begin_from(begun, words, start)
    for own, other in zip(detector.state_dict().values(), begun.state_dict().values(), strict=True):
        if own.is_floating_point():
            own.lerp_(other, 0.5)
