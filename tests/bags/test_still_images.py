"""WebP, AVIF, TIFF and BMP in folders and in messages are what OpenCV decodes, within limits."""

from __future__ import annotations

import struct
from pathlib import Path

import cv2
import numpy as np
import pytest

pytest.importorskip("av")
pytest.importorskip("mcap_ros2")
pytest.importorskip("foxglove_schemas_protobuf")
pytest.importorskip("rosbags")

from sam3_node.bags.bag import open_bag
from sam3_node.bags.decompression import MIN_STILL_PIXELS, decode_still
from sam3_node.types import Frame
from sam3_node.wire import decode_depth, decode_image
from tests.support.mcap_files import T0, WRITERS, Moment
from tests.support.refuses import refuses

SIZE = (48, 64)
ROWS, COLUMNS = np.mgrid[: SIZE[0], : SIZE[1]]
BGR = np.stack([ROWS * 5, COLUMNS * 3, 128 + 60 * np.sin(COLUMNS / 9)], -1).astype(np.uint8)
DEPTH = (ROWS * 64 + COLUMNS + 500).astype(np.uint16)
LOSSY = {"webp": [cv2.IMWRITE_WEBP_QUALITY, 90], "avif": [cv2.IMWRITE_AVIF_QUALITY, 90]}
FORMATS = ["webp", "webp lossless", "avif", "tiff", "bmp"]


def encode(name: str, image: np.ndarray = BGR) -> bytes:
    extension, _, lossless = name.partition(" ")
    done, data = cv2.imencode(f".{extension}", image, [] if lossless else LOSSY.get(extension, []))
    assert done
    return data.tobytes()


def check(frame: Frame, data: bytes) -> None:
    """Compare up to the colours of lossy images, whose smaller planes decoders enlarge differently."""
    expected = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    assert expected is not None
    error = np.abs(decode_image(frame).astype(int) - expected)
    assert error.max() <= 20
    assert error.mean() < 2


@pytest.mark.verifies(
    "recording",
    "WebP, AVIF, TIFF, BMP",
    "other implementation",
    "OpenCV writes and reads them",
    missing="animations, tiled TIFF",
)
@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_of_images_is_what_opencv_decodes(tmp_path: Path, name: str) -> None:
    data, folder = encode(name), tmp_path / "desk"
    (folder / "depth").mkdir(parents=True)
    for index in range(2):
        (folder / f"{index}.{name.split()[0]}").write_bytes(data)
        (folder / "depth" / f"{index}.tiff").write_bytes(encode("tiff", DEPTH))
    with open_bag(folder) as bag:
        frames = list(bag)
        assert bag.lost is None
    assert len(frames) == 2
    for frame in frames:
        check(frame, data)
        assert frame.depth is not None
        assert np.array_equal(decode_depth(frame.depth), DEPTH)


@pytest.mark.parametrize("format_", WRITERS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_compressed_message_is_what_opencv_decodes(tmp_path: Path, name: str, format_: str) -> None:
    good, colour, depth = (
        encode(name),
        "/camera/color/image_raw/compressed",
        "/camera/depth/image_raw/compressed",
    )
    moments = [
        Moment(depth, "compressed", T0, encode("tiff", DEPTH), "16UC1; tiff compressed"),
        Moment(colour, "compressed", T0, good, name.split()[0]),
        Moment(colour, "compressed", T0 + 1, good[: len(good) // 3], name.split()[0]),
    ]
    with open_bag(WRITERS[format_](tmp_path / "r.mcap", moments)) as bag:
        first, *_ = frames = list(bag)
        assert len(frames) == 1 or name in ("tiff", "bmp")  # their rows are whole before the cut
        assert bag.lost is None or f"skipped 1 of {colour}" in bag.lost
    check(first, good)
    assert first.depth is not None
    assert np.array_equal(decode_depth(first.depth), DEPTH)


def test_deep_colours_are_their_high_bytes() -> None:
    assert np.abs(decode_still(encode("tiff", BGR.astype(np.uint16) * 256)).astype(int) - BGR).max() <= 1


def declare(name: str, width: int, height: int) -> bytes:
    """Return an image that declares another size than it has."""
    data = bytearray(encode(name))
    if name == "bmp":
        struct.pack_into("<ii", data, 18, width, height)
    elif name == "webp":
        place = data.index(b"\x9d\x01\x2a") + 3
        struct.pack_into("<HH", data, place, width, height)
    elif name == "tiff":
        (first,) = struct.unpack_from("<I", data, 4)
        for tag, value in ((256, width), (257, height)):
            place = next(
                at for at in range(first + 2, len(data), 12) if data[at : at + 2] == struct.pack("<H", tag)
            )
            struct.pack_into("<HII", data, place + 2, 4, 1, value)
    return bytes(data)


@pytest.mark.parametrize("name", ["webp", "tiff", "bmp"])
@pytest.mark.parametrize("size", [(16383, 16383), (16000, MIN_STILL_PIXELS // 16000 + 1)])
def test_a_size_beyond_the_limit_is_refused_before_it_is_allocated(name: str, size: tuple[int, int]) -> None:
    with refuses(ValueError, field=str(name)):
        decode_still(declare(name, *size))


@pytest.mark.parametrize(
    "data", [b"", b"RIFF1234WEBP", b"II*\0", b"\0\0\0\x20ftypavif", b"BM12340000" + bytes(60)]
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="expected"):
        decode_still(data)
