"""EdgeTAM: RepViT against timm's outputs, memories against transformers', and folders as transformers writes them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import EdgeTamConfig as ImageConfig
from transformers import EdgeTamModel

from sam3_node.errors import ModelError
from sam3_node.models import TrackerModel, load_tracker
from sam3_node.models.sam.repvit import RepVit, fold_norms
from sam3_node.tracking import ObjectPrompt, Tracker
from tests.support import tiny
from tests.support.refuses import refuses
from tests.support.saving import reload
from tests.support.tiny import TRAINED_LOGIT, noise_clip, random_source, tiny_model
from tools.bench.edgetam_weights import DEPTHS, WIDTHS

TOLERANCE = 1e-3
TOKENS = tiny.FREE_LATENTS + tiny.WINDOWS**2
# of timm 1.0.31's repvit_m1: SHA-256 of the names and shapes of its tensors; mean, standard deviation, first and last
# value of each stage's map, for the weights of `fill` and the pixels of `make_pixels`
TIMM_NAMES = "e94d851a5d0432b45d4ff258cbff9e5c2b209d44cc1ba89a276a582edf42c653"
TIMM_MAPS = (
    (0.02053, 0.65562, -0.55625, -0.20806),
    (-0.00065, 0.96895, 0.6732, -0.20332),
    (0.32701, 7.18453, 2.09995, 2.99085),
    (-0.1685, 4.26647, 1.81907, -1.00141),
)


@torch.no_grad()
def fill(network: nn.Module) -> None:
    """Set weights from numpy's generator, whose numbers stay the same."""
    generator = np.random.default_rng(0)
    for name, value in sorted(network.state_dict().items()):
        if value.ndim == 0:
            continue
        noise = torch.from_numpy(generator.standard_normal(tuple(value.shape))).float()
        if "running_var" in name:
            value.copy_(0.5 + noise.abs())
        elif value.ndim > 1:
            value.copy_(noise / value[0].numel() ** 0.5)
        else:
            value.copy_(0.7 + 0.2 * noise if name.endswith("bn.weight") else 0.2 * noise)


def make_pixels() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).standard_normal((1, 3, 64, 64))).float()


@pytest.mark.verifies(
    "network", "EdgeTAM's backbone RepViT", "own package", "names and feature maps that timm gave"
)
@torch.inference_mode()
def test_repvit_equals_timms() -> None:
    network = RepVit(WIDTHS, DEPTHS).eval()
    fill(network)
    names = "".join(f"{name} {list(value.shape)}\n" for name, value in sorted(network.state_dict().items()))
    assert hashlib.sha256(names.encode()).hexdigest() == TIMM_NAMES
    maps = network(make_pixels())
    folded = fold_norms(network)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    for found, same, truth in zip(maps, folded(make_pixels()), TIMM_MAPS, strict=True):
        figures = (found.mean(), found.std(), found.flatten()[0], found.flatten()[-1])
        assert [float(figure) for figure in figures] == pytest.approx(truth, abs=2e-4)
        assert (found - same).abs().max() < TOLERANCE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights as transformers writes them: the configuration names timm's network."""
    found = tmp_path_factory.mktemp("edgetam")
    random_source("edgetam").save_pretrained(found)
    return found


def read_backbone(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config, config["vision_config"]["backbone_config"]


@pytest.mark.parametrize("size", [128, 192])
def test_a_folder_equals_the_stages_of_transformers_weights(folder: Path, size: int) -> None:
    """Bit for bit, in features and masks. `test_parity` compares these stages with transformers' own inference."""
    config, backbone = read_backbone(folder)
    assert (config["model_type"], backbone["model_type"]) == ("edgetam_video", "timm_wrapper")
    model = load_tracker(folder, image_size=size)
    assert model.has_memory
    reference = random_source("edgetam", size=size)
    reference.load_state_dict(random_source("edgetam").state_dict())
    trackers = [Tracker(model), Tracker(tiny.stages_of(reference))]
    for frame, pixels in enumerate(noise_clip(size, 4)):
        features = [tracker.model.encode(pixels)[:3] for tracker in trackers]
        assert all(map(torch.equal, *features))
        prompts = [ObjectPrompt(1, box=[20.0, 30.0, 70.0, 90.0])] if frame == 0 else []
        mine, theirs = (tracker.step(pixels, prompts).logits for tracker in trackers)
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("architecture", "repvit_m2", ("repvit_m1", "repvit_m2")),
        ("model_type", "sam2_hiera_det_model", "sam2_hiera_det_model"),
        ("model_args", {"kernel_size": 5}, "kernel_size"),
        ("model_args", {"depth": [1, 1]}, ("4", "depth")),
    ],
)
def test_another_backbone_is_refused(
    folder: Path, tmp_path: Path, field: str, value: object, expected: str | tuple[str, ...]
) -> None:
    config, backbone = read_backbone(folder)
    backbone[field] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refuses(ModelError, field=expected):
        load_tracker(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("perceiver_resampler_num_latents_2d", 9),
        ("perceiver_resampler_num_latents", 0),
        ("perceiver_resampler_hidden_size", 32),
        ("perceiver_resampler_num_attention_heads", 2),
        ("memory_attention_rope_k_sizes", [2, 8]),
    ],
)
def test_memories_that_do_not_fit_are_refused(
    folder: Path, tmp_path: Path, field: str, value: object
) -> None:
    config, _ = read_backbone(folder)
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with refuses(ModelError, field=field):
        load_tracker(tmp_path)


def test_a_grid_that_does_not_divide_into_windows_is_refused() -> None:
    with refuses(ModelError, field="EdgeTAM"):
        tiny.stages_of(random_source("edgetam", size=96))


def test_the_bank_keeps_latents_and_does_not_grow() -> None:
    model = tiny_model("edgetam")
    tracker = Tracker(model, max_objects=2)
    same = Tracker(model, max_objects=2)
    assert model.memory_tokens == TOKENS < model.grid[0] * model.grid[1]
    assert (tracker.bank.features.shape[2:], tracker.bank.features.dtype) == ((TOKENS, 64), torch.float32)
    sizes = set()
    for frame, pixels in enumerate(noise_clip(128, 24)):
        prompts = [ObjectPrompt(1, box=[20.0, 30.0, 70.0, 90.0])] if frame == 0 else []
        tracks = tracker.step(pixels, prompts)
        if frame > 20:
            assert torch.equal(same.step(pixels).logits, tracks.logits)
        elif frame == 20:
            same.restore(reload(tracker.state()))
        sizes.add((tracker.bank.nbytes, tracker.state().bank.features.nbytes))
    assert len(sizes) == 1


@pytest.mark.parametrize("method", ["pooled", "sparse"])
def test_compressed_memories_are_read_exactly(method: Any) -> None:
    with refuses(ModelError, field=(str(method), str(TOKENS))):
        tiny_model("edgetam").use_read(method)


def image_source(folder: Path) -> EdgeTamModel:
    """transformers' model for single images, with the weights of the one for videos."""
    video = random_source("edgetam")
    parts = ("prompt_encoder_config", "mask_decoder_config")
    heads = {part: getattr(video.config, part).to_dict() for part in parts}
    source = EdgeTamModel(ImageConfig(vision_config=video.config.vision_config, **heads)).eval()
    source.load_state_dict({name: video.state_dict()[name] for name in source.state_dict()})
    source.save_pretrained(folder)
    return source


@torch.inference_mode()
def test_weights_for_single_images_segment_as_transformers(tmp_path: Path) -> None:
    source = image_source(tmp_path)
    pixels = noise_clip(128, 1)[0]
    model: TrackerModel = load_tracker(tmp_path)
    assert not model.has_memory
    points = [[30.0, 40.0], [50.0, 60.0]]
    labels = [1, 0]
    logits, _ = Tracker(model).segment(model.encode(pixels), ObjectPrompt(1, points, labels))
    prompt = {"input_points": torch.tensor([[points]]), "input_labels": torch.tensor([[labels]])}
    truth = source(pixel_values=pixels, multimask_output=False, **prompt).pred_masks[0, 0, 0]
    assert truth.abs().max() >= TRAINED_LOGIT
    assert (logits - truth).abs().max() < TOLERANCE
