"""webcam:N with a video file as the device: its end is a lost device, reopening it brings the device back."""

from __future__ import annotations

import threading
from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.cameras.live_source import DeviceSource
from sam3_node.cameras.sources import open_camera
from sam3_node.cameras.webcam import OpenCvDevice
from sam3_node.errors import CameraError
from sam3_node.settings import CameraSettings


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
    with pytest.raises(CameraError, match=r"webcam:99: expected a camera, found none"):
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
    with pytest.raises(CameraError, match=r"expected webcam:INDEX"):
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
