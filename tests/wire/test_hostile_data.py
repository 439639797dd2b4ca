"""Tests of hostile masks and images: they are refused before memory of the declared size is allocated."""

from __future__ import annotations

import dataclasses
import struct
import zlib
from contextlib import suppress

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from sam3_node.errors import WireError
from sam3_node.types import Depth, Frame
from sam3_node.wire import Fields, decode_depth, decode_image, decode_mask, encode_image
from sam3_node.wire.masks import read_mask
from tests.support.hostility import MEGABYTE, refused
from tests.support.wire_examples import JPEG


def zstd(data):
    return zstandard.ZstdCompressor().compress(data)


def zstd_header(content_size):
    """Return a zstd frame that ends after its declared content size."""
    return struct.pack("<IBQ", 0xFD2FB528, 0b11100000, content_size)


HUGE = [16384, 16384]
FULL = [0, 0, 16384, 16384]
MASKS = {
    "bits: 3 bytes for the largest box": ("bits+zstd", HUGE, FULL, b"abc"),
    "bits: a header alone for the largest box": ("bits+zstd", HUGE, FULL, zstd_header(1 << 25)),
    "bits: a bomb for a small box": ("bits+zstd", [8, 8], [0, 0, 8, 8], zstd(bytes(100 * MEGABYTE))),
    "bits: 2^63 bytes declared": ("bits+zstd", [8, 8], [0, 0, 8, 8], zstd_header(2**63)),
    "bits: too few": ("bits+zstd", [8, 8], [0, 0, 8, 8], zstd(bytes(7))),
    "bits: none": ("bits+zstd", [8, 8], [0, 0, 8, 8], b""),
    "bits: something for an empty box": ("bits+zstd", [8, 8], [0, 0, 0, 0], b"abc"),
    "bits: two zstd frames": ("bits+zstd", [8, 8], [0, 0, 8, 8], zstd(bytes(8)) * 2),
    "bits: truncated zstd": ("bits+zstd", [8, 8], [0, 0, 8, 8], zstd(bytes(8))[:-1]),
    "rle: 3 bytes for the largest box": ("rle", HUGE, FULL, b"abc"),
    "rle: none": ("rle", [8, 8], [0, 0, 8, 8], b""),
    "rle: too few pixels": ("rle", [8, 8], [0, 0, 8, 8], b"11"),
    "rle: counts that overflow 64 bits": ("rle", HUGE, FULL, b"o" * 20 + b"1"),
    "rle: counts that overflow by their sum": ("rle", HUGE, FULL, b"oooooo?" * 3000),
    "rle: negative counts": ("rle", [8, 8], [0, 0, 8, 8], b"O11"),
    "rle: no last character": ("rle", [8, 8], [0, 0, 8, 8], b"11o"),
    "rle: other characters": ("rle", [8, 8], [0, 0, 8, 8], b"\x00\xff1"),
    "rle: far too many counts": ("rle", HUGE, [0, 0, 1, 1], b"0" * MEGABYTE),
    "rle: pixels outside the box": ("rle", [8, 8], [2, 2, 4, 4], b"0P2"),
    "rle: pixels though the box is empty": ("rle", [8, 8], [0, 0, 0, 0], b"0P2"),
    "box: outside": ("bits+zstd", [8, 8], [0, 0, 9, 8], zstd(bytes(9))),
    "box: inside out": ("bits+zstd", [8, 8], [4, 4, 2, 2], b""),
    "box: no pixels": ("bits+zstd", [8, 8], [4, 4, 4, 4], b""),
    "box: negative": ("bits+zstd", [8, 8], [-1, 0, 8, 8], b""),
    "box: floats": ("bits+zstd", [8, 8], [0.0, 0, 8, 8], b""),
    "box: three numbers": ("bits+zstd", [8, 8], [0, 8, 8], b""),
    "size: larger than allowed": ("bits+zstd", [16385, 8], [0, 0, 8, 8], b""),
    "size: negative": ("rle", [-8, -8], [0, 0, 0, 0], b"P2"),
    "size: 2^63": ("rle", [2**63, 2**63], [0, 0, 0, 0], b"0"),
    "encoding: unknown": ("polygon", [8, 8], [0, 0, 8, 8], b""),
    "data: text": ("rle", [8, 8], [0, 0, 0, 0], "P2"),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_masks_are_refused(mask):
    with refused("mask: expected"):
        decode_mask(dict(zip(("encoding", "size", "box", "data"), mask, strict=True)))


@given(
    st.binary(max_size=60)
    | st.text(st.characters(min_codepoint=48, max_codepoint=111), max_size=60).map(str.encode)
)
def test_any_rle_decodes_or_is_refused(data):
    value = {"encoding": "rle", "size": [9, 7], "box": [1, 0, 6, 9], "data": data}
    with suppress(WireError):
        assert decode_mask(value).crop.shape == (9, 5)


def test_a_box_above_max_pixels_is_refused():
    with refused("at most 100 pixels"):
        read_mask(
            Fields({"encoding": "rle", "size": HUGE, "box": FULL, "data": b"abc"}, "mask"), max_pixels=100
        )


def png(width, height, bits=8, colour=2, rows=b""):
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def jpeg(width, height):
    """Return the golden JPEG with another declared size."""
    data = JPEG.read_bytes()
    place = data.index(b"\xff\xc0") + 5
    return data[:place] + struct.pack(">HH", height, width) + data[place + 4 :]


IMAGES = {
    "png bomb": (8, 8, "png", png(60000, 60000)),
    "png of the largest size without its pixels": (16384, 16384, "png", png(16384, 16384)),
    "png of another size": (8, 8, "png", png(9, 8, rows=bytes(28 * 8))),
    "png with no pixels": (8, 8, "png", png(8, 8)),
    "png whose body is cut": (8, 8, "png", bytes(encode_image(np.zeros((8, 8, 3), np.uint8), "png"))[:-20]),
    "png called jpeg": (8, 8, "jpeg", png(8, 8, rows=bytes(25 * 8))),
    "jpeg bomb": (8, 8, "jpeg", jpeg(60000, 60000)),
    "jpeg of the largest size without its pixels": (16384, 16384, "jpeg", jpeg(16384, 16384)),
    "jpeg of another size": (8, 8, "jpeg", jpeg(16, 8)),
    "jpeg cut short": (8, 8, "jpeg", JPEG.read_bytes()[:-30]),
    "jpeg called png": (8, 8, "png", JPEG.read_bytes()),
    "jpeg without a size": (8, 8, "jpeg", b"\xff\xd8\xff\xd9"),
    "jpeg of endless segments": (8, 8, "jpeg", b"\xff\xd8" + b"\xff\xe0\x00\x02" * 100_000 + b"\xff\xd9"),
    "bmp": (8, 8, "png", b"BM" + bytes(300)),
    "raw of another size": (16384, 16384, "bgr8", b"abc"),
}


@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES.keys())
def test_images_are_refused(image):
    width, height, encoding, data = image
    with refused():
        decode_image(Frame("cam0", 0, 0, width, height, encoding, data))


DEPTHS = {
    "z16 of another size": ("z16", 16384, 16384, b"abc"),
    "zstd header alone": ("z16+zstd", 16384, 16384, zstd_header(2 * 16384 * 16384)),
    "zstd bomb": ("z16+zstd", 8, 8, zstd(bytes(100 * MEGABYTE))),
    "zstd of nothing": ("z16+zstd", 8, 8, b""),
    "png bomb": ("png16", 8, 8, png(60000, 60000, bits=16, colour=0)),
    "png of colour": ("png16", 8, 8, png(8, 8, rows=bytes(25 * 8))),
    "png of 8 bits": ("png16", 8, 8, png(8, 8, colour=0, rows=bytes(9 * 8))),
}


@pytest.mark.parametrize("depth", DEPTHS.values(), ids=DEPTHS.keys())
def test_depths_are_refused(depth):
    encoding, width, height, data = depth
    with refused():
        decode_depth(Depth(width, height, encoding, 0.001, True, data))


def test_a_valid_compressed_image_is_taken_from_a_memoryview():
    frame = Frame("cam0", 0, 0, 8, 8, "png", memoryview(png(8, 8, rows=bytes(25 * 8))))
    assert decode_image(frame).shape == (8, 8, 3)
    assert decode_image(
        dataclasses.replace(frame, encoding="jpeg", colour=bytearray(JPEG.read_bytes()))
    ).any()
