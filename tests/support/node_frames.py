"""Frames and conditions for the tests of the node."""

import time

import numpy as np

from sam3_node.types import Frame
from tests.support.node_rig import ids


def picture(seq: int, camera: str = "cam1", width: int = 64, height: int = 48) -> Frame:
    colour = np.full((height, width, 3), seq % 256, np.uint8)
    return Frame(camera, seq, time.time_ns(), width, height, "bgr8", colour.data)


def has_ids(camera: str, *wanted: int):
    return lambda masks: masks.camera == camera and ids(masks) == list(wanted)


def jpeg_with_broken_data(width: int, height: int) -> bytes:
    """Return a header that declares the size, followed by nothing that can be decoded."""
    size = bytes([height >> 8, height & 255, width >> 8, width & 255])
    return b"\xff\xd8\xff\xc0\x00\x11\x08" + size + b"\x03\x01\x22\x00\x02\x11\x01\x03\x11\x01" + b"\xff\xd9"
