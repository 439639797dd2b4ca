"""Scores of a detector against known values, and the contact sheet."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.detection.detectors import NANO, VOCABULARY, load_detector
from sam3_node.detection.vocabulary import Vocabulary
from sam3_node.errors import OutputError
from sam3_node.types import Detection
from tools.scenes.clips import Clip, write_clip
from tools.train_detector.check import POOLED, DetectionScorer, LabelledFrame, check, detect, read_truths
from tools.train_detector.sheet import WIDTH, draw_sheet
from tools.train_detector.words import Phrase

pytest.importorskip("pycocotools")

HERE, THERE = (10.0, 10.0, 60.0, 60.0), (100.0, 100.0, 180.0, 180.0)
RED_MUG, BLUE_CAN = Phrase("mug", ("red",)), Phrase("can", ("blue",))


def figures(detections: list[tuple[str, tuple[float, float, float, float], float]]) -> dict[str, float]:
    scorer = DetectionScorer()
    scorer.add([(POOLED, HERE), (POOLED, THERE)], detections)
    return scorer.figures()


def test_all_found_and_nothing_else_is_perfect() -> None:
    perfect = figures([(POOLED, HERE, 0.9), (POOLED, THERE, 0.7)])
    assert perfect == pytest.approx({"AP": 1, "AP50": 1, "recall": 1, "F1": 1, "score": 0.7}, abs=1e-6)


def test_half_found_is_half_of_the_recall() -> None:
    half = figures([(POOLED, HERE, 0.9)])
    assert half["recall"] == pytest.approx(0.5)
    assert half["AP50"] == pytest.approx(0.5, abs=0.01)
    assert half["F1"] == pytest.approx(2 / 3, abs=0.01)


def test_a_false_box_of_a_high_score_costs_precision() -> None:
    false = (POOLED, (200.0, 10.0, 240.0, 50.0), 0.95)
    assert figures([false, (POOLED, HERE, 0.9), (POOLED, THERE, 0.7)])["AP50"] < 0.7


def test_no_detection_scores_zero() -> None:
    assert not any(figures([]).values())


def test_categories_are_apart() -> None:
    scorer = DetectionScorer(("mug", "can"))
    scorer.add([("mug", HERE), ("spoon", THERE)], [("can", HERE, 0.9)])
    assert scorer.figures()["AP"] == 0
    assert scorer.figures(by_category=False)["AP50"] == pytest.approx(1, abs=1e-6)


def test_recombined_names_keep_the_true_ones() -> None:
    truth = LabelledFrame(np.zeros((8, 8, 3), np.uint8), [RED_MUG], [HERE], [RED_MUG, BLUE_CAN])
    mixed = truth.mixed()
    assert mixed[:2] == [RED_MUG, BLUE_CAN]
    assert {str(phrase) for phrase in mixed[2:]} == {"red can", "blue mug"}


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    """A clip of two frames with a red square that is named a mug."""
    image, labels = np.full((240, 320, 3), 200, np.uint8), np.zeros((240, 320), np.uint8)
    image[60:140, 100:180], labels[60:140, 100:180] = (20, 20, 200), 1
    objects = [{"id": 1, "kind": "mug", "color": "red"}]
    write_clip(tmp_path / "test", "a", Clip("a", [image] * 2, [labels] * 2, meta={"objects": objects}))
    return tmp_path / "test"


def test_labelled_frames_have_the_boxes_of_visible_objects(scenes: Path) -> None:
    (truth,) = read_truths(scenes, 2)
    assert (truth.names, truth.boxes, truth.clip) == ([RED_MUG], [(100.0, 60.0, 180.0, 140.0)], [RED_MUG])


def test_the_bundled_weights_are_checked_from_the_folder(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sheet = tmp_path / "sheet.png"
    check(NANO, scenes, 1, 0, sheet)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 frames, 2 objects"
    assert [line.split("  ")[0] for line in lines[2:6]] == [
        "kinds",
        "any kind",
        "names in the clip, and recombined",
        "object",
    ]
    assert cv2.imread(str(sheet)).shape[1] >= 2 * WIDTH


def test_no_phrases_find_nothing() -> None:
    detector = load_detector("yolo-world", NANO)
    assert detect(detector, np.zeros((64, 64, 3), np.uint8), [], 0.1) == []
    assert "mug" in Vocabulary.load(NANO / VOCABULARY)


def test_a_sheet_shows_boxes_and_names_a_path_that_fails(tmp_path: Path) -> None:
    image = np.zeros((240, 320, 3), np.uint8)
    draw_sheet(tmp_path / "new" / "a.png", [(image, [Detection("red mug", 0.8, HERE)])])
    assert cv2.imread(str(tmp_path / "new" / "a.png")).max() == 255
    with pytest.raises(OutputError, match="cannot write"):
        draw_sheet(tmp_path, [(image, [])])
