"""What is told before the first frame of a replay: unknown names, no object, bad files, and the plan of a dry run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from sam3_node.bags.formats.lerobot import POSE
from sam3_node.bags.native.reader import TABLETOP
from sam3_node.calibration import load_calibration
from sam3_node.cli.main import main
from sam3_node.errors import ReplayError
from sam3_node.perception.perception import Perception
from sam3_node.replay.completion import read_complete_summary
from sam3_node.replay.job import Job
from sam3_node.replay.planning import (
    NothingToFollowError,
    check_jobs,
    find_unknown_names,
    plan_jobs,
    plan_recording,
)
from sam3_node.replay.run import run_job
from sam3_node.replay.store import Summary, open_store
from sam3_node.settings import DetectorSettings, Settings
from tests.support.live import chosen
from tests.support.paths import ROOT
from tests.support.refuses import mentions, refuses

FRAMES = 4


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return write_pictures(tmp_path / "desk")


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "bad.mcap"
    path.write_bytes(b"no recording")
    return path


def write_pictures(folder: Path) -> Path:
    """Write a folder of a few pictures, a recording of one camera."""
    folder.mkdir()
    for index in range(FRAMES):
        noise = np.random.default_rng(index).integers(0, 255, (48, 64, 3), np.uint8)
        cv2.imwrite(str(folder / f"{index}.png"), noise)
    return folder


def replay(settings: Settings, bags: list[Path], out: Path, *options: str) -> int:
    """Run the command with tiny weights, and return its exit code."""
    fields: dict[str, Any] = chosen(settings)["model"]
    words = [text for name, value in fields.items() for text in (f"--model.{name}", str(value))]
    return main(["replay", *map(str, bags), "-o", str(out), *words, *options])


@pytest.mark.parametrize("options", [(), ("--prompt", "gizmozz", "--prompt", "mug")])
def test_a_job_that_would_follow_nothing_is_refused_and_leaves_the_folder(
    pictures: Path,
    settings: Settings,
    options: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    assert replay(settings, [pictures], out, *options) == 2
    assert "--allow-unfound" in capsys.readouterr().err
    # several recordings are refused before the first one is begun
    assert replay(settings, [pictures, write_pictures(tmp_path / "shelf")], tmp_path / "both", *options) == 2
    assert not (tmp_path / "both").exists()
    assert replay(settings, [pictures], out, "--box", "4,4,20,20") == 0


def test_names_that_are_unknown_are_skipped_if_the_user_allows_it(
    pictures: Path, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--prompt", "gizmozz", "--prompt", "mug", "--allow-unfound")
    assert replay(settings, [pictures], tmp_path / "out", *options) == 0
    summary = read_complete_summary(open_store(str(tmp_path / "out")))
    assert summary is not None
    assert summary.refused == 0
    assert list(summary.unfound) == ["mug"]
    assert any(mentions(note, "skipped", "gizmozz") for note in summary.notes)
    # nothing to skip to: the request is refused as before, and nothing is followed
    assert replay(settings, [pictures], tmp_path / "none", "--allow-unfound") == 0
    assert mentions(capsys.readouterr().out, "no object will be followed")


def test_a_bad_file_stops_no_other_one(
    pictures: Path, bad: Path, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert replay(settings, [bad, pictures], out, "--box", "4,4,20,20") == 1
    assert str(bad) in capsys.readouterr().err
    assert read_complete_summary(open_store(str(out / "desk"))) is not None
    # alone, it is an error as before
    assert replay(settings, [bad], tmp_path / "alone", "--box", "4,4,20,20") == 2


def test_what_is_wrong_with_all_recordings_ends_the_command(pictures: Path, tmp_path: Path) -> None:
    other = write_pictures(tmp_path / "shelf")
    absent = str(tmp_path / "absent")
    options = ["--box", "4,4,20,20", "--model.name", absent]
    assert main(["replay", str(pictures), str(other), "-o", str(tmp_path / "out"), *options]) == 2


def test_a_part_behind_the_end_is_told_with_the_length(
    pictures: Path, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(settings, [pictures], tmp_path / "out", "--box", "4,4,20,20", "--from", "900") == 1
    assert mentions(capsys.readouterr().out, "--from", "900.0 s", "after the first")
    # the folder is free for the corrected command
    assert replay(settings, [pictures], tmp_path / "out", "--box", "4,4,20,20", "--from", "0") == 0


def test_a_dry_run_tells_frames_bad_files_and_unknown_names_and_writes_nothing(
    pictures: Path, bad: Path, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    options = ("--dry-run", "--price-per-hour", "2")
    assert replay(settings, [pictures], out, "--prompt", "mug", *options) == 0
    assert mentions(capsys.readouterr().out, f"{FRAMES} frames", "/desk/image", "price", "free", "hours")
    assert replay(settings, [pictures, bad], out, "--prompt", "mug", *options) == 1
    assert mentions(capsys.readouterr().out, "bad.mcap: bad", f"{FRAMES} frames", "1 of them bad")
    assert replay(settings, [pictures], out, "--prompt", "gizmozz", *options) == 2
    assert mentions(capsys.readouterr().out, "refused", "gizmozz")
    assert not out.exists()


def test_a_plan_counts_what_the_replay_steps(bag: Path, settings: Settings, tmp_path: Path) -> None:
    job = Job((str(bag),), str(tmp_path / "out"), settings=chosen(settings), requires_objects=True)
    plan = plan_recording(job)
    assert plan.error is plan.refused is None
    assert plan_jobs([job]).frames_per_s is None
    perception = Perception.load(settings)
    summary = run_job(job, lambda _: perception)
    assert plan.frames == summary.frames
    # a finished recording shows the rate of this machine
    plan_of_all = plan_jobs([job], price_per_hour=3600.0)
    assert plan_of_all.frames_per_s == pytest.approx(summary.frames / summary.seconds)
    assert f"price {summary.seconds:.2f}" in plan_of_all.lines()[-1]
    fourth = replace(job, stride=4)
    run_job(fourth, lambda _: perception, again=True)
    plan_of_fourth = plan_jobs([fourth], price_per_hour=3600.0)
    assert plan_of_fourth.frames_per_s
    assert f"price {plan.frames / 4 / plan_of_fourth.frames_per_s:.2f}" in plan_of_fourth.lines()[-1]
    assert "each frame of 4" in plan_of_fourth.lines()[-1]


def test_a_finished_job_is_not_refused(pictures: Path, settings: Settings, load: Any, tmp_path: Path) -> None:
    job = Job((str(pictures),), str(tmp_path / "out"), settings=chosen(settings))
    run_job(job, load)
    strict = Job((str(pictures),), str(tmp_path / "out"), settings=chosen(settings), requires_objects=True)
    check_jobs([strict])
    with refuses(NothingToFollowError, field="--prompt"):
        check_jobs([strict], again=True)
    assert run_job(strict, load).frames == FRAMES
    with refuses(NothingToFollowError, field="--prompt"):
        run_job(strict, load, again=True)


def test_a_damaged_summary_is_left_to_its_replay(pictures: Path, settings: Settings, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "summary.json").write_text("{")
    job = Job((str(pictures),), str(out), everything=True, settings=chosen(settings))
    check_jobs([job])
    assert plan_jobs([job]).frames_per_s is None
    for damage in ("{", "[" * 100_000, "[]", "null"):
        (out / "summary.json").write_text(damage)
        with refuses(ReplayError, field="summary.json"):
            run_job(job)


def test_a_summary_of_other_values_is_no_summary() -> None:
    whole = {
        "bag": "a",
        "mode": "every",
        "strategy": "forward",
        "model": "nano",
        "device": "cpu",
        "cameras": {},
    }
    whole |= {"frames": 1, "failed": 0, "refused": 0, "objects": {}, "seconds": 1.0, "frames_per_s": 1.0}
    assert Summary.from_json(json.dumps(whole).encode()).frames == 1
    deep: object = []
    for _ in range(700):
        deep = [deep]
    for name in whole:
        for value in (None, [1], -1, 10**400, {"a": -1}, float("nan"), deep):
            with refuses(ReplayError, field=("summary.json", "--again")):
                Summary.from_json(json.dumps(whole | {name: value}).encode())


def test_a_plan_tells_what_poses_are_for_and_what_frames_lack(tmp_path: Path) -> None:
    dataset = Path(shutil.copytree(ROOT / "tests/data/lerobot/v2.1", tmp_path / "arm"))
    next(iter(sorted((dataset / "videos").rglob("*.mp4")))).write_bytes(b"no video")
    for path in (dataset / "data").rglob("*.parquet"):
        table = pyarrow.parquet.read_table(path)
        at = table.schema.get_field_index("observation.state")
        state = pyarrow.array([[0.0] * 6] * table.num_rows)
        pyarrow.parquet.write_table(table.set_column(at, "observation.state", state), path)
    info = json.loads((dataset / "meta/info.json").read_text())
    info["features"]["observation.state"] |= {"names": list(POSE), "shape": [6]}
    (dataset / "meta/info.json").write_text(json.dumps(info))
    job = Job((str(dataset),), str(tmp_path / "out"), everything=True, settings={"model": {"name": "nano"}})
    plan = plan_recording(job)
    assert mentions(str(plan.lost), "/front/image")
    assert mentions(plan.robot, "poses, not used")
    fixed = load_calibration(TABLETOP.with_suffix(".toml")).model_dump_json()
    assert mentions(plan_recording(replace(job, calibrations=(fixed,))).robot, "poses, used", "holds")


def test_only_a_detector_with_a_vocabulary_lacks_names(tmp_path: Path) -> None:
    unknown = find_unknown_names(["red mug", "gizmozz"], DetectorSettings())
    assert unknown is not None
    assert unknown.known == ("red mug",)
    assert find_unknown_names(["red mug"], DetectorSettings()) is None
    assert find_unknown_names(["gizmozz"], DetectorSettings(kind="grounding-dino", name="x/y")) is None
    assert find_unknown_names(["gizmozz"], DetectorSettings(text_encoder=tmp_path)) is None
    assert find_unknown_names(["mug"], DetectorSettings(kind="none")) is not None
    assert find_unknown_names([], DetectorSettings(kind="none")) is None
