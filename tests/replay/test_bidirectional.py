"""Objects tracked forward and backward: passes, their buffer and their merging."""

import resource
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sam3_node.errors import OutputError, ReplayError
from sam3_node.replay.completion import StoppedError
from sam3_node.replay.job import Job, ObjectOnFrame
from sam3_node.replay.run import PerceptionCache, run_job
from sam3_node.replay.second_pass import (
    ReverseFrameBuffer,
    Span,
    buffer_frames,
    index_frames,
    merge,
)
from sam3_node.replay.shards import SECOND_PASS, ShardLimits, Shards
from sam3_node.replay.store import FolderStore, Summary
from sam3_node.types import Instance, Mask, MaskFrame
from tests.support.live import masks_of, masks_on
from tests.support.recordings import frame_at
from tests.support.refuses import refuses
from tests.support.tabletop import NANO, cut, ious, shown

BALL = "orange ball"
FIRST = 92
SEAM = 100
STOP = 104
NAMES = {"model": NANO["model"]}
SMALL = ShardLimits(frames=5)


BACK = "tracking backward"
MOMENTS = [("replaying", 7), ("replaying", 31), ("reading", 3), (BACK, 1), (BACK, 5), (BACK, 7)]


class Killed(BaseException):
    """An exception that nothing catches."""


class Killer:
    """A progress callback that ends the run at one moment."""

    def __init__(self, what: str, done: int) -> None:
        self._moment = what, done

    def __call__(self, what: str, done: int, total: int | None) -> None:
        if (what, done) == self._moment:
            raise Killed


def ball_job(bag: Path, out: Path, strategy: Any, seq: int) -> Job:
    return Job((str(bag),), str(out), "every", strategy, objects=(shown(BALL, seq),), settings=NANO)


def job_on(bag: Path, out: Path) -> Job:
    """Objects on both cameras, in the middle of the recording."""
    points = ((30.0, 20.0),)
    objects = (
        ObjectOnFrame("left", seq=9, points=points, label="first"),
        ObjectOnFrame("left", seq=14, box=(16.0, 12.0, 48.0, 36.0), label="second"),
        ObjectOnFrame("right", seq=11, points=points, label="third"),
    )
    return Job((str(bag),), str(out), "every", "bidirectional", objects=objects)


def by_label(masks: MaskFrame) -> dict[str, Instance]:
    return {one.label: one for one in masks.instances}


def lasting(summary: Summary) -> Summary:
    return replace(summary, seconds=0.0, frames_per_s=0.0, resumed_from=0, stages_ms={})


def test_an_object_marked_in_the_middle_has_earlier_masks(tmp_path: Path) -> None:
    bag = cut(tmp_path / "bag.mcap", FIRST, STOP)
    run_job(job := ball_job(bag, tmp_path / "out", "bidirectional", SEAM))
    once = list(Shards(FolderStore(tmp_path / "out")).masks())
    merged = masks_of(job)
    found = ious(merged, BALL)
    assert list(found) == list(range(FIRST, STOP))
    assert min(found[seq] for seq in range(FIRST, SEAM)) > 0.3
    assert np.mean([found[seq] for seq in range(FIRST, SEAM)]) > 0.6
    before = ious(once, BALL)
    assert not any(before[seq] for seq in range(FIRST, SEAM))
    assert all(found[seq] == before[seq] for seq in range(SEAM, STOP))


def test_each_object_has_masks_from_its_cameras_first_frame(
    bag: Path, load: PerceptionCache, tmp_path: Path
) -> None:
    job = job_on(bag, tmp_path / "out")
    summary = run_job(job, load, limits=SMALL)
    assert summary.objects == {"left": 2, "right": 1}
    assert summary.frames == 48
    merged = masks_of(job)
    once = list(Shards(FolderStore(tmp_path / "out")).masks())
    assert [one.key for one in merged] == [one.key for one in once]
    for masks, forward in zip(merged, once, strict=True):
        expected = {"first": 1, "second": 2} if masks.camera == "left" else {"third": 1}
        found = by_label(masks)
        assert {label: one.id for label, one in found.items()} == expected
        for label, one in by_label(forward).items():
            assert found[label].score == one.score
            assert np.array_equal(found[label].mask.full(), one.mask.full())
    ages = [by_label(masks)["first"].age for masks in merged if masks.camera == "left"]
    assert ages == list(range(1, 24))


def test_without_objects_those_of_the_recording_are_tracked_back(
    bag: Path, load: PerceptionCache, tmp_path: Path
) -> None:
    job = replace(job_on(bag, tmp_path / "out"), objects=(), settings={"detector": {"min_track_score": 0.3}})
    run_job(job, load)
    ids = {(masks.camera, masks.seq): {one.id for one in masks.instances} for masks in masks_of(job)}
    assert [ids["left", seq] for seq in (0, 1, 2)] == [{1, 2}] * 3
    assert [ids["right", seq] for seq in (0, 1, 2, 3)] == [{1, 2}] * 4
    assert ids["left", 15] == {2}  # the other was removed after frame 14


def test_detected_objects_are_tracked_backward(tmp_path: Path) -> None:
    bag = cut(tmp_path / "bag.mcap", 70, 84)
    job = Job((str(bag),), str(tmp_path / "out"), "every", "bidirectional", ("blue can",), settings=NAMES)
    run_job(job)
    once = ious(Shards(FolderStore(tmp_path / "out")).masks(), "blue can")
    found = ious(masks_of(job), "blue can")
    late = [seq for seq, iou in once.items() if not iou]
    assert late
    assert np.mean([found[seq] for seq in late]) > 0.3


def test_a_killed_second_pass_continues_bit_for_bit(bag: Path, load: PerceptionCache, tmp_path: Path) -> None:
    kill_everywhere(job_on(bag, tmp_path / "whole"), tmp_path / "killed", load)


def kill_everywhere(whole: Job, out: Path, load: PerceptionCache) -> None:
    """Check that a job killed in each phase gives the results of an uninterrupted one."""
    expected = run_job(whole, load, limits=SMALL)
    assert len(Shards(FolderStore(Path(whole.out)), SECOND_PASS)) > 1
    job = replace(whole, out=str(out))
    for moment in MOMENTS:
        with pytest.raises(Killed):
            run_job(job, load, Killer(*moment), limits=SMALL)
    stop = threading.Event()

    def on_progress(what: str, done: int, total: int | None) -> None:
        assert what != "replaying"
        if what == BACK:
            assert done > 5
            stop.set()

    with pytest.raises(StoppedError):
        run_job(job, load, on_progress, stop, limits=SMALL)
    summary = run_job(job, load, limits=SMALL)
    assert summary.resumed_from > 48 + 5
    assert lasting(summary) == lasting(expected)
    assert (out / "masks.mcap").read_bytes() == (Path(whole.out) / "masks.mcap").read_bytes()


def masks_at(
    seq: int, scores: dict[int, float], model: str = "", camera: str = "cam0", *, column: int = 0, **seen: int
) -> MaskFrame:
    """Make masks of objects with these scores; `seen` has their age and frames_since_seen."""
    mask = Mask.from_full(np.eye(4, dtype=np.bool_)[column][None].repeat(4, axis=0))
    seen = {"age": 0, "frames_since_seen": 0} | seen
    instances = (Instance(n, model, score, "tracked", mask=mask, **seen) for n, score in scores.items())
    return MaskFrame(camera, seq, 0, 4, 4, model=model, instances=tuple(instances))


def passes(seqs: Iterable[int], scores: dict[int, float], model: str) -> Iterator[MaskFrame]:
    return (masks_at(seq, scores, model) for seq in seqs)


def chosen(masks: MaskFrame) -> dict[int, str]:
    return {one.id: one.label for one in masks.instances}


def test_the_higher_score_is_taken_for_each_object_and_forward_of_equals() -> None:
    forward = passes(range(3), {1: 0.9, 2: 0.3, 3: 0.5}, "forward")
    backward = passes(range(3), {3: 0.5, 2: 0.4, 1: 0.1}, "backward")
    for masks in merge(forward, backward):
        assert chosen(masks) == {1: "forward", 2: "backward", 3: "forward"}
        assert masks.model == "forward"


def test_objects_of_one_pass_alone_are_there_on_its_frames() -> None:
    forward = passes(range(6), {1: 0.9}, "forward")
    backward = passes(range(4), {1: 0.5, 2: 0.5}, "backward")
    merged = list(merge(forward, backward))
    assert [masks.seq for masks in merged] == list(range(6))
    assert [chosen(masks) for masks in merged] == [{1: "forward", 2: "backward"}] * 4 + [{1: "forward"}] * 2


def test_without_a_second_pass_the_first_is_as_it_was() -> None:
    frames = [masks_at(seq, {1: 0.9}, age=seq) for seq in range(4)]
    assert list(merge(frames, [])) == frames
    assert not list(merge([], []))


def test_several_cameras_come_in_the_order_of_the_recording() -> None:
    order = [("left", 0), ("right", 4), ("left", 1), ("right", 5), ("left", 2)]
    frames = [masks_at(seq, {1: 0.5}, camera=camera) for camera, seq in order]
    again = [masks_at(seq, {1: 0.6}, "again", camera) for camera, seq in order[1:4]]
    merged = list(merge(frames, again))
    assert [(masks.camera, masks.seq) for masks in merged] == order
    assert [chosen(masks)[1] for masks in merged] == ["", "again", "again", "again", ""]


def test_ages_are_counted_in_the_order_of_the_frames() -> None:
    forward = [masks_at(seq, {1: 0.5} if seq >= 2 else {}, age=max(0, seq - 2)) for seq in range(5)]
    backward = [masks_at(0, {1: 0.1}, age=2, frames_since_seen=1), masks_at(1, {1: 0.5}, age=1)]
    merged = [masks.instances[0] for masks in merge(forward, backward)]
    assert [one.age for one in merged] == [1, 2, 3, 4, 5]
    assert [one.frames_since_seen for one in merged] == [1, 0, 0, 0, 0]


def test_a_frame_that_the_first_pass_does_not_have_is_an_error() -> None:
    merged = merge(passes(range(3), {1: 0.5}, ""), passes(range(5, 6), {1: 0.5}, ""))
    with pytest.raises(ReplayError, match="frame 5"):
        list(merged)


def test_frames_are_read_only_as_needed() -> None:
    read: list[int] = []

    def watched() -> Iterator[MaskFrame]:
        for seq in range(100):
            read.append(seq)
            yield masks_at(seq, {1: 0.5})

    merged = merge(watched(), passes(range(100), {1: 0.4}, ""))
    for _ in range(10):
        next(merged)
    assert len(read) <= 11


KNOWN = Instance(1, "thing", 0.9, "tracked", 1, 0, Mask.from_full(np.ones((4, 4), np.bool_)))


def span(camera: str, first: int, last: int) -> Span:
    return Span.from_instance(first, last, camera, KNOWN)


def test_frames_come_back_from_the_last_to_the_first(tmp_path: Path) -> None:
    frames = [frame_at(seq) for seq in range(5)]
    with ReverseFrameBuffer(tmp_path) as spool:
        for place, frame in enumerate(frames):
            spool.append(10 * place, frame)
        assert len(spool) == 5
        expected = [(10 * seq, replace(frames[seq], depth=None)) for seq in reversed(range(5))]
        assert [tuple(placed) for placed in spool.read_backward()] == expected
        assert [tuple(placed) for placed in spool.read_backward()] == expected


def test_an_empty_buffer_has_no_frames(tmp_path: Path) -> None:
    with ReverseFrameBuffer(tmp_path) as spool:
        assert not list(spool.read_backward())


def test_the_buffer_leaves_no_file(tmp_path: Path) -> None:
    with ReverseFrameBuffer(tmp_path) as spool:
        spool.append(0, frame_at(0))
        assert not list(tmp_path.iterdir())
    spool.close()
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with refuses(OutputError, field=("buffer", "frames")):
        ReverseFrameBuffer(tmp_path / "absent")


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with ReverseFrameBuffer(tmp_path) as spool, refuses(OutputError, field=("buffer", "frames")):
            spool.append(0, frame_at(0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_frames_without_masks_are_left_out() -> None:
    frames = [frame_at(seq, camera) for seq in range(4) for camera in ("left", "right")]
    kept = [frame for number, frame in enumerate(frames) if number not in (2, 3, 7)]
    placed = list(index_frames(map(masks_on, kept), frames))
    assert [place for place, _ in placed] == list(range(5))
    assert [frame for _, frame in placed] == kept


def test_only_frames_of_spans_are_buffered(tmp_path: Path) -> None:
    frames = [frame_at(seq, camera) for seq in range(8) for camera in ("left", "right")]
    spans = [span("left", 2, 6), span("left", 4, 8), span("right", 9, 11), span("left", 12, 12)]
    with ReverseFrameBuffer(tmp_path) as spool:
        placed = list(index_frames(map(masks_on, frames), frames))
        assert list(buffer_frames(spool, spans, placed)) == list(range(1, 14))
        assert [place for place, _ in spool.read_backward()] == [12, 11, 9, 8, 6, 4, 2]
