"""`sam3-node record` in this process: its counts, its requests to the node, and its tolerance of bad messages."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from sam3_node.bags.native import NODE, RECORDING
from sam3_node.bags.native.reader import RecordingReader
from sam3_node.calibration import Calibration
from sam3_node.calibration.camera_file import HandEye, PinholeSection
from sam3_node.errors import OutputError, SettingsError, TransportError
from sam3_node.processes.supervisor import RECORD_READY, list_processes
from sam3_node.recording.recorder import Trigger, run_record
from sam3_node.replay.event_log import Step
from sam3_node.replay.job import Job
from sam3_node.replay.schedule import Schedule
from sam3_node.settings import GroupSettings, RecordSettings, Settings, SpatialSettings, TransportSettings
from sam3_node.transport import ControlServer, FramePublisher, MaskPublisher
from sam3_node.types import Depth, FramePose, MaskFrame
from sam3_node.wire import Event, Reply, pack_event, pack_frame, pack_masks, pack_pose
from tests.support.node_rig import READY_S, until
from tests.support.recorder_rig import FRAME_BYTES, Camera, frame, has_grown, read_seqs
from tests.support.refuses import refuses
from tests.support.wire_examples import masks


def settings_for(folder: Path, **record: Any) -> Settings:
    endpoints = {name: f"ipc://{folder}/{name}" for name in ("masks", "control")}
    transport = TransportSettings(frames=(f"ipc://{folder}/frames",), **endpoints)
    return Settings(transport=transport, record=RecordSettings(**{"out": folder / "r.mcap", **record}))


@contextmanager
def recording(settings: Settings, trigger: Trigger | None = None) -> Iterator[io.StringIO]:
    """Run a recorder in a thread, and check that it ends without an error."""
    stop, out, failures = threading.Event(), io.StringIO(), []

    def run() -> None:
        try:
            run_record(settings, stop, out, trigger=trigger)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield out
    finally:
        stop.set()
        thread.join(20)
    assert not thread.is_alive()
    assert not failures


def send_until(send: Callable[[int], object], done: Callable[[], bool], what: str) -> None:
    """Send with growing numbers until a condition holds."""
    numbers = iter(range(10**6))

    def sent_and_done() -> bool:
        send(next(numbers))
        time.sleep(0.01)
        return done()

    until(sent_and_done, what, READY_S)


def send_until_recorded(send: Callable[[int], object], path: Path, size: int) -> None:
    """Send with growing numbers until the file has this size."""
    send_until(send, has_grown(path, size), "messages on the disk")


def masks_at(seq: int, skipped: int = 0) -> MaskFrame:
    return MaskFrame("cam0", seq, seq, 8, 5, skipped=skipped)


@contextmanager
def peer(endpoint: str) -> Iterator[zmq.Socket]:
    """A publisher that drops nothing."""
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(endpoint)
        yield socket


def test_masks_and_events_that_are_missing_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "r.mcap"
    messages = [
        *map(pack_masks, (masks_at(10), masks_at(11), masks_at(14, 2), masks_at(17, 1), masks_at(2))),
        pack_event(Event(1, "failed", {"camera": "cam0", "seq": 3})),
        pack_event(Event(4, "reset")),
        *map(pack_masks, (masks_at(4), masks_at(9))),
    ]
    with peer(f"ipc://{tmp_path}/masks") as node, recording(settings_for(tmp_path)):
        first = pack_event(Event(0, "served", {"camera": "other"}))
        send_until_recorded(lambda _: node.send_multipart(first), path, 1500)
        for parts in messages:
            node.send_multipart(parts)
        last = messages[-1][1]
        until(
            lambda: any(getattr(x, "body", b"") == last for x in RecordingReader([path]).actions()),
            "the last",
        )
    counts = RecordingReader([path]).metadata()[RECORDING][0]
    assert counts["cameras"]["cam0"]["masks"] == 7
    assert counts["cameras"]["cam0"]["masks_lost"] == 2  # of 15 or 16, and of 5 to 8
    assert counts["cameras"]["cam0"]["skipped"] == 3
    assert counts["events_lost"] == 2
    assert counts["node_starts"] == counts["events"] - 3  # the first event, again and again


def test_a_recording_without_a_node_is_one_of_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sam3_node.recording.recorder.ABSENT_S", 0.1)
    path = tmp_path / "r.mcap"
    with Camera(f"ipc://{tmp_path}/frames", rate=50), recording(settings_for(tmp_path)) as out:
        until(lambda: "no node answers at ipc://" in out.getvalue(), "the report of an absent node")
        until(has_grown(path, 3 * FRAME_BYTES), "frames on the disk", READY_S)
    assert "no node answered at ipc://" in out.getvalue()
    assert NODE not in RecordingReader([path]).metadata()
    assert len(read_seqs(path)) >= 3


def test_poses_of_the_robot_are_recorded_and_replayed(tmp_path: Path) -> None:
    path = tmp_path / "r.mcap"
    settings = settings_for(tmp_path, cameras=("cam0",))
    settings = settings.model_copy(update={"spatial": SpatialSettings(poses=f"ipc://{tmp_path}/poses")})
    poses = [  # around the captures of the frames
        FramePose("gripper", "base", ms * 10**6, (ms / 1000, 0.0, 0.5), (0.0, 0.0, 0.0, 1.0))
        for ms in (999, 1001)
    ]
    tool = dataclasses.replace(poses[0], frame="tool")
    with (
        peer(f"ipc://{tmp_path}/poses") as robot,
        Camera(f"ipc://{tmp_path}/frames", 50),
        recording(settings) as out,
    ):

        def send_all() -> bool:
            for parts in (*map(pack_pose, (*poses, tool)), [b"pose/gripper", b"\xc1"]):
                robot.send_multipart(parts)
            begun = has_grown(path, FRAME_BYTES)()
            return begun and {tool, *poses} <= set(RecordingReader([path]).robot_poses())

        until(send_all, "the poses on the disk", READY_S)
        until(lambda: len(read_seqs(path)) > 2, "frames", READY_S)
    counts = RecordingReader([path]).metadata()[RECORDING][0]
    assert counts["poses"] >= 3
    assert counts["rejected"] >= 1
    assert f"{counts['poses']} poses" in out.getvalue()
    hand_eye = HandEye(kind="eye_in_hand", translation_m=(0, 0, 0.1), rotation_vector_rad=(0, 0, 0))
    pinhole = PinholeSection(width_px=640, height_px=480, fx_px=600, fy_px=600, cx_px=319.5, cy_px=239.5)
    calibration = Calibration(intrinsics=pinhole, hand_eye=hand_eye)
    job = Job((str(path),), str(tmp_path / "out"), calibrations=(calibration.model_dump_json(),))
    with Schedule(job, path) as schedule:
        steps = [action for action in schedule.actions() if isinstance(action, Step)]
    assert len(steps) > 2
    for step in steps:
        assert step.robot_pose.position_m == pytest.approx((step.frame.capture_ns / 1e9, 0.0, 0.5))


def test_a_node_that_comes_later_or_again_is_asked(tmp_path: Path) -> None:
    path, asked = tmp_path / "r.mcap", 0
    stop = threading.Event()

    def answer() -> None:
        nonlocal asked
        with ControlServer(f"ipc://{tmp_path}/control") as control:
            while not stop.is_set():
                found = control.receive(20)
                if found is not None:
                    asked += 1
                    control.reply(found[0], Reply(found[1].id, {"model": f"m{asked}", "events": 0}))

    with MaskPublisher(f"ipc://{tmp_path}/masks") as node, recording(settings_for(tmp_path)):
        send_until_recorded(lambda n: node.send_event(Event(n, "pause")), path, 1500)
        thread = threading.Thread(target=answer)
        thread.start()
        until(lambda: asked, "the question")
        send_until(lambda n: node.send_event(Event(0, "pause")), lambda: asked > 1, "the question again")
        stop.set()
        thread.join()
        until(lambda: len(RecordingReader([path]).metadata().get(NODE, [])) > 1, "both answers")
    models = [found["model"] for found in RecordingReader([path]).metadata()[NODE]]
    assert models[:2] == ["m1", "m2"]


def test_only_the_chosen_cameras_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "r.mcap"
    with (
        FramePublisher(f"ipc://{tmp_path}/frames") as publisher,
        recording(settings_for(tmp_path, cameras=("cam1",))),
    ):

        def send(seq: int) -> None:
            for camera in ("cam1", "cam10", "cam0"):
                publisher.send(frame(seq, 1000, camera))

        send_until_recorded(send, path, 10_000)
    assert {found.camera for found in RecordingReader([path]).frames()} == {"cam1"}


def test_a_folder_gets_a_file_by_the_time(tmp_path: Path) -> None:
    with recording(settings_for(tmp_path, out=tmp_path / "folder")) as out:
        until(lambda: "record frames from" in out.getvalue(), "the ready line")
    (path,) = (tmp_path / "folder").iterdir()
    assert re.match(rf"{RECORD_READY} ipc://.*, to {path}\n", out.getvalue())
    assert time.strptime(path.name, "%Y%m%dT%H%M%SZ.mcap")
    assert not list(RecordingReader([path]).frames())


def test_a_group_may_record(tmp_path: Path) -> None:
    settings = Settings(group=GroupSettings(processes=("node", "record")))
    node, recorder = list_processes(settings, tmp_path / "profile.toml")
    assert (node.name, recorder.name, recorder.ready) == ("node", "record", RECORD_READY)
    assert "record" in recorder.command
    lossless = settings.model_copy(update={"transport": TransportSettings(delivery="every")})
    with refuses(SettingsError, field="group.processes"):
        list_processes(lossless, tmp_path / "profile.toml")


def test_lossless_delivery_is_refused(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    transport = settings.transport.model_copy(update={"delivery": "every"})
    with refuses(SettingsError, field=("transport.delivery", "newest")):
        run_record(settings.model_copy(update={"transport": transport}), threading.Event())
    assert not (tmp_path / "r.mcap").exists()


def test_what_cannot_begin_leaves_nothing_open(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    for name in ("control", "masks"):
        transport = settings.transport.model_copy(update={name: "nonsense"})
        with pytest.raises(TransportError, match="nonsense"):
            run_record(settings.model_copy(update={"transport": transport}), threading.Event())
    (tmp_path / "r.mcap").write_text("mine")
    with refuses(OutputError, field=("never", "overwritten")):
        run_record(settings, threading.Event())
    assert (tmp_path / "r.mcap").read_text() == "mine"


def hostile_messages(count: int) -> Iterator[list[bytes]]:
    """Yield bytes on the topics of frames, masks and events: random, mutated, and of too many cameras."""
    rng = np.random.default_rng(3)
    frames = [bytes(part) for part in pack_frame(frame(0, 50))]
    bomb = Depth(16000, 16000, "z16+zstd", 0.001, False, b"(\xb5/\xfd\xa0" + bytes(30))
    whole = [frames, pack_masks(masks()), pack_event(Event(0, "reset"))]
    yield [bytes(part) for part in pack_frame(dataclasses.replace(frame(0, 50), depth=bomb))]
    yield from ([bytes(part) for part in pack_frame(frame(0, 50, f"c{number}"))] for number in range(100))
    for number in range(count):
        parts = [bytearray(part) for part in whole[number % 3]]
        for _ in range(rng.integers(1, 6)):
            part = parts[rng.integers(1, len(parts))]
            part[rng.integers(len(part))] = rng.integers(256)
        yield [bytes(part) for part in parts]
        yield [bytes(whole[number % 3][0]) + b"x" * (number % 2), rng.bytes(int(rng.integers(0, 200)))]


def test_hostile_messages_are_counted_and_the_recording_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "r.mcap"
    with (
        peer(f"ipc://{tmp_path}/frames") as camera,
        peer(f"ipc://{tmp_path}/masks") as node,
        recording(settings_for(tmp_path)) as out,
    ):
        valid = lambda seq: camera.send_multipart(pack_frame(frame(seq, 1000)))  # noqa: E731
        send_until_recorded(valid, path, 3000)
        for parts in hostile_messages(1000):
            (camera if parts[0].startswith(b"frame") else node).send_multipart(parts)
        before = path.stat().st_size
        send_until_recorded(lambda seq: valid(10**6 + seq), path, before + 400_000)
    counts = RecordingReader([path]).metadata()[RECORDING][0]
    assert counts["rejected"] > 500
    assert len(counts["cameras"]) == 64
    assert "messages were malformed, the last: " in out.getvalue()
    last = list(RecordingReader([path]).frames())[-1]
    assert last.seq > 10**6
    assert os.path.getsize(path) < 4_000_000
