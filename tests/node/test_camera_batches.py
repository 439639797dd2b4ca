"""Frames of cameras that wait at the same time are encoded together: turns, newest frames, and a replay of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sam3_node.bags import read_masks
from sam3_node.node import cameras as cameras_module
from sam3_node.perception import encode_ahead
from sam3_node.replay.job import Job
from sam3_node.replay.run import compare_job, run_job
from sam3_node.settings import TrackerSettings
from sam3_node.types import Frame, FrameBatch, MaskFrame
from tests.support.near_node import NearNode
from tests.support.node_rig import picture, until
from tests.support.patience import PATIENCE_MS
from tests.support.processes import Process, fork_command

NAMES = ("left", "right")
BOX = [16.0, 12.0, 48.0, 36.0]


class TwoCameras(NearNode):
    """A node that takes the frames of two cameras together."""

    def send_while_paused(self, *frames: Frame) -> list[MaskFrame]:
        """Let frames wait together, and return their masks in the order of the steps."""
        self.client.call("pause")
        for frame in frames:
            assert self.camera.send(frame)
            until(lambda frame=frame: self._has(frame), "the frame")  # type: ignore[misc]
        self.client.call("resume")
        return [self.take_masks() for _ in {frame.camera for frame in frames}]

    def take_masks(self) -> MaskFrame:
        masks = self.masks.take(PATIENCE_MS)
        assert masks is not None
        return masks

    def _has(self, frame: Frame) -> bool:
        """Return True if a frame waits."""
        waiting = list[Frame]()
        while (found := self.node.cameras.frames.peek(waiting, 0, any_camera=True)) is not None:
            waiting.append(found)
        return any((one.camera, one.seq) == (frame.camera, frame.seq) for one in waiting)


@pytest.fixture
def near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoCameras]:
    monkeypatch.setattr(cameras_module, "choose_together", lambda model: 2)
    # a frame that waits for a busy machine is stepped nevertheless
    other = (f"ipc://{tmp_path}/other",)
    with TwoCameras(tmp_path, more_frames=other, tracker=TrackerSettings(max_age_ms=0)) as served:
        for number, name in enumerate(NAMES):
            until(
                lambda name=name: served.camera.send(picture(0, name)) and served.masks.take(100),  # type: ignore[misc]
                f"masks of {name}",
            )
            until(lambda number=number: len(served.status()["cameras"]) > number, "the camera")  # type: ignore[misc]
        while served.masks.take(100) is not None:
            pass
        yield served


def test_cameras_that_wait_are_encoded_together_and_stepped_in_turn(near: TwoCameras) -> None:
    first, second = near.send_while_paused(picture(10, "left"), picture(10, "right"))
    assert {first.camera, second.camera} == set(NAMES)
    assert (first.batch, second.batch) == (FrameBatch(2, 0), FrameBatch(2, 1))
    alone = near.send_while_paused(picture(11, "right"))
    assert [masks.batch for masks in alone] == [None]
    # the one that was taken longest ago is first
    again = near.send_while_paused(picture(12, "right"), picture(12, "left"))
    assert [masks.camera for masks in again] == ["left", "right"]


def test_the_newest_frame_of_each_is_taken(near: TwoCameras) -> None:
    frames = [picture(seq, name) for seq in (20, 21, 22) for name in NAMES]
    found = near.send_while_paused(*frames)
    assert {(masks.camera, masks.seq, masks.batch is None) for masks in found} == {
        ("left", 22, False),
        ("right", 22, False),
    }


def test_a_frame_that_cannot_be_decoded_fails_alone(near: TwoCameras) -> None:
    broken = replace(picture(30, "left"), encoding="jpeg", colour=b"no picture")
    near.client.call("pause")
    for frame in (broken, picture(30, "right")):
        near.camera.send(frame)
        until(lambda frame=frame: near._has(frame), "the frame")  # type: ignore[misc]
    near.client.call("resume")
    masks = near.take_masks()
    assert (masks.camera, masks.batch) == ("right", None)
    assert near.status()["cameras"]["left"]["failed"] == 1


def test_frames_that_are_held_are_skipped_by_a_pause(
    near: TwoCameras, monkeypatch: pytest.MonkeyPatch
) -> None:
    taker = near.node.cameras.taker
    step = type(near.node)._step

    def pause_within(*args: object) -> None:
        step(*args)  # type: ignore[arg-type]
        near.node.perception.paused = True

    monkeypatch.setattr(type(near.node), "_step", pause_within)
    near.client.call("pause")
    for name in NAMES:
        near.camera.send(picture(40, name))
        until(lambda name=name: near._has(picture(40, name)), "the frame")  # type: ignore[misc]
    near.client.call("resume")
    stepped = near.take_masks()
    until(lambda: not taker.holds, "the other is skipped")
    monkeypatch.setattr(type(near.node), "_step", step)
    (other,) = set(NAMES) - {stepped.camera}
    (masks,) = near.send_while_paused(picture(43, other))
    assert masks.seq == 43
    assert masks.skipped >= 3, "frames 40 to 42"


def test_a_replay_as_recorded_repeats_batches_bit_for_bit(
    near: TwoCameras, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "live.mcap"
    with record(near, path) as recorder:
        near.send_while_paused(*(picture(50, name) for name in NAMES))
        near.client.call("add_object", camera="left", box=BOX)
        near.client.call("add_object", camera="right", box=BOX)
        for seq in range(51, 57):
            frames = [picture(seq, name) for name in NAMES]
            # in one round a camera is alone
            near.send_while_paused(*frames[: 1 if seq == 54 else 2])
        recorder.terminate()
    recorded = [masks for masks in read_masks(path) if masks.seq >= 50]
    assert sum(masks.batch is not None for masks in recorded) == 12
    assert any(masks.instances for masks in recorded)
    for beside in (False, True):
        monkeypatch.setattr(encode_ahead, "encodes_beside", lambda model, beside=beside: beside)
        job = Job((str(path),), str(tmp_path / str(beside)), "as-recorded", allow_gaps=True)
        run_job(job)
        compared = compare_job(job)
        assert compared.is_identical, compared


def record(near: TwoCameras, path: Path) -> Process:
    """Start a recorder of a node and its cameras; wait until it is ready."""
    log = path.with_suffix(".log")
    environment = {
        "SAM3_TRANSPORT__FRAMES": near.frames,
        "SAM3_TRANSPORT__MASKS": near.masks_at,
        "SAM3_TRANSPORT__CONTROL": near.control,
    }
    process = Process(fork_command(["record", str(path)], os.environ | environment, log), log)
    process.next_line()
    return process
