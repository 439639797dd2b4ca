"""The nano detector: its shape, its initial weights, the word vectors learnt with it, and its export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from sam3_node.detection.load import VOCABULARY
from sam3_node.detection.vocabulary import Vocabulary
from sam3_node.errors import ModelError
from sam3_node.models.yolo.network import (
    SCALES,
    WEIGHTS,
    Predictions,
    YoloWorld,
    YoloWorldConfig,
    load_yolo_world,
    save_yolo_world,
)
from tools.train_nano.export import read_checkpoint

from .words import Words, WordVectors, recover_words, vocabulary

# of similarities at the start: the logarithm of their scale, and the logit of an unlikely one
SCALE, RARE = 0.5, -6.0
MAX_BYTES = 10_000_000


class LearntDetector(nn.Module):
    """A YoloWorld and the vectors of its words."""

    def __init__(self, words: Words, config: YoloWorldConfig = SCALES["nano"]) -> None:
        super().__init__()
        self.net = YoloWorld(config).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.vectors = WordVectors(len(words), config.text_channels)
        with torch.no_grad():
            for head in self.net.heads:
                head.contrast.logit_scale.fill_(SCALE)
                head.contrast.bias.fill_(RARE)

    def forward(self, images: Tensor, numbers: Tensor) -> Predictions:
        """Predict from RGB uint8 [B, H, W, 3] and words int64 [B, K, 3]."""
        pixels = images.permute(0, 3, 1, 2).float() / 255  # channels last as it comes
        predictions: Predictions = self.net.predict(pixels, self.vectors(numbers))
        return predictions


def begin_from(detector: LearntDetector, words: Words, folder: Path) -> None:
    """Take the weights that were exported to a folder, and the words that its vocabulary was made of."""
    detector.net.load_state_dict(load_yolo_world(folder, dtype="float32").state_dict())
    recover_words(words, Vocabulary.load(folder / VOCABULARY), detector.vectors)


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
    """Move weights and words by a share of the way to another detector's."""
    for own, theirs in zip(detector.state_dict().values(), other.state_dict().values(), strict=True):
        if own.is_floating_point():
            own.lerp_(theirs, share)
