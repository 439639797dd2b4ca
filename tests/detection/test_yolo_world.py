"""YOLO-World as a detector: names in, boxes on the frame out."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from sam3_node.detection.detectors import raise_model_error
from sam3_node.detection.vocabulary import Vocabulary, read_source
from sam3_node.detection.yolo_world import YoloWorldDetector
from sam3_node.errors import ModelError, UnknownPhraseError, VocabularyError
from sam3_node.models.pixels import box_iou, letterbox
from sam3_node.models.yolo.convert import convert_checkpoint
from sam3_node.types import Detection, Mask
from tests.detection.test_sam3_concept import same
from tests.support.paths import SHARED
from tests.support.refuses import refuses
from tests.support.tiny_clip import vocabulary
from tests.support.tiny_detectors import picture
from tests.support.tiny_yolo import tiny_yolo

NAMES = ("mug", "red cup", "bottle", "wooden spoon")

PUBLIC = SHARED / "weights/yolo-world/yolov8s-worldv2.pt"


def known(dimension: int = 12) -> Vocabulary:
    return vocabulary(*NAMES, dimension=dimension)


def detector(**options: object) -> YoloWorldDetector:
    return YoloWorldDetector(tiny_yolo(), known(), name="tiny", **({"image_size": 96} | options))


def by_hand(image: np.ndarray, names: list[str], threshold: float, iou: float) -> list[Detection]:
    """One box at a time: the best goes in, what overlaps it and has its name goes out."""
    pixels, frame = letterbox(image, 96, resize="bilinear", stride=32)
    with torch.inference_mode():
        boxes, scores = tiny_yolo()(pixels, torch.from_numpy(known().encode(names)))
    best, classes = scores[0].max(dim=1)
    waiting = [i for i in best.argsort(descending=True).tolist() if best[i] > threshold]
    found = []
    while waiting:
        first = waiting.pop(0)
        box = tuple(frame.to_frame(boxes[0, first]).tolist())
        found.append(Detection(names[classes[first]], float(best[first]), box))
        overlaps = box_iou(boxes[0, first][None], boxes[0])[0]
        waiting = [i for i in waiting if overlaps[i] <= iou or classes[i] != classes[first]]
    return [d for d in found if d.box[0] < d.box[2] and d.box[1] < d.box[3]]


@pytest.mark.parametrize("size", [(90, 120), (200, 30)])
def test_boxes_are_those_of_greedy_suppression_on_the_frame(size: tuple[int, int]) -> None:
    image = picture(*size)
    names = ["bottle", "mug", "red cup"]
    mine = detector(iou=0.4, limit=1000)
    found = mine.detect(image, mine.prepare(names), 0.5)
    assert len(found) > 3
    assert {d.label for d in found} <= set(names)
    same(found, by_hand(image, names, 0.5, 0.4), px=1e-3)


def test_the_best_come_first_and_there_is_a_limit() -> None:
    mine = detector()
    query = mine.prepare(NAMES)
    every = mine.detect(picture(), query, 0.1)
    assert [d.score for d in every] == sorted((d.score for d in every), reverse=True)
    assert detector(limit=4).detect(picture(), query, 0.1) == every[:4]
    middle = every[len(every) // 2].score
    assert mine.detect(picture(), query, middle) == [d for d in every if d.score > middle]
    assert mine.detect(picture(), query, 1.0) == []


def test_a_query_stays_what_it_is_when_others_are_made() -> None:
    mine = detector()
    first = mine.prepare(["mug"])
    before = mine.detect(picture(), first, 0.3)
    second = mine.prepare(["Wooden  Spoon", "bottle"])
    assert first.phrases == ("mug",)
    assert mine.detect(picture(), first, 0.3) == before
    assert {d.label for d in mine.detect(picture(), second, 0.3)} <= {"Wooden  Spoon", "bottle"}


@pytest.mark.parametrize("size", [(1, 1), (1, 480), (480, 1), (37, 641), (2000, 3), (96, 96)])
def test_a_frame_of_any_size_will_do(size: tuple[int, int]) -> None:
    mine = detector(image_size=(64, 96))
    height, width = size
    for d in mine.detect(picture(*size), mine.prepare(NAMES), 0.05):
        x0, y0, x1, y1 = d.box
        assert 0 <= x0 < x1 <= width
        assert 0 <= y0 < y1 <= height


def test_a_frame_may_be_a_read_only_view() -> None:
    mine = detector()
    query = mine.prepare(NAMES)
    wide = picture(90, 240)
    view = wide[:, ::-2]
    view.flags.writeable = False
    assert mine.detect(view, query, 0.2) == mine.detect(np.ascontiguousarray(view), query, 0.2)


def test_an_unknown_phrase_is_told_with_the_nearest() -> None:
    with refuses(UnknownPhraseError, field="red mugs"):
        detector().prepare(["mug", "red mugs"])


def test_vectors_of_another_model_are_refused() -> None:
    with refuses(VocabularyError, field=("12", "6", "openai/clip")):
        YoloWorldDetector(tiny_yolo(), known(6), name="tiny", image_size=96)


@pytest.mark.parametrize("size", [0, -32, 100, (64, 90)])
def test_an_input_that_the_network_cannot_have_is_refused(size: int | tuple[int, int]) -> None:
    with refuses(ModelError, field=("32", "multiples")):
        detector(image_size=size)


def test_a_network_that_gives_no_numbers_finds_nothing() -> None:
    model = tiny_yolo()
    with torch.no_grad():
        model.backbone.stem.conv.weight.fill_(torch.nan)
    mine = YoloWorldDetector(model, known(), name="tiny", image_size=96)
    assert mine.detect(picture(), mine.prepare(NAMES), 0.0) == []


def test_a_failure_of_torch_is_told() -> None:
    with refuses(ModelError, field="RuntimeError"), raise_model_error("tiny"):
        torch.zeros(2, 3) @ torch.zeros(2, 3)


@pytest.mark.verifies(
    "network",
    "YOLO-World",
    "real data",
    "the public checkpoint on frames of DAVIS",
    "the public implementation beside it, at commit 18aa48e3",
)
@pytest.mark.skipif(not PUBLIC.exists(), reason="the public checkpoint is not here")
def test_public_weights_find_what_is_there(tmp_path: Path) -> None:
    names = read_source(SHARED / "weights/vocabulary/clip_vit_b32_104.json", "openai/clip-vit-base-patch32")
    mine = YoloWorldDetector(convert_checkpoint(PUBLIC, tmp_path).eval(), names, name="s", image_size=640)
    query = mine.prepare(names.phrases)
    for sequence, name in (("dog", "dog"), ("car-shadow", "car")):
        frame = cv2.imread(str(SHARED / f"data/davis/JPEGImages/{sequence}/00000.jpg"))
        truth = cv2.imread(str(SHARED / f"data/davis/Annotations/{sequence}/00000.png"), cv2.IMREAD_GRAYSCALE)
        best = next(d for d in mine.detect(frame, query, 0.4) if d.label == name)
        wanted = torch.tensor([Mask.from_full(truth > 0).box], dtype=torch.float32)
        assert box_iou(torch.tensor([best.box]), wanted) > 0.8
