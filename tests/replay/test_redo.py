"""Marks of a person carried out in finished results: what changes, what stays, and what a kill leaves."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sam3_node.bags import RecordingReader, RecordingWriter
from sam3_node.bags.marks import MarkFile, name_marks, read_marks
from sam3_node.bags.native.reader import RecordedMasks
from sam3_node.cli.main import main
from sam3_node.errors import BagError, ReplayError, RequestError
from sam3_node.replay.job import Job, ObjectOnFrame, read_prompts
from sam3_node.replay.redone import read_layers
from sam3_node.replay.run import PerceptionCache, redo_job, run_job
from sam3_node.replay.shards import ShardLimits
from sam3_node.replay.store import FolderStore
from sam3_node.schema.marks import Mark, list_edits
from sam3_node.settings import Settings
from sam3_node.types import MaskFrame
from sam3_node.wire import pack_masks
from tests.replay.test_bidirectional import Killed, Killer
from tests.support.live import chosen, masks_of, moving_frame
from tests.support.refuses import refuses

FRAMES = 20
SMALL = ShardLimits(frames=2)
WRONG = 8
"""Frame on which a person corrects the first object."""
RIGHT = 14
"""Frame that a person has checked."""
BOX = (2.0, 2.0, 20.0, 16.0)
CORRECTED = Mark(camera="left", seq=WRONG, id=1, label="cup", box=BOX)
CHECKED = Mark(camera="left", seq=RIGHT, state="checked")


@pytest.fixture(scope="module")
def bag(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bag") / "pick.mcap"
    with RecordingWriter(path) as writer:
        for seq in range(FRAMES):
            frame = moving_frame(seq)
            writer.write_frame(frame, frame.capture_ns)
    return path


@pytest.fixture(scope="module")
def base(
    bag: Path, settings: Settings, load: PerceptionCache, tmp_path_factory: pytest.TempPathFactory
) -> Job:
    """The finished replay of two objects, as a mask file and as PNGs."""
    objects = (
        ObjectOnFrame(points=((30.0, 20.0),), label="cup"),
        ObjectOnFrame(box=(16.0, 12.0, 48.0, 36.0), label="can"),
    )
    out = tmp_path_factory.mktemp("base") / "out"
    found = Job((str(bag),), str(out), objects=objects, outputs=("mcap", "png"), settings=chosen(settings))
    run_job(found, load)
    return found


@pytest.fixture
def job(base: Job, tmp_path: Path) -> Job:
    """The same, for one test."""
    return copy_job(base, tmp_path / "out")


def copy_job(job: Job, out: Path) -> Job:
    shutil.copytree(job.out, out)
    return replace(job, out=str(out))


def redo(job: Job, marks: list[Mark], load: PerceptionCache, **options: Any) -> str:
    return redo_job(job.bags[0], job.out, marks, load, limits=SMALL, **options).line


def bodies(job: Job) -> list[bytes]:
    """Return the messages of masks as the output has them."""
    reader = RecordingReader([Path(job.out) / "masks.mcap"])
    return [action.body for action in reader.actions() if isinstance(action, RecordedMasks)]


def pngs(job: Job) -> list[bytes]:
    return [path.read_bytes() for path in sorted((Path(job.out) / "png").rglob("*.png"))]


def by_id(masks: MaskFrame) -> dict[int, Any]:
    return {one.id: one for one in masks.instances}


def alone(masks: MaskFrame, object_id: int) -> bytes:
    """Return the message of one object."""
    return bytes(pack_masks(replace(masks, instances=(by_id(masks)[object_id],)))[1])


def test_a_redo_ends_before_the_checked_frame_and_changes_nothing_else(
    job: Job, load: PerceptionCache
) -> None:
    before = bodies(job), pngs(job), masks_of(job)
    redo(job, [CORRECTED, CHECKED], load)
    after = bodies(job), pngs(job), masks_of(job)
    inside = range(WRONG, RIGHT)
    for old, new in zip(before[:2], after[:2], strict=True):
        assert len(new) == FRAMES
        assert [one for index, one in enumerate(new) if index not in inside] == [
            one for index, one in enumerate(old) if index not in inside
        ]
    assert all(before[0][index] != after[0][index] for index in inside)
    for old, new in zip(before[2], after[2], strict=True):
        assert alone(old, 2) == alone(new, 2)
        assert by_id(old)[1].age == by_id(new)[1].age
        assert by_id(new)[1].label == "cup"
    assert not by_id(after[2][WRONG])[1].doubtful
    assert not np.array_equal(by_id(before[2][WRONG])[1].mask.full(), by_id(after[2][WRONG])[1].mask.full())
    # the same marks change nothing again, and results stay those of the job
    assert "nothing" in redo(job, [CORRECTED, CHECKED], load)
    run_job(job, load)
    assert bodies(job) == after[0]


def test_a_killed_redo_leaves_the_old_results_and_goes_on(
    base: Job, job: Job, load: PerceptionCache, tmp_path: Path
) -> None:
    before = bodies(job)
    with pytest.raises(Killed):
        redo(job, [CORRECTED], load, progress=Killer("redoing", 6))
    assert bodies(job) == before
    run_job(job, load)
    assert bodies(job) == before
    # also killed between the masks and the files that are made of them
    with pytest.raises(Killed):
        redo(job, [CORRECTED], load, progress=Killer("writing mcap", 3))
    run_job(job, load)
    after = bodies(job)
    whole = copy_job(base, tmp_path / "whole")
    redo(whole, [CORRECTED], load)
    assert after == bodies(whole)
    assert after != before


def test_each_redo_builds_on_the_one_before_and_can_be_taken_back(job: Job, load: PerceptionCache) -> None:
    first = bodies(job)
    redo(job, [CORRECTED], load)
    second = bodies(job)
    later = Mark(camera="left", seq=RIGHT, id=1, points=((40.0, 20.0), (4.0, 4.0)), labels=(1, 0))
    redo(job, [CORRECTED, later], load)
    third = bodies(job)
    assert second[:RIGHT] == third[:RIGHT]
    assert second[RIGHT:] != third[RIGHT:]
    redo(job, [CORRECTED], load)
    assert bodies(job) == second
    redo(job, [Mark(camera="left", seq=WRONG, id=1, state="rejected"), CORRECTED], load)
    assert bodies(job) == first
    # a few stretches may be tracked with other settings than the recording
    redo(job, [CORRECTED], load, settings={"tracker": {"bank_size": 2, "max_objects": 4}})
    (layer,) = read_layers(FolderStore(Path(job.out)))
    assert layer.settings == {"tracker": {"bank_size": 2}}
    assert bodies(job) not in (first, second)


def test_objects_are_added_and_removed_from_a_frame_on(job: Job, load: PerceptionCache) -> None:
    marks = [
        Mark(camera="left", seq=5, label="lid", box=BOX),
        Mark(camera="left", seq=9, id=2, removed=True),
        Mark(camera="left", seq=12, id=2, box=(16.0, 12.0, 48.0, 36.0)),
    ]
    summary = redo_job(job.bags[0], job.out, marks, load).summary
    assert summary.objects == {"left": 3}
    ids = [list(by_id(masks)) for masks in masks_of(job)]
    assert ids == [[1, 2]] * 5 + [[1, 2, 3]] * 4 + [[1, 3]] * 3 + [[1, 2, 3]] * 8
    assert {by_id(masks)[3].label for masks in masks_of(job)[5:]} == {"lid"}


def test_a_hidden_object_is_looked_for_again(job: Job, load: PerceptionCache) -> None:
    hidden = Mark(camera="left", seq=WRONG, id=1, hidden=True)
    redo(job, [hidden, CHECKED], load)
    (before, here, after) = masks_of(job)[WRONG - 1 : WRONG + 2]
    assert by_id(here)[1].state == "occluded"
    assert [by_id(masks)[1].area > 0 for masks in (before, here, after)] == [True, False, True]
    with refuses(ReplayError, field="earlier"):
        redo(job, [Mark(camera="left", seq=0, id=1, hidden=True)], load)


def test_the_command_reads_the_marks_beside_the_recording(
    job: Job, bag: Path, load: PerceptionCache, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["replay", str(bag), "-o", job.out, "--redo"]
    assert main(command) == 2
    assert "console" in capsys.readouterr().err
    assert main([*command, "--prompt", "mug"]) == 2
    assert "--names" in capsys.readouterr().err
    before = bodies(job)
    try:
        MarkFile(name_marks(bag)).add(CORRECTED)
        assert main(command) == 0
    finally:
        name_marks(bag).unlink()
    assert "1 marks" in capsys.readouterr().out
    assert bodies(job) != before


def test_marks_of_other_results_are_refused(job: Job, load: PerceptionCache, tmp_path: Path) -> None:
    before = bodies(job)
    for mark, told in (
        (replace_mark(CORRECTED, seq=99), "99"),
        (replace_mark(CORRECTED, label="bowl"), ("cup", "bowl")),
        (Mark(camera="left", seq=3, id=7, removed=True), "7"),
    ):
        with refuses(ReplayError, field=told):
            redo(job, [mark], load)
    with refuses(ReplayError, field="refused"):
        redo(job, [Mark(camera="left", seq=3, points=((900.0, 3.0),))], load)
    assert bodies(job) == before
    with refuses(ReplayError, field="finished"):
        redo(replace(job, out=str(tmp_path / "none")), [CORRECTED], load)


def replace_mark(mark: Mark, **changes: Any) -> Mark:
    fields = {name: getattr(mark, name) for name in mark.__struct_fields__}
    return Mark(**fields | changes)


def test_marks_are_kept_in_the_form_that_a_replay_reads(tmp_path: Path) -> None:
    path = tmp_path / "pick.mcap.marks.json"
    marks = MarkFile(path)
    for mark in (CORRECTED, CHECKED, Mark(camera="left", seq=9, id=2, removed=True)):
        marks.add(mark)
    assert read_marks(path) == marks.marks
    assert read_prompts(path) == (ObjectOnFrame(camera="left", seq=WRONG, box=BOX, label="cup"),)
    # another person goes on in another process, and undo takes back the last mark of all
    MarkFile(path).add(Mark(camera="left", seq=10, state="rejected"))
    assert marks.undo() == Mark(camera="left", seq=10, state="rejected")
    assert len(read_marks(path)) == 3
    with refuses(RequestError, field="mark"):
        marks.add(Mark(camera="left", seq=10))
    # objects alone, as people write them by hand, are marks that add objects
    path.write_text(json.dumps({"objects": [{"camera": "left", "frame": 3, "box": BOX}]}))
    assert read_marks(path) == (Mark(camera="left", seq=3, box=BOX),)
    path.write_text('{"objects": [], "marks": [{"camera": "left", "frame": 3, "object": 4}]}')
    with refuses(BagError, field=("object", "4")):
        read_marks(path)


def test_a_rejected_frame_leaves_its_marks_out() -> None:
    other = Mark(camera="left", seq=WRONG, id=2, box=BOX)
    rejected = Mark(camera="left", seq=WRONG, id=1, state="rejected")
    assert list_edits([CORRECTED, other, rejected]) == [other]
    assert not list_edits([CORRECTED, other, Mark(camera="left", seq=WRONG, state="rejected")])
    assert list_edits([CORRECTED, rejected, Mark(camera="left", seq=WRONG, id=1, state="open")]) == [
        CORRECTED
    ]
