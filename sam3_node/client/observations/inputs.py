"""Checks of the images and states that a user adds to an observation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import PolicyError
from ...types import Image


def check_images(images: npt.ArrayLike, what: str, dimensions: int = 3) -> Image:
    """Return images in RGB order, uint8 [height, width, 3], or with up to `dimensions` dimensions, as an array."""
    array = np.asarray(images)
    if array.dtype != np.uint8 or not 3 <= array.ndim <= dimensions or array.shape[-1] != 3:
        raise PolicyError(
            f"{what}: expected uint8 [height, width, 3] in RGB order, found {array.dtype} {list(array.shape)}"
        )
    return array


def check_vectors(values: npt.ArrayLike, what: str, dimensions: int = 1) -> npt.NDArray[np.float32]:
    """Return a vector, or an array of up to `dimensions` dimensions, as float32."""
    try:
        array = np.asarray(values, np.float32)
    except (TypeError, ValueError) as error:
        raise PolicyError(f"{what}: expected a vector of numbers, found {values!r:.80}") from error
    if not 1 <= array.ndim <= dimensions:
        raise PolicyError(f"{what}: expected a vector, found shape {list(array.shape)}")
    return array


def merge(given: Mapping[str, Any], added: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return both maps as one. Raises PolicyError for a key of both."""
    if twice := sorted(given.keys() & added.keys()):
        raise PolicyError(
            f"{what}: expected none of {', '.join(twice)}, which the objects have; give them another name"
        )
    return {**given, **added}
