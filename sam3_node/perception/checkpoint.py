"""A state as bytes, and back bit for bit: what a replay keeps so that it can be killed at any moment.

MAGIC, SHA-256 of the rest [32], size of the body as uint64 (little-endian), the body in a zstd frame. The body is
safetensors: `plain`, uint8, is the state in msgpack. Where a tensor stands in it, there is an extension of the tensor's
key and strides: kernels may round by how their operands lie in memory. Dimensions are stored from the outermost inward.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import msgpack
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ..errors import ReplayError, WireError
from ..types import State
from ..wire.zstd import compress, decompress

MAGIC = b"SAM3NST1"
PLAIN = "plain"
TENSOR = 1  # msgpack's extension type
_DIGEST = hashlib.sha256().digest_size
_SIZE = struct.Struct("<Q")


def pack_state(state: State) -> bytes:
    """The bytes of a state; TypeError where it holds what a state may not."""
    tensors: dict[str, Tensor] = {}

    def take(value: object) -> msgpack.ExtType:
        if not isinstance(value, Tensor):
            raise TypeError(f"a state holds plain values and tensors, found {type(value).__name__}")
        key, dense = str(len(tensors)), value.clone()
        tensors[key] = dense.permute(_outermost_first(dense.stride()))
        return msgpack.ExtType(TENSOR, msgpack.packb([key, dense.stride()]))

    plain = msgpack.packb(state, default=take)
    tensors[PLAIN] = torch.frombuffer(bytearray(plain), dtype=torch.uint8)
    body = save(tensors)
    content = _SIZE.pack(len(body)) + compress(body)
    return MAGIC + hashlib.sha256(content).digest() + content


def unpack_state(data: bytes) -> State:
    """The state of `pack_state`, its tensors of the same values, dtypes and layouts; ReplayError for other bytes."""
    magic, digest, content = data[: len(MAGIC)], data[len(MAGIC) :][:_DIGEST], data[len(MAGIC) + _DIGEST :]
    if magic != MAGIC:
        raise ReplayError(
            f"expected a checkpoint, which begins with {MAGIC!r}, found {magic!r}; begin the replay anew"
        )
    if hashlib.sha256(content).digest() != digest:
        raise ReplayError(
            f"expected a whole checkpoint, found one of {len(data)} bytes that is damaged or truncated; go on from an "
            "earlier one, or begin the replay anew"
        )
    try:
        (size,) = _SIZE.unpack_from(content)
        return _unpack_body(decompress(memoryview(content)[_SIZE.size :], size, "checkpoint"))
    except (
        WireError,
        SafetensorError,
        ValueError,
        LookupError,
        TypeError,
        RuntimeError,
        struct.error,
    ) as error:
        raise ReplayError(f"expected a checkpoint of this version, found: {error}") from error


def _unpack_body(body: bytes) -> State:
    tensors = load(body)

    def give(code: int, data: bytes) -> Tensor:
        key, strides = msgpack.unpackb(data)
        order = _outermost_first(strides)
        packed = tensors[key].permute(sorted(range(len(order)), key=order.__getitem__))
        return torch.empty_strided(packed.shape, strides, dtype=packed.dtype).copy_(packed)

    return msgpack.unpackb(tensors[PLAIN].numpy().tobytes(), ext_hook=give)


def _outermost_first(strides: Sequence[int]) -> list[int]:
    return sorted(range(len(strides)), key=lambda dimension: -strides[dimension])
