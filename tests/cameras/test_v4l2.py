"""V4L2 cameras and the choice of a mode. A kernel is imitated at its ioctls: no test here has seen a device."""

from __future__ import annotations

import struct
from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.cameras.camera_source import CapturedImage, Mode, choose_mode
from sam3_node.cameras.publish import frame_from
from sam3_node.cameras.sources import open_camera
from sam3_node.cameras.webcam import (
    V4l2Camera,
    V4l2Device,
    choose_v4l2_mode,
    find_camera,
    list_v4l2,
    read_camera,
    read_jpeg,
)
from sam3_node.errors import CameraError
from sam3_node.settings import CameraSettings
from sam3_node.wire import decode_image
from tests.support.refuses import refuses

SIZES = {
    "YUYV": {(640, 480): (30, 15), (1280, 720): (10,)},
    "MJPG": {(640, 480): (30,), (1280, 720): (30, 15)},
}
MODES = [
    Mode(*size, fps, form) for form, sizes in SIZES.items() for size, rates in sizes.items() for fps in rates
]
CAPTURE, METADATA = 0x1, 0x00800000


def fourcc(code: int) -> str:
    return struct.pack("=I", code).decode()


class Kernel:
    """Answers ioctls as the driver of a camera does, by the layouts of linux/videodev2.h."""

    def __init__(self, name: str, device_caps: int = CAPTURE) -> None:
        self.name, self.device_caps = name, device_caps

    def __call__(self, request: int, data: bytearray) -> None:
        number, size = request & 0xFF, request >> 16 & 0x3FFF
        assert len(data) == size
        answer = {0: self.capabilities, 2: self.formats, 74: self.sizes, 75: self.intervals}[number]
        try:
            answer(data)
        except IndexError as error:
            raise OSError(22, "Invalid argument") from error

    def capabilities(self, data: bytearray) -> None:
        caps = CAPTURE | METADATA | 0x80000000
        struct.pack_into(
            "=16s32s32sIII", data, 0, b"uvcvideo", self.name.encode(), b"usb-1", 1, caps, self.device_caps
        )

    def formats(self, data: bytearray) -> None:
        index, kind = struct.unpack_from("=II", data)
        assert kind == 1
        struct.pack_into("=4s", data, 44, list(SIZES)[index].encode())

    def sizes(self, data: bytearray) -> None:
        index, code = struct.unpack_from("=II", data)
        struct.pack_into("=III", data, 8, 1, *list(SIZES[fourcc(code)])[index])

    def intervals(self, data: bytearray) -> None:
        index, code, width, height = struct.unpack_from("=IIII", data)
        struct.pack_into("=III", data, 16, 1, 1, SIZES[fourcc(code)][width, height][index])


def camera(number: int, name: str) -> V4l2Camera:
    found = read_camera(Path(f"/dev/video{number}"), Kernel(name))
    assert found is not None
    return found


def test_the_name_and_all_modes_are_read() -> None:
    found = camera(2, "HD Pro Webcam C920")
    assert (found.name, found.index) == ("HD Pro Webcam C920", 2)
    assert list(found.modes) == MODES


def test_a_node_of_metadata_is_no_camera() -> None:
    assert read_camera(Path("/dev/video1"), Kernel("HD Pro Webcam C920", METADATA)) is None


def test_files_that_are_no_devices_are_passed_over(tmp_path: Path) -> None:
    for name in ("video0", "video1", "videos"):
        (tmp_path / name).touch()
    assert list_v4l2(tmp_path) == []


def test_a_camera_is_found_by_name_part_file_and_number() -> None:
    cameras = [
        camera(0, "Integrated Camera"),
        camera(2, "HD Pro Webcam C920"),
        camera(4, "HD Pro Webcam C922"),
    ]
    for name in ("HD Pro Webcam C920", "c920", "/dev/video2", "2"):
        assert find_camera(name, cameras) is cameras[1]
    with refuses(CameraError, field=("/dev/video2", "HD", "C920", "/dev/video4")):
        find_camera("HD Pro", cameras)
    with refuses(CameraError, field=("Integrated", "Camera")):
        find_camera("Integratd Camera", cameras)
    with refuses(CameraError, field="none"):
        find_camera("c920", [])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (CameraSettings(), Mode(640, 480, 30, "YUYV")),
        (CameraSettings(encoding="jpeg"), Mode(640, 480, 30, "MJPG")),
        (CameraSettings(width=1280, height=720), Mode(1280, 720, 30, "MJPG")),
        (CameraSettings(width=1280, height=720, fps=5), Mode(1280, 720, 10, "YUYV")),
    ],
)
def test_the_mode_follows_the_settings(settings: CameraSettings, expected: Mode) -> None:
    assert choose_v4l2_mode(camera(0, "Webcam"), settings) == expected


def test_a_camera_without_a_mode_that_can_be_read_says_what_it_has() -> None:
    odd = V4l2Camera(Path("/dev/video0"), "Odd", (Mode(640, 480, 30, "H264"),))
    with refuses(CameraError, field=("v4l2", "v4l2:Odd", "YUYV", "H264")):
        choose_v4l2_mode(odd, CameraSettings())


def jpeg(level: int = 90) -> bytes:
    return bytes(cv2.imencode(".jpg", np.full((48, 64, 3), level, np.uint8))[1])


class Capture:
    """Stands in for OpenCV's capture with CAP_PROP_CONVERT_RGB 0: one row of the bytes of each buffer."""

    def __init__(self, *buffers: bytes) -> None:
        self.buffers = list(buffers)

    def grab(self) -> bool:
        return bool(self.buffers)

    def get(self, _: int) -> float:
        return 0.0

    def retrieve(self) -> tuple[bool, np.ndarray]:
        return True, np.frombuffer(self.buffers.pop(0), np.uint8)[None]

    def release(self) -> None: ...


def test_mjpeg_is_passed_on_undecoded_and_damage_is_counted() -> None:
    device = V4l2Device(Capture(jpeg() + bytes(100), b"\xff\xd8 torn", jpeg(30)), MODES[3])
    assert device.grab()
    image = device.retrieve()
    assert image.size == (48, 64)
    assert frame_from(image, 0, CameraSettings(encoding="jpeg")).colour == jpeg()
    assert abs(int(frame_from(image, 0, CameraSettings()).colour[0]) - 90) < 3
    assert device.retrieve() is None
    assert device.lost == 1
    assert isinstance(device.retrieve(), CapturedImage)
    with refuses(CameraError, field="image"):
        device.grab()


def test_mjpeg_without_huffman_tables_can_be_decoded() -> None:
    """Check the kind that UVC cameras send: the tables of the standard are left out."""
    data = jpeg()
    while (start := data.find(b"\xff\xc4")) >= 0:
        data = data[:start] + data[start + 2 + int.from_bytes(data[start + 2 : start + 4], "big") :]
    frame = read_jpeg(data)
    assert frame is not None
    assert abs(int(decode_image(frame).mean()) - 90) < 3


def test_an_absent_camera_is_a_camera_error() -> None:
    with refuses(CameraError, field=("file", "camera")):
        open_camera("v4l2:No Such Camera", CameraSettings())


USB3 = [
    Mode(width, height, fps, form)
    for width, height, rates in ((1920, 1080, (30, 15)), (1280, 720, (30, 15)), (640, 480, (60, 30, 15)))
    for fps in rates
    for form in ("rgb8", "bgr8")
]
USB2 = [Mode(640, 480, 15, "rgb8"), Mode(640, 480, 6, "rgb8"), Mode(424, 240, 30, "rgb8")]


@pytest.mark.parametrize(
    ("modes", "wanted", "expected"),
    [
        (USB3, (640, 480, 30), (640, 480, 30)),
        (USB3, (640, 480, 20), (640, 480, 30)),
        (USB3, (640, 480, 90), (640, 480, 60)),
        (USB3, (700, 400, 30), (1280, 720, 30)),
        (USB3, (4000, 3000, 5), (1920, 1080, 15)),
        (USB3, (1280, 720, 60), (1280, 720, 30)),
        (USB2, (640, 480, 30), (640, 480, 15)),
        (USB2, (1280, 720, 30), (640, 480, 15)),
    ],
)
def test_the_nearest_mode_is_chosen(
    modes: list[Mode], wanted: tuple[int, int, float], expected: tuple[int, int, float]
) -> None:
    chosen = choose_mode(modes, Mode(*wanted, ""), ("bgr8", "rgb8"))
    assert chosen[:3] == expected


def test_the_first_format_is_preferred_and_an_unknown_one_is_none() -> None:
    wanted = Mode(640, 480, 30, "")
    for forms in (("bgr8", "rgb8"), ("rgb8", "bgr8")):
        chosen = choose_mode(USB3, wanted, forms)
        assert chosen.form == forms[0]
    assert choose_mode(USB3, wanted, ("y16",)) is None
    assert str(USB2[0]) == "640x480 at 15 fps, rgb8"
