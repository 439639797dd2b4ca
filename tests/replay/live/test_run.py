"""Replays through a live node: a real process with tiny weights, against the replay without one."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sam3_node.errors import ReplayError, SettingsError, TransportError
from sam3_node.perception.perception import Perception
from sam3_node.replay.completion import StoppedError
from sam3_node.replay.event_log import Step
from sam3_node.replay.job import Job, ObjectOnFrame
from sam3_node.replay.live import Endpoints, InFlightFrames, NodeCounts, run_live
from sam3_node.replay.run import PerceptionCache, compare_masks, run_job
from sam3_node.replay.shards import ShardLimits, Shards
from sam3_node.replay.store import FolderStore
from sam3_node.settings import Settings
from sam3_node.transport import FramePublisher
from sam3_node.types import Frame, Instance
from tests.support.live import (
    BOX,
    Live,
    chosen,
    masks_of,
    masks_on,
    moving_frame,
    record_edits,
    tiny_settings,
)
from tests.support.node_rig import Rig
from tests.support.patience import PATIENCE_MS, PATIENCE_S
from tests.support.refuses import mentions, refuses

SMALL = ShardLimits(frames=5)
SHOWN = ObjectOnFrame(seq=3, box=(16, 12, 48, 36), label="boxed")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """Return endpoints, weights and environment of all nodes in these tests."""
    rig = Rig(tmp_path_factory.mktemp("rig"))
    rig.environment |= {"SAM3_TRANSPORT__DELIVERY": "every", "SAM3_TRACKER__MAX_OBJECTS": "4"}
    return rig


@pytest.fixture
def rig(machine: Rig) -> Iterator[Rig]:
    """Provide processes that end with the test."""
    yield machine
    machine.close()


@pytest.fixture(scope="module")
def settings(machine: Rig) -> Settings:
    """Return the endpoints of the nodes."""
    return tiny_settings(machine.folder)


@pytest.fixture
def endpoints(rig: Rig) -> Endpoints:
    return Endpoints(rig.control)


@pytest.fixture(scope="module")
def bag(settings: Settings, load: PerceptionCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_edits(tmp_path_factory.mktemp("bag") / "edited.mcap", load(settings), last=18)


@pytest.fixture
def job(bag: Path, settings: Settings, tmp_path: Path) -> Job:
    return Job((str(bag),), str(tmp_path / "live"), settings=chosen(settings))


def plain_bag(path: Path, perception: Perception, frames: list[Frame]) -> Path:
    """Record these frames alone."""
    with Live(path, perception) as live:
        for frame in frames:
            live.skip(frame)
    return path


def damaged(frame: Frame) -> Frame:
    return replace(frame, colour=bytes(frame.colour)[:-40])


def bytes_of(job: Job) -> bytes:
    return (Path(job.out) / "masks.mcap").read_bytes()


def test_masks_are_those_of_a_replay_without_a_node(
    rig: Rig, job: Job, load: PerceptionCache, endpoints: Endpoints, tmp_path: Path
) -> None:
    """Replay with the recorded edits, one of which pauses."""
    rig.node()
    plain = replace(job, out=str(tmp_path / "plain"))
    expected = run_job(plain, load)
    summary = run_live(job, endpoints, limits=SMALL)
    assert bytes_of(job) == bytes_of(plain)
    for name in ("frames", "failed", "refused", "cameras", "objects"):
        assert getattr(summary, name) == getattr(expected, name)
    assert (summary.frames, summary.failed, summary.refused) == (36, 1, 0)
    assert summary.cameras == {"left": 17, "right": 18}
    assert sum(summary.objects.values()) > 1
    assert summary.notes == []
    assert summary.stages_ms["encode"] > 0


def test_only_the_frames_fail_that_are_damaged(
    rig: Rig, job: Job, settings: Settings, load: PerceptionCache, endpoints: Endpoints, tmp_path: Path
) -> None:
    """Damage frames within the stream, one before an edit, and the last one."""
    rig.node()
    frames = [moving_frame(seq) for seq in range(20)]
    for seq in (3, 8, 9, 19):
        frames[seq] = damaged(frames[seq])
    recording = plain_bag(tmp_path / "damaged.mcap", load(settings), frames)
    later = ObjectOnFrame(seq=10, box=(16, 12, 48, 36), label="later")
    job = replace(job, bags=(str(recording),), objects=(SHOWN, later))
    plain = replace(job, out=str(tmp_path / "plain"))
    assert run_live(job, endpoints).failed == run_job(plain, load).failed == 4
    assert bytes_of(job) == bytes_of(plain)
    assert [masks.seq for masks in masks_of(job)] == [x for x in range(20) if x not in (3, 8, 9, 19)]
    summary = json.loads((tmp_path / "live/summary.json").read_text())
    assert summary["refused"] == 1  # the object on the frame that failed
    assert summary["objects"] == {"left": 1}


def test_a_second_replay_is_independent_of_the_first(
    rig: Rig, job: Job, settings: Settings, load: PerceptionCache, endpoints: Endpoints, tmp_path: Path
) -> None:
    """Objects of the first replay, and another sender's frames with the same camera names, have no effect."""
    rig.node()
    frames = [moving_frame(seq) for seq in range(10)]
    recording = plain_bag(tmp_path / "bag.mcap", load(settings), frames)
    job = replace(job, bags=(str(recording),), objects=(ObjectOnFrame(box=(16, 12, 48, 36)),))
    run_live(job, endpoints)
    with FramePublisher(rig.frames[0], "every") as publisher:
        for frame in frames[:6]:
            assert publisher.send(frame, timeout_ms=PATIENCE_MS)
    arguments = ("--connect", rig.control, "--box", ",".join(map(str, BOX)))
    verb = rig.start("replay", str(recording), "-o", str(tmp_path / "two"), *arguments)
    assert verb.process.wait(PATIENCE_S) == 0, verb.log.read_text()
    summary = json.loads((tmp_path / "two/summary.json").read_text())
    assert summary["frames"] == 10
    assert any(mentions(note, "frames", "left") for note in summary["notes"])
    expected = [replace(masks, instances=tuple(map(next_id, masks.instances))) for masks in masks_of(job)]
    assert compare_masks(masks_of(replace(job, out=str(tmp_path / "two"))), expected).is_identical


def next_id(one: Instance) -> Instance:
    return replace(one, id=one.id + 1)


def test_a_stopped_replay_starts_over(rig: Rig, job: Job, endpoints: Endpoints) -> None:
    rig.node()
    stop = threading.Event()

    def progress(what: str, done: int, total: int | None) -> None:
        assert total == 36 or what.startswith("writing")
        if done == 12:
            stop.set()

    with refuses(StoppedError, field="start"):
        run_live(job, endpoints, progress, stop, limits=SMALL)
    kept = sum(1 for _ in Shards(FolderStore(Path(job.out))).masks())
    assert 11 <= kept < 35
    summary = run_live(job, endpoints, limits=SMALL)
    assert summary.frames == 36
    assert len(masks_of(job)) == 35
    assert any("pushed again" in note for note in summary.notes)
    rig.processes[-1].kill()
    assert run_live(job, endpoints) == summary, "what is finished needs no node"


def test_a_node_that_ends_is_an_error_and_shards_are_kept(rig: Rig, job: Job, endpoints: Endpoints) -> None:
    """Kill the node, and in another run restart it without its state."""
    node = rig.node()
    starts_again = False

    def progress(what: str, done: int, total: int | None) -> None:
        if done == 20:
            node.kill()
            if starts_again:
                rig.node()

    with refuses(TransportError, field="gone"):
        run_live(job, endpoints, progress, limits=SMALL)
    assert len(list(Shards(FolderStore(Path(job.out))).masks())) >= 19
    assert not (Path(job.out) / "summary.json").exists()
    node = rig.node()
    starts_again = True
    with refuses(TransportError, field="started"):
        run_live(job, endpoints, progress)


def test_a_node_that_cannot_be_lossless_is_refused(rig: Rig, job: Job, endpoints: Endpoints) -> None:
    rig.node(TRANSPORT__DELIVERY="newest")
    with pytest.raises(SettingsError, match=r"found 'newest'.*--transport\.delivery every"):
        run_live(job, endpoints)


def test_a_job_that_a_node_cannot_run_is_an_error(
    rig: Rig, job: Job, load: PerceptionCache, endpoints: Endpoints, tmp_path: Path
) -> None:
    with refuses(ReplayError, field="as-recorded"):
        run_live(replace(job, mode="as-recorded"), endpoints)
    with refuses(TransportError, field=("node", "connected")):
        run_live(job, endpoints)
    rig.node(TRACKER__MAX_CAMERAS="1")
    with refuses(SettingsError, field=("2", "left")):
        run_live(job, endpoints)
    other = replace(job, settings={**job.settings, "tracker": {"max_objects": 3}})
    with refuses(ReplayError, field=("tracker.max_objects", "4", "3")):
        run_live(other, endpoints, again=True)
    run_job(replace(job, out=str(tmp_path / "plain")), load)
    with refuses(ReplayError, field="job"):
        run_live(replace(job, out=str(tmp_path / "plain")), endpoints)


def test_frames_in_flight_settle_in_order() -> None:
    frames_in_flight = InFlightFrames()
    frames = [moving_frame(seq) for seq in range(5)]
    for frame in frames:
        frames_in_flight.add(Step(frame, 0))
    assert frames_in_flight.receive(masks_on(frames[0])) == 0
    assert frames_in_flight.receive(masks_on(moving_frame(9))) == 0
    assert frames_in_flight.receive(masks_on(frames[3])) == 2
    assert [masks and masks.seq for _, masks in frames_in_flight.settled] == [0, None, None, 3]
    assert not frames_in_flight.contradicts(NodeCounts(2, 2))
    assert frames_in_flight.contradicts(NodeCounts(2, 1))
    assert frames_in_flight.contradicts(NodeCounts(1, 2))
    frames_in_flight.update(NodeCounts(3, 2))  # its masks are still on their way
    assert len(frames_in_flight.in_flight) == 1
    frames_in_flight.update(NodeCounts(2, 3))
    assert not frames_in_flight.in_flight
    assert [masks and masks.seq for _, masks in frames_in_flight.settled] == [0, None, None, 3, None]
