"""Exemplars of SAM 3's detector against transformers' whole model, and what a prompt set makes of them."""

from __future__ import annotations

from itertools import product
from math import ceil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import CLIPTokenizer, Sam3Model
from transformers.models.sam3 import modeling_sam3
from transformers.models.sam3.modeling_sam3 import Sam3GeometryEncoderOutput

from sam3_node.detection.detectors import (
    Exemplar,
    PromptSet,
    View,
    add_exemplar,
    load_detector,
    prepare_prompts,
    require_exemplars,
    restore_prompts,
)
from sam3_node.detection.sam3_concept import Sam3ConceptDetector, load_sam3_concept, pool_boxes
from sam3_node.errors import RequestError
from sam3_node.models.pixels import normalise_frame
from sam3_node.perception.checkpoint import pack_state, unpack_state
from sam3_node.wire.operations import MAX_BOXES
from tests.support.refuses import refuses
from tests.support.tiny_clip import TOKENS
from tests.support.tiny_detectors import picture, write_tiny_grounding_dino, write_tiny_sam3

BOXES, LABELS = [[10.0, 20.0, 60.0, 70.0], [80.0, 5.0, 118.0, 44.5], [3.0, 4.0, 9.0, 8.0]], [1, 0, 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sam3") / "tiny-sam3"
    write_tiny_sam3(folder, gain=4.0)
    return folder


@pytest.fixture(scope="module")
def detector(folder: Path) -> Sam3ConceptDetector:
    return load_sam3_concept(folder)


def roi_align(features: Tensor, boxes: tuple[Tensor, ...], size: int) -> Tensor:
    """torchvision's operator with its defaults, a sample at a time; transformers calls it."""
    pooled = torch.zeros(len(boxes[0]), features.shape[1], size, size)
    for place, (x0, y0, x1, y1) in zip(pooled, boxes[0].tolist(), strict=True):
        width, height = max(x1 - x0, 1), max(y1 - y0, 1)
        across, down = ceil(width / size), ceil(height / size)
        for row, column, i, j in product(range(size), range(size), range(down), range(across)):
            y = y0 + height * (row + (i + 0.5) / down) / size
            x = x0 + width * (column + (j + 0.5) / across) / size
            place[:, row, column] += interpolate(features[0], y, x) / (across * down)
    return pooled


def interpolate(features: Tensor, y: float, x: float) -> Tensor:
    height, width = features.shape[1:]
    if y > height or x > width:
        return torch.zeros(len(features))
    y, x = min(y, height - 1), min(x, width - 1)
    top, left = int(y), int(x)
    rows, columns = ((top, 1 - y + top), (top + 1, y - top)), ((left, 1 - x + left), (left + 1, x - left))
    parts = [(r, c, p * q) for r, p in rows for c, q in columns if p * q > 0]
    return sum((features[:, r, c] * share for r, c, share in parts), torch.zeros(len(features)))


@pytest.mark.parametrize(
    "box", [[1, 1, 5, 4], [0, 0, 8, 6], [7.9, 5.9, 8, 6], [2, 2, 2.1, 5.5], [0.3, 3, 7, 3]]
)
def test_pooling_is_that_of_the_operator(box: list[float]) -> None:
    features, boxes = torch.randn(1, 5, 6, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([box])
    torch.testing.assert_close(pool_boxes(features, boxes, 7), roi_align(features, (boxes,), 7))


def run_reference(folder: Path, image: np.ndarray, shown: list[np.ndarray], text: str):
    """Run the whole model on an image, its prompts encoded on each of the images `shown` and joined."""
    model, tokenizer = Sam3Model.from_pretrained(folder), CLIPTokenizer.from_pretrained(folder)
    words = tokenizer([text], padding="max_length", max_length=TOKENS, return_tensors="pt")
    half, (height, width) = torch.full((1, 3, 1, 1), 0.5), image.shape[:2]
    corners = torch.tensor([BOXES]) / torch.tensor([width, height, width, height])
    sizes = corners[..., 2:] - corners[..., :2]
    boxes = torch.cat([corners[..., :2] + sizes / 2, sizes], dim=-1)
    marks = {"input_boxes": boxes, "input_boxes_labels": torch.tensor([LABELS])}

    def run(each: np.ndarray):
        return model(
            pixel_values=normalise_frame(each, (112, 112), half, half, torch.float32), **words, **marks
        )

    if len(shown) == 1 and shown[0] is image:
        return run(image)  # as published
    encoded: list[Sam3GeometryEncoderOutput] = []
    hook = model.geometry_encoder.register_forward_hook(lambda module, args, output: encoded.append(output))
    for each in shown:
        run(each)
    hook.remove()
    joined = (torch.cat([output[part] for output in encoded], dim=1) for part in range(2))
    output = Sam3GeometryEncoderOutput(*joined)
    model.geometry_encoder.forward = lambda **_: output
    return run(image)


@pytest.mark.verifies(
    "network", "SAM 3: exemplars, positive and negative", "own package", "transformers", "public weights"
)
@pytest.mark.parametrize("text", ["", "red mug"])
@pytest.mark.parametrize("seeds", [[3], [4], [3, 4]], ids=["its own image", "another image", "both"])
def test_logits_and_boxes_are_those_of_the_whole_model(
    folder: Path, detector: Sam3ConceptDetector, monkeypatch: pytest.MonkeyPatch, seeds: list[int], text: str
) -> None:
    operators = SimpleNamespace(ops=SimpleNamespace(roi_align=roi_align))
    monkeypatch.setattr(modeling_sam3, "torchvision", operators, raising=False)
    image = picture(seed=3)
    images = {str(seed): image if seed == 3 else picture(seed=seed) for seed in seeds}
    views = {
        name: View(BOXES, LABELS, detector.encode_exemplar(each, BOXES, LABELS))
        for name, each in images.items()
    }
    query = detector.prepare(["spoon", "these"], {"these": Exemplar(text, views)})
    logits: list[Tensor] = []
    network = detector._network
    with torch.inference_mode():
        hook = network.scoring.register_forward_hook(lambda *call: logits.append(call[2][-1, 1, :, 0]))
        boxes, _ = network(*detector._encode(image), query.text, query.mask)
        hook.remove()
        expected = run_reference(folder, image, list(images.values()), text or "visual")
        plain = network(*detector._encode(image), *detector.prepare(["visual"])[1:])
    assert expected.pred_logits.abs().max() > 1.5
    assert (boxes[1] - plain[0][0]).abs().max() > 0.05, "the exemplar changes nothing"
    torch.testing.assert_close(logits[0], expected.pred_logits[0], atol=1e-3, rtol=0)
    torch.testing.assert_close(boxes[1], expected.pred_boxes[0].clamp(0, 1), atol=1e-3, rtol=0)


def show(detector: Sam3ConceptDetector, prompts: PromptSet | None, name: str, **changes) -> PromptSet:
    given = {"place": "cam0 1", "boxes": BOXES[:1], "labels": [1], "text": "", "score": 0.3} | changes
    return add_exemplar(detector, prompts or PromptSet(None, {}), name, picture(), **given)


def test_boxes_of_one_image_are_encoded_together(detector: Sam3ConceptDetector) -> None:
    prompts = show(detector, None, "washer")
    for box, label in zip(BOXES[1:], LABELS[1:], strict=True):
        prompts = show(detector, prompts, "Washer", boxes=[box], labels=[label])
    once = show(detector, None, "washer", boxes=BOXES, labels=LABELS)
    assert torch.equal(prompts.query.text, once.query.text)
    both = show(detector, prompts, "washer", place="photo")
    assert both.query.text.shape[1] == TOKENS + 4 + 2


def test_a_name_keeps_its_exemplar_and_its_limits(detector: Sam3ConceptDetector) -> None:
    prompts = prepare_prompts(detector, ["mug"], 0.5, {"mug": 0.4})
    prompts = show(detector, prompts, "mug", labels=[0])
    assert (prompts.exemplars["mug"].text, prompts.thresholds) == ("mug", {"mug": 0.4})
    prompts = show(detector, prompts, "washer")
    assert (prompts.exemplars["washer"].text, prompts.thresholds["washer"]) == ("", 0.3)
    kept = prepare_prompts(detector, ["spoon", "Washer"], 0.5, exemplars=prompts.exemplars)
    assert list(kept.exemplars) == ["Washer"]
    restored = restore_prompts(detector, unpack_state(pack_state(prompts.state())))
    assert restored is not None
    assert torch.equal(restored.query.text, prompts.query.text)


def test_exemplars_that_say_nothing_or_too_much_are_refused(detector: Sam3ConceptDetector) -> None:
    with refuses(RequestError, field="labels"):
        show(detector, None, "washer", labels=[0])
    show(detector, None, "washer", labels=[0], text="a ring")
    with refuses(RequestError, field=("boxes", str(MAX_BOXES))):
        show(
            detector,
            show(detector, None, "washer"),
            "washer",
            boxes=BOXES[:1] * MAX_BOXES,
            labels=[1] * MAX_BOXES,
        )
    with refuses(RequestError, field=str(TOKENS)):
        show(detector, None, "washer", text="a" * TOKENS)


def test_detectors_that_find_names_only_refuse_by_name(tmp_path: Path) -> None:
    write_tiny_grounding_dino(tmp_path)
    for other in (load_detector("yolo-world"), load_detector("grounding-dino", tmp_path), None):
        with refuses(RequestError, field=("sam3-concept", other.name if other else "none")):
            require_exemplars(other)
