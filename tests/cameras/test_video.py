"""video:FILE and images:FOLDER on real files: each frame once, in order, and clear errors for other files."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.cameras.sources import open_camera
from sam3_node.errors import CameraError
from sam3_node.settings import CameraSettings
from tests.support.paths import SHARED
from tests.support.refuses import refuses

ROBOT_ARM = SHARED / "data" / "video" / "16_robotarm.mp4"
FAST = CameraSettings(fps=1000)


def write_video(path: Path, frames: int = 12, fps: float = 25.0) -> Path:
    """Write a video whose frame i is a flat grey of 20 * i."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), fps, (160, 120))
    for i in range(frames):
        writer.write(np.full((120, 160, 3), 20 * i, np.uint8))
    writer.release()
    return path


@pytest.fixture
def video(tmp_path: Path) -> Path:
    return write_video(tmp_path / "grey.mp4")


def greys(source: object) -> list[int]:
    return [round(float(captured.pixels().mean()) / 20) for captured in source]  # type: ignore[attr-defined]


def test_every_frame_comes_once_in_order_then_it_ends(video: Path) -> None:
    source = open_camera(f"video:{video}", FAST)
    assert source.name == f"video:{video}"
    assert greys(source) == list(range(12))
    source.close()


def test_images_carry_capture_and_media_time(video: Path) -> None:
    captured = list(open_camera(f"video:{video}", FAST))
    assert captured[0].pixels().shape == (120, 160, 3)
    stamps = [item.capture_ns for item in captured]
    assert stamps == sorted(stamps)
    assert [item.times["media_ns"] for item in captured[:3]] == [0, 40_000_000, 80_000_000]


def test_its_own_rate_is_kept_unless_settings_say_otherwise(video: Path) -> None:
    captured = list(open_camera(f"video:{video}", CameraSettings()))
    assert captured[-1].capture_ns - captured[0].capture_ns >= 0.43e9  # 11 intervals of 40 ms


def test_looping_starts_again(video: Path) -> None:
    source = open_camera(f"video:{video}", CameraSettings(fps=1000, loop=True))
    assert greys(itertools.islice(source, 26)) == [*range(12), *range(12), 0, 1]
    source.close()
    assert greys(source) == []


def test_stop_ends_even_a_looping_video(video: Path) -> None:
    stop = threading.Event()
    source = iter(open_camera(f"video:{video}", CameraSettings(fps=0.01, loop=True), stop))
    next(source)
    threading.Timer(0.05, stop.set).start()
    assert next(source, None) is None


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.mp4", tmp_path):
        with refuses(CameraError, field=str(path)):
            open_camera(f"video:{path}", FAST)


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 4096, b"not a video", b"\x00\x00\x00\x20ftypisom" + b"\xff" * 999]
)
def test_damaged_files_are_camera_errors(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.mp4"
    path.write_bytes(content)
    with refuses(CameraError, field=("readable", "video")):
        open_camera(f"video:{path}", FAST)


def test_a_file_cut_short_is_refused_or_ends_cleanly(tmp_path: Path) -> None:
    whole = write_video(tmp_path / "whole.avi", frames=12)
    cut = tmp_path / "cut.avi"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    try:
        found = greys(open_camera(f"video:{cut}", FAST))
    except CameraError:
        return
    assert found == list(range(len(found)))


@pytest.mark.parametrize("uri", ["", "video", "bag", "/dev/video0", "Scene:shapes"])
def test_unknown_schemes_name_the_known_ones(uri: str) -> None:
    with refuses(CameraError, field=("scene", "video:FILE", "webcam:INDEX")):
        open_camera(uri, FAST)


@pytest.mark.skipif(not ROBOT_ARM.is_file(), reason="needs the shared test video")
def test_a_real_recording() -> None:
    captured = list(itertools.islice(open_camera(f"video:{ROBOT_ARM}", CameraSettings(fps=200)), 20))
    assert {item.pixels().shape for item in captured} == {(720, 1280, 3)}
    assert captured[19].times["media_ns"] == 19 * 40_000_000


@pytest.mark.parametrize(
    ("source", "nearest"),
    [
        ("clip.MP4", ("video", "video:clip.MP4")),
        ("webcm:0", "webcam:0"),
        ("vidoe:clip.mp4", ("video", "video:clip.mp4")),
        ("0", "webcam:0"),
        ("/dev/video2", "webcam:2"),
        ("tabletop", "scene"),
        ("scene:tabeltop", "scene"),
    ],
)
def test_a_source_without_its_kind_or_misspelt_is_answered_with_the_nearest(
    source: str, nearest: str | tuple[str, ...]
) -> None:
    with refuses(CameraError, field=nearest):
        open_camera(source, FAST)


def test_a_bare_path_of_a_recording_is_answered_with_its_kind(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    with pytest.raises(CameraError, match=r"found '[^']*'$"):
        open_camera(str(images), FAST)
    cv2.imwrite(str(images / "0.png"), np.zeros((48, 64, 3), np.uint8))
    with refuses(CameraError, field=str(images)):
        open_camera(str(images), FAST)


def test_images_come_in_the_natural_order_of_their_names(tmp_path: Path) -> None:
    for index in (2, 10, 1):
        cv2.imwrite(str(tmp_path / f"{index}.png"), np.full((48, 64, 3), index, np.uint8))
    source = open_camera(f"images:{tmp_path}", CameraSettings(fps=1000))
    assert [int(image.pixels()[0, 0, 0]) for image in source] == [1, 2, 10]
    assert source.is_finite
    assert source.lost == 0


def test_a_folder_without_images_and_a_file_are_camera_errors(tmp_path: Path) -> None:
    with pytest.raises(CameraError, match="images:"):
        open_camera(f"images:{tmp_path}", CameraSettings())
    with refuses(CameraError, field=("folder", "images")):
        open_camera(f"images:{tmp_path / 'absent'}", CameraSettings())
