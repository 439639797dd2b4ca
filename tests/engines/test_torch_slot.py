"""Faster stages of torch: FP8 layers equal rounded ones, and nothing serves that the gate refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sam3_node.engines.fast_torch import Fp8Linear, make_fp8_encoder
from sam3_node.engines.quantize import QuantisedLayer, Scales, find_layers, quantise_encoder, weights_digest
from sam3_node.errors import EngineError, SettingsError
from sam3_node.models import load_tracker
from sam3_node.perception.perception import load_model
from sam3_node.settings import EngineSettings, ModelSettings, Settings, TrackerSettings
from tests.engines.test_validation import ALWAYS
from tests.support.tiny import noise_clip, random_source


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    random_source("sam3", presence=ALWAYS).save_pretrained(folder)
    return folder


def save_scales(weights: Path, path: Path, amax: float) -> Path:
    """Write scales without a calibration."""
    model = load_tracker(str(weights), device="cpu")
    layers = dict.fromkeys(find_layers(model.encode_stage), amax)
    Scales(model=model.name, digest=weights_digest(model), frames=1, amax=layers).save(path)
    return path


def make_settings(weights: Path, read: str = "exact", **engine: Any) -> Settings:
    return Settings(
        model=ModelSettings(name=str(weights), device="cpu"),
        tracker=TrackerSettings(read=read),
        engine=EngineSettings(**engine),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_in_fp8_equals_one_that_rounds(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    rounded = QuantisedLayer(nn.Linear(64, 96, bias=bias).to(dtype), 6.0)
    x = (torch.randn(2, 33, 64) * 3).to(dtype)  # some inputs saturate
    with torch.inference_mode():
        expected, found = rounded(x), Fp8Linear(rounded)(x)
    assert (found.shape, found.dtype) == (expected.shape, dtype)
    largest = expected.abs().max().item()
    assert (found - expected).abs().max() <= largest * (1e-6 if dtype == torch.float32 else 2.0**-7)


def test_an_encoder_in_fp8_equals_one_that_rounds(weights: Path, tmp_path: Path) -> None:
    scales = save_scales(weights, tmp_path / "scales.json", 8.0)
    model = load_tracker(str(weights), device="cpu")
    fast = make_fp8_encoder(model, make_settings(weights, precision="fp8", scales=scales))
    assert sum(isinstance(layer, Fp8Linear) for layer in fast.modules()) == 8  # four in each of two blocks
    pixels = noise_clip(model.image_size, 1)[0]
    with torch.inference_mode():
        found, expected = fast(pixels), quantise_encoder(model, Scales.load(scales))(pixels)
    for mine, theirs in zip(found[:3], expected[:3], strict=True):
        assert (mine - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_fp8_serves_once_the_gate_has_passed_it(weights: Path, tmp_path: Path) -> None:
    scales = save_scales(weights, tmp_path / "scales.json", 8.0)
    settings = make_settings(
        weights, precision="fp8", scales=scales, fallback=False, min_cosine=0.9, min_iou=0.5
    )
    model = load_model(settings.model, settings.tracker, settings.engine)
    assert any(isinstance(layer, Fp8Linear) for layer in model.stages.encode.modules())
    assert "torch:" not in model.name
    assert model.stages.read is model.read_stage


@pytest.mark.parametrize(
    ("amax", "engine", "message"),
    [
        (1e-3, {}, "refused by the gate"),
        (None, {}, "expected engine.scales"),
        (8.0, {"precision": "float32", "read_kernel": "triton"}, "expected a model on CUDA"),
    ],
)
def test_torch_serves_where_faster_stages_cannot(
    amax: float | None, engine: dict[str, Any], message: str, weights: Path, tmp_path: Path
) -> None:
    scales = None if amax is None else save_scales(weights, tmp_path / "scales.json", amax)
    settings = make_settings(weights, **({"precision": "fp8", "scales": scales} | engine))
    model = load_model(settings.model, settings.tracker, settings.engine)
    assert message in model.name
    assert model.stages.encode is model.encode_stage
    assert model.stages.read is model.read_stage
    strict = settings.engine.model_copy(update={"fallback": False})
    with pytest.raises(EngineError, match=message):
        load_model(settings.model, settings.tracker, strict)


def test_engines_do_not_approximate(weights: Path) -> None:
    settings = make_settings(weights, read="pooled", kind="inductor", precision="float32")
    with pytest.raises(
        SettingsError, match=r"tracker.read pooled: expected engine.kind torch, found inductor"
    ):
        load_model(settings.model, settings.tracker, settings.engine)


@pytest.mark.parametrize("method", ["exact", "sparse"])
def test_the_settings_choose_how_memories_are_read(weights: Path, method: str) -> None:
    settings = make_settings(weights, read=method)
    model = load_model(settings.model, settings.tracker, settings.engine)
    assert model.read_stage.tokens.method == method
