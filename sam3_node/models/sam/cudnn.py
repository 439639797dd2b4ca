"""cuDNN's fused attention, which takes values narrower than keys, and whether it can be used on a device."""

import functools
import logging
from typing import NamedTuple

import torch
from torch import Tensor

from .probes import PROBE_ERROR, relative_error

_log = logging.getLogger(__name__)


class Attended(NamedTuple):
    """Attention to some of the keys: out [N, L, V], and the log of the sum of exponentials, float32 [N, L, 1]."""

    out: Tensor
    log_sum: Tensor


def attend_cudnn(query: Tensor, key: Tensor, value: Tensor) -> Attended:
    """Attend with query [N, L, D] to all of key [N, T, D] and value [N, T, V <= D]."""
    out, log_sum, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query.contiguous()[:, None], key[:, None], value[:, None], None, True
    )
    return Attended(out[:, 0], log_sum[:, 0].reshape(query.shape[0], query.shape[1], 1).float())


def has_cudnn(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if cuDNN attends with narrow values on this device, and computes them and their sums rightly.

    The first call for a GPU runs a small attention; later ones know.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return _probe(device, dtype)


# compiled code takes the answer as a constant, because it may not run the probe. This is all that
# torch.compiler.assume_constant_result does, but that imports the compiler, which takes a second
has_cudnn._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
@torch.inference_mode()
def _probe(device: torch.device, dtype: torch.dtype) -> bool:
    generator = torch.Generator(device).manual_seed(0)
    query, key, value = (
        torch.randn(2, length, width, device=device, generator=generator).to(dtype)
        for length, width in ((256, 256), (640, 256), (640, 64))
    )
    try:
        attended = attend_cudnn(query, key, value)
    except RuntimeError as error:  # a GPU, a version or a width that it does not support
        _log.debug("cuDNN does not attend here: %s", str(error).splitlines()[0])
        return False
    scores = query.float() @ key.float().transpose(1, 2) * key.shape[-1] ** -0.5
    expected = scores.softmax(-1) @ value.float(), scores.logsumexp(-1, keepdim=True)
    errors = (relative_error(found, right) for found, right in zip(attended, expected, strict=True))
    return all(error < PROBE_ERROR for error in errors)
