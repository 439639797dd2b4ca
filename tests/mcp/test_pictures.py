"""Tests of pictures for agents: their size is bounded whatever the camera sends."""

import time
from typing import Any

import cv2
import numpy as np
import pytest

from sam3_node.errors import WireError
from sam3_node.mcp.pictures import MAX_PICTURE_BYTES, draw
from sam3_node.transport.mask_pairing import MaskPair
from sam3_node.types import ColourEncoding, Frame, Image, Instance, Mask, MaskFrame
from sam3_node.wire import encode_image


def pair_of(image: Image, encoding: ColourEncoding = "bgr8", **fields: Any) -> MaskPair:
    """Return a pair of an image and masks of its middle."""
    height, width = image.shape[:2]
    frame = Frame("cam0", 1, time.time_ns(), width, height, encoding, encode_image(image, encoding))
    full = np.zeros((height, width), np.bool_)
    full[height // 4 : 3 * height // 4 + 1, width // 4 : 3 * width // 4 + 1] = True
    instance = Instance(1, "cup", 0.9, "tracked", 1, 0, Mask.from_full(full))
    return MaskPair(frame, MaskFrame("cam0", 1, frame.capture_ns, width, height, instances=(instance,)))


def noise(width: int, height: int) -> Image:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize(
    ("width", "height"), [(1, 1), (16384, 1), (1, 5000), (640, 480), (4000, 3000), (1568, 1568)]
)
def test_a_picture_is_bounded(width: int, height: int) -> None:
    picture = draw(pair_of(noise(width, height)), 1568)
    shown = cv2.imdecode(np.frombuffer(picture.jpeg, np.uint8), cv2.IMREAD_COLOR)
    assert shown is not None
    assert shown.shape[1::-1] == (picture.width, picture.height)
    assert max(picture.width, picture.height) <= 1568
    assert len(picture.jpeg) <= MAX_PICTURE_BYTES
    assert picture.scale == pytest.approx(width / picture.width)


@pytest.mark.parametrize("encoding", ["bgr8", "rgb8", "mono8", "jpeg", "png"])
def test_every_encoding_is_drawn(encoding: ColourEncoding) -> None:
    image = np.full((60, 80, 3), 40, np.uint8)
    pair = pair_of(image, encoding)
    bare = draw(pair, 64, with_masks=False)
    drawn = draw(pair, 64)
    assert (drawn.width, drawn.height, drawn.scale) == (64, 48, 1.25)
    assert bare.jpeg != drawn.jpeg


def test_a_damaged_picture_is_an_error() -> None:
    frame = Frame("cam0", 1, time.time_ns(), 80, 60, "jpeg", b"\xff\xd8 no picture")
    with pytest.raises(WireError):
        draw(MaskPair(frame, None), 64)
