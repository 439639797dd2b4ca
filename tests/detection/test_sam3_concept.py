"""SAM 3's own detector against transformers' whole model, a phrase at a time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import CLIPTokenizer, Sam3Model, Sam3VideoConfig, Sam3VideoModel

from sam3_node.detection.sam3_concept import PHRASE_BATCH, Sam3ConceptDetector, load_sam3_concept
from sam3_node.errors import ModelError, RequestError
from sam3_node.models import load_tracker
from sam3_node.models.pixels import box_iou, normalise_frame
from sam3_node.types import Detection
from tests.support.refuses import refuses
from tests.support.tiny import sam3_config, tiny_model
from tests.support.tiny_clip import LETTERS, TOKENS
from tests.support.tiny_detectors import HIDDEN, picture, sam3_detector_config, write_tiny_sam3

NAMES = ["red mug", "a bottle", "spoon"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sam3") / "tiny-sam3"
    write_tiny_sam3(folder)
    return folder


@pytest.fixture(scope="module")
def mine(folder: Path) -> Sam3ConceptDetector:
    return load_sam3_concept(folder)


def reference(folder: Path, image: np.ndarray, names: list[str], threshold: float) -> list[Detection]:
    """Boxes and scores as the model's documentation makes them of its outputs, each phrase on its own."""
    model, tokenizer = Sam3Model.from_pretrained(folder), CLIPTokenizer.from_pretrained(folder)
    half = torch.full((1, 3, 1, 1), 0.5)
    pixels = normalise_frame(image, (112, 112), half, half, torch.float32)
    height, width = image.shape[:2]
    found = []
    for name in names:
        text = tokenizer([name], padding="max_length", max_length=TOKENS, return_tensors="pt")
        with torch.inference_mode():
            out = model(pixel_values=pixels, **text)
        scores = out.pred_logits.sigmoid() * out.presence_logits.sigmoid()
        boxes = out.pred_boxes.clamp(0, 1) * torch.tensor([width, height, width, height])
        for score, box in zip(scores[0].tolist(), boxes[0].tolist(), strict=True):
            if score > threshold and box[0] < box[2] and box[1] < box[3]:
                found.append(Detection(name, score, tuple(box)))
    return sorted(found, key=lambda d: -d.score)


def everything(folder: Path, **options: float) -> Sam3ConceptDetector:
    """Return a detector that keeps overlapping boxes."""
    model, tokenizer = Sam3Model.from_pretrained(folder), CLIPTokenizer.from_pretrained(folder)
    return Sam3ConceptDetector(model, tokenizer, name="tiny", **({"iou": 1.0, "limit": 1000} | options))


def same(found: list[Detection], wanted: list[Detection]) -> None:
    assert [d.label for d in found] == [d.label for d in wanted]
    np.testing.assert_allclose([d.score for d in found], [d.score for d in wanted], atol=1e-5)
    np.testing.assert_allclose([d.box for d in found], [d.box for d in wanted], atol=1e-2)


@pytest.mark.verifies("network", "SAM 3: objects by name", "own package", "transformers", "public weights")
@pytest.mark.parametrize("names", [NAMES, [f"{a} mug" for a in LETTERS[: 2 * PHRASE_BATCH + 1]]])
def test_boxes_and_scores_are_those_of_the_whole_model(folder: Path, names: list[str]) -> None:
    image, detector = picture(), everything(folder)
    found = detector.detect(image, detector.prepare(names), 0.1)
    assert len(found) > 3 * len(names)
    same(found, reference(folder, image, names, 0.1))


def test_the_threshold_parts_what_is_found(folder: Path) -> None:
    image, detector = picture(), everything(folder)
    query = detector.prepare(NAMES)
    every = detector.detect(image, query, 0.0)
    middle = every[len(every) // 2].score
    assert detector.detect(image, query, middle) == [d for d in every if d.score > middle]
    assert everything(folder, limit=3).detect(image, query, 0.0) == every[:3]


def test_of_one_phrases_overlapping_boxes_the_best_stays(folder: Path) -> None:
    image, every = picture(), everything(folder)
    query = every.prepare(NAMES)
    left = everything(folder, iou=0.3).detect(image, query, 0.0)
    for name in NAMES:
        both = (every.detect(image, query, 0.0), left)
        all_boxes, boxes = (torch.tensor([d.box for d in found if d.label == name]) for found in both)
        assert 0 < len(boxes) < len(all_boxes)
        # the frame's edge cuts some boxes
        assert (box_iou(boxes, boxes) - torch.eye(len(boxes))).max() <= 0.4
        assert boxes[0].tolist() == all_boxes[0].tolist()


def test_other_phrases_do_not_change_what_one_finds(mine: Sam3ConceptDetector) -> None:
    alone = mine.detect(picture(), mine.prepare(["spoon"]), 0.1)
    among = mine.detect(picture(), mine.prepare([*NAMES, "x", "y", "z"]), 0.1)
    same([d for d in among if d.label == "spoon"], alone)


@pytest.fixture(scope="module")
def composite(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """facebook/sam3's layout: detector and tracker in one."""
    target = tmp_path_factory.mktemp("composite")
    for file in folder.glob("tokenizer*"):
        shutil.copy(file, target)
    tracker, detector = sam3_config(hidden=HIDDEN).to_dict(), sam3_detector_config().to_dict()
    config = Sam3VideoConfig(tracker_config=tracker, detector_config=detector)
    torch.manual_seed(1)
    model = Sam3VideoModel(config).eval()
    model.detector_model.load_state_dict(Sam3Model.from_pretrained(folder).state_dict())
    model.save_pretrained(target)
    return target


def test_the_detector_of_a_composite_checkpoint_loads(folder: Path, composite: Path) -> None:
    mine, plain = load_sam3_concept(composite), load_sam3_concept(folder)
    found = mine.detect(picture(), mine.prepare(NAMES), 0.1)
    assert found
    same(found, plain.detect(picture(), plain.prepare(NAMES), 0.1))


def test_one_trunk_serves_tracker_and_detector(composite: Path) -> None:
    alone, tracker = load_sam3_concept(composite), load_tracker(composite)
    assert tracker.encode(tracker.preprocess(picture())).trunk is None
    shared = load_sam3_concept(composite, tracker=tracker)
    features = tracker.encode(tracker.preprocess(picture()))
    assert features.trunk is not None
    found = shared.detect(picture(), shared.prepare(NAMES), 0.1, features.trunk)
    same(found, alone.detect(picture(), alone.prepare(NAMES), 0.1))
    assert shared.share_trunk_with(tracker), "again is no harm"


def test_the_trunk_of_another_tracker_is_not_shared(composite: Path) -> None:
    for other in (tiny_model(), load_tracker("nano"), load_tracker(composite, image_size=168)):
        mine = load_sam3_concept(composite, tracker=other)
        assert not mine.share_trunk_with(other)
        assert other.encode(other.preprocess(picture())).trunk is None
        assert mine.detect(picture(), mine.prepare(NAMES), 0.1)


@pytest.mark.parametrize("size", [(1, 1), (1, 480), (480, 1), (37, 641), (112, 112)])
def test_a_frame_of_any_size_will_do(mine: Sam3ConceptDetector, size: tuple[int, int]) -> None:
    height, width = size
    found = mine.detect(picture(*size), mine.prepare(NAMES), 0.0)
    assert found
    for x0, y0, x1, y1 in (d.box for d in found):
        assert 0 <= x0 < x1 <= width
        assert 0 <= y0 < y1 <= height


def test_a_phrase_of_too_many_tokens_is_refused(mine: Sam3ConceptDetector) -> None:
    assert mine.prepare(["mug", "a" * (TOKENS - 2)]).text.shape[:2] == (2, TOKENS)
    with refuses(RequestError, field=(str(TOKENS), str(TOKENS + 1))):
        mine.prepare(["mug", "a" * (TOKENS - 1)])


def copied(folder: Path, target: Path, leave_out: str = "") -> Path:
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns(leave_out))
    return target


def test_a_folder_without_its_parts_says_which(folder: Path, tmp_path: Path) -> None:
    with refuses(ModelError, field="folder"):
        load_sam3_concept(tmp_path / "nowhere")
    with refuses(ModelError, field=("tokenizer.json", "vocab.json", "merges.txt")):
        load_sam3_concept(copied(folder, tmp_path / "mute", leave_out="tokenizer*"))
    for file in ("model.safetensors", "config.json"):
        with refuses(ModelError, field=str(tmp_path)):
            load_sam3_concept(copied(folder, tmp_path / f"without {file}", leave_out=file))


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_damaged_files_are_clear_errors(folder: Path, tmp_path: Path, file: str) -> None:
    broken = copied(folder, tmp_path / "broken")
    (broken / file).write_bytes((broken / file).read_bytes()[:1000])
    with refuses(ModelError, field=str(broken)):
        load_sam3_concept(broken)


def test_a_preprocessor_that_is_no_json_is_told(folder: Path, tmp_path: Path) -> None:
    broken = copied(folder, tmp_path / "broken")
    (broken / "preprocessor_config.json").write_text("{")
    with refuses(ModelError, field="JSON"):
        load_sam3_concept(broken)


def test_weights_of_something_else_are_refused(folder: Path, tmp_path: Path) -> None:
    other = copied(folder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))
    with refuses(ModelError, field=("sam3", "sam3_video")):
        load_sam3_concept(other)
    model = Sam3Model.from_pretrained(folder)
    state = {k: v for k, v in model.state_dict().items() if "query_embed" not in k}
    model.save_pretrained(other, state_dict=state)
    with refuses(ModelError, field=("1", "Sam3Model", "detr_decoder.query_embed")):
        load_sam3_concept(other)


def test_a_tokenizer_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    other = copied(folder, tmp_path / "other")
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["mugs"])
    tokenizer.save_pretrained(other)
    with refuses(ModelError, field=("56", "57", "tokens")):
        load_sam3_concept(other)
