"""Export weights for the package: the running average in float16, with the learnt vocabulary."""

from __future__ import annotations

from pathlib import Path

from sam3_node.detection.load import VOCABULARY
from sam3_node.errors import ModelError
from sam3_node.models.yolo.weights import WEIGHTS, save_yolo_world
from tools.train_nano.export import read_checkpoint

from .network import LearntDetector
from .words import Words, vocabulary

MAX_BYTES = 10_000_000


def export(checkpoint: Path, folder: Path) -> Path:
    """Export a training checkpoint for `load_detector("yolo-world", folder)`; return the weights' path.

    Raises ModelError where there is no checkpoint, or a damaged one.
    """
    held = read_checkpoint(checkpoint, by="tools.train_detector")
    words = Words(held["kinds"], held["colours"])
    detector = LearntDetector(words)
    detector.load_state_dict(held["average"])
    save_yolo_world(detector.net.half(), folder)
    vocabulary(words, detector.vectors).save(folder / VOCABULARY)
    path = folder / WEIGHTS
    if path.stat().st_size > MAX_BYTES:
        raise ModelError(f"{path} holds {path.stat().st_size} bytes, expected at most {MAX_BYTES}")
    return path
