"""Observations for openpi, and the messages of its policy server.

The layout is that of openpi's client package (openpi_client.msgpack_numpy): one msgpack value for each binary message
of a WebSocket. An array is {b"__ndarray__": true, b"data", b"dtype", b"shape"} with keys of bytes, a scalar of numpy is
{b"__npgeneric__": true, b"data", b"dtype"}.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import PolicyError
from .codec import Array, pack_arrays, read_array, read_dtype, unpack_arrays
from .inputs import merge
from .slots import SlotObservation

MAX_SCALAR_BYTES = 1 << 20


def as_openpi(
    objects: SlotObservation, inputs: Mapping[str, Any], *, prompt: str, name: str = "observation/objects"
) -> dict[str, Any]:
    """Return an observation: your `inputs` as the policy's configuration names them, its `prompt`, and the objects.

    `inputs` are for example {"observation/image": uint8 [H, W, 3] in RGB order, "observation/state": float32 [D]}. The
    masks are the images `name`_0, `name`_1 …, uint8 [H, W, 3], three slots in the channels of each (see
    `SlotObservation.pictures`). `name`_state, float32 [N * len(FIELDS)], has the flags, ages and boxes
    (`SlotObservation.vector`). Let the configuration's transform of inputs read them; transforms ignore keys that they
    do not name. Slots of 224 x 224 with fit="pad" lie on images from openpi's `resize_with_pad`. Raises PolicyError if
    `inputs` has one of these keys.
    """
    added = {"prompt": prompt, f"{name}_state": objects.vector(), **objects.pictures(name)}
    return merge(inputs, added, "inputs")


def pack_openpi(observation: Mapping[str, Any]) -> bytes:
    """Return the message of an observation for a policy server."""
    return pack_arrays(observation, _encode_array)


def unpack_openpi(message: bytes | str) -> Any:
    """Return the value of a server's message: its metadata first, then a map with "actions", float [T, D].

    Raises PolicyError for invalid bytes, and for text, in which the server reports an error.
    """
    if isinstance(message, str):
        raise PolicyError(f"the openpi server reports: {message}")
    return unpack_arrays(message, "message of the openpi server", _decode_map)


def _encode_array(array: Array) -> dict[bytes, Any]:
    return {
        b"__ndarray__": True,
        b"data": array.tobytes(),
        b"dtype": array.dtype.str,
        b"shape": list(array.shape),
    }


def _decode_map(value: dict[Any, Any]) -> Any:
    if b"__ndarray__" not in value and b"__npgeneric__" not in value:
        return value
    dtype = read_dtype(value.get(b"dtype"))
    try:
        if b"__npgeneric__" in value:
            if dtype.itemsize > MAX_SCALAR_BYTES:
                raise PolicyError(f"expected a scalar of at most {MAX_SCALAR_BYTES} bytes, found {dtype}")
            return np.array(value[b"data"], dtype)[()]
        shape = tuple(int(side) for side in value[b"shape"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise PolicyError(f"expected an array with data, dtype and shape: {error!s:.200}") from error
    return read_array(value.get(b"data"), dtype, shape)
