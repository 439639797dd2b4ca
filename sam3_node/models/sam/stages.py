"""The four stages that every frame runs through, as plain functions of tensors: what an engine takes the place of.

Prompts are answered by the torch modules themselves; these are for frames on which objects are only followed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

if TYPE_CHECKING:
    from .tracker_model import Decoded, Decoder, MemoryWrite

Run = Callable[..., Any]


class Stages(NamedTuple):
    """Callables with the signatures of the modules that they replace; N objects, `h`, `w` the token grid.

    encode(pixels [1, 3, S, S]) -> the tensors of `Features`.
    read(top [1, C, h, w], memory [N, M, hw, 64], offset int64 [N, M], pointers [N, P, C], pointer_age float32 [N, P],
    valid bool [N, M + P] or None) -> [N, C, h, w], see `MemoryRead`.
    decode(top [N, C, h, w], fine, middle) -> the tensors of `Decoded`, without a prompt.
    remember(top [1, C, h, w], logits [N, 4h, 4w], presence [N]) -> [N, hw, 64] bfloat16, see `MemoryWrite`.
    """

    encode: Run
    read: Run
    decode: Run
    remember: Run


class FollowDecode(nn.Module):
    """The decoder where nothing is prompted."""

    def __init__(self, decoder: Decoder, multimask: bool) -> None:
        super().__init__()
        self.decoder, self.multimask = decoder, multimask

    def forward(self, top: Tensor, fine: Tensor, middle: Tensor) -> Decoded:
        """top [N, C, h, w] as read from the bank, fine and middle of the image."""
        sparse, dense = self.decoder.no_prompt()
        return self.decoder(top, fine, middle, sparse, dense, self.multimask)


class FollowRemember(nn.Module):
    """The memory encoder where nothing is prompted."""

    def __init__(self, write: MemoryWrite) -> None:
        super().__init__()
        self.write = write

    def forward(self, top: Tensor, logits: Tensor, presence: Tensor) -> Tensor:
        """top [1, C, h, w] of the image, logits [N, 4h, 4w], presence [N] -> memory [N, hw, 64] bfloat16."""
        return self.write(top, self.write.upsample(logits), False, presence)
