"""Tests of JPEGs with a hole in their pixels: they are refused, and no complete one is, also where it is grey."""

import cv2
import numpy as np
import pytest

from sam3_node.errors import WireError
from sam3_node.wire.images import decode_photo, read_jpeg_header
from tests.support.tables import each_row

GREY = 128
"""The value that decoders fill in."""
KINDS = {
    "4:2:0": {},
    "4:4:4": {"SAMPLING_FACTOR": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444},
    "4:2:2": {"SAMPLING_FACTOR": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422},
    "grey": {},
    "restarts": {"RST_INTERVAL": 3},
    "restarts of rows": {"RST_INTERVAL": 7},
}


def write(image: np.ndarray, kind: str, quality: int = 80) -> bytes:
    if kind == "grey":
        image = image[:, :, 0]
    flags = [
        cv2.IMWRITE_JPEG_QUALITY,
        quality,
        *(
            part
            for name, value in KINDS[kind].items()
            for part in (getattr(cv2, f"IMWRITE_JPEG_{name}"), value)
        ),
    ]
    return cv2.imencode(".jpg", image, flags)[1].tobytes()


def picture() -> np.ndarray:
    """Draw soft spots, 61 x 101 pixels: no whole number of blocks on a side."""
    spots = np.random.default_rng(0).integers(0, 256, (16, 26, 3), dtype=np.uint8)
    return cv2.resize(spots, (101, 61), interpolation=cv2.INTER_CUBIC)


def cut(data: bytes, begin: float, end: float) -> bytes:
    """Take a part of the bytes of the pixels away, as shares of them."""
    scan = read_jpeg_header(data).scan
    assert scan is not None
    first, last = (scan.begin + round(share * (scan.end - scan.begin)) for share in (begin, end))
    return data[:first] + data[last:]


@each_row("kind", KINDS)
@each_row("hole", [(0.3, 0.5), (0.1, 0.8), (0.55, 1.0), (0.0, 0.4)])
def test_a_hole_is_refused(kind: str, hole: tuple[float, float]) -> None:
    with pytest.raises(WireError, match="expected a complete JPEG"):
        decode_photo(cut(write(picture(), kind), *hole))


def test_a_part_between_restarts_that_is_short_is_refused() -> None:
    """Check damage that leaves all restart markers in their places."""
    data = write(picture(), "restarts of rows")
    third = data.index(b"\xff\xd2")
    with pytest.raises(WireError, match="expected a complete JPEG"):
        decode_photo(data[: third - 200] + data[third:])


def grey_end(*places: slice) -> np.ndarray:
    image = picture()
    image[places] = GREY
    return image


COMPLETE = {
    "a picture": picture(),
    "grey": np.full((61, 101, 3), GREY, np.uint8),
    "grey of whole blocks": np.full((64, 96, 3), GREY, np.uint8),
    "a pixel": np.full((1, 1, 3), GREY, np.uint8),
    "a grey lower half": grey_end(slice(30, None)),
    "a grey corner": grey_end(slice(40, None), slice(70, None)),
    "grey columns": grey_end(slice(None), slice(60, None)),
}


@each_row("kind", KINDS)
@each_row("name", COMPLETE)
@each_row("quality", [20, 95])
def test_a_complete_jpeg_is_decoded(kind: str, name: str, quality: int) -> None:
    assert decode_photo(write(COMPLETE[name], kind, quality)).shape == COMPLETE[name].shape
