"""EXIF orientations, against OpenCV's own reader."""

import io
import struct

import cv2
import numpy as np
import pytest
from PIL import Image

from sam3_node.wire.images import decode_photo
from sam3_node.wire.orientation import find_orientation, without_orientation

ORIENTATIONS = range(1, 9)


def make_photo(orientation: int, suffix: str, order: str = "<") -> bytes:
    """A picture without symmetry, with an EXIF orientation."""
    pixels = np.zeros((40, 64, 3), np.uint8)
    pixels[4:14, 6:40] = (20, 20, 230)
    pixels[24:36, 44:60] = (20, 200, 20)
    exif = Image.Exif()
    exif[0x0112] = orientation
    exif[0x010F] = "camera"
    exif.endian = order
    file = io.BytesIO()
    Image.fromarray(pixels[..., ::-1]).save(file, suffix, exif=exif.tobytes(), quality=95)
    return file.getvalue()


def read_usually(data: bytes) -> np.ndarray:
    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)


@pytest.mark.parametrize("suffix", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_a_photo_is_turned_as_viewers_turn_it(orientation: int, suffix: str) -> None:
    data = make_photo(orientation, suffix)
    assert find_orientation(data) == orientation
    turned = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    upright = np.asarray(_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    found = decode_photo(data)[..., ::-1]
    assert found.shape == upright.shape
    assert np.abs(found.astype(int) - upright).mean() < 2
    assert (orientation == 1) == (turned.shape == upright.shape and np.array_equal(turned, upright))


def _transpose(image: Image.Image) -> Image.Image:
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("suffix", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_what_is_written_is_read_as_its_pixels_are(orientation: int, suffix: str, order: str) -> None:
    data = make_photo(orientation, suffix, order)
    written = without_orientation(data)
    assert find_orientation(written) == 1
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    assert np.array_equal(read_usually(written), pixels)
    # a strict reader checks each chunk
    Image.open(io.BytesIO(written)).verify()
    assert len(written) == len(data)


@pytest.mark.parametrize(
    "tiff",
    [
        b"II*\0",
        b"II*\0\xff\xff\xff\xff",
        b"II*\0\x08\0\0\0\xff\xff",
        b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01",
        b"II*\0\x08\0\0\0" + struct.pack("<HHHIHH", 1, 0x0112, 3, 1, 9, 0),
        b"II*\0\x08\0\0\0" + struct.pack("<HHHIHH", 1, 0x0112, 3, 2, 6, 0),
    ],
)
def test_damaged_tags_are_upright(tiff: bytes) -> None:
    data = b"\xff\xd8\xff\xe1\0\x40Exif\0\0" + tiff
    assert find_orientation(data) == 1
    assert without_orientation(data) == data
