"""`sam3-node record` in this process: counts, requests to the node, triggers, compression of colour, and the quota."""

import dataclasses
import errno
import io
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from sam3_node.bags.native import COLOUR, NODE, RECORDER, RECORDING, RING, writer
from sam3_node.bags.native.reader import RecordingReader
from sam3_node.bags.native.writer import RecordingWriter
from sam3_node.calibration import Calibration
from sam3_node.calibration.camera_file import HandEye, PinholeSection
from sam3_node.errors import OutputError, ReplayError, SettingsError, TransportError
from sam3_node.processes.supervisor import RECORD_READY, list_processes
from sam3_node.recording.recorder import MessageRing, Quota, Recorder, Trigger, run_record
from sam3_node.replay.event_log import Step
from sam3_node.replay.job import Job
from sam3_node.replay.schedule import Schedule
from sam3_node.settings import GroupSettings, RecordSettings, Settings, SpatialSettings, TransportSettings
from sam3_node.transport import FramePublisher, MaskPublisher
from sam3_node.transport.control_server import ControlServer
from sam3_node.transport.tap import ReceivedMessage
from sam3_node.types import Depth, Frame, FramePose, JointState, MaskFrame
from sam3_node.wire import (
    Event,
    Reply,
    Request,
    decode_image,
    pack_event,
    pack_frame,
    pack_masks,
    pack_pose,
)
from tests.support.node_rig import until
from tests.support.patience import PATIENCE_S
from tests.support.processes import Process
from tests.support.refuses import mentions, refuses
from tests.support.repeats import repetitions
from tests.support.threads import repeating
from tests.support.wire_examples import masks, plain

FRAME_BYTES = 20_000
# An arm of two joints, whose shapes do not matter here.
ARM_URDF = """<robot name="arm">
<link name="base"/>
<link name="upper"><collision><geometry><box size="0.1 0.1 0.4"/></geometry></collision></link>
<link name="hand"/>
<joint name="elbow" type="revolute"><parent link="base"/><child link="upper"/>
<axis xyz="0 0 1"/><limit lower="-3" upper="3"/></joint>
<joint name="wrist" type="revolute"><parent link="upper"/><child link="hand"/>
<axis xyz="0 0 1"/><limit lower="-3" upper="3"/></joint>
</robot>
"""


def frame(seq: int, size: int = FRAME_BYTES, camera: str = "cam0") -> Frame:
    """Return a frame of random bytes that depend only on `seq`."""
    return Frame(camera, seq, 10**9 + seq, 640, 480, "jpeg", np.random.default_rng(seq).bytes(size))


class Camera(ExitStack):
    """Publishes frames in `folder` from a thread; `sent` is the seq of the last."""

    def __init__(self, folder: Path, rate: float = 50, size: int = FRAME_BYTES) -> None:
        super().__init__()
        self.sent = -1
        publisher = self.enter_context(FramePublisher(f"ipc://{folder}/frames"))

        def send() -> None:
            time.sleep(1 / rate)
            publisher.send(frame(self.sent + 1, size))
            self.sent += 1

        self.enter_context(repeating(send))


def arguments(folder: Path, out: Path, **settings: Any) -> list[str]:
    given = {"transport.frames": f"ipc://{folder}/frames", "transport.masks": f"ipc://{folder}/masks"}
    given |= {"transport.control": f"ipc://{folder}/control"}
    given |= {name.replace("__", "."): value for name, value in settings.items()}
    options = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    return [sys.executable, "-m", "sam3_node", "record", str(out), *options]


def read_seqs(path: Path) -> list[int]:
    """Check that a file has the frames that `frame` makes; return their seqs."""
    frames = list(RecordingReader([path]).frames())
    for item in frames:
        expected = dataclasses.replace(frame(item.seq, len(item.colour)), sent_ns=item.sent_ns)
        assert plain(item) == plain(expected)
    return [item.seq for item in frames]


def has_grown(path: Path, size: int) -> Callable[[], bool]:
    return lambda: path.exists() and path.stat().st_size > size


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the file of the recording."""
    return tmp_path / "r.mcap"


def settings_for(folder: Path, **record: Any) -> Settings:
    endpoints = {name: f"ipc://{folder}/{name}" for name in ("masks", "control")}
    transport = TransportSettings(frames=(f"ipc://{folder}/frames",), **endpoints)
    return Settings(transport=transport, record=RecordSettings(**{"out": folder / "r.mcap", **record}))


@contextmanager
def recording(settings: Settings, trigger: Trigger | None = None) -> Iterator[io.StringIO]:
    """Run a recorder in a thread, and check that it ends without an error."""
    stop = threading.Event()
    out = io.StringIO()
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run_record, settings, stop, out, trigger=trigger)
        try:
            yield out
        finally:
            stop.set()
        running.result(PATIENCE_S)


def send_until(send: Callable[[int], object], done: Callable[[], bool], what: str) -> None:
    """Send with growing numbers until a condition holds."""
    numbers = iter(range(10**6))

    def sent_and_done() -> bool:
        send(next(numbers))
        time.sleep(0.01)
        return done()

    until(sent_and_done, what, PATIENCE_S)


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


def test_masks_and_events_that_are_missing_are_counted(tmp_path: Path, path: Path) -> None:
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
        bodies = lambda: (getattr(item, "body", b"") for item in RecordingReader([path]).actions())  # noqa: E731
        until(lambda: last in bodies(), "the last")
    counts = RecordingReader([path]).metadata()[RECORDING][0]
    camera = counts["cameras"]["cam0"]
    # lost: of 15 or 16, and of 5 to 8
    assert (camera["masks"], camera["masks_lost"], camera["skipped"]) == (7, 2, 3)
    assert counts["events_lost"] == 2
    assert counts["node_starts"] == counts["events"] - 3  # the first event, again and again


def test_a_recording_without_a_node_is_one_of_frames(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sam3_node.recording.recorder.ABSENT_S", 0.1)
    with Camera(tmp_path), recording(settings_for(tmp_path)) as out:
        until(lambda: "no node answers at ipc://" in out.getvalue(), "the report of an absent node")
        until(has_grown(path, 3 * FRAME_BYTES), "frames on the disk", PATIENCE_S)
    assert "no node answered at ipc://" in out.getvalue()
    assert NODE not in RecordingReader([path]).metadata()
    assert len(read_seqs(path)) >= 3


def test_poses_and_joints_of_the_robot_are_recorded_and_replayed(tmp_path: Path, path: Path) -> None:
    settings = settings_for(tmp_path, cameras=("cam0",))
    settings = settings.model_copy(update={"spatial": SpatialSettings(poses=f"ipc://{tmp_path}/poses")})
    still = (0.0, 0.0, 0.0, 1.0)  # around the captures of the frames
    poses = [FramePose("gripper", "base", ms * 10**6, (ms / 1000, 0.0, 0.5), still) for ms in (999, 1001)]
    tool = dataclasses.replace(poses[0], frame="tool")
    states = [JointState("arm", ms * 10**6, {"elbow": ms / 1000, "wrist": -1.0}) for ms in (999, 1001)]
    states.append(JointState("other", 10**9, {"elbow": 7.0}))
    with peer(f"ipc://{tmp_path}/poses") as robot, Camera(tmp_path), recording(settings) as out:

        def send_all() -> bool:
            packed = map(pack_pose, (*poses, tool, *states))
            for parts in (*packed, [b"pose/gripper", b"\xc1"], [b"joints/arm", b"\xc1"]):
                robot.send_multipart(parts)
            if not has_grown(path, FRAME_BYTES)():
                return False
            reader = RecordingReader([path])
            found = list(reader.robot())
            return all(message in found for message in (tool, *poses, *states))

        until(send_all, "the poses on the disk", PATIENCE_S)
        until(lambda: len(read_seqs(path)) > 2, "frames", PATIENCE_S)
    counts = RecordingReader([path]).metadata()[RECORDING][0]
    assert counts["poses"] >= 6
    assert counts["rejected"] >= 2
    assert f"{counts['poses']} poses" in out.getvalue()
    pinhole = PinholeSection(width_px=640, height_px=480, fx_px=600, fy_px=600, cx_px=319.5, cy_px=239.5)
    urdf = tmp_path / "arm.urdf"
    urdf.write_text(ARM_URDF)
    for kind in ("eye_in_hand", "eye_to_hand"):  # a camera on the gripper, and a fixed one
        hand_eye = HandEye(kind=kind, translation_m=(0, 0, 0.1), rotation_vector_rad=(0, 0, 0))
        text = Calibration(intrinsics=pinhole, hand_eye=hand_eye).model_dump_json()
        settings_of_job = {"robot": {"urdf": str(urdf), "name": "arm"}}
        for step in read_steps(Job((str(path),), "", calibrations=(text,), settings=settings_of_job), path):
            at_s = step.frame.capture_ns / 1e9
            assert step.robot.pose.position_m == pytest.approx((at_s, 0.0, 0.5))
            assert step.robot.joints.positions == pytest.approx({"elbow": at_s, "wrist": -1.0})
    # without a calibration and a URDF, the poses still tell where the gripper is
    for step in read_steps(Job((str(path),), ""), path):
        assert step.robot.pose.position_m == pytest.approx((step.frame.capture_ns / 1e9, 0.0, 0.5))


def read_steps(job: Job, path: Path) -> list[Any]:
    """Return the steps of a replay of a recording of some frames."""
    with Schedule(job, path) as schedule:
        steps = [action for action in schedule.actions() if isinstance(action, Step)]
    assert len(steps) > 2
    return steps


def test_a_node_that_comes_later_or_again_is_asked(tmp_path: Path, path: Path) -> None:
    model = "before the restart"

    def answer(request: Request) -> Reply:
        return Reply(request.id, {"model": model, "events": 0})

    def read_models() -> list[str]:
        return [found["model"] for found in RecordingReader([path]).metadata().get(NODE, [])]

    with MaskPublisher(f"ipc://{tmp_path}/masks") as node, recording(settings_for(tmp_path)):
        send_until_recorded(lambda n: node.send_event(Event(n, "pause")), path, 1500)
        # each answer has been recorded before anything ends, however long it takes
        with ControlServer(f"ipc://{tmp_path}/control", answer):
            until(read_models, "the answer", PATIENCE_S)
            model = "after the restart"
            restart = lambda _: node.send_event(Event(0, "pause"))  # noqa: E731
            send_until(restart, lambda: model in read_models(), "the answer of the node that came again")
    assert read_models()[0] == "before the restart"


def test_only_the_chosen_cameras_are_recorded(tmp_path: Path, path: Path) -> None:
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


def test_hostile_messages_are_counted_and_the_recording_goes_on(tmp_path: Path, path: Path) -> None:
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
    assert mentions(out.getvalue(), "malformed")
    last = list(RecordingReader([path]).frames())[-1]
    assert last.seq > 10**6
    assert os.path.getsize(path) < 4_000_000


SECOND = 10**9


def message(time_ns: int, size: int = 1000) -> ReceivedMessage:
    return ReceivedMessage([memoryview(bytes(size))], time_ns)


def test_the_ring_holds_the_last_seconds_and_so_many_bytes() -> None:
    ring = MessageRing(3, 10_000_000)
    for number in range(100):
        ring.add(message(number * SECOND))
    assert [item.received_ns // SECOND for item in ring.take_all(99 * SECOND)] == [96, 97, 98, 99]
    assert (ring.bytes, ring.dropped) == (0, 96)
    small = MessageRing(1000, 50_000)
    for number in range(100):
        small.add(message(number))
        assert small.bytes <= 50_000
    assert [item.received_ns for item in small.take_all(100)] == list(range(76, 100))
    ring.add(message(0))
    assert not list(ring.take_all(10 * SECOND))


def test_a_trigger_fires_once_however_often_it_is_asked() -> None:
    trigger = Trigger()
    assert not trigger.take()
    trigger.fire()
    trigger.fire()
    assert trigger.take()
    assert not trigger.take()


def recorded(verb: Process) -> int:
    return sum(line.startswith("recorded ") for line in verb.seen)


def test_a_signal_writes_what_was_and_what_follows_each_time_to_a_file(tmp_path: Path) -> None:
    out = tmp_path / "events"
    command = arguments(tmp_path, out, record__after_s=1.0)
    with Camera(tmp_path) as camera, Process.spawn([*command, "--ring", "60"]) as verb:
        assert mentions(verb.line_with("record frames from"), "ring", "60")
        for number in (1, 2):
            begin = camera.sent
            until(lambda begin=begin: camera.sent > begin + 30, "frames for the ring", PATIENCE_S)
            assert len(list(out.iterdir())) == number - 1
            sent = camera.sent
            verb.process.send_signal(signal.SIGUSR1)
            until(lambda number=number: recorded(verb) == number, "the file", PATIENCE_S)
            newest = max(out.iterdir(), key=lambda path: path.stat().st_mtime_ns)
            seqs = read_seqs(newest)
            assert seqs[0] < sent - 10
            assert seqs[-1] > sent
            assert seqs == list(range(seqs[0], seqs[-1] + 1))
            assert RecordingReader([newest]).metadata()[RING][0]["ring_s"] == 60
        assert verb.terminate() == 0
    first, second = sorted(out.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert read_seqs(second)[0] > read_seqs(first)[-1]


def test_without_a_trigger_nothing_is_written(tmp_path: Path) -> None:
    with Camera(tmp_path) as camera, recording(settings_for(tmp_path, ring_s=5)):
        until(lambda: camera.sent > 10, "frames", PATIENCE_S)
    assert not list(tmp_path.glob("*.mcap"))


def test_a_folder_that_cannot_be_written_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = settings_for(tmp_path, ring_s=5, out=tmp_path / "file/r.mcap")
    with refuses(OutputError, field="file"):
        run_record(settings, threading.Event())


def test_a_late_beginning_is_not_replayed_as_recorded(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, ring_s=60, ring_mb=0.1, after_s=0.0)
    trigger = Trigger()
    with (
        Camera(tmp_path),
        MaskPublisher(f"ipc://{tmp_path}/masks") as node,
        recording(settings, trigger) as out,
    ):
        send_until(lambda n: node.send_event(Event(n, "pause")), lambda: len(out.getvalue()) > 0, "a start")
        begin = time.monotonic()
        is_over = lambda: time.monotonic() > begin + 1  # noqa: E731
        send_until(lambda n: node.send(masks()), is_over, "masks beyond the ring")
        trigger.fire()
        until(lambda: "\nrecorded " in out.getvalue(), "the file", PATIENCE_S)
    (path,) = tmp_path.glob("*.mcap")
    assert path.name.startswith("r-")
    assert RecordingReader([path]).metadata()[RING][0]["dropped"] > 0
    assert path.stat().st_size < 10 * FRAME_BYTES
    job = Job((str(path),), str(tmp_path / "out"), "as-recorded")
    with Schedule(job, path) as schedule, refuses(ReplayError, field="ring"):
        list(schedule.actions())


WIDTH = 64
HEIGHT = 48


def raw(seq: int, encoding: str) -> Frame:
    """Return a smooth frame that depends on its number."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    image = np.stack([(x * 3 + seq) % 200, y * 4, (x + y) % 128], axis=2).astype(np.uint8)
    data = image[..., 0] if encoding == "mono8" else image
    return Frame("cam0", seq, 10**9 + seq, WIDTH, HEIGHT, encoding, np.ascontiguousarray(data).tobytes())  # type: ignore[arg-type]


@pytest.mark.parametrize("encoding", ["bgr8", "rgb8", "mono8"])
@pytest.mark.parametrize("colour", ["raw", "jpeg", "png"])
def test_raw_colour_is_compressed_as_asked(tmp_path: Path, path: Path, colour: str, encoding: str) -> None:
    with (
        FramePublisher(f"ipc://{tmp_path}/frames") as camera,
        recording(settings_for(tmp_path, colour=colour)) as out,
    ):
        has_begun = has_grown(path, 4 * 1024)  # an empty one is not known as a recording yet
        has_frames = lambda: has_begun() and len(list(RecordingReader([path]).frames())) > 20  # noqa: E731
        send_until(lambda seq: camera.send(raw(seq, encoding)), has_frames, "frames")
    found = list(RecordingReader([path]).frames())
    assert [frame.seq for frame in found] == sorted({frame.seq for frame in found})
    assert not mentions(out.getvalue(), "malformed")
    for item in found:
        assert item.encoding == (encoding if colour == "raw" else colour)
        error = decode_image(item).astype(int) - decode_image(raw(item.seq, encoding))
        assert np.abs(error).mean() <= (8 if colour == "jpeg" else 0)
    described = RecordingReader([path]).metadata().get(COLOUR, [])
    if colour == "raw":
        assert not described
    else:
        assert [record["exact"] for record in described] == [colour == "png"]


@pytest.mark.parametrize("colour", ["jpeg", "png"])
def test_a_replay_says_that_a_lossy_recording_is_not_exact(tmp_path: Path, path: Path, colour: str) -> None:
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


def test_compressed_frames_are_recorded_as_they_came(tmp_path: Path, path: Path) -> None:
    with Camera(tmp_path), recording(settings_for(tmp_path, colour="jpeg")):
        until(lambda: path.exists() and path.stat().st_size > 5 * FRAME_BYTES, "frames", PATIENCE_S)
    assert COLOUR not in RecordingReader([path]).metadata()


def test_the_rate_is_stated_after_some_seconds_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sam3_node.recording.recorder.RATE_S", 0.5)
    with Camera(tmp_path), recording(settings_for(tmp_path)) as out:
        until(lambda: "rate: " in out.getvalue(), "the rate", PATIENCE_S)
    line = r"rate: ([\d.]+) MB/s, cam0 ([\d.]+) frames/s; the disk is full in [\d.]+ hours"
    rates = re.findall(line, out.getvalue())
    assert len(rates) == 2
    for megabytes, frames in rates:
        assert float(megabytes) == pytest.approx(float(frames) * FRAME_BYTES / 1e6, rel=0.3, abs=0.1)


SIZE = 100_000


def write(path: Path, age_s: float, own: bool = True) -> Path:
    with RecordingWriter(path) as writer:
        if own:
            writer.write_metadata(RECORDER, {"began_ns": 0})
        writer.write_frame(frame(0, SIZE), 1)
    os.utime(path, (time.time() - age_s,) * 2)
    return path


@pytest.fixture
def strangers(tmp_path: Path) -> list[Path]:
    """Return files that no quota of the folder concerns, all old."""
    target = write(tmp_path / "kept.mcap", 9000)
    link = tmp_path / "20200101T000000Z.mcap"
    link.symlink_to(target)
    replayed = write(tmp_path / "20200101T000001Z.mcap", 9000, own=False)
    damaged = tmp_path / "20200101T000002Z.mcap"
    damaged.write_bytes(bytes(SIZE))
    text = tmp_path / "notes.txt"
    text.write_text("mine")
    inner = write(tmp_path / "sub/20200101T000003Z.mcap", 9000)
    others = [target, link, replayed, damaged, text, inner]
    return [*others, write(tmp_path / "x20200101T000003Z.mcap", 9000)]


def test_the_oldest_go_first_and_nothing_else(tmp_path: Path, strangers: list[Path]) -> None:
    own = [write(tmp_path / f"20260101T00000{n}Z.mcap", 1000 - n) for n in range(5)]
    own.append(write(tmp_path / "20260101T000009Z_0001.mcap", 10))
    quota = Quota(RecordSettings(out=tmp_path, max_total_gb=(5 * SIZE + SIZE // 2) / 1e9))
    assert quota.enforce(own[-1]) == own[:3]  # the damaged file and the stranger's one count, but stay
    assert [path for path in own if path.exists()] == own[3:]
    assert all(os.path.lexists(path) for path in strangers)
    assert quota.enforce(own[-1]) == []


def test_files_that_are_too_old_go(tmp_path: Path, strangers: list[Path]) -> None:
    own = [write(tmp_path / f"20260101T00000{n}Z.mcap", age) for n, age in enumerate((7300, 7100, 10))]
    assert Quota(RecordSettings(out=tmp_path, max_age_h=2)).enforce(None) == own[:1]
    assert Quota(RecordSettings(out=tmp_path)).enforce(None) == []
    assert all(os.path.lexists(path) for path in strangers)


def test_files_of_one_name_are_those_of_its_series(tmp_path: Path) -> None:
    names = ("a.b.mcap", "a.b_0001.mcap", "a.b-20260101T000000Z.mcap")
    own = [write(tmp_path / name, 9000) for name in names]
    others = [write(tmp_path / name, 9000) for name in ("axb.mcap", "a.b2.mcap", "20260101T000000Z.mcap")]
    assert set(Quota(RecordSettings(out=tmp_path / "a.b.mcap", max_age_h=1)).enforce(None)) == set(own)
    assert all(path.exists() for path in others)


def test_neither_the_current_file_nor_that_of_another_recorder_is_deleted(tmp_path: Path) -> None:
    current = write(tmp_path / "20260101T000000Z.mcap", 9000)
    quota = Quota(RecordSettings(out=tmp_path, max_age_h=1, max_total_gb=1e-9))
    with RecordingWriter(tmp_path / "20260101T000001Z.mcap") as other:
        other.write_metadata(RECORDER, {})
        assert quota.enforce(current) == []
    assert quota.enforce(current) == [other.path]


def test_a_recorder_keeps_to_its_quota_and_splits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sam3_node.recording.recorder.PROGRESS_S", 0.05)
    settings = settings_for(tmp_path, max_total_gb=20 * FRAME_BYTES / 1e9)
    with Camera(tmp_path, rate=100), recording(settings) as out:
        until(lambda: out.getvalue().count("deleted ") > 5, "deleted files", PATIENCE_S)
        assert sum(path.stat().st_size for path in tmp_path.glob("*.mcap")) < 40 * FRAME_BYTES
    assert not (tmp_path / "r.mcap").exists()
    assert all(read_seqs(path) for path in tmp_path.glob("*.mcap"))
    shutil.rmtree(tmp_path)


MEBIBYTE = 1 << 20
KILLS = repetitions(5, 20)
AT_ONCE = 5


@pytest.mark.parametrize("batch", range(KILLS // AT_ONCE))
def test_a_kill_costs_less_than_one_and_a_half_mebibytes(tmp_path: Path, batch: int) -> None:
    rng = random.Random(batch)
    paths = [tmp_path / f"{number}.mcap" for number in range(AT_ONCE)]
    with (
        Camera(tmp_path, rate=20 + 8 * batch) as camera,
        MaskPublisher(f"ipc://{tmp_path}/masks") as node,
        ExitStack() as opened,
    ):
        verbs = [opened.enter_context(Process.spawn(arguments(tmp_path, path))) for path in paths]
        for verb, path in zip(verbs, paths, strict=True):
            verb.line_with("record frames from")
            until(has_grown(path, FRAME_BYTES), "frames on the disk", PATIENCE_S)
        for verb, path in zip(verbs, paths, strict=True):
            node.send(masks())
            time.sleep(rng.uniform(0, 1.5))
            sent = camera.sent
            verb.process.send_signal(signal.SIGKILL)
            verb.process.wait(timeout=PATIENCE_S)
            recorded = RecordingReader([path])
            seqs = read_seqs(path)
            assert (sent - seqs[-1]) * FRAME_BYTES < 1.5 * MEBIBYTE
            assert seqs == sorted(set(seqs))
            list(recorded.actions())
            assert recorded.lost is not None


def test_after_a_kill_a_new_recording_works(tmp_path: Path) -> None:
    with Camera(tmp_path):
        for name, end in (("a.mcap", signal.SIGKILL), ("b.mcap", signal.SIGTERM)):
            with Process.spawn(arguments(tmp_path, tmp_path / name)) as verb:
                until(has_grown(tmp_path / name, 5 * FRAME_BYTES), "frames on the disk", PATIENCE_S)
                verb.process.send_signal(end)
                assert verb.process.wait(timeout=PATIENCE_S) == (-end if end == signal.SIGKILL else 0)
    assert read_seqs(tmp_path / "b.mcap")[0] > read_seqs(tmp_path / "a.mcap")[-1]
    assert RecordingReader([tmp_path / "b.mcap"]).metadata()[RECORDING]


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_file(tmp_path: Path, path: Path, end: signal.Signals) -> None:
    with Camera(tmp_path), Process.spawn(arguments(tmp_path, path, record__split_mb=0.2)) as verb:
        until(has_grown(tmp_path / "r_0002.mcap", FRAME_BYTES), "a third file", PATIENCE_S)
        verb.process.send_signal(end)
        assert verb.process.wait(timeout=PATIENCE_S) == 0
    paths = sorted(tmp_path.glob("*.mcap"), key=lambda found: (len(found.name), found.name))
    seqs = [seq for part in paths for seq in read_seqs(part)]
    recorded = RecordingReader(paths)
    counts = recorded.metadata()[RECORDING][-1]["cameras"]["cam0"]
    assert counts["frames"] == len(seqs)
    assert counts["frames_lost"] == seqs[-1] - seqs[0] + 1 - len(seqs)
    assert [found.seq for found in recorded.frames()] == seqs
    assert recorded.lost is None


def test_a_full_disk_ends_it_and_spares_what_is_there(tmp_path: Path, path: Path) -> None:
    limited = ["bash", "-c", 'ulimit -f 2500; exec "$@"', "bash", *arguments(tmp_path, path)]
    with Camera(tmp_path, rate=60) as camera, Process.spawn(limited) as verb:
        assert verb.process.wait(timeout=PATIENCE_S) == 2
        assert camera.sent > 0
        verb.line_with(" MB in ")
        verb.line_with(f"cannot write {path}: File too large; the recording ends here")
    recorded = RecordingReader([path])
    seqs = read_seqs(path)
    assert len(seqs) * FRAME_BYTES > 1_000_000
    assert list(recorded.frames())
    assert recorded.lost is None


def test_a_disk_that_is_full_gets_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(record=RecordSettings(out=tmp_path / "pick.mcap"))
    full = shutil.disk_usage(tmp_path)._replace(free=60 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with refuses(OutputError, field=("pick.mcap", "64 MiB", "60", "record.max_total_gb")) as caught:
        Recorder(settings, io.StringIO(), Trigger())
    # a supervisor tries again: somebody may free the disk
    assert caught.value.may_pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("chunks", [0, 1])
def test_a_recording_without_a_message_leaves_no_file(
    tmp_path: Path, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full at the first message, or after one that is kept."""
    path = tmp_path / "pick.mcap"
    frame = Frame("cam0", 0, 0, 4, 2, "mono8", bytes(8))
    recording = RecordingWriter(path)
    for _ in range(chunks):
        recording.write_frame(frame, 0)
        recording.flush()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    recording.write_frame(frame, 1)
    monkeypatch.setattr(writer._RecordingFile, "write", fail)
    with refuses(OutputError, field=(str(path), "space")) as caught:
        recording.flush()
    assert caught.value.may_pass
    assert path.exists() == bool(chunks)


def test_what_a_stopped_recorder_misses_is_counted(tmp_path: Path, path: Path) -> None:
    with (
        Camera(tmp_path, rate=100, size=100_000) as camera,
        Process.spawn(arguments(tmp_path, path)) as verb,
    ):
        until(has_grown(path, 500_000), "frames on the disk", PATIENCE_S)
        verb.process.send_signal(signal.SIGSTOP)
        begin = camera.sent
        until(lambda: camera.sent > begin + 250, "frames that nobody takes", PATIENCE_S)
        verb.process.send_signal(signal.SIGCONT)
        verb.line_with("; lost: cam0")  # said at once, not only at the end
        assert verb.terminate() == 0
    seqs = read_seqs(path)
    counts = RecordingReader([path]).metadata()[RECORDING][0]["cameras"]["cam0"]
    assert counts["frames"] == len(seqs)
    assert counts["frames_lost"] == seqs[-1] - seqs[0] + 1 - len(seqs) > 50
    assert f"; lost: cam0 {counts['frames_lost']} frames" in verb.line_with(" MB in ")


def test_nobody_has_to_read_its_lines(tmp_path: Path, path: Path) -> None:
    with Camera(tmp_path):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(arguments(tmp_path, path), **pipes)
        try:
            process.stdout.close()
            until(has_grown(path, 5 * FRAME_BYTES), "frames on the disk", PATIENCE_S)
        finally:
            process.terminate()
            assert process.wait(timeout=PATIENCE_S) == 0
    assert RecordingReader([path]).metadata()[RECORDING]
