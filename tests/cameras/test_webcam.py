"""webcam:N, V4L2 and network streams. A video file is the device, and a kernel is imitated at its ioctls."""

import itertools
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.cameras import webcam
from sam3_node.cameras.camera_source import CapturedImage, Mode, choose_mode
from sam3_node.cameras.live_source import DeviceSource
from sam3_node.cameras.publish import frame_from
from sam3_node.cameras.sources import open_camera
from sam3_node.errors import CameraError
from sam3_node.settings import CameraSettings
from sam3_node.wire import decode_image
from tests.support.node_rig import until
from tests.support.recordings import write_film
from tests.support.refuses import mentions, refuses
from tests.support.tables import each_row


@pytest.fixture
def device(tmp_path: Path) -> Path:
    images = (np.full((120, 160, 3), 5 * i, np.uint8) for i in range(40))
    return write_film(tmp_path / "device.avi", images, 30, "MJPG")


def open_file(path: Path, stop: threading.Event | None = None, fps: float = 0) -> DeviceSource:
    return DeviceSource(
        "webcam:9", lambda: webcam.OpenCvDevice(cv2.VideoCapture(str(path))), fps, stop or threading.Event()
    )


@pytest.mark.parametrize(
    ("source", "field"), [("webcam:99", ("webcam", "webcam:99")), ("v4l2:No Such Camera", ("file", "camera"))]
)
def test_an_absent_camera_is_a_camera_error(source: str, field: tuple[str, ...]) -> None:
    with refuses(CameraError, field=field):
        open_camera(source, CameraSettings(width=640, height=480, fps=30))


def test_opencv_says_nothing_of_an_absent_camera(capfd: pytest.CaptureFixture[str]) -> None:
    level = cv2.utils.logging.getLogLevel()
    with pytest.raises(CameraError):
        open_camera("webcam:99", CameraSettings())
    assert capfd.readouterr() == ("", "")
    assert cv2.utils.logging.getLogLevel() == level


@pytest.mark.parametrize(
    "uri", ["webcam:", "webcam:-1", "webcam:front", "webcam:1e3", "webcam:²", "webcam:99999"]
)
def test_a_wrong_index_is_a_camera_error(uri: str) -> None:
    with refuses(CameraError, field="webcam:INDEX"):
        open_camera(uri, CameraSettings())


def test_images_come_with_their_time_of_capture(device: Path) -> None:
    source = open_file(device)
    captured = next(iter(source))
    source.close()
    assert captured.image.shape == (120, 160, 3)
    assert captured.capture_ns > 1_600_000_000 * 10**9


def test_a_lost_camera_is_opened_again(device: Path, caplog: pytest.LogCaptureFixture) -> None:
    away = device.with_suffix(".away")
    source = open_file(device)
    images = iter(source)
    next(images)
    device.rename(away)  # its end is reached, and then it cannot be opened
    back = threading.Timer(0.6, away.rename, [device])
    back.start()
    while back.is_alive():
        assert next(images).image.shape == (120, 160, 3)
    source.close()
    assert mentions(caplog.text, "webcam:9", "0.25 s")
    assert mentions(caplog.text, "0.50 s")


def test_stop_ends_the_wait_for_a_lost_camera(device: Path) -> None:
    stop = threading.Event()
    source = open_file(device, stop)
    images = iter(source)
    next(images)
    device.unlink()
    threading.Timer(0.3, stop.set).start()
    assert all(captured.image.shape == (120, 160, 3) for captured in images)
    source.close()


def test_closing_ends_the_iteration(device: Path) -> None:
    source = open_file(device)
    images = iter(source)
    next(images)
    source.close()
    source.close()
    assert next(images, None) is None


def test_a_slower_rate_thins_the_images(device: Path) -> None:
    """Check that a device that gives its 40 images at once passes only the first on at 0.1 a second."""
    source = open_file(device, fps=0.1)
    images = iter(source)
    first = next(images)
    threading.Timer(0.2, source.close).start()
    assert float(first.image.mean()) < 20
    assert next(images, None) is None


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a network camera that sends 20 images of rising grey on each connection."""
    connections = itertools.count()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            start = next(connections) * 100
            self.send_response(200)
            self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=image")
            self.end_headers()
            for index in range(20):
                data = jpeg((start + index) % 250)
                head = f"--image\r\nContent-Type: image/jpeg\r\nContent-Length: {len(data)}\r\n\r\n"
                try:
                    self.wfile.write(head.encode() + data + b"\r\n")
                except OSError:
                    return
                time.sleep(0.01)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_a_stream_is_read_and_connected_again_after_its_end(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    source = open_camera(f"http://user:secret@127.0.0.1:{port}/video.mjpg", CameraSettings())
    images = iter(source)
    assert next(images).image.shape == (48, 64, 3)
    while next(images).image.mean() < 90:  # from the second connection on
        pass
    source.close()
    assert not source.is_finite
    assert f"http://127.0.0.1:{port}/video.mjpg: no image; opening it again" in caplog.text
    assert "secret" not in caplog.text + source.name


def test_a_stream_that_is_absent_is_a_camera_error_without_the_password() -> None:
    with refuses(CameraError, field=("none", "check")) as raised:
        open_camera("rtsp://user:secret@127.0.0.1:1/front", CameraSettings())
    assert "rtsp://127.0.0.1:1/front" in str(raised.value)
    assert "secret" not in str(raised.value)


def test_an_address_without_a_host_is_no_stream() -> None:
    with refuses(CameraError, field=("camera", "source")):
        open_camera("rtsp:front", CameraSettings())


SIZES = {
    "YUYV": {(640, 480): (30, 15), (1280, 720): (10,)},
    "MJPG": {(640, 480): (30,), (1280, 720): (30, 15)},
}
MODES = [
    Mode(*size, fps, form) for form, sizes in SIZES.items() for size, rates in sizes.items() for fps in rates
]
CAPTURE = 0x1
METADATA = 0x00800000


def fourcc(code: int) -> str:
    return struct.pack("=I", code).decode()


class Kernel:
    """Answers ioctls as the driver of a camera does, by the layouts of linux/videodev2.h."""

    def __init__(self, name: str, device_caps: int = CAPTURE, port: str = "usb-1") -> None:
        self.name = name
        self.device_caps = device_caps
        self.port = port

    def __call__(self, request: int, data: bytearray) -> None:
        number = request & 0xFF
        size = request >> 16 & 0x3FFF
        assert len(data) == size
        answer = {0: self.capabilities, 2: self.formats, 74: self.sizes, 75: self.intervals}[number]
        try:
            answer(data)
        except IndexError as error:
            raise OSError(22, "Invalid argument") from error

    def capabilities(self, data: bytearray) -> None:
        caps = CAPTURE | METADATA | 0x80000000
        struct.pack_into(
            "=16s32s32sIII",
            data,
            0,
            b"uvcvideo",
            self.name.encode(),
            self.port.encode(),
            1,
            caps,
            self.device_caps,
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


def camera(number: int, name: str, port: str = "usb-1") -> webcam.V4l2Camera:
    return webcam.read_camera(Path(f"/dev/video{number}"), Kernel(name, port=port))


def test_the_name_and_all_modes_are_read() -> None:
    found = camera(2, "HD Pro Webcam C920")
    assert (found.name, found.index) == ("HD Pro Webcam C920", 2)
    assert list(found.modes) == MODES


def test_a_node_of_metadata_is_no_camera() -> None:
    assert webcam.read_camera(Path("/dev/video1"), Kernel("HD Pro Webcam C920", METADATA)) is None


def test_files_that_are_no_devices_are_passed_over(tmp_path: Path) -> None:
    for name in ("video0", "video1", "videos"):
        (tmp_path / name).touch()
    assert webcam.list_v4l2(tmp_path) == []


def test_cameras_of_one_name_are_told_apart(tmp_path: Path) -> None:
    twins = [camera(0, "C920", "usb-1"), camera(2, "C920", "usb-2")]
    for name in ("C920", "c92"):
        with refuses(CameraError, field=("/dev/video0", "usb-1", "/dev/video2", "usb-2", "by-path")):
            webcam.find_camera(name, twins)
    link = tmp_path / "link"
    link.symlink_to("/dev/video2")
    for name in ("/dev/video2", "2", str(link)):
        assert webcam.find_camera(name, twins) is twins[1]
    # one camera with two files
    assert webcam.find_camera("C920", [twins[0], camera(1, "C920", "usb-1")]) is twins[0]


def test_a_lost_camera_is_not_taken_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    attached: list[webcam.V4l2Camera] = []
    opened: list[int] = []

    def open_capture(index: int, *_: object) -> Capture:
        opened.append(index)
        return Capture()

    # the source alone would open the camera again in a thread
    monkeypatch.setattr(webcam, "DeviceSource", lambda _, open_device, *__: open_device)
    monkeypatch.setattr(webcam, "list_v4l2", lambda: attached)
    monkeypatch.setattr(webcam, "_open_capture", open_capture)
    for address in ("C920", "/dev/video0", "0"):
        opened.clear()
        again = webcam.open_v4l2(address, CameraSettings(), threading.Event())
        attached[:] = [camera(0, "C920", "usb-1")]
        again()
        # it is away, and a twin has come: first alone, then with its file
        for number in (2, 0):
            attached[:] = [camera(number, "C920", "usb-2")]
            with refuses(CameraError, field=("usb-1", f"/dev/video{number}", "usb-2")):
                again()
        attached[:] = [camera(0, "C920", "usb-1"), camera(2, "C920", "usb-2")]
        again()
        assert opened == [0, 0]


def test_a_camera_is_found_by_name_part_file_and_number() -> None:
    names = {0: "Integrated Camera", 2: "HD Pro Webcam C920", 4: "HD Pro Webcam C922"}
    cameras = [camera(*item) for item in names.items()]
    for name in ("HD Pro Webcam C920", "c920", "/dev/video2", "2"):
        assert webcam.find_camera(name, cameras) is cameras[1]
    with refuses(CameraError, field=("/dev/video2", "HD", "C920", "/dev/video4")):
        webcam.find_camera("HD Pro", cameras)
    with refuses(CameraError, field=("Integrated", "Camera")):
        webcam.find_camera("Integratd Camera", cameras)
    with refuses(CameraError, field="none"):
        webcam.find_camera("c920", [])


@pytest.mark.parametrize("source", ["v4l2:C920", "v4l2:/dev/video0", "webcam:0"])
def test_a_lost_camera_is_never_replaced_by_its_twin(
    source: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The one at port 1 is lost, and the one at port 2 gets its name and file, until the first is back."""
    opened: list[str] = []
    first, second = (
        webcam.V4l2Camera(Path("/dev/video0"), "C920", (MODES[0],), f"usb-{port}") for port in (1, 2)
    )
    present = [first]

    class Lossy(Capture):
        """A device that gives one image and is lost."""

        def retrieve(self) -> tuple[bool, np.ndarray]:
            present[0] = second
            self.buffers.clear()
            return True, np.zeros((48, 64, 3), np.uint8)

    def open_capture(*_: object) -> Lossy:
        opened.append(present[0].port)
        return Lossy(b"image")

    monkeypatch.setattr(webcam, "list_v4l2", lambda: list(present))
    monkeypatch.setattr(webcam, "_open_capture", open_capture)
    stop = threading.Event()
    images = iter(open_camera(source, CameraSettings(), stop))
    next(images)
    until(lambda: "usb-2" in caplog.text, "the refusal of the other camera")
    assert mentions(caplog.text, "usb-1", "again")
    present[0] = first
    next(images)
    stop.set()
    assert set(opened) == {"usb-1"}


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
    assert webcam.choose_v4l2_mode(camera(0, "Webcam"), settings) == expected


def test_a_camera_without_a_mode_that_can_be_read_says_what_it_has() -> None:
    odd = webcam.V4l2Camera(Path("/dev/video0"), "Odd", (Mode(640, 480, 30, "H264"),))
    with refuses(CameraError, field=("v4l2", "v4l2:Odd", "YUYV", "H264")):
        webcam.choose_v4l2_mode(odd, CameraSettings())


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
    device = webcam.V4l2Device(Capture(jpeg() + bytes(100), b"\xff\xd8 torn", jpeg(30)), MODES[3])
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
    assert abs(int(decode_image(webcam.read_jpeg(data)).mean()) - 90) < 3


USB3 = [
    Mode(width, height, fps, form)
    for width, height, rates in ((1920, 1080, (30, 15)), (1280, 720, (30, 15)), (640, 480, (60, 30, 15)))
    for fps in rates
    for form in ("rgb8", "bgr8")
]
USB2 = [Mode(640, 480, 15, "rgb8"), Mode(640, 480, 6, "rgb8"), Mode(424, 240, 30, "rgb8")]


@each_row(
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
