"""SAM 3's own detector against transformers' whole model, a phrase or an exemplar at a time."""

import json
import shutil
from itertools import product
from math import ceil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import CLIPTokenizer, Sam3Model, Sam3VideoConfig, Sam3VideoModel
from transformers.models.sam3 import modeling_sam3
from transformers.models.sam3.modeling_sam3 import Sam3GeometryEncoderOutput

from sam3_node.detection import detectors
from sam3_node.detection.detectors import (
    MAX_BOXES,
    Exemplar,
    PromptSet,
    View,
    add_exemplar,
    prepare_prompts,
)
from sam3_node.detection.loading import load_detector
from sam3_node.detection.sam3_concept import (
    PHRASE_BATCH,
    Sam3ConceptDetector,
    load_sam3_concept,
    pool_boxes,
)
from sam3_node.errors import ModelError, RequestError
from sam3_node.models import load_tracker
from sam3_node.models.pixels import box_iou, normalise_frame
from sam3_node.types import Detection
from tests.detection.test_clip_text import copied
from tests.support.refuses import refuses
from tests.support.tiny import sam3_config, tiny_model
from tests.support.tiny_clip import LETTERS, TOKENS
from tests.support.tiny_detectors import (
    HIDDEN,
    picture,
    sam3_detector_config,
    write_tiny_grounding_dino,
    write_tiny_sam3,
)

NAMES = ["red mug", "a bottle", "spoon"]
BOXES = [[10.0, 20.0, 60.0, 70.0], [80.0, 5.0, 118.0, 44.5], [3.0, 4.0, 9.0, 8.0]]
LABELS = [1, 0, 1]
HALF = torch.full((1, 3, 1, 1), 0.5)


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
    model = Sam3Model.from_pretrained(folder)
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    pixels = normalise_frame(image, (112, 112), HALF, HALF, torch.float32)
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
    model = Sam3Model.from_pretrained(folder)
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    return Sam3ConceptDetector(model, tokenizer, name="tiny", **({"iou": 1.0, "limit": 1000} | options))


def same(found: list[Detection], wanted: list[Detection], px: float = 1e-2) -> None:
    assert [d.label for d in found] == [d.label for d in wanted]
    np.testing.assert_allclose([d.score for d in found], [d.score for d in wanted], atol=1e-5)
    np.testing.assert_allclose([d.box for d in found], [d.box for d in wanted], atol=px)


@pytest.mark.verifies("network", "SAM 3: objects by name", "own package", "transformers", "public weights")
@pytest.mark.parametrize("names", [NAMES, [f"{a} mug" for a in LETTERS[: 2 * PHRASE_BATCH + 1]]])
def test_boxes_and_scores_are_those_of_the_whole_model(folder: Path, names: list[str]) -> None:
    image = picture()
    detector = everything(folder)
    found = detector.detect(image, detector.prepare(names), 0.1)
    assert len(found) > 3 * len(names)
    same(found, reference(folder, image, names, 0.1))


def test_the_threshold_parts_what_is_found(folder: Path) -> None:
    image = picture()
    detector = everything(folder)
    query = detector.prepare(NAMES)
    every = detector.detect(image, query, 0.0)
    middle = every[len(every) // 2].score
    assert detector.detect(image, query, middle) == [d for d in every if d.score > middle]
    assert everything(folder, limit=3).detect(image, query, 0.0) == every[:3]


def test_of_one_phrases_overlapping_boxes_the_best_stays(folder: Path) -> None:
    image = picture()
    every = everything(folder)
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
    tracker = sam3_config(hidden=HIDDEN).to_dict()
    detector = sam3_detector_config().to_dict()
    config = Sam3VideoConfig(tracker_config=tracker, detector_config=detector)
    torch.manual_seed(1)
    model = Sam3VideoModel(config).eval()
    model.detector_model.load_state_dict(Sam3Model.from_pretrained(folder).state_dict())
    model.save_pretrained(target)
    return target


def test_the_detector_of_a_composite_checkpoint_loads(folder: Path, composite: Path) -> None:
    mine = load_sam3_concept(composite)
    plain = load_sam3_concept(folder)
    found = mine.detect(picture(), mine.prepare(NAMES), 0.1)
    assert found
    same(found, plain.detect(picture(), plain.prepare(NAMES), 0.1))


def test_one_trunk_serves_tracker_and_detector(composite: Path) -> None:
    alone = load_sam3_concept(composite)
    tracker = load_tracker(composite)
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


def test_a_phrase_of_too_many_tokens_is_refused(mine: Sam3ConceptDetector) -> None:
    assert mine.prepare(["mug", "a" * (TOKENS - 2)]).text.shape[:2] == (2, TOKENS)
    with refuses(RequestError, field=(str(TOKENS), str(TOKENS + 1))):
        mine.prepare(["mug", "a" * (TOKENS - 1)])


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


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights whose logits are as large as trained ones."""
    folder = tmp_path_factory.mktemp("sharp")
    write_tiny_sam3(folder, gain=4.0)
    return folder


def roi_align(features: Tensor, boxes: tuple[Tensor, ...], size: int) -> Tensor:
    """torchvision's operator with its defaults, a sample at a time; transformers calls it."""
    _, channels, height, width = features.shape
    pooled = torch.zeros(len(boxes[0]), channels, size, size)
    for place, (x0, y0, x1, y1) in zip(pooled, boxes[0].tolist(), strict=True):
        across = max(x1 - x0, 1)
        down = max(y1 - y0, 1)
        columns = ceil(across / size)
        rows = ceil(down / size)
        for row, column, i, j in product(range(size), range(size), range(rows), range(columns)):
            y = y0 + down * (row + (i + 0.5) / rows) / size
            x = x0 + across * (column + (j + 0.5) / columns) / size
            if y <= height and x <= width:
                y = min(y, height - 1)
                x = min(x, width - 1)
                top = min(int(y), height - 2)
                left = min(int(x), width - 2)
                shares = torch.outer(
                    torch.tensor([top + 1 - y, y - top]), torch.tensor([left + 1 - x, x - left])
                )
                corners = features[0, :, top : top + 2, left : left + 2] * shares
                place[:, row, column] += corners.sum((1, 2)) / (rows * columns)
    return pooled


@pytest.mark.parametrize("box", [[1, 1, 5, 4], [0, 0, 8, 6], [7.9, 5.9, 8, 6], [2, 2, 2.1, 5.5]])
def test_pooling_is_that_of_the_operator(box: list[float]) -> None:
    features = torch.randn(1, 5, 6, 8, generator=torch.Generator().manual_seed(1))
    boxes = torch.tensor([box])
    torch.testing.assert_close(pool_boxes(features, boxes, 7), roi_align(features, (boxes,), 7))


@pytest.mark.verifies(
    "network", "SAM 3: exemplars, positive and negative", "own package", "transformers", "public weights"
)
@pytest.mark.parametrize("text", ["", "red mug"])
@pytest.mark.parametrize("seeds", [[3], [4], [3, 4]], ids=["its own image", "another image", "both"])
def test_exemplars_give_the_logits_and_boxes_of_the_whole_model(
    sharp: Path, monkeypatch: pytest.MonkeyPatch, seeds: list[int], text: str
) -> None:
    """As published on its own image; encoded on other images, as transformers' modules give it in that order."""
    operators = SimpleNamespace(ops=SimpleNamespace(roi_align=roi_align))
    monkeypatch.setattr(modeling_sam3, "torchvision", operators, raising=False)
    model = Sam3Model.from_pretrained(sharp)
    tokenizer = CLIPTokenizer.from_pretrained(sharp)
    given = tokenizer([text or "visual"], padding="max_length", max_length=TOKENS, return_tensors="pt")
    corners = torch.tensor([BOXES]) / torch.tensor([120, 90, 120, 90])
    sizes = corners[..., 2:] - corners[..., :2]
    given |= {"input_boxes": torch.cat([corners[..., :2] + sizes / 2, sizes], dim=-1)}
    given |= {"input_boxes_labels": torch.tensor([LABELS])}
    detector = load_sam3_concept(sharp)
    logits = []
    encoded = []
    network = detector._network
    images = {str(seed): picture(seed=seed) for seed in seeds}
    views = {
        name: View(BOXES, LABELS, detector.encode_exemplar(each, BOXES, LABELS))
        for name, each in images.items()
    }
    query = detector.prepare(["spoon", "these"], {"these": Exemplar(text, views)})
    model.geometry_encoder.register_forward_hook(lambda *call: encoded.append(call[2]))
    network.scoring.register_forward_hook(lambda *call: logits.append(call[2][-1, -1, :, 0]))
    with torch.inference_mode():
        pixels = [normalise_frame(each, (112, 112), HALF, HALF, torch.float32) for each in images.values()]
        expected, *_ = [model(pixel_values=each, **given) for each in pixels]
        if seeds != [3]:
            joined = (torch.cat([output[part] for output in encoded], dim=1) for part in range(2))
            output = Sam3GeometryEncoderOutput(*joined)
            model.geometry_encoder.forward = lambda **_: output
            own = normalise_frame(picture(), (112, 112), HALF, HALF, torch.float32)
            expected = model(pixel_values=own, **given)
        boxes, _ = network(*detector._encode(picture()), query.text, query.mask)
        plain, _ = network(*detector._encode(picture()), *detector.prepare([text or "visual"])[1:])
    assert expected.pred_logits.abs().max() > 1.5
    assert (boxes[1] - plain[0]).abs().max() > 0.05, "the exemplar changes nothing"
    torch.testing.assert_close(logits[0], expected.pred_logits[0], atol=1e-3, rtol=0)
    torch.testing.assert_close(boxes[1], expected.pred_boxes[0].clamp(0, 1), atol=1e-3, rtol=0)


def show(detector: Sam3ConceptDetector, prompts: PromptSet, name: str, **changes) -> PromptSet:
    given = {"place": "cam0 1", "boxes": BOXES[:1], "labels": [1], "text": "", "score": 0.3} | changes
    return add_exemplar(detector, prompts, name, picture(), **given)


def test_an_exemplar_stays_with_its_name_and_grows(mine: Sam3ConceptDetector) -> None:
    prompts = show(mine, prepare_prompts(mine, ["mug"], 0.5, {"mug": 0.4}), "mug", labels=[0])
    for box, label in zip(BOXES, LABELS, strict=True):
        prompts = show(mine, prompts, "washer", boxes=[box], labels=[label])
    assert [prompts.exemplars[name].text for name in ("mug", "washer")] == ["mug", ""]
    assert prompts.thresholds == {"mug": 0.4, "washer": 0.3}
    kept = prepare_prompts(mine, ["spoon", "Washer"], 0.5, exemplars=prompts.exemplars)
    together = show(mine, PromptSet(), "washer", boxes=BOXES, labels=LABELS)
    assert torch.equal(kept.query.text[1], together.query.text[0])
    assert show(mine, prompts, "Washer", place="photo").query.text.shape[1] == TOKENS + 4 + 2


def test_the_boxes_of_all_exemplars_are_limited(
    mine: Sam3ConceptDetector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detectors, "MAX_ALL_BOXES", 2 * len(BOXES))
    prompts = show(mine, PromptSet(), "washer", boxes=BOXES, labels=LABELS)
    prompts = show(mine, prompts, "bolt", boxes=BOXES, labels=LABELS)
    monkeypatch.setattr(mine, "encode_exemplar", lambda *args: pytest.fail("encoded"))
    with refuses(RequestError, field=("boxes", str(2 * len(BOXES) + 1))):
        show(mine, prompts, "nut", boxes=BOXES[:1], labels=LABELS[:1])


def test_exemplars_that_cannot_be_used_are_refused(mine: Sam3ConceptDetector, tmp_path: Path) -> None:
    for field, changes in (
        ("labels", {"labels": [0]}),
        (("boxes", "0"), {"boxes": []}),
        (("boxes", str(MAX_BOXES + 1)), {"boxes": BOXES[:1] * (MAX_BOXES + 1)}),
        (str(TOKENS), {"text": "a" * TOKENS}),
    ):
        with refuses(RequestError, field=field):
            show(mine, PromptSet(), "washer", **changes)
    write_tiny_grounding_dino(tmp_path)
    load = load_detector
    for other in (load("yolo-world"), load("grounding-dino", tmp_path), None):
        with refuses(RequestError, field=("sam3-concept", other.name if other else "none")):
            show(other, PromptSet(), "washer")
