"""Weights for the package: the running average of training, in float16, with the vocabulary that was learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sam3_node.detection.load import VOCABULARY
from sam3_node.errors import ModelError
from sam3_node.models.yolo_weights import WEIGHTS, save_yolo_world

from .network import LearntDetector
from .words import Words, vocabulary

MOST_BYTES = 10_000_000


def read_checkpoint(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """What training has written to `path`; raises ModelError where there is nothing, or something damaged."""
    if not path.is_file():
        raise ModelError(f"no checkpoint {path}: train first, python -m tools.train_detector")
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch raises RuntimeError, EOFError, UnpicklingError and more
        raise ModelError(
            f"expected a checkpoint of training in {path}, found it damaged ({type(error).__name__}); "
            "move it away to begin anew"
        ) from error


def export(checkpoint: Path, folder: Path) -> Path:
    """Write what `load_detector("yolo-world", folder)` takes from a checkpoint of training; returns the weights' path.

    Raises ModelError where there is no checkpoint, or a damaged one.
    """
    held = read_checkpoint(checkpoint)
    words = Words(held["kinds"], held["colours"])
    detector = LearntDetector(words)
    detector.load_state_dict(held["average"])
    save_yolo_world(detector.net.half(), folder)
    vocabulary(words, detector.vectors).save(folder / VOCABULARY)
    path = folder / WEIGHTS
    if path.stat().st_size > MOST_BYTES:
        raise ModelError(f"{path} holds {path.stat().st_size} bytes, expected at most {MOST_BYTES}")
    return path
