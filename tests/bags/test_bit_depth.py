"""Images of sensors with 10 to 16 bits, in encodings of 16."""

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import cv2
import numpy as np
import pytest

from sam3_node.bags import open_bag
from sam3_node.bags.bit_depth import BitDepths
from sam3_node.bags.messages.ros_images import read_payload
from sam3_node.bags.samples import WideColour
from sam3_node.cli.calibration_views import _open_sources
from sam3_node.types import Frame
from sam3_node.wire import decode_image
from sam3_node.wire.images import decode_photo
from tests.support import mcap_files
from tests.support.mcap_files import T0, raw
from tests.support.refuses import mentions
from tests.support.ros_recordings import decoded
from tests.support.tables import each_row

GREY = np.tile(np.arange(0, 256, 4, dtype=np.uint8), (48, 1))
GREY[0, 0] = 255
COLOUR = np.dstack([GREY, 255 - GREY, GREY // 2])
TOPIC = "/cam/image_raw"


def widen(image: np.ndarray, bits: int) -> np.ndarray:
    """Return what a sensor of so many bits gives for an image of 8 bits, with values in the bits below."""
    return image.astype(np.uint16) << (bits - 8) | ((1 << (bits - 8)) - 1)


def payload_of(encoding: str, bits: int) -> Any:
    """Return an image as a message of ROS, of COLOUR or, in grey and mosaics, of GREY."""
    packed, _, form = encoding.partition(" ")
    if form:
        image = widen(GREY if form == "grey" else COLOUR, bits)
        message = SimpleNamespace(format=packed, data=cv2.imencode(f".{packed}", image)[1])
        return read_payload(message, "sensor_msgs/msg/CompressedImage", TOPIC)
    image = widen(GREY if encoding == "mono16" or "bayer" in encoding else COLOUR, bits)
    if encoding.startswith("rgb"):
        image = image[:, :, ::-1]
    if "a16" in encoding:
        alpha = np.full((*GREY.shape, 1), 65535, np.uint16)  # of 16 bits, whatever the sensor has
        image = np.concatenate([image, alpha], axis=2)
    message = SimpleNamespace(
        height=48,
        width=64,
        encoding=encoding,
        is_bigendian=0,
        step=0,
        data=np.ascontiguousarray(image).tobytes(),
    )
    return read_payload(message, "sensor_msgs/msg/Image", TOPIC)


@each_row(
    "encoding",
    [
        *("mono16", "bgr16", "rgb16", "bgra16", "rgba16"),
        *(f"bayer_{pattern}16" for pattern in ("rggb", "bggr", "gbrg", "grbg")),
        *("png grey", "png colour", "tiff grey", "tiff colour"),
    ],
)
@each_row("bits", [8, 10, 12, 14, 16])
def test_each_encoding_of_16_bits_is_scaled_by_those_of_its_sensor(encoding: str, bits: int) -> None:
    found = decoded(BitDepths().narrow(TOPIC, payload_of(encoding, bits)))
    expected = COLOUR
    if encoding in ("mono16", "png grey", "tiff grey"):
        expected = cv2.cvtColor(GREY, cv2.COLOR_GRAY2BGR)
    elif "bayer" in encoding:
        pattern = encoding.removeprefix("bayer_").removesuffix("16").upper()
        expected = cv2.cvtColor(GREY, getattr(cv2, f"COLOR_Bayer{pattern}2BGR"))
    assert np.abs(found.astype(int) - expected).max() <= 1


def test_a_dark_image_is_as_dark_as_the_others_of_its_stream() -> None:
    depths = BitDepths()
    found = []
    for image in (GREY // 64, GREY, GREY // 64, GREY):
        wide = WideColour.from_pixels(widen(image, 12)[:, :, None], "mono8")
        found.append(int(np.frombuffer(depths.narrow(TOPIC, wide).data, np.uint8).max()))
    assert found == [63, 255, 3, 255]
    (line,) = depths.describe()
    assert mentions(line, TOPIC, "12", "since image 1")
    # another topic has a sensor of its own, and 16 bits are what the encoding says
    depths.narrow("/other", WideColour.from_pixels(widen(GREY, 16)[:, :, None], "mono8"))
    assert depths.describe() == [line]


def write_recording(kind: str, folder: Path) -> Path:
    """Write GREY of a sensor of 12 bits."""
    image = widen(GREY, 12)
    if kind == "rosbag":
        path = folder / "take.mcap"
        return mcap_files.write_ros2(
            path, [raw(image, "mono16", stamp_ns=T0 + index, width=64, height=48) for index in (0, 9)]
        )
    if kind == "video":
        with av.open(str(folder / "take.mkv"), "w") as container:
            stream = container.add_stream("ffv1", rate=10)
            stream.width = 64
            stream.height = 48
            stream.pix_fmt = "gray16le"
            for index in range(2):
                frame = av.VideoFrame.from_ndarray(image, format="gray16le")
                frame.pts = index
                frame.time_base = Fraction(1, 10)
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        return folder / "take.mkv"
    for index in range(2):
        cv2.imwrite(str(folder / f"{index:04}.{kind}"), image)
    return folder


@pytest.mark.parametrize("kind", ["rosbag", "video", "png", "tiff"])
def test_a_recording_of_a_sensor_of_12_bits_is_bright_and_told(tmp_path: Path, kind: str) -> None:
    with open_bag(write_recording(kind, tmp_path)) as bag:
        frames = list(bag)
        assert len(frames) == 2
        assert mentions(bag.lost, "12", "16")
        for frame in frames:
            assert np.abs(decode_image(frame)[:, :, 0].astype(int) - GREY).max() <= 1


@each_row("bits", [8, 10, 12, 14, 16])
@each_row("expected", [GREY, COLOUR])
def test_a_png_that_is_sent_alone_is_scaled_by_its_own_values(bits: int, expected: np.ndarray) -> None:
    png = cv2.imencode(".png", widen(expected, bits))[1].tobytes()
    shown = expected if expected.ndim == 3 else cv2.cvtColor(expected, cv2.COLOR_GRAY2BGR)
    for found in (decode_image(Frame("cam0", 0, 0, 64, 48, "png", png)), decode_photo(png)):
        assert (found == shown).all()


def test_pictures_of_a_board_are_scaled_each(tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "board.png"), widen(COLOUR, 12))
    (picture,) = _open_sources([str(tmp_path)], "", 1, {})
    assert (picture.image == COLOUR).all()
