"""Hostile messages, masks and images are refused, without memory for data that is declared but not present."""

import dataclasses
import struct
import zlib
from contextlib import suppress

import msgpack
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from sam3_node import wire
from sam3_node.errors import WireError
from sam3_node.types import Depth, Frame
from sam3_node.wire import codec
from sam3_node.wire.masks import read_mask
from tests.support.hostility import (
    MEGABYTE,
    declare_jpeg,
    join_png,
    limited_memory,
    mutations,
    png_chunk,
    png_header,
    refused,
)
from tests.support.tables import each_row
from tests.support.wire_examples import EXAMPLES, JPEG, golden

UNPACKED = sorted(set(EXAMPLES) - {"beat"})  # receivers look at the topic of a beat alone


def nested(depth):
    return b"\x91" * depth + b"\xc0"


MSGPACK = {
    "nothing": b"",
    "an unused byte": b"\xc1",
    "two values": b"\x01\x02",
    "4e9 items in an array": b"\xdd\xee\x6b\x28\x00",
    "4e9 items in a map": b"\xdf\xee\x6b\x28\x00",
    "4 GB of text": b"\xdb\xff\xff\xff\xff",
    "4 GB of data": b"\xc6\xff\xff\xff\xff",
    "4 GB of an extension": b"\xc9\xff\xff\xff\xff\x01",
    "items declared at each of many levels": b"\xdd\x00\x00\x10\x00" * 500,
    "nested 20 deep": nested(20),
    "nested 1000 deep": nested(1000),
    "nested 100000 deep": nested(100_000),
    "maps nested 20 deep": b"\x81\xa1a" * 20 + b"\xc0",
    "an extension": msgpack.packb(msgpack.ExtType(5, b"data")),
    "an empty extension": b"\xc7\x00\x05",
    "a time stamp": msgpack.packb(msgpack.Timestamp(1)),
    "text that is not UTF-8": b"\xa2\xff\xfe",
    "a key that is a number": b"\x81\x01\x02",
    "a key that is a list": b"\x81\x90\x02",
    "a long array": b"\xdc\xff\xff" + b"\x01" * 65535,
    "a long text": b"\xda\xff\xff" + b"a" * 65535,
    "many items": b"\x9f" + (b"\xdc\x04\x00" + b"\x90" * 1024) * 15,
}
SMALL = codec.Limits(total_bytes=MEGABYTE, text_bytes=1024, total_items=8192)


@each_row("data", MSGPACK.values(), ids=MSGPACK.keys())
def test_msgpack_is_refused(data):
    with refused("test: expected"):
        wire.unpack(data, what="test", limits=SMALL)


def test_a_message_over_the_limit_is_not_parsed():
    with refused("at most 100 bytes, found 1000"):
        wire.unpack(bytes(1000), what="test", limits=codec.Limits(total_bytes=100))


def test_nesting_within_the_limit_is_accepted():
    assert wire.unpack(nested(16), what="test") is not None


@given(st.binary(max_size=200))
def test_any_bytes_unpack_or_are_refused(data):
    for call in (
        wire.unpack_request,
        wire.unpack_reply,
        lambda data: wire.unpack_masks([b"masks/cam0", data]),
    ):
        with pytest.raises(WireError):
            call(data)


@each_row("name", UNPACKED)
def test_mutated_messages_unpack_or_are_refused(name):
    refusals = 0
    with limited_memory():
        for parts in mutations(golden(name), 400, seed=name):
            try:
                value = EXAMPLES[name].unpack(parts)
                if isinstance(value, Frame):
                    wire.decode_image(value)
            except WireError:
                refusals += 1
    assert refusals > 100


@each_row("name", UNPACKED)
def test_truncated_messages_are_refused(name):
    parts = golden(name)
    for index, part in enumerate(parts):
        for length in range(0, len(part), max(1, len(part) // 50)):
            truncated = [*parts[:index], part[:length], *parts[index + 1 :]]
            with pytest.raises(WireError):
                wire.decode_image(EXAMPLES[name].unpack(truncated))


WRONG = [
    None,
    True,
    -1,
    1.5,
    2**64 - 1,
    float("nan"),
    float("inf"),
    "text",
    b"data",
    [],
    [1, 2, 3, 4],
    [{}],
    {},
]


def paths(value, path=()):
    """Yield the path of every value in a nested message."""
    listed = enumerate(value) if isinstance(value, list) else ()
    for key, child in value.items() if isinstance(value, dict) else listed:
        yield (*path, key)
        yield from paths(child, (*path, key))


@each_row("name", UNPACKED)
def test_wrong_types_anywhere_are_refused_or_accepted(name):
    parts = golden(name)
    body = next(index for index, part in enumerate(parts) if part[0] >= 0x80)
    for path in paths(msgpack.unpackb(parts[body])):
        for wrong in WRONG:
            message = msgpack.unpackb(parts[body])
            container = message
            for key in path[:-1]:
                container = container[key]
            container[path[-1]] = wrong
            parts[body] = msgpack.packb(message)
            try:
                EXAMPLES[name].unpack(parts)
            except WireError as error:
                assert len(str(error)) < 400  # noqa: PT017
            parts = golden(name)


def changed(name, *path, value):
    """Return a golden message with one field of its map replaced, or removed if `value` is KeyError."""
    parts = golden(name)
    body = 0 if len(parts) == 1 else 1
    message = msgpack.unpackb(parts[body])
    container = message
    for key in path[:-1]:
        container = container[key]
    if value is KeyError:
        del container[path[-1]]
    else:
        container[path[-1]] = value
    parts[body] = msgpack.packb(message)
    return parts


FIELDS = [
    ("frame-raw", ["v"], 2, "wire version 1, found 2"),
    ("frame-raw", ["v"], True, "wire version 1, found True"),
    ("frame-raw", ["v"], KeyError, "wire version 1, found nothing"),
    ("frame-raw", ["kind"], "masks", "'kind' to be one of frame, found 'masks'"),
    ("frame-raw", ["camera"], "other", "expected the topic frame/other, found"),
    ("frame-raw", ["camera"], "a/b", "'camera' to be the name of a camera"),
    ("frame-raw", ["camera"], "", "'camera' to be the name of a camera"),
    ("frame-raw", ["camera"], ".", "not of dots alone"),
    ("frame-raw", ["camera"], "..", "not of dots alone"),
    ("frame-raw", ["seq"], -1, "'seq' to be an integer in 0.."),
    ("frame-raw", ["seq"], 2**63, "'seq' to be an integer"),
    ("frame-raw", ["seq"], True, "'seq' to be an integer"),
    ("frame-raw", ["seq"], 1.0, "'seq' to be an integer"),
    ("frame-raw", ["capture_ns"], KeyError, "'capture_ns' to be an integer in .*, found nothing"),
    ("frame-raw", ["clock"], "sun", "one of device, monotonic, system, found 'sun'"),
    ("frame-raw", ["width"], 4, "expected 24 bytes .* found 18"),
    ("frame-raw", ["width"], 0, "'width' to be an integer in 1..16384, found 0"),
    ("frame-raw", ["height"], -2, "'height' to be an integer in 1..16384, found -2"),
    ("frame-raw", ["height"], 16385, "'height' to be an integer in 1..16384"),
    ("frame-raw", ["encoding"], "yuv", "one of bgr8, h264, jpeg, mono8, png, rgb8, found 'yuv'"),
    ("frame-raw", ["intrinsics", "fx"], float("nan"), "'fx' to be a finite number"),
    ("frame-raw", ["intrinsics", "fy"], 0.0, "'fy' to be a finite number above 0"),
    ("frame-raw", ["intrinsics", "coeffs"], [0.0] * 15, "'coeffs' to be a list of at most 14"),
    ("frame-raw", ["intrinsics", "model"], [], "one of brown_conrady, fisheye, none, found a list of 0"),
    ("frame-raw", ["depth"], KeyError, "only with, a depth header"),
    ("frame-raw", ["depth", "width"], 16384, "found 12 bytes"),
    ("frame-raw", ["depth", "scale_m"], -0.001, "'scale_m' to be a finite number above 0"),
    ("frame-raw", ["depth", "aligned"], 1, "'aligned' to be true or false, found 1"),
    ("frame-raw", ["times", "sensor_ns"], float("inf"), "times: expected 'sensor_ns' to be a finite number"),
    ("frame-raw", ["times"], [1], "'times' to be a map, found a list of 1"),
    ("masks-rle", ["kind"], "frame", "'kind' to be one of masks"),
    ("masks-rle", ["prompts"], ["mug", 7], "expected 'prompts\\[1\\]' to be a string, found 7"),
    ("masks-rle", ["stages_us", "track"], -1, "stages_us: expected 'track'"),
    ("masks-rle", ["instances", 1, "id"], 3, "each instance's id once, found 3 twice"),
    ("masks-rle", ["instances", 1, "score"], float("nan"), "instances\\[1\\]: expected 'score'"),
    ("masks-rle", ["instances", 1, "score"], 1.5, "'score' to be a finite number in 0.0..1.0, found 1.5"),
    ("masks-rle", ["instances", 1, "state"], "lost", "one of occluded, tentative, tracked"),
    ("masks-rle", ["instances", 0, "position_m"], [0.0, 1.0], "'position_m' to be 3 finite numbers"),
    (
        "masks-rle",
        ["instances", 0, "extent_m"],
        [0.1, -0.1, 0.1],
        "'extent_m\\[1\\]' to be a finite number in 0.0..inf",
    ),
    ("masks-rle", ["instances", 0, "area"], 9, "and area 8 of its mask"),
    ("masks-rle", ["instances", 0, "box"], [0, 0, 8, 5], "expected the box"),
    ("masks-rle", ["instances", 0, "mask", "size"], [6, 8], "expected the frame.s size"),
    (
        "masks-rle",
        ["instances", 2, "mask"],
        KeyError,
        "instances\\[2\\]: expected 'mask' to be a map, found nothing",
    ),
    ("masks-rle", ["width"], 9, "mask: expected the frame's size"),
    ("request-status", ["v"], 2, "wire version 1, found 2"),
    ("request-status", ["args"], [], "args: expected a map"),
    ("request-status", ["op"], None, "'op' to be a string, found nothing"),
    ("request-status", ["id"], -1, "'id' to be an integer"),
    *(
        ("request-id", ["request_id"], bad, "request_id")
        for bad in ("", "a b", "x" * 65, "a\n", "\u202e", 7, b"a")
    ),
    ("reply-error", ["error"], None, "error: expected a map, found nothing"),
    ("reply-error", ["ok"], 0, "'ok' to be true or false"),
]


@each_row(("name", "path", "value", "match"), FIELDS)
def test_a_wrong_field_is_named(name, path, value, match):
    with refused(match):
        EXAMPLES[name].unpack(changed(name, *path, value=value))


def test_0_is_not_above_0_where_denormals_are_flushed():
    # the processor then compares the least denormal as 0
    torch.set_flush_denormal(True)
    with refused("'fy' to be a finite number above 0"):
        wire.unpack_frame(changed("frame-raw", "intrinsics", "fy", value=0.0))


@pytest.mark.parametrize("parts", [[], [b"frame/cam0"], [b"frame/cam0", b"\x80"], [b""] * 5])
def test_a_wrong_number_of_parts_is_refused(parts):
    with refused("parts"):
        wire.unpack_frame(parts)
    with refused("frame|masks"):
        wire.unpack_masks(parts)


def test_masks_that_together_hold_too_many_pixels_are_refused(monkeypatch):
    monkeypatch.setattr("sam3_node.wire.messages.MAX_MASK_PIXELS", 50)  # the boxes hold 12 and 40
    with refused("instances\\[1\\]: mask: expected a box of at most 38 pixels"):
        wire.unpack_masks(golden("masks-rle"))


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


@each_row("mask", MASKS.values(), ids=MASKS.keys())
def test_masks_are_refused(mask):
    with refused("mask: expected"):
        wire.decode_mask(dict(zip(("encoding", "size", "box", "data"), mask, strict=True)))


@given(
    st.binary(max_size=60)
    | st.text(st.characters(min_codepoint=48, max_codepoint=111), max_size=60).map(str.encode)
)
def test_any_rle_decodes_or_is_refused(data):
    value = {"encoding": "rle", "size": [9, 7], "box": [1, 0, 6, 9], "data": data}
    with suppress(WireError):
        assert wire.decode_mask(value).crop.shape == (9, 5)


def test_a_box_above_max_pixels_is_refused():
    mask = {"encoding": "rle", "size": HUGE, "box": FULL, "data": b"abc"}
    with refused("at most 100 pixels"):
        read_mask(wire.Fields(mask, "mask"), max_pixels=100)


def png(width, height, bits=8, colour=2, rows=b""):
    pixels = png_chunk(b"IDAT", zlib.compress(rows))
    return join_png(png_header(width, height, bits, colour), pixels, png_chunk(b"IEND"))


WHOLE_PNG = bytes(wire.encode_image(np.zeros((8, 8, 3), np.uint8), "png"))
WHOLE_JPEG = JPEG.read_bytes()
IMAGES = {
    "png bomb": (8, 8, "png", png(60000, 60000)),
    "png of the largest size without its pixels": (16384, 16384, "png", png(16384, 16384)),
    "png of another size": (8, 8, "png", png(9, 8, rows=bytes(28 * 8))),
    "png with no pixels": (8, 8, "png", png(8, 8)),
    "png whose body is cut": (8, 8, "png", WHOLE_PNG[:-20]),
    "png called jpeg": (8, 8, "jpeg", png(8, 8, rows=bytes(25 * 8))),
    "jpeg bomb": (8, 8, "jpeg", declare_jpeg(WHOLE_JPEG, 60000, 60000)),
    "jpeg without its pixels": (16384, 16384, "jpeg", declare_jpeg(WHOLE_JPEG, 16384, 16384)),
    "jpeg of another size": (8, 8, "jpeg", declare_jpeg(WHOLE_JPEG, 16, 8)),
    "jpeg cut short": (8, 8, "jpeg", WHOLE_JPEG[:-30]),
    "jpeg called png": (8, 8, "png", WHOLE_JPEG),
    "jpeg without a size": (8, 8, "jpeg", b"\xff\xd8\xff\xd9"),
    "jpeg of endless segments": (8, 8, "jpeg", b"\xff\xd8" + b"\xff\xe0\x00\x02" * 100_000 + b"\xff\xd9"),
    "bmp": (8, 8, "png", b"BM" + bytes(300)),
    "raw of another size": (16384, 16384, "bgr8", b"abc"),
}


@each_row("image", IMAGES.values(), ids=IMAGES.keys())
def test_images_are_refused(image):
    width, height, encoding, data = image
    with refused():
        wire.decode_image(Frame("cam0", 0, 0, width, height, encoding, data))


DEPTHS = {
    "z16 of another size": ("z16", 16384, 16384, b"abc"),
    "zstd header alone": ("z16+zstd", 16384, 16384, zstd_header(2 * 16384 * 16384)),
    "zstd bomb": ("z16+zstd", 8, 8, zstd(bytes(100 * MEGABYTE))),
    "zstd of nothing": ("z16+zstd", 8, 8, b""),
    "png bomb": ("png16", 8, 8, png(60000, 60000, bits=16, colour=0)),
    "png of colour": ("png16", 8, 8, png(8, 8, rows=bytes(25 * 8))),
    "png of 8 bits": ("png16", 8, 8, png(8, 8, colour=0, rows=bytes(9 * 8))),
}


@each_row("depth", DEPTHS.values(), ids=DEPTHS.keys())
def test_depths_are_refused(depth):
    encoding, width, height, data = depth
    with refused():
        wire.decode_depth(Depth(width, height, encoding, 0.001, True, data))


def test_a_valid_compressed_image_is_taken_from_a_memoryview():
    frame = Frame("cam0", 0, 0, 8, 8, "png", memoryview(png(8, 8, rows=bytes(25 * 8))))
    assert wire.decode_image(frame).shape == (8, 8, 3)
    grey = dataclasses.replace(frame, encoding="jpeg", colour=bytearray(WHOLE_JPEG))
    assert wire.decode_image(grey).any()
