"""Pack a state into bytes and unpack it bit for bit, so that a replay can be killed at any time and resumed.

`perception.snapshot` uses the same body for the snapshots of a live node.

Format: MAGIC, SHA-256 of the rest [32], size of the body as uint64 (little-endian), the body in a zstd frame. The body
is safetensors. Its tensor `plain`, uint8, is the state in msgpack. In the state, a msgpack extension with key and
strides stands for each tensor. The strides are kept because the rounding of kernels may depend on the memory layout.
Dimensions are stored from the outermost inward.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ..errors import ReplayError, WireError
from ..schema.state import State
from ..types import Buffer
from ..wire.codec import Limits, compress, decompress, make_item_counter, require_complete, unpack

MAGIC = b"SAM3NST4"
"""First bytes of a checkpoint; the last is the version of the layout."""
PLAIN = "plain"
"""Name of the tensor that holds everything else, as msgpack."""
TENSOR = 1
"""Number of msgpack's extension type that stands for a tensor."""
_DIGEST = hashlib.sha256().digest_size
"""Bytes of a digest."""
_SIZE = struct.Struct("<Q")
FREE_BYTES = 32 << 20
"""Bytes that a checkpoint may unpack to, whatever its own size. More would let a small file take much memory."""
MAX_RATIO = 100
"""Bytes that each byte of a larger checkpoint may unpack to. States shrink to about half, because features are
noise; zstd itself would allow a ratio of 32768."""
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names of dtypes in safetensors."""
MAX_STATE_ITEMS = 1 << 22
"""Items of all lists and maps of a state. An empty map takes one byte, and 64 times that in memory."""
MAX_STRIDES_BYTES = 1024
"""Bytes of the key and the strides of a tensor."""
MALFORMED = (
    WireError,
    SafetensorError,
    msgpack.UnpackException,
    ValueError,
    LookupError,
    TypeError,
    RuntimeError,
    struct.error,
)
"""Errors that `unpack_tensors` raises for bytes that `pack_tensors` did not make."""


def pack_state(state: State) -> bytes:
    """Pack a state into bytes; TypeError if it holds anything but plain values and tensors."""
    body = pack_tensors(state)
    content = _SIZE.pack(len(body)) + compress(body)
    return MAGIC + hashlib.sha256(content).digest() + content


def pack_tensors(state: State) -> bytes:
    """Pack a state as safetensors; TypeError if it holds anything but plain values and tensors."""
    return b"".join(list_parts(state))


def list_parts(state: State) -> list[Buffer]:
    """Return the bytes of `pack_tensors` in parts, for a thread that must not stop others.

    safetensors' own `save` holds the interpreter's lock while it copies all tensors.
    """
    tensors: dict[str, Tensor] = {}

    def replace_tensor(value: object) -> msgpack.ExtType:
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        if not isinstance(value, Tensor):
            raise TypeError(f"a state holds plain values and tensors, found {type(value).__name__}")
        key = str(len(tensors))
        # a view of a larger tensor must not bring all of its memory along
        dense = value.clone()
        # in this order the values are contiguous, so that they need no further copy
        tensors[key] = dense.permute(_outermost_first(dense.stride()))
        return msgpack.ExtType(TENSOR, msgpack.packb([key, dense.stride()]))

    packed = msgpack.packb(state, default=replace_tensor)
    # a bytearray, because torch warns of memory that cannot be written
    tensors[PLAIN] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    return _serialize(tensors)


def _serialize(tensors: Mapping[str, Tensor]) -> list[Buffer]:
    """Return a safetensors file in parts: the size of the header, the header, and the values of each tensor."""
    header: dict[str, Any] = {}
    parts = list[Buffer]()
    end = 0
    # the largest items first, so that all values are aligned
    for key in sorted(tensors, key=lambda key: (-tensors[key].itemsize, key)):
        tensor = tensors[key].contiguous()
        flat = tensor.reshape(-1)
        if flat.stride(0) != 1:  # of a single value, the stride may be any
            flat = torch.empty(flat.shape, dtype=flat.dtype).copy_(flat)
        if tensor.dtype not in DTYPES:
            raise TypeError(f"a state holds tensors of {', '.join(DTYPES.values())}, found {tensor.dtype}")
        begin = end
        end = end + tensor.nbytes
        location = {"shape": list(tensor.shape), "data_offsets": [begin, end]}
        header[key] = {"dtype": DTYPES[tensor.dtype], **location}
        parts.append(flat.view(torch.uint8).numpy().data)
    text = json.dumps(header).encode()
    # the values begin at a multiple of 8 bytes, so that they are aligned
    text += b" " * (-len(text) % _SIZE.size)
    return [_SIZE.pack(len(text)), text, *parts]


def unpack_state(data: bytes) -> State:
    """Unpack what `pack_state` packed, with equal tensor values, dtypes and layouts; ReplayError for other bytes."""
    magic = data[: len(MAGIC)]
    digest = data[len(MAGIC) :][:_DIGEST]
    content = data[len(MAGIC) + _DIGEST :]
    if magic != MAGIC:
        raise ReplayError(
            f"expected a checkpoint, which begins with {MAGIC!r}, found {magic!r}; start the replay again"
        )
    # before anything is unpacked: damaged bytes may look like any content
    if hashlib.sha256(content).digest() != digest:
        raise ReplayError(
            f"expected a complete checkpoint, found one of {len(data)} bytes that is damaged or truncated; resume from "
            "an earlier one, or start the replay again"
        )
    try:
        (size,) = _SIZE.unpack_from(content)
        # the size is what the file declares: a digest says nothing of who has made it
        if size > max(FREE_BYTES, MAX_RATIO * len(content)):
            raise ValueError(
                f"{size} bytes packed in {len(content)}; resume from an earlier one, or start again"
            )
        return unpack_tensors(decompress(memoryview(content)[_SIZE.size :], size, "checkpoint"))
    except MALFORMED as error:
        raise ReplayError(f"expected a checkpoint of this version, found: {error}") from error


def unpack_tensors(body: bytes) -> State:
    """Unpack what `pack_tensors` packed; one of MALFORMED for other bytes."""
    tensors = load(body)

    def restore_tensor(code: int, data: bytes) -> Tensor:
        key, strides = unpack(data, what="tensor", limits=Limits(total_bytes=MAX_STRIDES_BYTES))
        order = _outermost_first(strides)
        # each tensor is used once, and takes the memory of its values: the state is no larger than the body
        packed = tensors.pop(key).permute(sorted(range(len(order)), key=order.__getitem__))
        # strides that were made up could ask for any amount of memory
        last = sum((size - 1) * stride for size, stride in zip(packed.shape, strides, strict=True))
        if packed.numel() and last >= packed.numel():
            raise ValueError(f"expected strides of a dense tensor {list(packed.shape)}, found {strides}")
        return torch.empty_strided(packed.shape, strides, dtype=packed.dtype).copy_(packed)

    # keys may be ids, or a camera and an id: tuples, because lists cannot be keys
    plain = tensors.pop(PLAIN).numpy().tobytes()
    require_complete(plain, len(plain))
    count = make_item_counter("state", MAX_STATE_ITEMS)
    state: State = msgpack.unpackb(
        plain,
        ext_hook=restore_tensor,
        list_hook=count,
        object_hook=count,
        strict_map_key=False,
        use_list=False,
    )
    return state


def _outermost_first(strides: Sequence[int]) -> list[int]:
    return sorted(range(len(strides)), key=lambda dimension: -strides[dimension])
