"""bag:FILE and scene:tabletop play every frame in order, at its pace, as recorded, up to any damage."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sam3_node.bags import RecordingWriter
from sam3_node.cameras import playback
from sam3_node.cameras.camera_source import CameraSource, CapturedImage
from sam3_node.cameras.publish import frame_from, run_camera
from sam3_node.cameras.sources import open_camera
from sam3_node.errors import BagError
from sam3_node.settings import CameraSettings, load_settings
from sam3_node.types import Frame
from sam3_node.wire import decode_depth, decode_image, encode_depth
from tests.support.recordings import INTRINSICS, MS, frame_at, write_recording
from tests.support.refuses import refuses

FAST = CameraSettings(fps=1000)
JPEG = CameraSettings(fps=1000, encoding="jpeg")
Z16 = encode_depth(np.full((48, 64), 500, np.uint16), "z16", 0.001, aligned=True)  # of frame 0


def play(folder: Path, frames: int | list[Frame], settings: CameraSettings = FAST) -> CameraSource:
    """Write a recording of these frames, and open it."""
    return open_camera(f"bag:{write_recording(folder / 'table.mcap', frames)}", settings)


def seqs(source: Iterable[CapturedImage]) -> list[int]:
    """Return the seqs of the recorded frames."""
    return [captured.image.seq for captured in source if isinstance(captured.image, Frame)]


def long_recording(path: Path) -> Path:
    """Write several chunks and cut the last one."""
    large = {"encoding": "bgr8", "width": 200, "height": 100, "colour": bytes(60_000)}
    write_recording(path, [replace(frame_at(seq), **large) for seq in range(40)])
    path.write_bytes(path.read_bytes()[: 3 << 19])
    return path


def test_every_frame_comes_once_in_order_then_it_ends(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "table.mcap", 6)
    source = open_camera(f"bag:{path}", FAST)
    assert source.name == f"bag:{path}"
    assert seqs(source) == list(range(6))


def test_images_are_captured_anew_with_what_was_recorded(tmp_path: Path) -> None:
    captured = list(play(tmp_path, 3))
    stamps = [item.capture_ns for item in captured]
    assert stamps == sorted(stamps)
    assert stamps[0] > frame_at(2).capture_ns + 10**17  # Unix time
    assert [item.times for item in captured] == [
        {"sensor_ns": seq, "media_ns": 40 * MS * seq} for seq in range(3)
    ]
    assert captured[2].intrinsics == INTRINSICS
    assert captured[2].size == (48, 64)
    assert captured[2].pixels().mean() == pytest.approx(20, abs=2)
    depth = captured[2].depth
    assert depth is not None
    assert set(np.unique(decode_depth(depth))) == {502}


def test_its_own_pace_is_kept_unless_settings_say_otherwise(tmp_path: Path) -> None:
    frames = [frame_at(seq, stamp_ns=at * MS) for seq, at in enumerate((0, 10, 150, 160))]
    captured = list(play(tmp_path, frames, CameraSettings()))
    assert captured[2].capture_ns - captured[1].capture_ns >= 100 * MS
    assert captured[-1].capture_ns - captured[0].capture_ns >= 140 * MS


def test_jpeg_and_depth_are_passed_on_as_they_were_recorded(tmp_path: Path) -> None:
    (captured,) = play(tmp_path, 1, JPEG)
    recorded = frame_at(0)
    frame = frame_from(captured, 7, JPEG)
    assert (frame.camera, frame.seq, frame.clock) == ("cam0", 7, "system")
    assert frame.colour == recorded.colour
    assert frame.depth == Z16


def test_another_encoding_or_size_is_made_when_asked_for(tmp_path: Path) -> None:
    (captured,) = play(tmp_path, [frame_at(9)])
    raw = frame_from(captured, 0, FAST)
    assert (raw.encoding, len(raw.colour)) == ("bgr8", 48 * 64 * 3)
    half = frame_from(captured, 0, CameraSettings(encoding="jpeg", width=32))
    assert decode_image(half).shape == (24, 32, 3)
    assert half.depth.scale_m == 0.001
    assert decode_depth(half.depth).shape == (24, 32)
    assert half.intrinsics.fx == 30.0


def test_depth_of_another_camera_is_not_resized(tmp_path: Path) -> None:
    recorded = frame_at(0)
    recorded = replace(recorded, depth=replace(recorded.depth, aligned=False))
    (captured,) = play(tmp_path, [recorded])
    assert frame_from(captured, 0, CameraSettings(width=32)).depth == replace(Z16, aligned=False)


def test_looping_starts_again_at_the_same_pace(tmp_path: Path) -> None:
    source = play(tmp_path, 3, CameraSettings(loop=True))
    captured = list(itertools.islice(source, 7))
    assert seqs(captured) == [0, 1, 2, 0, 1, 2, 0]
    assert captured[6].capture_ns - captured[0].capture_ns >= 6 * 39 * MS
    source.close()
    assert not list(source)


def test_stop_ends_even_a_looping_recording(tmp_path: Path) -> None:
    stop = threading.Event()
    settings = CameraSettings(fps=0.01, loop=True)
    source = iter(open_camera(f"bag:{write_recording(tmp_path / 'table.mcap')}", settings, stop))
    next(source)
    threading.Timer(0.05, stop.set).start()
    assert next(source, None) is None


def test_of_several_cameras_the_first_is_played(tmp_path: Path) -> None:
    frames = [frame_at(0), frame_at(0, "left"), frame_at(1), frame_at(1, "left")]
    source = play(tmp_path, frames)
    assert [captured.image.camera for captured in source] == ["table"] * 2  # type: ignore[union-attr]


def test_a_damaged_recording_is_played_as_far_as_it_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = long_recording(tmp_path / "cut.mcap")
    with caplog.at_level(logging.WARNING):
        found = seqs(open_camera(f"bag:{path}", FAST))
    assert found == list(range(len(found)))
    assert len(found) > 5
    assert "cut.mcap is cut off" in caplog.text


def test_an_image_that_cannot_be_decoded_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frames = [frame_at(0), replace(frame_at(1), colour=b"not a JPEG"), frame_at(2)]
    path = write_recording(tmp_path / "table.mcap", frames)
    overrides = {
        "camera.source": f"bag:{path}",
        "camera.wait": "false",
        "transport.frames": "tcp://127.0.0.1:0",
    }
    summary = run_camera(load_settings(overrides=overrides), threading.Event())
    assert (summary.captured, summary.unsent) == (3, 1)
    assert "skipped image 1 of cam0: jpeg image: expected a JPEG" in caplog.text


def test_a_file_that_is_gone_when_it_loops_ends_the_camera(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "table.mcap", 2)
    source = iter(open_camera(f"bag:{path}", CameraSettings(fps=1000, loop=True)))
    next(source)
    path.unlink()
    with pytest.raises(BagError, match="cannot read"):
        list(source)


def test_files_that_hold_no_frame_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty.mcap").write_bytes(b"")
    with RecordingWriter(tmp_path / "bare.mcap"):
        pass
    for name, what in (
        ("none", f"no file at {tmp_path}"),
        ("empty", "found an empty one"),
        ("bare", "no message at all"),
    ):
        with pytest.raises(BagError, match=what):
            open_camera(f"bag:{tmp_path}/{name}.mcap", FAST)


def test_the_tabletop_says_when_it_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playback, "TABLETOP", tmp_path / "tabletop.mcap")
    with refuses(BagError, field=str(tmp_path)):
        open_camera("scene:tabletop", FAST)
    write_recording(tmp_path / "tabletop.mcap", 2)
    source = open_camera("scene:tabletop", FAST)
    assert (source.name, seqs(source)) == ("scene:tabletop", [0, 1])
