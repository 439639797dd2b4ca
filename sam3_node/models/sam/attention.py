"""Attention to memories: queries [N, L, D], keys [N, T, D] and values [N, T, V] that are narrower than keys.

`Attention` is the one function for eager, compiled and captured steps. What it is given decides who computes it:

- float32 on a CPU, eager: plain products, object by object. Narrow values need no padding, and scores reuse a buffer.
- Our kernels in use, all keys attended to alike, and blocks of 128 queries fill the GPU (`kernels.fills`): cuDNN, with
  values left narrow. 16 objects take 3.1 ms a layer (ours 3.8).
- Our kernels in use, anything else: our kernel (`kernels.attend`). It reads as many keys of each object as are valid,
  and splits the keys of few objects among idle processors: 1 object 0.36 ms a layer (cuDNN 0.59), 4 objects 1.05 ms
  (cuDNN 1.3).
- Half precision on a GPU without our kernels: cuDNN for each part of the keys that has no mask. 16 objects take 3.1 ms
  with values left narrow, 4.1 ms padded.
- The same where cuDNN refuses: flash attention, with values padded to the width of the keys, 9.2 ms.
- float32 on a GPU: memory-efficient attention, padded. Flash and cuDNN take half precision alone.

Milliseconds: H100, SAM 3 at 1008 pixels (L 5184, T 36352, D 256, V 64), bfloat16. Parts of the keys are merged by the
logarithms of their sums of exponentials, which is exact. cuDNN plans each new shape, for 40 to 150 ms: the memory bank
therefore gives few different lengths (`tracking.memory`).
"""

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .algebra import is_eager_on_cpu
from .cudnn import Attended, attend_cudnn, has_cudnn

MAX_SCORES = 1 << 24
"""Scores of one step of plain attention; 64 MB in float32. More rows at a time would leave the CPU's cache."""
FULL_FROM = 2
"""Objects from which full banks are read without a mask, as cuDNN needs them. Our kernel is faster for one object."""


class Regions(NamedTuple):
    """The keys that N objects attend to: of T keys, first `reduced` ones, then `full` ones, then those of pointers."""

    reduced: int
    full: int
    weight: int
    """As how many keys each of the first region counts."""
    mask: Tensor | None
    """bool [N, 1, M <= T] for the last M keys, True for those to attend to; in each region they come first. None for
    all. Each object attends to at least one."""

    @property
    def starts(self) -> list[int]:
        """First keys of the second and of the third region."""
        return [self.reduced, self.reduced + self.full]

    @property
    def are_alike(self) -> bool:
        """True if every key is attended to, with the same weight."""
        return self.mask is None and (self.weight == 1 or self.reduced == 0)

    def count_valid(self, objects: int, keys: int, device: torch.device) -> Tensor:
        """Return the number of valid keys at the beginning of each region, int32 [N, 3]."""
        valid = torch.ones(objects, keys, dtype=torch.bool, device=device)
        if self.mask is not None:
            valid[:, keys - self.mask.shape[-1] :] = self.mask[:, 0]
        parts = valid.tensor_split(self.starts, dim=1)
        return torch.stack([part.sum(dim=1, dtype=torch.int32) for part in parts], dim=1)


class Attention(nn.Module):
    """softmax(Q K^T / sqrt(D)) V for values narrower than keys; see the module."""

    def __init__(self) -> None:
        super().__init__()
        self._buffer = torch.empty(0)
        self.uses_kernels = False
        """True if our kernels project the keys and attend."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, regions: Regions, counts: Tensor | None = None
    ) -> Tensor:
        """Attend with query [N, L, D] to key [N, T, D] and value [N, T, V <= D]; return [N, L, V].

        counts: `regions.count_valid`, which our kernels need.
        """
        if query.dtype == torch.float32 and is_eager_on_cpu(query) and not self.uses_kernels:
            return self._attend_in_steps(query, key, value, regions)
        if not self.uses_kernels:
            return _attend_by_torch(query, key, value, regions)
        from .kernels import attend

        assert counts is not None
        return attend(query, key, value, counts, regions.starts, regions.weight, regions.are_alike)

    def _attend_in_steps(self, query: Tensor, key: Tensor, value: Tensor, regions: Regions) -> Tensor:
        """Attend object by object, a few queries at a time."""
        mask = regions.mask
        count = query.shape[0]
        length = query.shape[1]
        keys = key.shape[1]
        # the queries are scaled once, because there are far fewer of them than of scores
        query = query * query.shape[-1] ** -0.5
        rows = min(length, max(1, MAX_SCORES // keys))
        if self._buffer.numel() < rows * keys:  # it grows, and is reused
            # a tensor made in inference mode could not be written outside of it
            with torch.inference_mode(False):
                self._buffer = torch.empty(rows * keys)
        buffer = self._buffer[: rows * keys].view(rows, keys)
        out = query.new_empty(count, length, value.shape[-1])
        for i in range(count):
            for start in range(0, length, rows):
                some = slice(start, start + rows)
                part = query[i, some]
                scores = torch.mm(part, key[i].T, out=buffer[: len(part)])
                if regions.weight > 1:
                    # a key that counts w times adds log w to its score
                    scores[:, : regions.reduced].add_(math.log(regions.weight))
                if mask is not None:
                    scores[:, -mask.shape[-1] :].masked_fill_(~mask[i], float("-inf"))
                torch.softmax(scores, dim=-1, out=scores)
                torch.mm(scores, value[i], out=out[i, some])
        return out


def _attend_by_torch(query: Tensor, key: Tensor, value: Tensor, regions: Regions) -> Tensor:
    """Attend by torch's operations. Most need one mask for all or none, so keys with a mask are attended to apart."""
    mask = regions.mask
    weight = regions.weight
    free = key.shape[1]
    if mask is not None:
        free -= mask.shape[-1]
    # with a weight of 1, the first region is like the second
    first = 0 if weight == 1 else regions.reduced
    # a mask that reaches into the weighted keys
    if first > free:
        return _attend_biased(query, key, value, regions)
    if mask is None and not first:
        if query.device.type == "cuda" and has_cudnn(query.device, query.dtype):
            return attend_cudnn(query, key, value).out
        return _attend_widened(query, key, value, None)
    if mask is not None and not free:
        return _attend_widened(query, key, value, mask[:, None])
    parts = [_attend_fused(query, key[:, first:free], value[:, first:free])]
    if first:
        parts.append(_attend_fused(query, key[:, :first], value[:, :first], weight))
    if mask is not None:
        parts.append(_attend_masked(query, key[:, free:], value[:, free:], mask))
    return functools.reduce(_merge_attention, parts).out


def _attend_fused(query: Tensor, key: Tensor, value: Tensor, weight: int = 1) -> Attended:
    """Attend to all keys with the device's fastest operation that also gives the sums of exponentials."""
    if query.device.type == "cuda" and has_cudnn(query.device, query.dtype):
        attended = attend_cudnn(query, key, value)
        return attended._replace(log_sum=attended.log_sum + math.log(weight))
    heads = query[:, None], key[:, None], _widen(value, key)[:, None]
    if query.device.type == "cpu":
        out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads)
    elif query.dtype == torch.float32:
        out, log_sum, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(*heads, None, True)
    else:
        out, log_sum, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*heads)
    # some operations pad the sums to more rows than there are queries
    log_sum = log_sum[:, 0, : query.shape[1], None].float() + math.log(weight)
    return Attended(out[:, 0, :, : value.shape[-1]], log_sum)


def _attend_masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Attended:
    """Attend to a few keys with a mask, in plain steps."""
    scores = (query @ key.transpose(1, 2)).float() * query.shape[-1] ** -0.5
    # an object may have no valid key in this part, and -inf alone would make NaN
    scores = scores.masked_fill(~mask, torch.finfo(torch.float32).min)
    return Attended(scores.softmax(-1).to(value.dtype) @ value, scores.logsumexp(-1, keepdim=True))


def _attend_biased(query: Tensor, key: Tensor, value: Tensor, regions: Regions) -> Tensor:
    """Attend with a mask that reaches into the first, weighted keys."""
    bias = query.new_zeros(len(key), 1, key.shape[1])
    bias[..., : regions.reduced] = math.log(regions.weight)
    if regions.mask is not None:
        bias[..., -regions.mask.shape[-1] :].masked_fill_(~regions.mask, float("-inf"))
    return _attend_widened(query, key, value, bias[:, None])


def _attend_widened(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """Attend with a mask or bias [N, 1, 1, T], or none, by the operation that torch chooses; it takes wide values."""
    wide = _widen(value, key)[:, None]
    out = F.scaled_dot_product_attention(query[:, None], key[:, None], wide, attn_mask=bias)
    return out[:, 0, :, : value.shape[-1]]


def _widen(value: Tensor, key: Tensor) -> Tensor:
    """Pad values with zeros to the width of keys."""
    return F.pad(value, (0, key.shape[-1] - value.shape[-1]))


def _merge_attention(first: Attended, second: Attended) -> Attended:
    """Return the attention to the keys of both. This is exact: each part weighs as the sum of its exponentials."""
    share = torch.sigmoid(second.log_sum - first.log_sum).to(first.out.dtype)
    return Attended(torch.lerp(first.out, second.out, share), torch.logaddexp(first.log_sum, second.log_sum))
