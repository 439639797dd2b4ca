"""Objects tracked forward and backward; second passes that are killed and continued."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sam3_node.bags import read_masks
from sam3_node.errors import ReplayError
from sam3_node.perception.perception import Perception
from sam3_node.replay.completion import StoppedError
from sam3_node.replay.job import Job, ObjectOnFrame
from sam3_node.replay.run import PerceptionCache, run_job
from sam3_node.replay.second_pass import find_multi_shot_spans
from sam3_node.replay.shards import SECOND_PASS, ShardLimits, Shards
from sam3_node.replay.store import FolderStore, Summary
from sam3_node.settings import Settings
from sam3_node.types import Instance, MaskFrame
from tests.support.live import Live, edited
from tests.support.refuses import refuses
from tests.support.tabletop import NANO, cut, ious, shown

BALL, FIRST, SEAM, STOP = "orange ball", 92, 100, 104
NAMES = {"model": NANO["model"]}
SMALL = ShardLimits(frames=5)


MOMENTS = [
    ("replaying", 7),
    ("replaying", 31),
    ("reading", 3),
    ("tracking backward", 1),
    ("tracking backward", 5),
    ("tracking backward", 7),
]


class Killed(BaseException):
    """An exception that nothing catches."""


class Killer:
    """A progress callback that ends the run at one moment."""

    def __init__(self, what: str, done: int) -> None:
        self._moment = what, done

    def __call__(self, what: str, done: int, total: int | None) -> None:
        if (what, done) == self._moment:
            raise Killed


@pytest.fixture(scope="module")
def bag(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two cameras, one frame that does not decode, and every kind of edit."""
    path = tmp_path_factory.mktemp("bag") / "live.mcap"
    with Live(path, Perception.load(settings)) as live:
        for _ in edited(live):
            pass
    return path


def job_on(bag: Path, out: Path) -> Job:
    """Objects on both cameras, in the middle of the recording."""
    points = ((30.0, 20.0),)
    objects = (
        ObjectOnFrame("left", seq=9, points=points, label="first"),
        ObjectOnFrame("left", seq=14, box=(16.0, 12.0, 48.0, 36.0), label="second"),
        ObjectOnFrame("right", seq=11, points=points, label="third"),
    )
    return Job((str(bag),), str(out), "every", "bidirectional", objects=objects)


def masks_of(job: Job) -> list[MaskFrame]:
    return list(read_masks(Path(job.out) / "masks.mcap"))


def by_label(masks: MaskFrame) -> dict[str, Instance]:
    return {one.label: one for one in masks.instances}


def lasting(summary: Summary) -> Summary:
    return replace(summary, seconds=0.0, frames_per_s=0.0, resumed_from=0, stages_ms={})


def test_an_object_marked_in_the_middle_has_earlier_masks(tmp_path: Path) -> None:
    bag = cut(tmp_path / "bag.mcap", FIRST, STOP)
    job = Job(
        (str(bag),),
        str(tmp_path / "out"),
        "every",
        "bidirectional",
        objects=(shown(BALL, SEAM),),
        settings=NANO,
    )
    run_job(job)
    once, merged = list(Shards(FolderStore(tmp_path / "out")).masks()), masks_of(job)
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
    assert [(one.camera, one.seq, one.capture_ns) for one in merged] == [
        (one.camera, one.seq, one.capture_ns) for one in once
    ]
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


def test_as_recorded_has_no_other_strategy(bag: Path, tmp_path: Path) -> None:
    with refuses(ReplayError, field=("forward", "multi-shot")):
        Job((str(bag),), str(tmp_path), "as-recorded", "multi-shot")


def test_a_killed_second_pass_continues_bit_for_bit(bag: Path, load: PerceptionCache, tmp_path: Path) -> None:
    kill_everywhere(job_on(bag, tmp_path / "whole"), tmp_path / "killed", load)


def test_a_killed_multi_shot_pass_continues_bit_for_bit(
    bag: Path, load: PerceptionCache, tmp_path: Path
) -> None:
    early = (replace(one, seq=seq) for seq, one in zip((1, 4, 2), job_on(bag, tmp_path).objects, strict=True))
    job = replace(job_on(bag, tmp_path / "whole"), strategy="multi-shot", objects=tuple(early))
    forward = replace(job, strategy="forward", out=str(tmp_path / "forward"))
    run_job(forward, load)
    masks = masks_of(forward)
    scores = [one.score for found in masks for one in found.instances]
    # weights without meaning: what is doubtful is chosen so that there is much of it
    doubt = max(
        scores, key=lambda doubt: sum(span.last - span.first for span in find_multi_shot_spans(masks, doubt))
    )
    kill_everywhere(
        replace(job, settings={"detector": {"min_track_score": doubt}}), tmp_path / "killed", load
    )


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
        if what == "tracking backward":
            assert done > 5
            stop.set()

    with pytest.raises(StoppedError):
        run_job(job, load, on_progress, stop, limits=SMALL)
    summary = run_job(job, load, limits=SMALL)
    assert summary.resumed_from > 48 + 5
    assert lasting(summary) == lasting(expected)
    assert (out / "masks.mcap").read_bytes() == (Path(whole.out) / "masks.mcap").read_bytes()
