"""webcam:N and network streams through OpenCV. A video file is the device: its end is a lost device."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.cameras.live_source import DeviceSource
from sam3_node.cameras.sources import open_camera
from sam3_node.cameras.webcam import OpenCvDevice
from sam3_node.errors import CameraError
from sam3_node.settings import CameraSettings
from tests.support.refuses import refuses


@pytest.fixture
def device(tmp_path: Path) -> Path:
    path = tmp_path / "device.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 30, (160, 120))
    for i in range(40):
        writer.write(np.full((120, 160, 3), 5 * i, np.uint8))
    writer.release()
    return path


def open_file(path: Path, stop: threading.Event | None = None, fps: float = 0) -> DeviceSource:
    return DeviceSource(
        "webcam:9", lambda: OpenCvDevice(cv2.VideoCapture(str(path))), fps, stop or threading.Event()
    )


def test_an_absent_camera_is_a_camera_error() -> None:
    with refuses(CameraError, field=("webcam", "webcam:99")):
        open_camera("webcam:99", CameraSettings(width=640, height=480, fps=30))


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
    assert "webcam:9: no image; opening it again in 0.25 s" in caplog.text
    assert "in 0.50 s" in caplog.text


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


class Server:
    """A network camera that sends images of rising grey, `count` on each connection."""

    def __init__(self, count: int) -> None:
        self.connections = itertools.count()
        camera = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                start = next(camera.connections) * 100
                self.send_response(200)
                self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=image")
                self.end_headers()
                for index in range(count):
                    grey = np.full((48, 64, 3), (start + index) % 250, np.uint8)
                    data = cv2.imencode(".jpg", grey)[1].tobytes()
                    head = f"--image\r\nContent-Type: image/jpeg\r\nContent-Length: {len(data)}\r\n\r\n"
                    try:
                        self.wfile.write(head.encode() + data + b"\r\n")
                    except OSError:
                        return
                    time.sleep(0.01)

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def uri(self) -> str:
        return f"http://user:secret@127.0.0.1:{self.server.server_port}/video.mjpg"


@pytest.fixture
def server() -> Iterator[Server]:
    camera = Server(20)
    yield camera
    camera.server.shutdown()
    camera.server.server_close()


def test_a_stream_is_read_and_connected_again_after_its_end(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    source = open_camera(server.uri, CameraSettings())
    images = iter(source)
    assert next(images).image.shape == (48, 64, 3)
    while next(images).image.mean() < 90:  # from the second connection on
        pass
    source.close()
    assert not source.is_finite
    assert (
        f"http://127.0.0.1:{server.server.server_port}/video.mjpg: no image; opening it again" in caplog.text
    )
    assert "secret" not in caplog.text + source.name


def test_a_stream_that_is_absent_is_a_camera_error_without_the_password() -> None:
    with refuses(CameraError, field=("none", "check")) as raised:
        open_camera("rtsp://user:secret@127.0.0.1:1/front", CameraSettings())
    assert "rtsp://127.0.0.1:1/front" in str(raised.value)
    assert "secret" not in str(raised.value)


def test_an_address_without_a_host_is_no_stream() -> None:
    with refuses(CameraError, field=("camera", "source")):
        open_camera("rtsp:front", CameraSettings())
