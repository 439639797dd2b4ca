"""A clip folder's clip becomes a recording that plays and is judged by its own labels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sam3_node.wire import decode_depth, decode_image
from tools.scenes.clips import Clip, write_clip

pytest.importorskip("mcap")

from sam3_node.bags import LabelledClip, RecordingReader
from tools.scenes.recording import write_recording

INTRINSICS = {"fx": 50.0, "fy": 51.0, "cx": 32.0, "cy": 24.0}
OBJECTS = [{"id": 1, "name": "red mug"}, {"id": 3, "name": "grey wrench"}]


def clip(**meta: Any) -> Clip:
    """Two objects on a ramp of depth; the second leaves after the first two frames."""
    images = [np.full((48, 64, 3), 40 * n, np.uint8) for n in range(4)]
    labels = [np.zeros((48, 64), np.uint8) for _ in range(4)]
    for n, frame in enumerate(labels):
        frame[10:20, 5 + n : 30 + n] = 1
        frame[30:40, 5:30] = 3 if n < 2 else 0
    depth = np.tile(np.arange(64, dtype=np.uint16) * 13, (48, 1))
    return Clip("table", images, labels, [depth] * 4, meta)


def full_clip() -> Clip:
    poses = [np.eye(4).tolist()] * 3 + [np.diag([1.0, -1.0, -1.0, 1.0]).tolist()]
    return clip(fps=15, intrinsics=INTRINSICS, objects=OBJECTS, camera_poses=poses)


def test_everything_that_the_clip_knows_is_recorded(tmp_path: Path) -> None:
    write_recording(full_clip(), tmp_path / "table.mcap")
    recording = LabelledClip.load(tmp_path / "table.mcap")
    assert (len(recording), round(recording.fps, 3)) == (4, 15.0)
    frame = recording.frames[2]
    assert (frame.encoding, frame.clock, frame.width, frame.height) == ("jpeg", "device", 64, 48)
    assert decode_image(frame).mean() == pytest.approx(80, abs=2)
    assert frame.intrinsics is not None
    assert (frame.intrinsics.fx, frame.intrinsics.cy) == (50.0, 23.5)
    assert recording.labels == {1: "red mug", 3: "grey wrench"}
    assert sorted(recording.truth(1)) == [1, 3]
    assert sorted(recording.truth(2)) == [1]
    assert np.array_equal(recording.truth(2)[1], full_clip().labels(2) == 1)
    assert list(RecordingReader([tmp_path / "table.mcap"]).poses())[3].camera_to_world[1, 1] == -1


def test_objects_out_of_view_stay_in_the_truth(tmp_path: Path) -> None:
    write_recording(full_clip(), tmp_path / "table.mcap")
    second = [masks.instances[1] for masks in RecordingReader([tmp_path / "table.mcap"]).truth()]
    assert [found.state for found in second] == ["tracked"] * 2 + ["occluded"] * 2
    assert [found.frames_since_seen for found in second] == [0, 0, 1, 2]


@pytest.mark.parametrize("step", [1, 2, 3])
def test_depth_keeps_its_size_whatever_the_step(tmp_path: Path, step: int) -> None:
    write_recording(full_clip(), tmp_path / "table.mcap", depth_step=step)
    depth = LabelledClip.load(tmp_path / "table.mcap").frames[0].depth
    assert depth is not None
    assert (depth.scale_m, depth.aligned) == (0.001, True)
    true = full_clip().depth(0)
    assert true is not None
    expected = true[np.ix_(np.arange(48) // step * step, np.arange(64) // step * step)]
    assert np.array_equal(decode_depth(depth), expected)


def test_a_clip_with_labels_alone_numbers_its_objects(tmp_path: Path) -> None:
    bare = Clip("table", clip().frames, clip().annotations)
    write_recording(bare, tmp_path / "table.mcap")
    recording = LabelledClip.load(tmp_path / "table.mcap")
    assert recording.labels == {1: "object 1", 3: "object 3"}
    assert recording.frames[0].depth is None
    assert recording.frames[0].intrinsics is None


def test_the_command_writes_the_same_file_every_time(tmp_path: Path) -> None:
    write_clip(tmp_path / "clips", "table", full_clip())
    command = [sys.executable, "-m", "tools.scenes.recording", str(tmp_path / "clips")]
    for name in ("a.mcap", "b.mcap"):
        done = subprocess.run([*command, "table", "-o", str(tmp_path / name)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "4 frames" in done.stdout
    assert (tmp_path / "a.mcap").read_bytes() == (tmp_path / "b.mcap").read_bytes()
    done = subprocess.run([*command, "none", "-o", str(tmp_path / "c")], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: expected a clip none")
