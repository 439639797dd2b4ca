"""Tests of compressed images that attack their decoder: they are refused before it sees them.

All files are generated here. The decoder is the oracle: whatever is accepted, it decodes to the size that was read.
"""

import itertools
import struct
import zlib
from contextlib import suppress

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sam3_node.errors import WireError
from sam3_node.types import Depth, Frame
from sam3_node.wire import decode_depth, decode_image, images
from tests.support.hostility import MEGABYTE, large_jpeg, large_png, limited_memory, png_header, refused
from tests.support.hostility import join_png as png
from tests.support.hostility import png_chunk as chunk
from tests.support.tables import each_row

SIDE = 64
RAMP = np.add.outer(np.arange(SIDE), np.arange(SIDE))[..., None].repeat(3, 2).astype(np.uint8)
END = b"\xff\xd9"


def write_jpeg(image=RAMP, **options):
    flags = [
        value for name, number in options.items() for value in (getattr(cv2, f"IMWRITE_JPEG_{name}"), number)
    ]
    return cv2.imencode(".jpg", image, flags)[1].tobytes()


def split_scans(data):
    """Return the bytes before the first scan, the scans with the tables before each, and the end."""
    starts = [place for place in range(len(data)) if data[place : place + 2] == b"\xff\xda"]
    return data[: starts[0]], [data[a:b] for a, b in itertools.pairwise([*starts, len(data) - 2])]


BASELINE = write_jpeg()
PROGRESSIVE = write_jpeg(PROGRESSIVE=1)
FRAME = BASELINE.index(b"\xff\xc0")
SCAN = BASELINE.index(b"\xff\xda")
HEAD, SCANS = split_scans(PROGRESSIVE)


def replace(data, place, new):
    return data[:place] + new + data[place + len(new) :]


def insert(data, place, new):
    return data[:place] + new + data[place:]


def segment(marker, body=b""):
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def frame_header(width, height, marker=0xC0, bits=8, components=(0x22, 0x11, 0x11)):
    parts = b"".join(bytes([number, sampling, 0]) for number, sampling in enumerate(components, 1))
    return segment(marker, struct.pack(">BHHB", bits, height, width, len(components)) + parts)


JPEGS = {
    "10,000 scans": HEAD + SCANS[0] + SCANS[1] * 10_000 + END,
    "one scan too many": HEAD + b"".join(SCANS) + SCANS[-1] * (images.MAX_SCANS + 1 - len(SCANS)) + END,
    "baseline of many scans": BASELINE[:-2] + BASELINE[SCAN:-2] * images.MAX_SCANS + END,
    "another size behind fill bytes": insert(
        BASELINE, FRAME, b"\xff" + frame_header(12000, 12000) + segment(0xFE, BASELINE[FRAME:SCAN])
    ),
    "another size behind a fill byte before a comment": insert(
        BASELINE, 2, b"\xff" + segment(0xFE, frame_header(SIDE, SIDE)) + frame_header(12000, 12000)
    ),
    "two sizes": insert(BASELINE, FRAME, frame_header(12000, 12000)),
    "two sizes, the second behind the pixels": BASELINE[:-2] + frame_header(12000, 12000) + END,
    "a second size in the pixels": insert(BASELINE, SCAN + 40, frame_header(12000, 12000)),
    "no height, which a later marker gives": insert(
        replace(BASELINE, FRAME + 5, b"\0\0"), -2, b"\xff\xdc\0\4\0\x40"
    ),
    "a height behind the pixels": insert(BASELINE, -2, b"\xff\xdc\0\4\x40\0"),
    "an image within another": insert(BASELINE, FRAME, BASELINE),
    "an unknown marker": insert(BASELINE, FRAME, segment(0x02)),
    "a segment without a length": insert(BASELINE, FRAME, b"\xff\xe0\0\1"),
    "a segment that is longer than the file": insert(BASELINE, FRAME, b"\xff\xe0\xff\xff"),
    "segments without end": insert(BASELINE, FRAME, segment(0xFE) * 250_000),
    "tables without end": insert(BASELINE, FRAME, segment(0xDB) * 250_000),
    "no end": BASELINE[:-2],
    "no end but in a comment": insert(BASELINE[:-2], FRAME, segment(0xFE, END)),
    "an end before the pixels": BASELINE[:SCAN] + END,
    "no header": BASELINE[:FRAME] + BASELINE[SCAN:],
    "12 bits": replace(BASELINE, FRAME + 4, b"\x0c"),
    "5 components": BASELINE[:FRAME] + frame_header(SIDE, SIDE, components=[0x11] * 5) + BASELINE[SCAN:],
    "2 components": BASELINE[:FRAME] + frame_header(SIDE, SIDE, components=[0x11] * 2) + BASELINE[SCAN:],
    "sampling of 15": replace(BASELINE, FRAME + 11, b"\xff"),
    "sampling of 0": replace(BASELINE, FRAME + 11, b"\x00"),
    "components of one number": replace(BASELINE, FRAME + 13, BASELINE[FRAME + 10 : FRAME + 11]),
    "a scan of another component": replace(BASELINE, SCAN + 5, b"\x77"),
    "a scan without components": replace(BASELINE, SCAN + 4, b"\x00"),
    **{
        f"the marker {marker:02X}": replace(BASELINE, FRAME + 1, bytes([marker]))
        for marker in (0xC3, 0xC5, 0xC6, 0xC7, 0xC8, 0xC9, 0xCA, 0xCB, 0xCC, 0xCD, 0xCE, 0xCF)
    },
}


@each_row("data", JPEGS.values(), ids=JPEGS.keys())
def test_hostile_jpegs_are_refused(data):
    assert len(data) < 1.2 * MEGABYTE
    with refused("jpeg image: expected", megabytes=4):
        decode_image(Frame("cam0", 0, 0, SIDE, SIDE, "jpeg", data))


GOOD_JPEGS = {
    "baseline": BASELINE,
    "progressive": PROGRESSIVE,
    "grey": write_jpeg(RAMP[:, :, 0]),
    "restarts": write_jpeg(RST_INTERVAL=2),
    "optimised": write_jpeg(OPTIMIZE=1),
    "without subsampling": write_jpeg(SAMPLING_FACTOR=cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444),
    "fill bytes": insert(insert(BASELINE, SCAN, b"\xff\xff"), FRAME, b"\xff" * 50),
    "bytes behind the end": BASELINE + bytes(1000),
    "a second image behind the end": BASELINE + write_jpeg(RAMP[:32]),
    "a preview in a segment": insert(BASELINE, 2, segment(0xE1, b"Exif\0\0" + write_jpeg(RAMP[:8, :8]))),
    "a long profile": insert(BASELINE, 2, segment(0xE2, bytes(65_000)) * 255),
}


@each_row("data", GOOD_JPEGS.values(), ids=GOOD_JPEGS.keys())
def test_jpegs_of_cameras_are_decoded(data):
    assert images.compressed_size(data, "jpeg") == (SIDE, SIDE)
    image = decode_image(Frame("cam0", 0, 0, SIDE, SIDE, "jpeg", memoryview(data)))
    assert np.abs(image.astype(int) - RAMP).mean() < 4


def header(width=SIDE, height=SIDE, **fields):
    return png_header(width, height, **fields)


ROWS = bytes(SIDE * (1 + 3 * SIDE))
PIXELS = chunk(b"IDAT", zlib.compress(ROWS))
IEND = chunk(b"IEND")
EIGHT_MB = zlib.compress(bytes(7_900_000), 9)


PNGS = {
    "two headers": png(header(), header(12000, 12000), PIXELS, IEND),
    "a header behind the pixels": png(header(), PIXELS, header(12000, 12000), IEND),
    "no header": png(PIXELS, IEND),
    "pixels before the header": png(PIXELS, header(), IEND),
    "a long header": png(chunk(b"IHDR", header()[8:-4] + b"\0"), PIXELS, IEND),
    "no pixels": png(header(), IEND),
    "no end": png(header(), PIXELS),
    "no end but in a text": png(header(), chunk(b"tEXt", b"a\0" + IEND), PIXELS),
    "another end": png(header(), PIXELS, chunk(b"iEND")),
    "an animation": png(header(), chunk(b"acTL", bytes(8)), PIXELS, IEND),
    "a frame of an animation": png(header(), chunk(b"fcTL", bytes(26)), PIXELS, IEND),
    "a length of 2^32 - 1": png(header(), b"\xff\xff\xff\xffIDAT", PIXELS, IEND),
    "a chunk without a name": png(header(), chunk(b"\0\0\0\0"), PIXELS, IEND),
    "texts without end": png(header(), chunk(b"tEXt", b"a\0b") * 60_000, PIXELS, IEND),
    "one text too many": png(header(), chunk(b"tEXt", b"a\0b") * (images.MAX_ANCILLARY + 1), PIXELS, IEND),
    "compressed texts of 8 MB": png(
        header(), chunk(b"zTXt", b"a\0\0" + EIGHT_MB) * (images.MAX_PACKED + 1), PIXELS, IEND
    ),
    "profiles of 8 MB": png(
        header(), chunk(b"iCCP", b"a\0\0" + EIGHT_MB) * (images.MAX_PACKED + 1), PIXELS, IEND
    ),
    "pixels in pieces of nothing": png(header(), chunk(b"IDAT") * 80_000, PIXELS, IEND),
    "a bomb behind the pixels": png(header(), chunk(b"IDAT", zlib.compress(bytes(200 * MEGABYTE), 9)), IEND),
    "a bomb behind the pixels of the seven passes": png(
        header(interlace=1), chunk(b"IDAT", zlib.compress(bytes(200 * MEGABYTE), 9)), IEND
    ),
    "damaged pixels": png(header(), chunk(b"IDAT", b"\xff" * 40), IEND),
    "no width": png(header(0), PIXELS, IEND),
    "a kind that is not defined": png(header(colour=5), PIXELS, IEND),
    "3 bits": png(header(bits=3), PIXELS, IEND),
    "another compression": png(header(methods=(1, 0)), PIXELS, IEND),
    "another filter": png(header(methods=(0, 64)), PIXELS, IEND),
    "another interlace": png(header(interlace=2), PIXELS, IEND),
}


@each_row("data", PNGS.values(), ids=PNGS.keys())
def test_hostile_pngs_are_refused(data):
    assert len(data) < 1.2 * MEGABYTE
    with refused("png image: expected", megabytes=4):
        decode_image(Frame("cam0", 0, 0, SIDE, SIDE, "png", data))


GOOD_PNGS = {
    "plain": png(header(), PIXELS, IEND),
    "in parts": png(header(), *(chunk(b"IDAT", bytes([byte])) for byte in zlib.compress(ROWS)), IEND),
    "texts and a time": png(
        header(), chunk(b"tEXt", b"a\0b") * 20, chunk(b"tIME", b"\7\xe9\1\1\0\0\0"), PIXELS, IEND
    ),
    "a compressed text": png(header(), chunk(b"zTXt", b"a\0\0" + zlib.compress(b"b")), PIXELS, IEND),
    "bytes behind the end": png(header(), PIXELS, IEND, bytes(1000)),
    "grey of 1 bit": png(header(bits=1, colour=0), chunk(b"IDAT", zlib.compress(bytes(9 * SIDE))), IEND),
    "16 bits": png(header(bits=16), chunk(b"IDAT", zlib.compress(bytes((1 + 6 * SIDE) * SIDE))), IEND),
    "interlaced": png(header(interlace=1), chunk(b"IDAT", zlib.compress(bytes(3 * SIDE * SIDE + 120))), IEND),
}


@each_row("data", GOOD_PNGS.values(), ids=GOOD_PNGS.keys())
def test_pngs_of_other_programs_are_decoded(data):
    assert images.compressed_size(data, "png") == (SIDE, SIDE)
    assert not decode_image(Frame("cam0", 0, 0, SIDE, SIDE, "png", data)).any()


def test_hostile_depth_is_refused():
    bomb = png(header(bits=16, colour=0), chunk(b"IDAT", zlib.compress(bytes(200 * MEGABYTE), 9)), IEND)
    with refused("png16 depth: expected 64 x 64 pixels, found more"):
        decode_depth(Depth(SIDE, SIDE, "png16", 0.001, True, bomb))


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("bgr8", RAMP.tobytes()),
        ("mono8", bytes(SIDE * SIDE)),
        ("jpeg", BASELINE),
        ("png", GOOD_PNGS["plain"]),
    ],
)
def test_more_pixels_than_allowed_are_refused(encoding, data):
    frame = Frame("cam0", 0, 0, SIDE, SIDE, encoding, data)
    with refused("at most 4095 pixels, found 64 x 64.*raise tracker.max_frame_pixels"):
        decode_image(frame, max_pixels=4095)
    assert decode_image(frame, max_pixels=4096).shape == (SIDE, SIDE, 3)


def test_more_depth_pixels_than_allowed_are_refused():
    depth = Depth(SIDE, SIDE, "z16", 0.001, True, bytes(SIDE * SIDE * 2))
    with refused("at most 4095 pixels"):
        decode_depth(depth, max_pixels=4095)


@pytest.mark.parametrize(
    ("encoding", "data"),
    [("jpeg", PROGRESSIVE), ("png", GOOD_PNGS["16 bits"]), ("png", GOOD_PNGS["interlaced"])],
)
def test_images_that_decode_slowly_may_have_fewer_pixels(encoding, data):
    frame = Frame("cam0", 0, 0, SIDE, SIDE, encoding, data)
    with refused("found more work"):
        decode_image(frame, max_pixels=SIDE * SIDE)
    assert decode_image(frame, max_pixels=8 * SIDE * SIDE).shape == (SIDE, SIDE, 3)


EDITS = st.tuples(
    st.sampled_from(["set", "insert", "delete", "copy"]),
    st.one_of(st.integers(0, 700), st.integers(0, 4000)),
    st.one_of(
        st.binary(min_size=1, max_size=4),
        st.sampled_from(
            [b"\xff", b"\xff\xff", END, b"\xff\xd8", b"\xff\xda", b"\xff\xd0", b"\xff\xdc\0\4\0\x20"]
        ),
        st.sampled_from(
            [frame_header(512, 512), frame_header(512, 512, 0xC2), segment(0xFE), chunk(b"IDAT"), IEND]
        ),
        st.sampled_from([header(512, 512), b"IDAT", b"acTL", b"\0\0\2\0"]),
    ),
    st.integers(0, 300),
)


def edit(data, edits):
    for kind, place, new, length in edits:
        place %= max(1, len(data))
        if kind == "set":
            data = replace(data, place, new)
        elif kind == "insert":
            data = insert(data, place, new)
        elif kind == "delete":
            data = data[:place] + data[place + length % 20 :]
        else:
            data = insert(data, place, data[length : 2 * length])
    return data


def renew_checksums(data):
    """Return a PNG with the checksums of its chunks, so that its decoder reads on."""
    chunks = [data[:8]]
    place = 8
    while place + 12 <= len(data) and (size := int.from_bytes(data[place : place + 4], "big")) < 4 * MEGABYTE:
        chunks.append(chunk(data[place + 4 : place + 8], data[place + 8 : place + 8 + size]))
        place += 12 + size
    return b"".join(chunks)


def agree(read, data):
    """Assert that the decoder finds the size that was read, unless one of both refuses the bytes."""
    with suppress(WireError, cv2.error):
        found = read(data)
        if found.width * found.height <= 4 * MEGABYTE:
            image = cv2.imdecode(
                np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
            )
            assert image is None or image.shape[:2] == (found.height, found.width)


@given(st.sampled_from(list(GOOD_JPEGS.values())), st.lists(EDITS, min_size=1, max_size=3))
def test_an_edited_jpeg_has_the_size_that_its_decoder_finds(data, edits):
    agree(images.read_jpeg_header, edit(data, edits))


@given(st.sampled_from(list(GOOD_PNGS.values())), st.lists(EDITS, min_size=1, max_size=3))
def test_an_edited_png_has_the_size_that_its_decoder_finds(data, edits):
    agree(images.read_png_header, renew_checksums(edit(data, edits)))


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(data):
    with limited_memory():
        for read, start in ((images.read_jpeg_header, b"\xff\xd8"), (images.read_png_header, png(header()))):
            with suppress(WireError):
                assert min(read(start + data)) > 0


@pytest.mark.parametrize(
    ("sampling", "progressive", "bytes_per_pixel"),
    [
        (cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420, 0, 6),
        (cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444, 0, 6),
        (cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420, 1, 6),
        (cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444, 1, 9),
    ],
)
def test_the_memory_of_a_photo_is_known_before_it_is_decoded(sampling, progressive, bytes_per_pixel):
    data = write_jpeg(SAMPLING_FACTOR=sampling, PROGRESSIVE=progressive)
    needed = bytes_per_pixel * SIDE * SIDE
    assert images.decode_photo(data, max_memory=needed).shape == RAMP.shape
    with refused("scale"):
        images.decode_photo(data, max_memory=needed - 1)


def test_a_png_of_16_bits_takes_twice_the_memory_of_8():
    assert images.read_png_header(GOOD_PNGS["16 bits"]).memory_bytes == 12 * SIDE * SIDE


def test_a_baseline_jpeg_in_several_scans_is_held_whole_by_its_decoder():
    scans = b"".join(segment(0xDA, bytes([1, number, 0, 0, 63, 0])) + b"\0" for number in (1, 2, 3))
    data = b"\xff\xd8" + frame_header(SIDE, SIDE, components=(0x11, 0x11, 0x11)) + scans + END
    assert images.read_jpeg_header(data).memory_bytes == 9 * SIDE * SIDE


LARGE = {
    "png": large_png,
    "jpeg": lambda: large_jpeg(BASELINE),
    "progressive": lambda: large_jpeg(PROGRESSIVE),
}


@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)
def test_a_photo_of_many_pixels_is_refused_before_it_is_decoded(make, monkeypatch):
    data = make()
    assert images.identify_compressed(data)[1:] == (8192, 8192)
    monkeypatch.setattr(cv2, "imdecode", lambda *args: pytest.fail("decoded"))
    with refused("8192 x 8192 pixels .* scale"):
        images.decode_photo(data, max_memory=images.MAX_PHOTO_MEMORY)
