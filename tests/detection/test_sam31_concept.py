"""SAM 3.1's concept detector from Meta's names: against another implementation's values, and from a file."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sam3_node.detection.loading import load_detector
from sam3_node.detection.sam3_concept import Sam3ConceptDetector
from sam3_node.detection.sam3_concept_weights import build_sam3_model
from sam3_node.errors import ModelError
from sam3_node.models import load_tracker
from tests.support.paths import ROOT
from tests.support.sam31_detector import whole_tensors
from tests.support.tiny_clip import write_tiny_clip
from tests.support.tiny_detectors import picture
from tools.sam31.concept_parity import LIMIT, TOKENS, Found, run_ours

RECORDED = ROOT / "tests" / "data" / "sam31" / "concept_muggled.json"
"""muggled_sam's values, written by `python -m tools.sam31.concept_parity --record`."""


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return whole_tensors()


def test_text_boxes_scores_and_exemplars_are_those_of_another_implementation() -> None:
    wanted = json.loads(RECORDED.read_text())
    found: Found = run_ours(whole_tensors(tokens=TOKENS))
    for name, values in wanted.items():
        other = torch.tensor(values)
        assert (getattr(found, name) - other).abs().max() < LIMIT * other.abs().max(), name


def test_a_file_gives_detector_and_tracker_with_one_trunk(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    write_tiny_clip(tmp_path)
    file = tmp_path / "sam3.1_multiplex.safetensors"
    save_file(tensors, file)
    alone = load_detector("sam3-concept", file)
    tracker = load_tracker(file)
    shared = load_detector("sam3-concept", file, tracker=tracker)
    assert isinstance(shared, Sam3ConceptDetector)
    assert shared._network.trunk is tracker.trunk
    image = picture()
    trunk = tracker.encode(tracker.preprocess(image)).trunk
    assert trunk is not None
    query = shared.prepare(["red mug"])
    found = shared.detect(image, query, 0.0, trunk)
    wanted = alone.detect(image, query, 0.0)
    assert found
    assert [d.score for d in found] == pytest.approx([d.score for d in wanted], abs=1e-5)


def test_a_file_without_a_detector_is_told(tensors: dict[str, Tensor]) -> None:
    tracker = {name: value for name, value in tensors.items() if "detector.transformer" not in name}
    with pytest.raises(ModelError, match=r"expected SAM 3.1's detector .* take the whole checkpoint"):
        build_sam3_model(tracker, "FILE")
    missing = "detector.transformer.decoder.norm.weight"
    with pytest.raises(ModelError, match="lacks 1 tensors"):
        build_sam3_model({name: value for name, value in tensors.items() if name != missing}, "FILE")
