"""`sam3-node camera list`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sam3_node.bags.native.reader import TABLETOP
from sam3_node.cameras import sources
from sam3_node.cameras.camera_source import Mode
from sam3_node.cameras.sources import describe_modes, list_cameras
from sam3_node.cameras.webcam import V4l2Camera
from sam3_node.cli.main import main
from sam3_node.errors import CameraError


def test_recordings_come_with_their_cameras_and_damaged_ones_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(TABLETOP, tmp_path / "table.mcap")
    (tmp_path / "torn.mcap").write_bytes(b"torn")
    assert main(["camera", "list", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        "RealSense:",
        "V4L2:",
        f"recordings in {tmp_path}:",
    ]
    (table,) = [line for line in lines if "table.mcap" in line]
    assert "640x480" in table
    assert "with depth" in table
    (torn,) = [line for line in lines if "torn.mcap" in line]
    assert "cannot be read: " in torn


def test_a_folder_that_is_absent_says_so(tmp_path: Path) -> None:
    lines = list(list_cameras(tmp_path / "absent"))
    assert "cannot be listed: " in lines[-1]


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse() -> None:
        raise CameraError("it needs the library libusb: sudo apt install libusb-1.0-0")

    monkeypatch.setattr("sam3_node.cameras.realsense_sdk.load_sdk", refuse)
    lines = list(list_cameras(tmp_path))
    assert lines[:2] == [
        "RealSense:",
        "  cannot be listed: it needs the library libusb: sudo apt install libusb-1.0-0",
    ]
    assert lines[-1] == "  none"


def test_cameras_come_with_their_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = (Mode(640, 480, 30, "YUYV"), Mode(640, 480, 15, "YUYV"), Mode(1280, 720, 30, "MJPG"))
    assert list(describe_modes(modes)) == ["1280x720 MJPG: 30 fps", "640x480 YUYV: 15, 30 fps"]
    camera = V4l2Camera(Path("/dev/video2"), "HD Webcam", modes)
    monkeypatch.setattr("sam3_node.cameras.webcam.list_v4l2", lambda: [camera])
    assert list(sources._list_v4l2()) == [
        "v4l2:/dev/video2  HD Webcam",
        "  1280x720 MJPG: 30 fps",
        "  640x480 YUYV: 15, 30 fps",
    ]


def test_a_folder_is_for_the_list_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["camera", "scene:shapes", "recordings"]) == 2
    assert "expected one source, found 'scene:shapes' and 'recordings'" in capsys.readouterr().err
