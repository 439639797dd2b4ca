"""The demonstration itself, with its real processes, and the parts of it that judge."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import psutil
import pytest

from sam3_node.cameras.scene import Scene
from sam3_node.demo import SOURCE, deepest_point, run_demo, tight_box
from sam3_node.demo_results import UNTRAINED, Results
from sam3_node.errors import ProcessError
from sam3_node.settings import load_settings
from sam3_node.types import Instance, Mask, MaskFrame

pytest.importorskip("torch")
pytest.importorskip("mcap")

from sam3_node.bags import read_masks


def results_of(shift: int) -> Results:
    """Two frames whose masks are the truth, moved to the right."""
    scene = Scene.from_uri(SOURCE)
    frames = []
    for seq in range(2):
        _, ids = scene.render(seq)
        instances = tuple(
            Instance(
                truth + 10, "", 1.0, "tracked", 1, 0, Mask.from_full(np.roll(ids == truth, shift, axis=1))
            )
            for truth in (1, 2)
        )
        times = (seq * 10**9, seq * 10**9 + 10**7, seq * 10**9 + 3 * 10**7)
        size = (scene.width, scene.height)
        frames.append(MaskFrame("cam0", seq, times[0], *size, *times[1:], instances=instances))
    truth_of, labels = {11: 1, 12: 2}, {11: "mug", 12: "ring"}
    return Results(scene, frames, truth_of, labels, [], {"model": "nano", "trained": True})


@pytest.mark.parametrize(("shift", "low", "high"), [(0, 1.0, 1.0), (300, 0.0, 0.05)])
def test_masks_are_judged_against_the_scene(shift: int, low: float, high: float) -> None:
    results = results_of(shift)
    for masks in results.frames:
        results.judge(masks, results.scene.render(masks.seq)[1])
    figures = results.summary()
    assert low <= figures["mean_iou"] <= high
    assert (figures["frames"], figures["ids"], figures["frames_per_s"]) == (2, [11, 12], 1.0)
    assert figures["age_p50_ms"] == pytest.approx(30.0)


def test_the_table_says_when_the_weights_are_untrained() -> None:
    results = results_of(0)
    assert UNTRAINED not in results.table()
    assert UNTRAINED in replace(results, status={"model": "nano", "trained": False}).table()


def test_prompts_are_inside_the_object() -> None:
    _, ids = Scene.from_uri(SOURCE).render(0)
    for truth in (1, 2, 4, 5):
        inside = ids == truth
        x, y = deepest_point(inside)
        assert inside[int(y), int(x)]
        assert Mask.from_full(inside).box == tight_box(inside)


def test_it_plays_through_real_processes_and_leaves_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_demo(tmp_path, 3.0, load_settings(None, {"model.threads": "1"}))
    figures = json.loads((tmp_path / "summary.json").read_text())
    printed = capsys.readouterr().out
    for key in ("frames", "frames_per_s", "age_p50_ms", "age_p99_ms", "ids", "mean_iou"):
        assert key in figures
    assert figures["frames"] > 0
    assert figures["ids"]
    bag = list(read_masks(tmp_path / "masks.mcap"))
    assert len(bag) == figures["frames"]
    assert all(later.seq > earlier.seq for earlier, later in itertools.pairwise(bag))
    assert cv2.VideoCapture(str(tmp_path / "overlay.mp4")).read()[0]
    assert cv2.imread(str(tmp_path / "contact.png")) is not None
    assert "camera | camera cam0 publishing on tcp://127.0.0.1:" in printed
    assert "mean IoU" in printed
    assert (UNTRAINED in printed) == (not figures["trained"])
    assert not psutil.Process().children()


def test_a_node_that_cannot_start_is_told_with_what_it_said(tmp_path: Path) -> None:
    settings = load_settings(None, {"model.name": str(tmp_path / "no-such-weights")})
    with pytest.raises(
        ProcessError, match=r"node ended with exit code 2; its last lines:[\s\S]*no-such-weights"
    ):
        run_demo(tmp_path / "out", 1.0, settings)
    assert not psutil.Process().children()
