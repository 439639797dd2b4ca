"""Compression of raw colour by the recorder, and the rate that it states."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from sam3_node.bags.native import COLOUR
from sam3_node.bags.native.reader import RecordingReader
from sam3_node.replay.job import Job
from sam3_node.replay.schedule import Schedule
from sam3_node.transport import FramePublisher, MaskPublisher
from sam3_node.types import Frame
from sam3_node.wire import decode_image
from tests.recording.test_recorder import recording, send_until, settings_for
from tests.support.node_rig import READY_S, until
from tests.support.recorder_rig import FRAME_BYTES, Camera, has_grown
from tests.support.wire_examples import masks

WIDTH, HEIGHT = 64, 48


def raw(seq: int, encoding: str) -> Frame:
    """Return a smooth frame that depends on its number."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    image = np.stack([(x * 3 + seq) % 200, y * 4, (x + y) % 128], axis=2).astype(np.uint8)
    data = image[..., 0] if encoding == "mono8" else image
    return Frame("cam0", seq, 10**9 + seq, WIDTH, HEIGHT, encoding, np.ascontiguousarray(data).tobytes())  # type: ignore[arg-type]


@pytest.mark.parametrize("encoding", ["bgr8", "rgb8", "mono8"])
@pytest.mark.parametrize("colour", ["raw", "jpeg", "png"])
def test_raw_colour_is_compressed_as_asked(tmp_path: Path, colour: str, encoding: str) -> None:
    path = tmp_path / "r.mcap"
    with (
        FramePublisher(f"ipc://{tmp_path}/frames") as camera,
        recording(settings_for(tmp_path, colour=colour)) as out,
    ):
        has_begun = has_grown(path, 4 * 1024)  # an empty one is not known as a recording yet
        send_until(
            lambda seq: camera.send(raw(seq, encoding)),
            lambda: has_begun() and len(list(RecordingReader([path]).frames())) > 20,
            "frames",
        )
    found = list(RecordingReader([path]).frames())
    assert [frame.seq for frame in found] == sorted({frame.seq for frame in found})
    assert "messages were malformed" not in out.getvalue()
    for frame in found:
        assert frame.encoding == (encoding if colour == "raw" else colour)
        error = decode_image(frame).astype(int) - decode_image(raw(frame.seq, encoding))
        assert np.abs(error).mean() <= (8 if colour == "jpeg" else 0)
    described = RecordingReader([path]).metadata().get(COLOUR, [])
    if colour == "raw":
        assert not described
    else:
        assert [record["exact"] for record in described] == [colour == "png"]


@pytest.mark.parametrize("colour", ["jpeg", "png"])
def test_a_replay_says_that_a_lossy_recording_is_not_exact(tmp_path: Path, colour: str) -> None:
    path = tmp_path / "r.mcap"
    with (
        FramePublisher(f"ipc://{tmp_path}/frames") as camera,
        MaskPublisher(f"ipc://{tmp_path}/masks") as node,
        recording(settings_for(tmp_path, colour=colour)),
    ):

        def send(seq: int) -> None:
            camera.send(raw(seq, "bgr8"))
            node.send(masks())

        reader = lambda: RecordingReader([path])  # noqa: E731
        done = lambda: has_grown(path, 0)() and any(reader().masks()) and any(reader().frames())  # noqa: E731
        send_until(send, done, "frames and masks")
    job = Job((str(path),), str(tmp_path / "out"), "as-recorded", allow_gaps=True)
    with Schedule(job, path) as schedule:
        list(schedule.actions())
        assert any("not bit-exact" in note for note in schedule.notes.lines) == (colour == "jpeg")


def test_compressed_frames_are_recorded_as_they_came(tmp_path: Path) -> None:
    path = tmp_path / "r.mcap"
    with Camera(f"ipc://{tmp_path}/frames", rate=50), recording(settings_for(tmp_path, colour="jpeg")):
        until(lambda: path.exists() and path.stat().st_size > 5 * FRAME_BYTES, "frames", READY_S)
    assert COLOUR not in RecordingReader([path]).metadata()


def test_the_rate_is_stated_after_some_seconds_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sam3_node.recording.recorder.RATE_S", 0.5)
    with Camera(f"ipc://{tmp_path}/frames", rate=50), recording(settings_for(tmp_path)) as out:
        until(lambda: "rate: " in out.getvalue(), "the rate", READY_S)
    rates = re.findall(
        r"rate: ([\d.]+) MB/s, cam0 ([\d.]+) frames/s; the disk is full in [\d.]+ hours", out.getvalue()
    )
    assert len(rates) == 2
    for megabytes, frames in rates:
        assert float(megabytes) == pytest.approx(float(frames) * FRAME_BYTES / 1e6, rel=0.3, abs=0.1)
