"""Parts of recordings through the command: by time, by number of frames, and what is left after a stop."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from sam3_node.cli.main import main
from sam3_node.errors import ReplayError
from sam3_node.perception.perception import Perception
from sam3_node.replay.completion import StoppedError
from sam3_node.replay.job import Job, ObjectOnFrame
from sam3_node.replay.run import PerceptionCache, read_finished_summary, run_job
from sam3_node.replay.schedule import NOTHING_ASKED
from sam3_node.replay.shards import ShardLimits, Shards
from sam3_node.replay.store import FolderStore
from sam3_node.types import MaskFrame
from tests.support.live import record_edits, stop_after, tiny_settings
from tests.support.recordings import write_recording
from tests.support.refuses import mentions, refuses

SMALL = ShardLimits(frames=5)
OUTPUTS = ("mcap-images", "coco", "png", "overlay", "images")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bag")
    return record_edits(folder / "live.mcap", Perception.load(tiny_settings(folder)), 40)


@pytest.fixture
def job(live: Path, tmp_path: Path) -> Job:
    """Return a job on the frames of a live run, with one object marked on the first frame."""
    settings = {"model": tiny_settings(live.parent).model.model_dump(mode="json", exclude_unset=True)}
    objects = (ObjectOnFrame(box=(4, 4, 20, 20)),)
    return Job((str(live),), str(tmp_path / "out"), objects=objects, settings=settings, outputs=())


def masks_of(job: Job) -> list[MaskFrame]:
    return list(Shards(FolderStore(Path(job.out))).masks())


def test_a_part_is_replayed_as_if_the_rest_did_not_exist(job: Job, load: PerceptionCache) -> None:
    run_job(job, load)
    whole = masks_of(job)
    part = replace(job, out=f"{job.out}/part", begin_ns=0, end_ns=10**15, stop=7)
    assert run_job(part, load).frames == 7
    assert [masks.key for masks in masks_of(part)] == [masks.key for masks in whole[:7]]
    with refuses(ReplayError, field=("job.stop", "7", "8")):
        run_job(replace(part, stop=8), load)


def test_recorded_edits_before_the_part_are_named(job: Job, load: PerceptionCache) -> None:
    summary = run_job(replace(job, objects=(), start=30), load)
    assert any(note.startswith("skipped") and mentions(note, "edits") for note in summary.notes)


def test_a_replay_without_objects_says_so(job: Job, load: PerceptionCache, tmp_path: Path) -> None:
    bag = write_recording(tmp_path / "r.mcap")
    bare = replace(job, bags=(str(bag),), objects=())
    assert NOTHING_ASKED in run_job(bare, load).notes
    with_objects = replace(bare, objects=job.objects, out=f"{job.out}-more")
    assert NOTHING_ASKED not in run_job(with_objects, load).notes
    recorded = replace(job, objects=(), out=f"{job.out}-recorded")
    assert NOTHING_ASKED not in run_job(recorded, load).notes


def test_a_stop_writes_the_outputs_of_what_is_done(job: Job, load: PerceptionCache) -> None:
    job = replace(job, outputs=OUTPUTS)
    with refuses(StoppedError, field=("13", "frames")):
        run_job(job, load, *stop_after(13), limits=SMALL)
    out = Path(job.out)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["complete"], summary["frames"], summary["outputs"]) == (False, 13, list(OUTPUTS))
    rows = json.loads((out / "masks.json").read_text())["images"]
    assert len(rows) == len(masks_of(job)) > 0
    assert all((out / row["file_name"]).is_file() for row in rows)
    assert not read_finished_summary(job)
    whole = replace(job, out=f"{job.out}-whole")
    run_job(whole, load)
    assert run_job(job, load).resumed_from == 13
    assert read_finished_summary(job)
    for name in ("masks.mcap", "masks.json"):
        assert (out / name).read_bytes() == (Path(whole.out) / name).read_bytes()


def replay(job: Job, bag: Path, folder: Path, *options: str) -> int:
    """Run the command with the model of a job and a box, and return its exit code."""
    model: dict[str, Any] = dict(job.settings["model"])
    chosen = [text for name, value in model.items() for text in (f"--model.{name}", str(value))]
    return main(["replay", str(bag), "-o", str(folder / "out"), "--box", "4,4,20,20", *chosen, *options])


def test_the_command_takes_a_part_and_keeps_images(
    job: Job, live: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--from", "0", "--to", "1e6", "--frames", "6", "--outputs", "coco,mcap", "--with-images"]
    assert replay(job, live, tmp_path, *options) == 0
    rows = json.loads((tmp_path / "out/masks.json").read_text())["images"]
    assert 0 < len(rows) <= 6
    assert all((tmp_path / "out" / row["file_name"]).is_file() for row in rows)
    assert mentions(capsys.readouterr().out, "6 frames")


def test_folders_of_several_recordings_stay_in_the_output() -> None:
    job = Job(("..", "a/..", ".", "x/a b.mcap", "x/a$b.mcap"), "out")
    names = [single.out for single in job.split_by_recording()]
    assert names == ["out/bag", "out/bag-2", "out/bag-3", "out/a_b", "out/a_b-2"]


def test_a_part_without_frames_is_no_success(
    job: Job, live: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(job, live, tmp_path, "--from", "1e6") == 1
    assert mentions(capsys.readouterr().out, "no frame")


def test_images_that_cannot_be_decoded_are_no_success(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
    data = bytearray(cv2.imencode(".png", noise)[1])
    data[data.index(b"IDAT") + 20] ^= 0xFF
    (tmp_path / "desk").mkdir()
    for index in range(2):
        (tmp_path / "desk" / f"{index}.png").write_bytes(data)
    assert replay(job, tmp_path / "desk", tmp_path) == 1
    assert mentions(capsys.readouterr().out, "2 failed")
