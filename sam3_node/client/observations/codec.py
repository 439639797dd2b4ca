"""Messages of policy servers: bounded msgpack in which arrays are maps. Nothing is unpickled."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ...errors import PolicyError, WireError
from ...wire import Limits, pack, unpack

Array = npt.NDArray[Any]
LIMITS = Limits(
    total_bytes=512 << 20, text_bytes=1 << 20, container_items=1 << 16, total_items=1 << 18, depth=32
)
MAX_DIMENSIONS = 16
KINDS = "biufSU"
"""Kinds of dtypes that are sent: numbers, flags and text."""


def pack_arrays(value: object, encode: Callable[[Array], Mapping[Any, Any]]) -> bytes:
    """Pack a value of maps and lists in which arrays are replaced by the maps that `encode` returns."""
    try:
        return pack(_encode(value, encode))
    except WireError as error:
        raise PolicyError(str(error)) from error


def unpack_arrays(data: bytes, what: str, decode: Callable[[dict[Any, Any]], Any]) -> Any:
    """Unpack a value within LIMITS, and replace each of its maps by what `decode` returns for it.

    Raises PolicyError that names `what` for anything else.
    """
    try:
        value = unpack(data, what=what, limits=LIMITS)
    except WireError as error:
        raise PolicyError(str(error)) from error
    try:
        return _decode(value, decode)
    except PolicyError as error:
        raise PolicyError(f"{what}: {error}") from error


def check_dtype(dtype: np.dtype[Any]) -> None:
    """Raise PolicyError for a dtype of neither numbers nor text."""
    if dtype.kind not in KINDS:
        raise PolicyError(f"expected an array of numbers or text, found dtype {dtype!s:.80}")


def read_dtype(text: object) -> np.dtype[Any]:
    """Return the dtype of a string such as "<f4". numpy would parse any text."""
    if isinstance(text, str) and re.fullmatch(rf"[<>|=]?[{KINDS}]\d{{1,9}}", text):
        with suppress(TypeError, ValueError):
            return np.dtype(text)
    raise PolicyError(f"expected the dtype of an array of numbers or text, found {text!s:.80}")


def read_array(
    data: object, dtype: np.dtype[Any], shape: tuple[int, ...], order: Literal["C", "F"] = "C"
) -> Array:
    """Return a new array of these bytes. Raises PolicyError if they are not exactly its elements."""
    check_dtype(dtype)
    if not isinstance(data, bytes) or min(shape, default=0) < 0 or len(shape) > MAX_DIMENSIONS:
        raise PolicyError(f"expected bytes of an array, found {type(data).__name__} for shape {shape!s:.80}")
    if dtype.itemsize == 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise PolicyError(f"expected bytes of {dtype!s:.80} {shape!s:.80}, found {len(data)}")
    try:
        array: Array = np.ndarray(shape, dtype, data, order=order)
    except ValueError as error:  # the other sides of an empty array may be too great
        raise PolicyError(f"expected the shape of an array, found {shape!s:.80}: {error}") from error
    return array.copy(order)


def _encode(value: object, encode: Callable[[Array], Mapping[Any, Any]]) -> object:
    if isinstance(value, np.ndarray):
        check_dtype(value.dtype)
        return encode(value)
    if isinstance(value, Mapping):
        return {key: _encode(item, encode) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item, encode) for item in value]
    return value


def _decode(value: object, decode: Callable[[dict[Any, Any]], Any]) -> Any:
    if isinstance(value, dict):
        return decode({key: _decode(item, decode) for key, item in value.items()})
    if isinstance(value, list):
        return [_decode(item, decode) for item in value]
    return value
