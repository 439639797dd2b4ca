"""Replays with tiny weights: as recorded, on every frame, stopped and continued."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from sam3_node.cli.main import main
from sam3_node.errors import BagError, OutputError, ReplayError
from sam3_node.perception.perception import Perception
from sam3_node.replay.completion import StoppedError
from sam3_node.replay.job import Job, ObjectOnFrame
from sam3_node.replay.outputs import OUTPUTS
from sam3_node.replay.run import PerceptionCache, compare_job, compare_masks, read_finished_summary, run_job
from sam3_node.replay.shards import ShardLimits
from sam3_node.settings import Settings
from sam3_node.types import Instance, Mask
from tests.support.live import BOX, SIZE, Live, masks_of, moving_frame, tiny_settings
from tests.support.observations import make_frame, make_instance
from tests.support.paths import ROOT
from tests.support.processes import run_command
from tests.support.refuses import mentions, refuses

SMALL = ShardLimits(frames=5)


@pytest.fixture
def job(bag: Path, tmp_path: Path) -> Job:
    return Job((str(bag),), str(tmp_path / "out"), "as-recorded")


def test_as_recorded_gives_the_recorded_masks(job: Job, load: PerceptionCache) -> None:
    summary = run_job(job, load, limits=SMALL)
    assert compare_job(job).is_identical
    assert (summary.frames, summary.failed, summary.refused) == (40, 1, 0)
    assert (summary.cameras, summary.objects) == ({"left": 23, "right": 16}, {"left": 2, "right": 2})
    assert (summary.notes, summary.lost) == ([], None)
    skipped = {seq for seq in range(24) if seq % 3 == 1}
    assert {masks.seq for masks in masks_of(job) if masks.camera == "right"} == set(range(24)) - skipped


def test_one_camera_alone_gives_its_recorded_masks(job: Job, load: PerceptionCache) -> None:
    left = replace(job, topics=("left",))
    assert run_job(left, load).cameras == {"left": 23}
    assert compare_job(left).is_identical


@pytest.mark.parametrize("after", [1, 2, 9, 23, 39])
def test_a_stopped_replay_continues_bit_for_bit(
    job: Job, load: PerceptionCache, tmp_path: Path, after: int
) -> None:
    stop = threading.Event()

    def progress(what: str, done: int, total: int | None) -> None:
        assert total == 39 or what.startswith("writing")
        if done == after:
            stop.set()

    with refuses(StoppedError, field=("command", "resume")):
        run_job(job, load, progress, stop, limits=SMALL)
    assert not read_finished_summary(job)
    summary = run_job(job, load, limits=SMALL)
    assert summary.resumed_from == after
    assert summary.frames == 40
    assert summary.failed == 1
    whole = replace(job, out=str(tmp_path / "whole"))
    run_job(whole, load)
    assert (Path(job.out) / "masks.mcap").read_bytes() == (Path(whole.out) / "masks.mcap").read_bytes()


def test_a_stride_leaves_out_frames_and_resumes_bit_for_bit(
    job: Job, load: PerceptionCache, tmp_path: Path
) -> None:
    third = replace(job, mode="every", stride=3, outputs=("mcap", "coco"))
    stop = threading.Event()

    def progress(what: str, done: int, total: int | None) -> None:
        if done == 5:
            stop.set()

    with refuses(StoppedError, field=("command", "resume")):
        run_job(third, load, progress, stop, limits=SMALL)
    run_job(third, load, limits=SMALL)
    every = run_job(replace(third, stride=1, out=str(tmp_path / "every")), load)
    whole = replace(third, out=str(tmp_path / "whole"))
    summary = run_job(whole, load)
    assert every.frames / 3 <= summary.frames < every.frames
    assert all(masks.skipped <= 2 for masks in masks_of(whole))
    assert any(masks.skipped == 2 for masks in masks_of(whole))
    for name in ("masks.mcap", "masks.json"):
        assert (Path(third.out) / name).read_bytes() == (Path(whole.out) / name).read_bytes()


def test_a_stride_is_of_replays_of_all_frames(job: Job) -> None:
    for wrong in ({"stride": 2}, {"mode": "every", "stride": 0}, {"mode": "every", "stride": 10**9}):
        with refuses(ReplayError, field="stride"):
            replace(job, **wrong)
    with refuses(ReplayError, field="stride"):
        replace(job, mode="every", strategy="bidirectional", stride=2)


def test_a_finished_replay_is_left_as_it_is(job: Job) -> None:
    def refuse(settings: Settings) -> Perception:
        raise AssertionError("nothing is to be loaded")

    first = run_job(job, limits=SMALL)
    assert read_finished_summary(job)
    before = {path: path.stat().st_mtime_ns for path in Path(job.out).rglob("*") if path.name != "lock"}
    assert run_job(job, refuse) == first
    assert {path: path.stat().st_mtime_ns for path in before} == before
    more = replace(job, outputs=("mcap", "coco"))
    assert not read_finished_summary(more)
    assert run_job(more, refuse).outputs == ["mcap", "coco"]
    assert (Path(job.out) / "masks.json").exists()


def test_again_starts_over(job: Job, load: PerceptionCache) -> None:
    run_job(job, load, limits=SMALL)
    seen: list[int] = []
    note = lambda what, done, total: seen.append(done) if what == "replaying" else None  # noqa: E731
    run_job(job, load, note, again=True)
    assert seen[0] in (0, 1)
    assert compare_job(job).is_identical


def test_results_of_another_job_are_not_touched(job: Job, load: PerceptionCache) -> None:
    run_job(job, load, limits=SMALL)
    with refuses(ReplayError, field=("job.mode", "as-recorded", "every")):
        run_job(replace(job, mode="every"), load)
    other = replace(job, settings={"tracker": {"bank_size": 4}})
    with refuses(ReplayError, field=("settings.tracker.bank_size", "7", "4")):
        run_job(other, load)
    assert compare_job(job).is_identical


def test_other_weights_are_refused(
    job: Job, settings: Settings, load: PerceptionCache, tmp_path: Path, bag: Path
) -> None:
    weights = tmp_path / "weights"
    tiny_settings(weights)
    name = weights / "tiny" / "model.safetensors"
    name.write_bytes(name.read_bytes()[:-4] + b"abcd")
    other = replace(job, settings={"model": {"name": str(weights / "tiny")}})
    with refuses(ReplayError, field="model_digest"):
        run_job(other, load)
    lenient = replace(other, out=str(tmp_path / "lenient"), allow_gaps=True)
    summary = run_job(lenient, load)
    assert any("model_digest" in note for note in summary.notes)
    assert any("model.name was" in note for note in summary.notes)


def test_other_settings_give_other_masks_and_are_noted(job: Job, load: PerceptionCache) -> None:
    other = replace(job, settings={"tracker": {"bank_size": 2}})
    assert run_job(other, load).notes == ["tracker.bank_size was 7 in the recording, is 2"]
    assert mentions(str(compare_job(other)), "different", "masks")


def test_two_replays_do_not_write_to_one_folder(job: Job, load: PerceptionCache) -> None:
    def again(what: str, done: int, total: int | None) -> None:
        with refuses(OutputError, field=("replay", "writes")):
            run_job(job, load)

    run_job(job, load, again, limits=ShardLimits(frames=1000))


def test_every_frame_with_the_recorded_edits(job: Job, load: PerceptionCache) -> None:
    every = replace(job, mode="every")
    summary = run_job(every, load, limits=SMALL)
    assert (summary.frames, summary.failed, summary.refused) == (48, 1, 0)
    assert summary.objects == {"left": 2, "right": 2}
    found = {(masks.camera, masks.seq): masks for masks in masks_of(every)}
    assert len(found) == 47
    assert all(masks.skipped == 0 for masks in found.values())

    def ids(camera: str, seq: int) -> list[int]:
        return [instance.id for instance in found[camera, seq].instances]

    assert [ids("left", seq) for seq in (1, 2, 9, 15)] == [[], [1], [1, 2], [2]]
    assert ids("right", 2) == [1]  # shown on it, when it had been stepped
    assert ids("right", 17) == [2]


def test_every_frame_with_objects_shown_on_frames(job: Job, load: PerceptionCache, tmp_path: Path) -> None:
    square = np.zeros(SIZE, np.uint8)
    square[12:36, 16:48] = 255
    cv2.imwrite(str(tmp_path / "square.png"), square)
    shown = (
        ObjectOnFrame(camera="right", mask=str(tmp_path / "square.png"), label="square"),
        ObjectOnFrame(camera="left", seq=4, points=((30, 20), (2, 2)), labels=(1, 0)),
        ObjectOnFrame(camera="left", seq=99, points=((30, 20),), label="late"),
    )
    every = replace(job, mode="every", objects=shown)
    summary = run_job(every, load, limits=SMALL)
    found = {(masks.camera, masks.seq): masks for masks in masks_of(every)}
    first = found["right", 0].instances
    assert [(instance.id, instance.label, instance.state) for instance in first] == [(1, "square", "tracked")]
    assert first[0].mask.area == np.count_nonzero(square)
    assert [found["right", seq].instances[0].age for seq in range(3)] == [0, 1, 2]
    assert [len(found["left", seq].instances) for seq in (3, 4, 5)] == [0, 1, 1]
    assert summary.notes == ["object late: expected seq 99 of left, found no such frame"]


def test_names_without_a_detector_are_refused_and_nothing_else(job: Job, load: PerceptionCache) -> None:
    summary = run_job(replace(job, mode="every", names=("mug",)), load)
    assert summary.refused == 1
    assert summary.frames == 48
    assert summary.objects == {"left": 0, "right": 0}


Way = Callable[[Live], Any]


def lose_an_event(live: Live) -> None:
    live.ask("add_object", recorded=False, camera="left", box=BOX)
    live.ask("pause")


def lose_a_frame(live: Live) -> None:
    live.step(moving_frame(12), record_frame=False)


def lose_masks(live: Live) -> None:
    live.step(moving_frame(12), record_masks=False)


@pytest.mark.parametrize(
    ("lose", "told"),
    [
        (lose_an_event, ("1", "2", "pause")),
        (lose_a_frame, ("12", "stepped")),
        (lose_masks, ("1", "recording")),
    ],
)
def test_gaps_of_a_recording_are_errors_or_notes(
    settings: Settings, load: PerceptionCache, tmp_path: Path, lose: Way, told: str | tuple[str, ...]
) -> None:
    with Live(tmp_path / "gap.mcap", load(settings)) as live:
        for camera in list(live.perception.pipelines):
            live.perception.drop(camera)
        for seq in range(12):
            live.step(moving_frame(seq))
        lose(live)
        for seq in range(13, 16):
            live.step(moving_frame(seq))
    job = Job((str(tmp_path / "gap.mcap"),), str(tmp_path / "out"), "as-recorded")
    with refuses(ReplayError, field=told):
        run_job(job, load)
    summary = run_job(replace(job, allow_gaps=True), load)
    assert summary.resumed_from == 12
    assert summary.frames in (15, 16)
    assert len(summary.notes) == 1


def test_a_late_beginning_is_an_error(settings: Settings, load: PerceptionCache, tmp_path: Path) -> None:
    perception = Perception.load(settings)
    with Live(tmp_path / "before.mcap", perception) as live:
        live.step(moving_frame(0))
        live.ask("add_object", camera="left", box=BOX)
        live.step(moving_frame(1))
    with Live(tmp_path / "late.mcap", perception, live.events) as live:
        live.step(moving_frame(2))
    job = Job((str(tmp_path / "late.mcap"),), str(tmp_path / "out"), "as-recorded")
    with refuses(ReplayError, field=("begins", "later")):
        run_job(job, load)


def test_a_restart_of_the_node_is_replayed(settings: Settings, load: PerceptionCache, tmp_path: Path) -> None:
    with Live(tmp_path / "twice.mcap", Perception.load(settings)) as live:
        for start in (0, 10):
            for seq in range(start, start + 4):
                live.step(moving_frame(seq))
                if seq % 10 == 1:
                    live.ask("add_object", box=BOX)
            live.restart()
    job = Job((str(tmp_path / "twice.mcap"),), str(tmp_path / "out"), "as-recorded")
    run_job(job, load)
    assert compare_job(job).is_identical


def test_a_truncated_recording_is_replayed_up_to_its_end(
    bag: Path, load: PerceptionCache, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.mcap"
    cut.write_bytes(bag.read_bytes()[: bag.stat().st_size // 2])
    job = Job((str(cut),), str(tmp_path / "out"), "as-recorded", allow_gaps=True)
    summary = run_job(job, load)
    assert summary.lost is not None


def test_other_recordings_are_not_replayed_as_recorded(
    bag: Path, load: PerceptionCache, tmp_path: Path
) -> None:
    tabletop = ROOT / "sam3_node/assets/tabletop.mcap"
    with refuses(ReplayError, field="--every"):
        run_job(Job((str(tabletop),), str(tmp_path), "as-recorded"), load)
    with pytest.raises(BagError):
        run_job(Job((str(tmp_path / "absent.mcap"),), str(tmp_path)), load)


def test_compare_describes_the_first_difference(job: Job, load: PerceptionCache) -> None:
    run_job(job, load)
    masks = masks_of(job)
    other = [replace(one, stages_us={"track": 5}) for one in masks]
    assert compare_masks(masks, other).is_identical
    one = other[20].instances[0]
    other[20] = replace(other[20], instances=(replace(one, score=one.score / 2), *other[20].instances[1:]))
    found = compare_masks(masks, other)
    assert found.identical == found.frames - 1
    assert "had score" in str(found)
    assert mentions(str(compare_masks(masks[:-1], masks)), "not replayed")
    assert mentions(str(compare_masks(masks, masks[:-1])), "not recorded")


def test_the_summary_is_what_is_on_disk(job: Job, load: PerceptionCache) -> None:
    summary = run_job(job, load)
    told = json.loads((Path(job.out) / "summary.json").read_text())
    assert told["frames"] == summary.frames
    assert told["frames_per_s"] > 0
    assert told["stages_ms"]["encode"] > 0


def test_the_command_takes_several_recordings_and_compares(bag: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.mcap"
    other.write_bytes(bag.read_bytes())
    done = run_command(["replay", bag, other, "-o", tmp_path / "out", "--as-recorded", "--compare"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("identical: the masks of all 39 recorded frames, bit for bit") == 2
    assert (tmp_path / "out/live/masks.mcap").read_bytes() == (tmp_path / "out/other/masks.mcap").read_bytes()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--compare",), "--compare: expected --as-recorded with it"),
        (("--as-recorded", "--prompt", "mug"), "expected no names or objects beside it"),
        (("--outputs", "avi"), f"some of {', '.join(OUTPUTS)}"),
        (("--objects", "absent.json"), "cannot read absent.json"),
        (("--from", "soon"), "expected seconds from the start"),
        (("--to", "2026-05-01T12:00:00"), "has no offset"),
        (("--frames", "0"), "--frames"),
        (("--box", "80,90,40,30"), "expected x0 < x1 and y0 < y1"),
        (("--box", "1,2,3"), "expected 4 numbers"),
        (("--box", "nan,0,4,4"), "expected finite numbers"),
        (("--box", "9000,9000,9100,9100"), "expected a part inside the frame"),
        (("--prompt", ""), "expected the name of an object"),
        (("--prompt", "mug", "--prompt", " "), "expected the name of an object"),
        (("--topics", ","), "expected at least one name"),
        (("--outputs", ""), "expected at least one name"),
    ],
)
def test_wrong_options_end_a_replay_before_its_first_frame(
    bag: Path, options: tuple[str, ...], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    try:
        code = main(["replay", str(bag), "-o", str(out), *options])
    except SystemExit as ended:
        code = ended.code
    printed = capsys.readouterr()
    assert code == 2
    assert told in printed.err
    assert not printed.out
    # so that the corrected command may use the folder
    assert {path.name for path in out.glob("*")} <= {".replay"}


def test_a_comparison_names_the_field_of_an_object_that_differs() -> None:
    named = replace(make_instance(1, "mug"), name_confidence=0.5, doubtful=True)

    def differs(now: Instance, then: Instance) -> str | None:
        return compare_masks([make_frame(now)], [make_frame(then)]).first

    assert differs(named, named) is None
    assert mentions(differs(replace(named, confidence=0.8), named) or "", "confidence", "0.9")
    assert mentions(differs(replace(named, name_confidence=0.6), named) or "", "name_confidence", "0.5")
    assert "doubtful True" in (differs(replace(named, doubtful=False), named) or "")


def test_a_comparison_tells_of_another_mask_of_the_robot() -> None:
    def differs(now: Mask | None, then: Mask | None) -> str | None:
        frame = make_frame(make_instance(1, "mug"))
        return compare_masks([replace(frame, robot_mask=now)], [replace(frame, robot_mask=then)]).first

    full = make_instance(1, "mug").mask.full()
    robot = Mask.from_full(full)
    same = Mask.from_full(full.copy())
    assert differs(robot, same) is None
    assert mentions(
        differs(robot, robot.without(np.cumsum(full).reshape(full.shape) == 1)) or "", "robot_mask", "1"
    )
    assert mentions(differs(robot, None) or "", "robot_mask", "None")
