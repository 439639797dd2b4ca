"""Grounding DINO against transformers' model and processor."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertTokenizer, GroundingDinoForObjectDetection, GroundingDinoProcessor
from transformers.image_transforms import get_size_with_aspect_ratio
from transformers.models.grounding_dino.image_processing_pil_grounding_dino import (
    GroundingDinoImageProcessorPil,
)

from sam3_node.detection import grounding_dino
from sam3_node.detection.grounding_dino import (
    GroundingDinoDetector,
    TextQuery,
    input_size,
    load_grounding_dino,
)
from sam3_node.errors import RequestError, UnknownPhraseError
from sam3_node.models.pixels import box_iou, normalise_frame
from sam3_node.models.weight_files import IMAGENET
from tests.support.refuses import refuses
from tests.support.tiny_detectors import picture, write_tiny_grounding_dino

NAMES = ["red mug", "bottle", "spoons"]
SMALL = {"shortest": 64, "longest": 107}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dino") / "tiny-dino"
    write_tiny_grounding_dino(folder)
    return folder


def detector(folder: Path, **options: float) -> GroundingDinoDetector:
    """Return a detector that keeps overlapping boxes by default."""
    model = GroundingDinoForObjectDetection.from_pretrained(folder)
    tokenizer = BertTokenizer.from_pretrained(folder)
    given = SMALL | {"iou": 1.0, "limit": 1000} | options
    return GroundingDinoDetector(model, tokenizer, name="tiny", **given)


def processor(folder: Path) -> GroundingDinoProcessor:
    images = GroundingDinoImageProcessorPil(size={"shortest_edge": 64, "longest_edge": 107})
    return GroundingDinoProcessor(images, BertTokenizer.from_pretrained(folder))


def test_text_and_pixels_are_those_of_the_processor(folder: Path) -> None:
    mine = detector(folder)
    image = picture(90, 120)
    wanted = processor(folder)(images=image[..., ::-1].copy(), text=[NAMES], return_tensors="pt")
    assert torch.equal(mine.prepare(NAMES).tokens, wanted.input_ids)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in IMAGENET)
    size = input_size((90, 120), **SMALL)
    pixels = normalise_frame(image, size, mean, std, torch.float32)
    assert pixels.shape == wanted.pixel_values.shape
    assert (pixels - wanted.pixel_values).abs().max() < 0.05


@pytest.mark.verifies("network", "Grounding DINO", "own package", "transformers", "public weights")
@pytest.mark.parametrize("names", [NAMES, ["mug", "red mug", "a mug"]])
def test_boxes_scores_and_labels_are_those_of_the_processor(folder: Path, names: list[str]) -> None:
    """Compared in what words score: the processor lets full stops compete as well."""
    mine = detector(folder)
    image = picture(90, 120)
    query = mine.prepare(names)
    out = raw_without_marks(folder, image, query)
    found = mine.detect(image, query, 0.5)
    assert len(found) > 5
    assert len({d.label for d in found}) > 1
    for d in found:
        part = {"threshold": d.score - 1e-6, "text_threshold": d.score - 1e-6, "target_sizes": [(90, 120)]}
        wanted = processor(folder).post_process_grounded_object_detection(out, query.tokens, **part)[0]
        last = wanted["scores"].argmin()
        assert wanted["scores"][last].item() == pytest.approx(d.score, abs=1e-6)
        np.testing.assert_allclose(d.box, in_frame(wanted["boxes"][last]), atol=1e-3)
        assert wanted["text_labels"][last].removeprefix("##") in d.label


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("names", [["red mug"], ["red mug", "spoons", "bottle"]])
def test_with_a_text_score_the_processors_label_has_the_whole_phrase(
    folder: Path, names: list[str], share: float
) -> None:
    """Compared with the recipe that takes the boxes whose label has a name in it."""
    image = picture(90, 120)
    query = detector(folder).prepare(names)
    out = raw_without_marks(folder, image, query)
    # a score between those of the words, which are all near 0.5 in random weights
    words = out.logits[0, :, : len(query.owners)].sigmoid()[:, query.owners < len(names)]
    text_score = words.quantile(share).item()
    found = detector(folder, text_score=text_score).detect(image, query, 0.1)
    part = {"threshold": 0.1, "text_threshold": text_score, "target_sizes": [(90, 120)]}
    wanted = processor(folder).post_process_grounded_object_detection(out, query.tokens, **part)[0]
    labels = wanted["text_labels"]
    boxes = [
        in_frame(box)
        for box, label in zip(wanted["boxes"], labels, strict=True)
        if any(name in label for name in names)
    ]
    np.testing.assert_allclose(sorted(d.box for d in found), sorted(boxes), atol=1e-3)
    assert 0 < len(found) < len(detector(folder).detect(image, query, 0.1))


def raw_without_marks(folder: Path, image: np.ndarray, query: TextQuery) -> Any:
    """The same, where full stops do not compete."""
    out = raw(folder, image, query.tokens)
    marks = query.owners == len(query.phrases)
    out.logits = out.logits.clone()
    out.logits[..., : len(marks)] = out.logits[..., : len(marks)].masked_fill(marks, -torch.inf)
    return out


def raw(folder: Path, image: np.ndarray, tokens: torch.Tensor) -> Any:
    """The whole model's own outputs on a frame."""
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in IMAGENET)
    pixels = normalise_frame(image, input_size(image.shape[:2], **SMALL), mean, std, torch.float32)
    with torch.inference_mode():
        return GroundingDinoForObjectDetection.from_pretrained(folder)(pixel_values=pixels, input_ids=tokens)


def in_frame(box: torch.Tensor) -> list[float]:
    return torch.minimum(box.clamp(min=0), torch.tensor([120.0, 90.0, 120.0, 90.0])).tolist()


def test_a_token_belongs_to_the_phrase_that_it_was_written_for(folder: Path) -> None:
    """Whatever the phrases have in common, and a full stop inside one."""
    query = detector(folder).prepare(["mug", "Dr. Pepper", "red mug"])
    assert query.phrases == ("mug", "Dr. Pepper", "red mug")
    assert query.owners.tolist() == [3, 0, 3, 1, 1, 1, 3, 2, 2, 3, 3]
    assert query.tokens[0, 1] == query.tokens[0, 8]


def test_the_order_of_phrases_does_not_matter(folder: Path) -> None:
    mine = detector(folder)
    first, second = (mine.detect(picture(), mine.prepare(names), 0.5) for names in (NAMES, NAMES[::-1]))
    assert [d.label for d in first] == [d.label for d in second]
    np.testing.assert_allclose([d.box for d in first], [d.box for d in second], atol=1e-2)


def test_of_one_phrases_overlapping_boxes_the_best_stays(folder: Path) -> None:
    every = detector(folder)
    query = every.prepare(["mug"])
    found, left = (d.detect(picture(), query, 0.0) for d in (every, detector(folder, iou=0.3)))
    assert set(left) < set(found)
    assert left[0] == found[0]
    boxes = torch.tensor([d.box for d in left])
    assert (box_iou(boxes, boxes) - torch.eye(len(boxes)) <= 0.3001).all()
    assert detector(folder, limit=2).detect(picture(), query, 0.0) == found[:2]


@pytest.mark.parametrize("size", [(480, 640), (1080, 1920), (720, 1280), (800, 800), (100, 600), (2000, 900)])
def test_the_input_is_as_large_as_the_processor_makes_it(size: tuple[int, int]) -> None:
    wanted = get_size_with_aspect_ratio(size, 800, 1333)
    np.testing.assert_allclose(input_size(size, 800, 1333), wanted, atol=1)


def test_words_that_the_model_does_not_know_are_told(folder: Path) -> None:
    mine = detector(folder)
    assert mine.prepare(["杯 mug"]).tokens.shape == (1, 5)
    for phrase in ("杯", "\u200b", "杯 🍵"):
        with refuses(UnknownPhraseError, field=("knows", "none")):
            mine.prepare(["mug", phrase])


def test_more_words_than_the_model_reads_are_refused(folder: Path) -> None:
    mine = detector(folder)
    assert mine.prepare(["mug"] * 11).tokens.shape == (1, 24)
    with refuses(RequestError, field=("24", "26", "12", "fewer")):
        mine.prepare(["mug"] * 12)


class Inputs:
    """What a detector makes of frames for its network, which gets small pictures all the same."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(grounding_dino, "normalise_frame", self.make)

    def make(
        self,
        image: np.ndarray,
        size: tuple[int, int],
        mean: torch.Tensor,
        std: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        self.size = size
        self.mean = mean.flatten().tolist()
        self.std = std.flatten().tolist()
        height, width = size
        return normalise_frame(image, (min(height, 64), min(width, 107)), mean, std, dtype)

    def sizes_of(self, mine: GroundingDinoDetector) -> list[tuple[int, int]]:
        """Return the sizes of inputs of a square frame, which the shortest side limits, and of one that is wide."""
        sizes = []
        for shape in ((90, 90), (60, 180)):
            mine.detect(picture(*shape), mine.prepare(NAMES), 0.0)
            sizes.append(self.size)
        return sizes


def test_the_folder_tells_how_pixels_are_made(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = Inputs(monkeypatch)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for size in (None, "large", {"shortest_edge": 0, "longest_edge": 10}):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": size}))
        assert inputs.sizes_of(load_grounding_dino(tmp_path)) == [(800, 800), (444, 1333)]
    found = {"image_mean": [0, 0, 0], "image_std": [1, 1, 1]}
    found["size"] = {"shortest_edge": 64, "longest_edge": 107}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(found))
    mine = load_grounding_dino(tmp_path)
    assert inputs.sizes_of(mine) == [(64, 64), (36, 107)]
    assert (inputs.mean, inputs.std) == ([0, 0, 0], [1, 1, 1])
    assert mine.name == tmp_path.name
    assert mine.detect(picture(), mine.prepare(NAMES), 0.0)
