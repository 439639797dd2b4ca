"""Tests of the demonstration, with its real processes, and of its scores."""

import importlib.util
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import psutil
import pytest

from sam3_node.bags import LabelledClip, read_masks
from sam3_node.cameras.playback import TABLETOP
from sam3_node.cli.demo import BoxPrompter, DemoResults, make_environment, run_demo, write_results
from sam3_node.cli.machine_load import STAT, LoadMeter
from sam3_node.errors import ProcessError
from sam3_node.settings import ModelSettings, load_settings
from sam3_node.types import Instance, Mask, MaskFrame
from sam3_node.visualization import overlay
from tests.support.node_rig import Rig, masks_where
from tests.support.patience import PATIENCE_S
from tests.support.recordings import write_recording
from tests.support.refuses import mentions, refuses


def make_results(folder: Path, shift: int) -> DemoResults:
    """Return two messages with the true masks, moved down; the second is of the second pass over the recording."""
    recording = LabelledClip.load(write_recording(folder / "table.mcap", 4))
    frames = []
    for number, seq in enumerate((1, 6)):
        instances = tuple(
            Instance(truth + 10, "", 1.0, "tracked", 1, 0, Mask.from_full(np.roll(inside, shift, axis=0)))
            for truth, inside in recording.truth(seq).items()
        )
        times = (number * 10**9, number * 10**9 + 10**7, number * 10**9 + 3 * 10**7)
        frames.append(MaskFrame("cam0", seq, times[0], 64, 48, *times[1:], instances=instances))
    return DemoResults(recording, frames, {11: 1, 12: 2}, {1: 0, 2: 0}, [], {"model": "nano"})


@pytest.mark.parametrize(("shift", "expected"), [(0, 1.0), (5, 0.5), (15, 0.0)])
def test_masks_are_scored_against_the_recording(tmp_path: Path, shift: int, expected: float) -> None:
    results = make_results(tmp_path, shift)
    assert [results.score(masks) for masks in results.frames] == pytest.approx([expected, expected])
    figures = results.summary()
    assert figures["mean_iou"] == pytest.approx(expected)
    assert (figures["frames"], figures["ids"], figures["frames_per_s"]) == (2, [11, 12], 1.0)
    assert figures["age_p50_ms"] == pytest.approx(30.0)


def test_the_picture_is_the_frame_whose_worst_mask_is_the_best(tmp_path: Path) -> None:
    good = make_results(tmp_path, 0)
    bad = make_results(tmp_path, 5).frames
    good.frames = [bad[0], good.frames[1], bad[1]]
    write_results(tmp_path, good)
    picture = cv2.imread(str(tmp_path / "picture.jpg")).astype(int)
    drawn = [overlay(good.recording.image(masks.seq), masks) for masks in good.frames]
    assert np.argmin([np.abs(picture - image).mean() for image in drawn]) == 1


@pytest.mark.parametrize(
    ("share_of_rate", "others", "is_told"),
    [(0.5, 0.5, True), (0.5, 0.05, False), (0.5, None, False), (1.0, 0.5, False)],
)
def test_a_busy_machine_is_told_in_one_line_if_the_rate_was_not_kept(
    tmp_path: Path, share_of_rate: float, others: float | None, is_told: bool
) -> None:
    results = make_results(tmp_path, 0)
    first, second = results.frames
    period_ns = round(1e9 / (share_of_rate * results.recording.fps))
    results.frames[1] = replace(second, published_ns=first.published_ns + period_ns)
    results.others_share = others
    line = results.describe_load()
    assert (line is not None) == is_told
    if line is not None:
        assert mentions(line, "busy", f"{results.recording.fps:.0f} frames", "50 %")
        assert "\n" not in line


def test_the_time_of_other_programs_is_measured_without_the_own() -> None:
    if not STAT.exists():
        pytest.skip("needs /proc/stat of Linux")
    meter = LoadMeter()
    # a child counts as another program until it has ended and was waited for
    code = "import time\nwhile time.process_time() < 1: pass\nprint('done', flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "done\n"
        before = meter.measure_others()
        other.communicate("\n", timeout=PATIENCE_S)
    after = meter.measure_others()
    assert before is not None
    assert after is not None
    assert 0 <= after < before <= 1


def test_processes_get_the_settings_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capital letters too, as in the folder of somebody's weights."""
    model = ModelSettings(name="/data/Weights/Best", compile=True)
    for name, value in make_environment(model=model).items():
        monkeypatch.setenv(name, value)
    assert load_settings(None).model == model


def test_objects_are_prompted_when_they_are_in_view(tmp_path: Path) -> None:
    """The second object is hidden on frames 0, 3, 6, ...; both are added once, when in view."""
    path = write_recording(tmp_path / "table.mcap", 30)
    recording = LabelledClip.load(path)
    with Rig(tmp_path) as rig:
        rig.node()
        rig.start("camera", f"bag:{path}", CAMERA__LOOP="true")
        with rig.client() as client:
            prompter = BoxPrompter(recording, client)
            while not prompter.truth_ids:
                prompter.update(
                    masks_where(client, lambda masks: masks.seq % 3 == 0, "one without the second")
                )
            assert list(prompter.truth_ids.values()) == [1]
            while len(prompter.truth_ids) < 2:
                prompter.update(masks_where(client, lambda masks: True, "masks"))
            prompter.update(masks_where(client, lambda masks: True, "masks"))
            names = {object_id: recording.labels[truth] for object_id, truth in prompter.truth_ids.items()}
            assert {tracked.id: tracked.label for tracked in client.list_objects()} == names
        assert sorted(prompter.truth_ids.values()) == [1, 2]
        assert [text.split(", ")[1] for _, text in prompter.events] == ["object 1", "object 2"]


def test_it_runs_real_processes_and_writes_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(psutil.Process().children())
    run_demo(tmp_path, 1.5, load_settings(None, {"model.threads": "1"}))
    figures = json.loads((tmp_path / "summary.json").read_text())
    printed = capsys.readouterr().out
    for key in ("frames", "frames_per_s", "age_p50_ms", "age_p99_ms", "ids", "mean_iou"):
        assert key in figures
    assert figures["frames"] > 0
    assert {row["label"] for row in figures["objects"]} <= set(LabelledClip.load(TABLETOP).labels.values())
    assert 0 <= figures["mean_iou"] <= 1
    bag = list(read_masks(tmp_path / "masks.mcap"))
    assert len(bag) == figures["frames"]
    assert all(later.seq > earlier.seq for earlier, later in itertools.pairwise(bag))
    if importlib.util.find_spec("yourdfpy"):
        assert bag[-1].robot_mask is not None
    assert cv2.VideoCapture(str(tmp_path / "overlay.mp4")).read()[0]
    assert all(cv2.imread(str(tmp_path / name)) is not None for name in ("contact.png", "picture.jpg"))
    assert mentions(printed, "camera |", "cam0")
    assert "mean IoU" in printed
    assert set(psutil.Process().children()) <= before


def test_objects_not_found_by_name_are_added_by_a_box(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = run_demo(tmp_path, 5.0, load_settings(None, {"model.threads": "1", "detector.score": "0.98"}))
    printed = capsys.readouterr().out
    assert mentions(printed, "looking", "red mug")
    assert mentions(printed, "not found", "red mug")
    assert len(set(results.truth_ids.values())) >= 3, "those in view"
    assert {text.rsplit(", ")[-1] for _, text in results.events[2:]} == {"by a box"}


def test_a_node_that_cannot_start_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    settings = load_settings(None, {"model.name": str(tmp_path / "no-such-weights")})
    with refuses(ProcessError, field=("2", "last")):
        run_demo(tmp_path / "out", 1.0, settings)
    assert set(psutil.Process().children()) <= before
