"""The nano detector: its shape, its initial weights, and the word vectors learnt with it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from sam3_node.detection.detectors import VOCABULARY
from sam3_node.detection.vocabulary import Vocabulary
from sam3_node.models.yolo.network import SCALES, Predictions, YoloWorld, YoloWorldConfig, load_yolo_world

from .words import Words, WordVectors, recover_words

# of similarities at the start: the logarithm of their scale, and the logit of an unlikely one
SCALE, RARE = 0.5, -6.0


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
