"""Arrays as maps {dtype, shape, data}: C order, little-endian, plain numbers only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import WireError
from .codec import MAX_INT, Fields, describe

_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
DTYPES = ("bool", *_INTEGERS, "float16", "float32", "float64")
MAX_DIMENSIONS = 8


def pack_array(array: npt.NDArray[Any]) -> dict[str, Any]:
    """The map of an array whose dtype is one of DTYPES; WireError for others (objects, strings, …)."""
    if array.dtype.name not in DTYPES or array.ndim > MAX_DIMENSIONS:
        raise WireError(
            f"array: expected one of {', '.join(DTYPES)} in at most {MAX_DIMENSIONS} dimensions, "
            f"found {array.dtype.name} in {array.ndim}"
        )
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": little.tobytes()}


def unpack_array(value: object, what: str = "array") -> npt.NDArray[Any]:
    """The array of such a map: a read-only view of its data, not a copy."""
    fields = Fields(value, what)
    dtype = np.dtype(fields.choice("dtype", DTYPES)).newbyteorder("<")
    shape = fields.integers("shape", min(len(fields.sequence("shape")), MAX_DIMENSIONS))
    data = fields.blob("data")
    if math.prod(shape) * dtype.itemsize != len(data) or max(shape, default=0) > MAX_INT // 8:
        raise WireError(f"{what}: expected the bytes of {dtype.name} {shape}, found {describe(data)}")
    array = _view(shape, dtype, data, what)
    if dtype == np.bool_ and array.size and array.view(np.uint8).max() > 1:
        raise WireError(f"{what}: expected bools to be bytes of 0 or 1, found others")
    return array


def _view(shape: tuple[int, ...], dtype: np.dtype[Any], data: bytes, what: str) -> npt.NDArray[Any]:
    try:
        return np.ndarray(shape, dtype, buffer=data)
    except (ValueError, TypeError) as error:  # empty, yet with sides whose product overflows
        raise WireError(f"{what}: expected a shape that fits in memory, found {shape}") from error
