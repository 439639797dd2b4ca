"""Recordings of a trigger: the last seconds from memory, and what follows."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("mcap")
pytest.importorskip("foxglove_schemas_protobuf")

from sam3_node.bags.native import RING
from sam3_node.bags.native.reader import RecordingReader
from sam3_node.errors import OutputError, ReplayError
from sam3_node.recording.recorder import MessageRing, Trigger, run_record
from sam3_node.replay.job import Job
from sam3_node.replay.schedule import Schedule
from sam3_node.transport import MaskPublisher, ReceivedMessage
from sam3_node.wire import Event
from tests.recording.test_recorder import recording, send_until, settings_for
from tests.support.node_rig import READY_S, until
from tests.support.recorder_rig import FRAME_BYTES, Camera, RecorderProcess, arguments, read_seqs
from tests.support.refuses import refuses
from tests.support.wire_examples import masks

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


def test_a_signal_writes_what_was_and_what_follows_each_time_to_a_file(tmp_path: Path) -> None:
    out = tmp_path / "events"
    command = arguments(tmp_path, out, record__after_s=0.3)
    with (
        Camera(f"ipc://{tmp_path}/frames", rate=50) as camera,
        RecorderProcess([*command, "--ring", "60"]) as verb,
    ):
        assert "into a ring of 60 s" in verb.line_with("record frames from")
        for number in (1, 2):
            begin = camera.sent
            until(lambda begin=begin: camera.sent > begin + 30, "frames for the ring", READY_S)
            assert len(list(out.iterdir())) == number - 1
            sent = camera.sent
            verb.process.send_signal(signal.SIGUSR1)
            until(
                lambda number=number: sum(x.startswith("recorded ") for x in verb.seen) == number,
                "the file",
                READY_S,
            )
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
    with Camera(f"ipc://{tmp_path}/frames", rate=50) as camera, recording(settings_for(tmp_path, ring_s=5)):
        until(lambda: camera.sent > 10, "frames", READY_S)
    assert not list(tmp_path.glob("*.mcap"))


def test_a_folder_that_cannot_be_written_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = settings_for(tmp_path, ring_s=5, out=tmp_path / "file/r.mcap")
    with refuses(OutputError, field="file"):
        run_record(settings, threading.Event())


def test_a_late_beginning_is_not_replayed_as_recorded(tmp_path: Path) -> None:
    settings, trigger = settings_for(tmp_path, ring_s=60, ring_mb=0.1, after_s=0.0), Trigger()
    with (
        Camera(f"ipc://{tmp_path}/frames", rate=50),
        MaskPublisher(f"ipc://{tmp_path}/masks") as node,
        recording(settings, trigger) as out,
    ):
        send_until(lambda n: node.send_event(Event(n, "pause")), lambda: len(out.getvalue()) > 0, "a start")
        begin = time.monotonic()
        send_until(
            lambda n: node.send(masks()), lambda: time.monotonic() > begin + 1, "masks beyond the ring"
        )
        trigger.fire()
        until(lambda: "\nrecorded " in out.getvalue(), "the file", READY_S)
    (path,) = tmp_path.glob("*.mcap")
    assert path.name.startswith("r-")
    assert RecordingReader([path]).metadata()[RING][0]["dropped"] > 0
    assert path.stat().st_size < 10 * FRAME_BYTES
    job = Job((str(path),), str(tmp_path / "out"), "as-recorded")
    with Schedule(job, path) as schedule, refuses(ReplayError, field="ring"):
        list(schedule.actions())
