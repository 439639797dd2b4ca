"""Attention whose values are narrower than its keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOST_SCORES = 1 << 24  # 64 MB: larger ones would leave the cache anyway


class Attention(nn.Module):
    """softmax(Q K^T / sqrt(D)) V with values narrower than keys.

    On a CPU, small ones in float32 are computed in plain steps, in a scores buffer that is kept: for narrow values
    that beats fused attention, which wants values as wide as keys. Elsewhere values are padded for the fused kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self._buffer = torch.empty(0)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """query [N, L, D], key [N, T, D], value [N, T, V <= D], mask bool [N, 1, T] or None -> [N, L, V]."""
        if self._is_plain_faster(query, key):
            return self._in_steps(query, key, value, mask)
        wide = F.pad(value, (0, key.shape[-1] - value.shape[-1]))
        attended = None if mask is None else mask[:, None]
        out = F.scaled_dot_product_attention(query[:, None], key[:, None], wide[:, None], attn_mask=attended)
        return out[:, 0, :, : value.shape[-1]]

    @staticmethod
    def _is_plain_faster(query: Tensor, key: Tensor) -> bool:
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return False
        scores = query.shape[0] * query.shape[1] * key.shape[1]
        return query.device.type == "cpu" and query.dtype == torch.float32 and scores <= MOST_SCORES

    def _in_steps(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scores = self._scores(query.shape[0], query.shape[1], key.shape[1])
        torch.bmm(query * query.shape[-1] ** -0.5, key.transpose(1, 2), out=scores)
        if mask is not None:
            scores.masked_fill_(~mask, float("-inf"))
        torch.softmax(scores, dim=-1, out=scores)
        return torch.bmm(scores, value)

    def _scores(self, *shape: int) -> Tensor:
        """A buffer of this shape, allocated anew only when it must grow."""
        size = shape[0] * shape[1] * shape[2]
        if self._buffer.numel() < size:
            with torch.inference_mode(False):
                self._buffer = torch.empty(size)
        return self._buffer[:size].view(shape)
