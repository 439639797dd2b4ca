"""SAM 1 against transformers' `SamModel`: features, and masks from points, boxes and earlier masks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import SamModel

from sam3_node.errors import ModelError
from sam3_node.models import TrackerModel, load_tracker
from sam3_node.models.pixels import mask_boxes
from sam3_node.tracking import ObjectPrompt, Tracker
from sam3_node.tracking.track_history import BOX_MARGINS
from tests.support.refuses import refuses
from tests.support.tiny import TRAINED_LOGIT, noise_clip
from tests.support.tiny_sam1 import SIZE, random_sam1

TOLERANCE = 1e-3
POINTS = [[30.0, 40.0], [50.0, 60.0]]
LABELS = [1, 0]
BOX = [30.0, 40.0, 100.0, 120.0]


@pytest.fixture(scope="module", params=[4, 5], ids=["padded windows", "whole windows"])
def source(request: pytest.FixtureRequest) -> SamModel:
    return random_sam1(request.param)


@pytest.fixture(scope="module")
def model(source: SamModel, tmp_path_factory: pytest.TempPathFactory) -> TrackerModel:
    folder = tmp_path_factory.mktemp("sam1")
    source.save_pretrained(folder)
    return load_tracker(folder)


@torch.inference_mode()
def decode(source: SamModel, pixels: torch.Tensor, multimask: bool, **prompt: Any) -> torch.Tensor:
    """Return the logits [h, w] of the best mask of transformers."""
    found = source(pixel_values=pixels, multimask_output=multimask, **prompt)
    return found.pred_masks[0, 0, found.iou_scores[0, 0].argmax()]


@pytest.mark.verifies("network", "SAM 1: images", "own package", "transformers")
@pytest.mark.parametrize(
    ("points", "labels", "box"),
    [(POINTS, LABELS, None), (POINTS[:1], [1], None), (None, None, BOX), (POINTS, LABELS, BOX)],
    ids=["points", "one point", "box", "box and points"],
)
def test_masks_equal_transformers(
    source: SamModel, model: TrackerModel, points: Any, labels: Any, box: Any
) -> None:
    pixels = noise_clip(SIZE, 1)[0]
    logits, _ = Tracker(model).segment(model.encode(pixels), ObjectPrompt(1, points, labels, box))
    given = {"input_points": points, "input_labels": labels, "input_boxes": box}
    prompt = {name: torch.tensor([[value]]) for name, value in given.items() if value is not None}
    truth = decode(source, pixels, multimask=box is None and len(points) == 1, **prompt)
    assert truth.abs().max() >= TRAINED_LOGIT
    assert (logits - truth).abs().max() < TOLERANCE


def test_objects_are_followed_by_the_box_and_logits_of_their_last_masks(
    source: SamModel, model: TrackerModel
) -> None:
    """Each mask equals the reference for one of the boxes: after a jump of the area, a tighter box may count."""
    tracker = Tracker(model)
    last = {}
    compared = 0
    prompts = [ObjectPrompt(1, box=BOX), ObjectPrompt(2, points=POINTS[:1])]
    for number, pixels in enumerate(noise_clip(SIZE, 5)):
        tracks = tracker.step(pixels, prompts if number == 0 else [])
        for object_id, logits in zip(tracks.ids, tracks.logits, strict=True):
            if number and (logits > 0).any():  # others are withheld
                before = last[object_id][None]
                truths = [follow(source, pixels, before, margin) for margin in BOX_MARGINS]
                assert min(truth.abs().max() for truth in truths) >= TRAINED_LOGIT
                assert min((logits - truth).abs().max() for truth in truths) < TOLERANCE
                compared += 1
            if (logits > 0).any():
                last[object_id] = logits
        assert len(last) == 2
    assert compared > 2


def follow(source: SamModel, pixels: torch.Tensor, before: torch.Tensor, margin: float) -> torch.Tensor:
    """Return the reference's logits from the box, with a margin, and the logits of the last mask."""
    corners = mask_boxes(before > 0) * (SIZE / before.shape[-1])
    sides = corners[:, 2:] - corners[:, :2]
    corners += margin * torch.cat([-sides, sides], dim=1)
    corners.clamp_(0, SIZE)
    return decode(source, pixels, False, input_boxes=corners[None], input_masks=before[None].clamp(-32, 32))


def test_objects_are_followed_in_bfloat16(model: TrackerModel, source: SamModel, tmp_path: Path) -> None:
    """It is what a GPU runs. Clicks are embedded in float32 all the same."""
    source.save_pretrained(tmp_path)
    half = load_tracker(tmp_path, dtype="bfloat16")
    prompt = ObjectPrompt(1, points=[[70.5, 80.5]], labels=[1])
    trackers = Tracker(half), Tracker(model)
    for number, pixels in enumerate(noise_clip(SIZE, 2)):
        rounded, exact = (tracker.step(pixels, [] if number else [prompt]) for tracker in trackers)
        assert ((rounded.logits > 0) == (exact.logits > 0)).float().mean() > 0.95
    points = torch.tensor(prompt.points)[None], torch.tensor(prompt.labels)[None]
    mine, truth = (tracker.model.decode_stage.prompt(*points)[0].float() for tracker in trackers)
    assert (mine - truth).abs().max() < 2**-7


@pytest.mark.parametrize("kept", ["shared_image_embedding", "prompt_encoder.shared_embedding"])
def test_the_shared_frequencies_have_either_name(
    source: SamModel, model: TrackerModel, tmp_path: Path, kept: str
) -> None:
    source.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state[f"{kept}.positional_embedding"] = state.pop("shared_image_embedding.positional_embedding")
    save_file(state, tmp_path / "model.safetensors")
    assert torch.equal(load_tracker(tmp_path).decode_stage.position, model.decode_stage.position)


@pytest.mark.parametrize(
    ("field", "value"), [("mlp_dim", 10**8), ("num_hidden_layers", 10**8), ("image_size", 96)]
)
def test_a_configuration_out_of_bounds_is_refused(tmp_path: Path, field: str, value: int) -> None:
    random_sam1().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"][field] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refuses(ModelError, field=field):
        load_tracker(tmp_path)


def test_there_is_one_image_size(tmp_path: Path) -> None:
    random_sam1().save_pretrained(tmp_path)
    assert load_tracker(tmp_path, image_size=SIZE).image_size == SIZE
    with refuses(ModelError, field=str(SIZE)):
        load_tracker(tmp_path, image_size=96)
