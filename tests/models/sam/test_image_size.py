"""Trackers at other image sizes than their weights' own, against transformers' at that size."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, Sam2VideoConfig, Sam3TrackerVideoConfig

from sam3_node.errors import ModelError
from sam3_node.models import load_tracker
from sam3_node.models.checkpoints import set_image_size, size_step, suggest_sizes
from sam3_node.models.sam.configuration import EdgeTamConfig
from sam3_node.perception.loading import load_model
from sam3_node.settings import ModelSettings, TrackerSettings
from sam3_node.tracking import ObjectPrompt, Tracker
from tests.support import tiny
from tests.support.refuses import refuses
from tests.tracking.test_parity import TOLERANCE, oracle_prompt

OWN = {"sam3": 112, "sam2": 128}


def prompts(size: int) -> dict[int, ObjectPrompt]:
    mask = torch.zeros(size, size)
    mask[size // 4 : size // 2, size // 3 : size // 2 + 9] = 1
    return {
        0: ObjectPrompt(1, points=[[0.3 * size, 0.4 * size]]),
        2: ObjectPrompt(2, box=[0.2 * size, 0.3 * size, 0.6 * size, 0.8 * size]),
        4: ObjectPrompt(3, mask=mask),
    }


def reference(family: str, source: nn.Module, size: int) -> nn.Module:
    """transformers' model built for that size, with the weights of `source`."""
    config = tiny.CONFIGS[family](size=size)
    if family == "sam3":
        vit = config.vision_config.backbone_config
        own = source.config.vision_config.backbone_config
        vit.window_size = own.window_size
        vit.pretrain_image_size = own.pretrain_image_size
    model = tiny.CLASSES[family](config).eval()
    model.load_state_dict(source.state_dict())
    return model


@pytest.mark.parametrize(
    ("family", "size"),
    [
        *(("sam3", size) for size in (168, 56, 70, 126)),
        *(("sam2", size) for size in (64, 96, 160)),
        ("edgetam", 192),
    ],
)
def test_logits_are_those_of_transformers_at_that_size(tmp_path: Path, family: str, size: int) -> None:
    source = tiny.random_source(family)
    source.save_pretrained(tmp_path)
    model = load_tracker(tmp_path, image_size=size)
    oracle = tiny.Oracle(reference(family, source, size))
    assert (model.image_size, model.can_track) == (size, True)
    tracker = Tracker(model, max_objects=3)
    given = prompts(size)
    largest = 0.0
    for frame, pixels in enumerate(tiny.noise_clip(size, 10)):
        prompt = given.get(frame)
        tracks = tracker.step(pixels, [prompt] if prompt else [])
        truth = oracle.step(pixels, {prompt.object_id: oracle_prompt(prompt)} if prompt else {})
        for object_id, logits in zip(tracks.ids, tracks.logits, strict=True):
            assert (logits - truth[object_id]).abs().max() < TOLERANCE, f"frame {frame}, object {object_id}"
        largest = max(largest, tiny.find_largest_logit(tracks))
    assert largest >= tiny.TRAINED_LOGIT


@pytest.mark.parametrize("family", ["sam3", "sam2"])
def test_the_weights_own_size_changes_nothing(tmp_path: Path, family: str) -> None:
    tiny.random_source(family).save_pretrained(tmp_path)
    pixels = tiny.noise_clip(OWN[family], 1)[0]
    with torch.inference_mode():
        for size in (0, OWN[family]):
            found = load_tracker(tmp_path, image_size=size).encode(pixels)
            assert torch.equal(found.top, load_tracker(tmp_path).encode(pixels).top)


def test_the_tracker_of_a_composite_checkpoint_takes_another_size(tmp_path: Path) -> None:
    tiny.random_composite().save_pretrained(tmp_path)
    model = load_tracker(tmp_path, image_size=168)
    assert (model.image_size, model.grid, model.can_track) == (168, (12, 12), True)
    own = load_tracker(tmp_path)
    for name, value in own.decode_stage.pointer_proj.state_dict().items():
        assert torch.equal(value, model.decode_stage.pointer_proj.state_dict()[name])


def test_the_ladders_of_the_public_weights() -> None:
    edgetam = EdgeTamConfig(model_type="edgetam_video")
    assert suggest_sizes(Sam3TrackerVideoConfig()) == [1008, 840, 672, 504]
    assert suggest_sizes(edgetam) == [1024, 768, 512]
    assert (size_step(Sam3TrackerVideoConfig()), size_step(Sam2VideoConfig())) == (14, 32)
    for config in (Sam3TrackerVideoConfig(), Sam2VideoConfig(), edgetam):
        for size in suggest_sizes(config):
            assert set_image_size(config, size, "weights").prompt_encoder_config.image_size == size
            side = size // config.prompt_encoder_config.patch_size
            assert list(config.vision_config.backbone_feature_sizes[-1]) == [side] * 2


@pytest.mark.parametrize("size", [1, 32, 200, 255, 257])
def test_sizes_that_cannot_be_are_refused_with_those_that_can(size: int) -> None:
    with refuses(ModelError, field=str(size)):
        load_tracker("nano", image_size=size)


def test_the_setting_reaches_the_model() -> None:
    settings = ModelSettings(device="cpu", image_size=160)
    assert load_model(settings, TrackerSettings()).image_size == 160


def test_a_configuration_on_disk_is_not_changed(tmp_path: Path) -> None:
    tiny.random_source("sam2").save_pretrained(tmp_path)
    load_tracker(tmp_path, image_size=160)
    assert AutoConfig.from_pretrained(tmp_path).image_size == 128
