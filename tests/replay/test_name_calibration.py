"""How sure names are is fitted to a user's own recordings, by names of things that these do not show."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from sam3_node.bags import read_masks
from sam3_node.bags.native.reader import TABLETOP, RecordingReader
from sam3_node.cli.main import main
from sam3_node.errors import ModelError, ReplayError, RequestError, SettingsError
from sam3_node.perception.perception import Perception
from sam3_node.replay.job import Job, settings_for
from sam3_node.replay.name_calibration import (
    MOST_ABSENT,
    NamedMask,
    choose_absent,
    choose_runs,
    fit_names,
)
from sam3_node.replay.run import compare_job, name_calibration_for, run_job
from sam3_node.replay.schedule import open_schedule
from sam3_node.settings import DetectorSettings, Settings
from sam3_node.tracking.names import BUNDLED, FEATURES, load_name_calibration
from tests.support.live import Live, masks_of, tiny_settings
from tests.support.refuses import mentions, refuses

THERE = ["red mug", "green bottle", "yellow box", "blue can", "orange ball"]
NOT_THERE = ["red ball", "orange box", "blue bottle"]


def make_masks(rng: np.random.Generator, name: str, level: float, tracks: int = 3) -> list[NamedMask]:
    """Return masks whose margins lie around a level; look and thing are those of a detector that gives none."""
    found = []
    for track in range(tracks):
        for _ in range(20):
            margins = rng.normal(level, 0.4, 3)
            features = [*margins.tolist(), 1.36, 0.71, float(rng.uniform(0.5, 1.0))]
            found.append(NamedMask(name, (0, "cam0", track), features))
    return found


def test_absent_names_are_unlike_and_the_nearest_come_first() -> None:
    found = choose_absent(THERE, lambda name: "banana" not in name)
    assert len(found) == len(set(found)) == MOST_ABSENT
    assert not {*found} & {*THERE}
    assert not any("banana" in name for name in found)
    colours = {name.split()[0] for name in THERE}
    kinds = {name.split()[1] for name in THERE}
    assert found[0].split()[0] in colours
    assert found[0].split()[1] in kinds
    # a thing that was named without a colour may have any
    assert not any("mug" in name for name in choose_absent(["mug", "red ball"], lambda _: True))


def test_all_names_are_asked_for_together_apart_and_some_alone() -> None:
    runs = choose_runs(["mug"], NOT_THERE)
    assert runs[:3] == [("mug",), tuple(NOT_THERE), ("mug", *NOT_THERE)]
    assert runs[3:] == [(name,) for name in NOT_THERE]
    assert choose_runs(["mug"], ["ball"]) == [("mug",), ("ball",), ("mug", "ball")]


def test_what_tells_right_from_wrong_is_found_and_judged_on_other_names() -> None:
    rng = np.random.default_rng(5)
    masks = [mask for name in THERE for mask in make_masks(rng, name, 2.0)]
    masks += [mask for name in NOT_THERE for mask in make_masks(rng, name, -1.0)]
    found, report = fit_names(masks, THERE, "other", 0.9)
    assert (report.present, report.absent) == (300, 180)
    assert (report.before.present, report.before.absent) == (1.0, 1.0)
    assert report.after.present > 0.9
    assert report.after.absent < 0.02
    assert found.suits("other")
    assert not found.suits("nano")
    # what does not vary tells nothing
    assert not {"look", "thing"} & found.weights.keys()
    assert (
        found.estimate([2.0, 2.0, 2.0, 1.36, 0.71, 1.0]) > 0.9 > 0.5 > found.estimate([-1.0] * len(FEATURES))
    )


def test_names_that_cannot_be_told_apart_are_not_sure() -> None:
    rng = np.random.default_rng(6)
    masks = [mask for name in [*THERE, *NOT_THERE] for mask in make_masks(rng, name, 1.0)]
    _, report = fit_names(masks, THERE, "other", 0.9)
    assert report.after.absent < 0.05


@pytest.mark.parametrize(("names", "reason"), [(THERE, "absent names"), (NOT_THERE, "that are there")])
def test_both_right_and_wrong_names_are_needed(names: list[str], reason: str) -> None:
    masks = [mask for name in names for mask in make_masks(np.random.default_rng(7), name, 1.0)]
    with refuses(RequestError, field=reason):
        fit_names(masks, THERE, "other", 0.9)


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ("", "calibrate names"),
        ("[]", "a list"),
        ('{"detectors": ["nano"], "bias": 0}', "weights"),
        ('{"detectors": [], "bias": 0, "weights": {}}', "detectors"),
        ('{"detectors": ["nano"], "bias": "1", "weights": {}}', "bias"),
        ('{"detectors": ["nano"], "bias": 0, "weights": {"luck": 1}}', "luck"),
        ('{"detectors": ["nano"], "bias": 0, "weights": {"score": -1}}', "weights"),
        ('{"detectors": ["nano"], "bias": 0, "weights": {"score": NaN}}', "NaN"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: str, field: str) -> None:
    path = tmp_path / "names.json"
    with refuses(ModelError, field=str(path)):
        load_name_calibration(path)
    path.write_text(content)
    with refuses(ModelError, field=field):
        load_name_calibration(path)


def test_without_a_file_the_bundled_detector_is_judged_as_ever() -> None:
    assert load_name_calibration(None) is BUNDLED


def test_a_recording_has_how_sure_names_are(tmp_path: Path) -> None:
    """Its replay needs no file, but one with another detector cannot use it."""
    path = tmp_path / "names.json"
    path.write_text('{"detectors": ["nano"], "bias": -30, "weights": {}}')
    settings = tiny_settings(tmp_path).model_copy(
        update={"detector": DetectorSettings(prompts=tuple(THERE), name_calibration=path)}
    )
    recording = tmp_path / "live.mcap"
    with Live(recording, Perception.load(settings)) as live:
        for frame in islice(RecordingReader([TABLETOP]).frames(), 3):
            live.step(frame)
        named = [item for masks in live.masks for item in masks.instances]
        assert named
        assert max(item.name_confidence for item in named) < 1e-6
    path.unlink()

    job = Job((str(recording),), str(tmp_path / "as-recorded"), mode="as-recorded")
    summary = run_job(job)
    assert not summary.notes
    assert compare_job(job).is_identical
    again = Job((str(recording),), str(tmp_path / "every"), settings={"model": {"dtype": "float32"}})
    run_job(again)
    found = [item.name_confidence for masks in masks_of(again) for item in masks.instances]
    assert found
    assert max(found) < 1e-6

    with open_schedule(again) as schedule:
        assert name_calibration_for(schedule, "other") is BUNDLED
        schedule.description = {"name_calibration": {"bias": 0}}
        with refuses(ReplayError, field="name_calibration"):
            name_calibration_for(schedule, "nano")
    # a job may also have none
    with open_schedule(replace(again, settings={"detector": {"name_calibration": None}})) as schedule:
        assert name_calibration_for(schedule, "nano") is BUNDLED
    # a recording of another program may have these numbers without their setting
    assert settings_for(again, {"name_calibration": {"bias": 0}}).detector.name_calibration is None


def replay(out: Path, settings: dict[str, object]) -> dict[str, list[bool]]:
    """Replay the bundled recording with all names. Return by name which masks are sure."""
    names = (*THERE, *NOT_THERE)
    run_job(Job((str(TABLETOP),), str(out), names=names, outputs=("mcap",), stop=30, settings=settings))
    found: dict[str, list[bool]] = {}
    for masks in read_masks(out / "masks.mcap"):
        for instance in masks.instances:
            if instance.area and instance.state == "tracked":
                found.setdefault(instance.label, []).append(not instance.doubtful)
    return found


def test_the_command_fits_and_a_node_doubts_what_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "names.json"
    fixed = ["--model.dtype", "float32", "--model.threads", "1", "--tracker.recall", "false"]
    command = ["calibrate", "names", str(TABLETOP), "-o", str(path), *fixed]
    assert main([*command, "--absent", "red ball"]) == 2
    assert mentions(capsys.readouterr().err, "detector.prompts")
    asked = ["--detector.prompts", ",".join(THERE)]
    assert main([*command, *asked, "--absent", "red mug"]) == 2
    assert mentions(capsys.readouterr().err, "--absent", "red mug")
    assert main([*command, *asked, "--absent", ",".join(NOT_THERE), "--every", "15"]) == 0
    told = capsys.readouterr().out
    assert mentions(told, *THERE, *NOT_THERE, "detector.name_calibration")
    content = json.loads(path.read_text())
    assert content["detectors"] == ["nano"]
    assert content["report"]["not_there"] == NOT_THERE
    assert content["report"]["after"]["absent"] <= content["report"]["before"]["absent"]

    settings = {"model": {"dtype": "float32", "threads": 1}, "detector": {"name_calibration": str(path)}}
    sure = replay(tmp_path / "out", settings)
    right = [each for name in THERE for each in sure.get(name, [])]
    wrong = [each for name in NOT_THERE for each in sure.get(name, [])]
    assert sum(right) > 0.6 * len(right) > 0
    assert sum(wrong) <= 0.05 * len(wrong)

    other = {"detector": {"name_calibration": path, "kind": "none"}}
    Perception.load(Settings(**other))  # a detector that is not there names nothing
    content["detectors"] = ["yolov8s"]
    path.write_text(json.dumps(content))
    with refuses(SettingsError, field="detector.name_calibration"):
        Perception.load(Settings(**settings))
