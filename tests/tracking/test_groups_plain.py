"""The tracker of groups beside one that keeps all frames in lists, on the same stages."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sam3_node.models.sam31 import random_model
from tools.sam31.tracking import compare_clip


class OneGroup:
    """Our stages, for one group at a time."""

    def __init__(self) -> None:
        self.model = random_model(56, 32)

    def encode(self, pixels: Tensor) -> list[Tensor]:
        return list(self.model.stages.encode(pixels))

    def decode_prompt(
        self, features: Any, points: Tensor, labels: Tensor, hint: Tensor | None, sparse: Tensor
    ) -> tuple[Tensor, ...]:
        decoded = self.model.decode_stage.candidates(features, points, labels, hint)
        # the first mask, which does not compete, is not asked for
        parts = decoded.logits, decoded.iou, decoded.pointer
        logits, iou, pointer = (torch.cat([torch.zeros_like(part[:1]), part]) for part in parts)
        return logits, iou, pointer, decoded.presence[:1]

    def decode_video(self, top: Tensor, features: Any, used: Tensor) -> tuple[Tensor, ...]:
        decoded = self.model.stages.decode(top, features.fine, features.middle, used[None])
        return tuple(part[0] for part in (decoded[0], decoded[1], decoded[2], decoded[3]))

    def remember(self, top: Tensor, logits: Tensor, presence: Tensor, prompted: Tensor) -> Tensor:
        memory: Tensor = self.model.stages.remember(top, logits[None], presence[None], prompted[None])
        return memory[0]

    def read(self, top: Tensor, memory: Tensor, offset: Tensor, pointers: Tensor, age: Tensor) -> Tensor:
        read: Tensor = self.model.stages.read(
            top, memory[None], offset[None], pointers[None], age[None], None
        )
        return read


@pytest.mark.parametrize("objects", [1, 2, 17])
def test_the_bank_gives_what_lists_of_all_frames_give(objects: int) -> None:
    """Prompts come on the first frame, live and as corrections, and an object is removed."""
    error, _ = compare_clip(OneGroup(), objects, frames=25)
    assert error < 1e-5
