"""Mask images that the commands read and write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import OutputError, RequestError
from ..types import Mask


def read_mask(path: Path | None) -> Mask | None:
    """Read a mask from an image file. Pixels other than 0 are inside."""
    if path is None:
        return None
    import cv2

    image = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)
    if image is None:
        raise RequestError(f"mask {path}: expected a readable image file")
    return Mask.from_full(image > 0)


def label_image(masks: Sequence[Mask]) -> Any:
    """Return uint16 [h, w] with the number of the smallest mask around each pixel, counted from 1; 0 outside."""
    import numpy as np

    labels = np.zeros(masks[0].size, np.uint16)
    for number in sorted(range(len(masks)), key=lambda number: -masks[number].area):
        labels[masks[number].full()] = number + 1
    return labels


def write_image(path: Path, image: Any) -> None:
    """Write an image as PNG. Raises OutputError."""
    import cv2

    try:
        path.write_bytes(cv2.imencode(".png", image)[1].tobytes())
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
