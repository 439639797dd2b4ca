"""FP8: calibrated on frames, rounded as an engine would, written as standard ONNX; scales of other weights refused."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from sam3_node.bags.native.reader import TABLETOP
from sam3_node.cli import main as cli
from sam3_node.engines import quantize
from sam3_node.engines.specs import tracker_stages
from sam3_node.errors import EngineError, SettingsError
from sam3_node.models import TrackerModel, load_tracker
from sam3_node.models.sam31 import random_model
from sam3_node.tracking import ObjectPrompt, Tracker
from tests.support.paths import ROOT
from tests.support.refuses import refuses
from tests.support.tables import each_row
from tests.support.tiny import random_source, tiny_model
from tests.support.tiny import stages_of as tiny_stages

FAMILIES = ("sam3", "sam2")
DEFAULT = ROOT / "calibration" / "fp8" / "default.toml"
ZERO = torch.zeros((), dtype=torch.float8_e4m3fn)
QKV = {"sam3": "backbone.layers.0.qkv", "sam2": "backbone.blocks.0.qkv"}


def images(count: int = 3) -> list[quantize.Image]:
    generator = np.random.default_rng(3)
    return [generator.integers(0, 256, (60, 80, 3), np.uint8) for _ in range(count)]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str) -> TrackerModel:
    return tiny_model(family)


@pytest.fixture(scope="module")
def scales(model: TrackerModel) -> quantize.Scales:
    pytest.importorskip("modelopt")
    return quantize.calibrate(model, images())


def made_up(model: TrackerModel) -> quantize.Scales:
    """Scales without a calibration."""
    amax = dict.fromkeys(quantize.find_layers(model.encode_stage), 8.0)
    return quantize.Scales(model=model.name, digest=quantize.weights_digest(model), frames=1, amax=amax)


def cosine(expected: torch.Tensor, actual: torch.Tensor) -> float:
    return torch.cosine_similarity(expected.flatten().float(), actual.flatten().float(), dim=0).item()


@pytest.mark.parametrize("channels", [False, True])
def test_rounds_as_modelopt_does(channels: bool) -> None:
    tensor_quant = pytest.importorskip("modelopt.torch.quantization.tensor_quant")
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) * 8
    amax = 2.0 ** torch.arange(64).remainder(6)[:, None] * 7 if channels else torch.tensor(14.0)
    zero = torch.zeros(64, dtype=ZERO.dtype) if channels else ZERO
    rounded = quantize.round_fp8(
        x, (amax / quantize.MAX_E4M3).flatten() if channels else amax / quantize.MAX_E4M3, zero
    )
    assert torch.equal(rounded, tensor_quant.fp8_eager(x, amax))
    assert rounded.abs().max() <= amax.max()


def test_dead_and_tiny_channels_stay_numbers() -> None:
    layer = nn.Linear(8, 3).bfloat16()
    with torch.no_grad():
        layer.weight[0] = 0
        layer.weight[1] = 1e-6
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    actual = quantize.QuantisedLayer(layer, 0.0)(x)
    assert actual.isfinite().all()
    assert actual.shape == (2, 3)


def test_a_convolution_is_rounded_too() -> None:
    layer = nn.Conv2d(3, 4, 3, stride=2, padding=1)
    x = torch.randn(1, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    actual = quantize.QuantisedLayer(layer, 4.0)(x)
    assert not torch.equal(actual, layer(x))
    assert cosine(layer(x), actual) > 0.99


def test_the_largest_input_of_every_layer_is_found(model: TrackerModel, scales: quantize.Scales) -> None:
    largest: dict[str, float] = {}

    def note(name: str, x: torch.Tensor) -> None:
        largest[name] = max(largest.get(name, 0.0), x.abs().max().item())

    layers = quantize.find_layers(model.encode_stage, ("linear",))
    hooks = [
        layer.register_forward_pre_hook(lambda _, x, name=name: note(name, x[0]))
        for name, layer in layers.items()
    ]
    with torch.inference_mode():
        for image in images():
            model.encode(model.preprocess(image))
    for hook in hooks:
        hook.remove()
    assert scales.amax == pytest.approx(largest)
    assert scales.frames == 3


def test_calibration_does_not_change_the_model_and_reports_each_frame(model: TrackerModel) -> None:
    pytest.importorskip("modelopt")
    told: list[int] = []
    before = model.encode(model.preprocess(images()[0]))
    quantize.calibrate(model, images(2), progress=told.append)
    after = model.encode(model.preprocess(images()[0]))
    assert told == [1, 2]
    assert all(torch.equal(*pair) for pair in zip(before[:3], after[:3], strict=True))


@pytest.mark.parametrize(
    ("frames", "told"),
    [
        ([], ("frame", "none")),
        ([np.zeros((4, 4), np.uint8)], ("1", "BGR", "uint8")),
        ([np.zeros((4, 4, 3), np.float32)], "float32"),
        ([np.zeros((0, 4, 3), np.uint8)], ("1", "BGR")),
    ],
)
def test_invalid_frames_are_refused(frames: list[quantize.Image], told: str | tuple[str, ...]) -> None:
    pytest.importorskip("modelopt")
    with refuses(EngineError, field=told):
        quantize.calibrate(tiny_model(), frames)


def test_an_encoder_of_convolutions_alone_is_refused() -> None:
    with refuses(EngineError, field="EdgeTAM"):
        quantize.calibrate(tiny_model("edgetam"), [])


def test_the_copy_is_close_and_the_model_untouched(model: TrackerModel, scales: quantize.Scales) -> None:
    stage = quantize.quantise_encoder(model, scales)
    pixels = model.preprocess(images()[1])
    with torch.inference_mode():
        pairs = list(zip(model.encode_stage(pixels), stage(pixels), strict=True))
    assert all(cosine(*pair) > 0.98 for pair in pairs)
    assert not any(torch.equal(*pair) for pair in pairs)
    assert not any(isinstance(layer, quantize.QuantisedLayer) for layer in model.modules())


def test_a_tracker_runs_with_the_copy(family: str, scales: quantize.Scales) -> None:
    model = tiny_model(family)
    model.stages = model.stages._replace(encode=quantize.quantise_encoder(model, scales))
    tracker = Tracker(model, max_objects=2)
    side = model.image_size
    tracker.step(model.preprocess(images()[0]), [ObjectPrompt(7, points=[(side / 2, side / 2)], labels=[1])])
    tracks = tracker.step(model.preprocess(images()[1]))
    assert tracks.ids == [7]
    assert tracks.logits.isfinite().all()


def test_only_layers_of_the_recipe_are_rounded(family: str, model: TrackerModel) -> None:
    recipe = quantize.Recipe(exclude=(quantize.Exclusion(layers=QKV[family], reason="a test"),))
    stage = quantize.quantise_encoder(model, made_up(model), recipe)
    rounded = {name for name, layer in stage.named_modules() if isinstance(layer, quantize.QuantisedLayer)}
    assert rounded == quantize.find_layers(model.encode_stage, ("linear",)).keys() - {QKV[family]}


def test_convolutions_are_quantised_where_the_recipe_names_them(model: TrackerModel) -> None:
    stage = quantize.quantise_encoder(
        model, made_up(model), quantize.Recipe(kinds=("convolution",), exclude=())
    )
    rounded = [layer.layer for layer in stage.modules() if isinstance(layer, quantize.QuantisedLayer)]
    assert rounded
    assert all(isinstance(layer, nn.Conv2d) for layer in rounded)


def test_scales_are_kept_in_a_file(scales: quantize.Scales, tmp_path: Path) -> None:
    scales.save(tmp_path / "there" / "scales.json")
    assert quantize.Scales.load(tmp_path / "there" / "scales.json") == scales


@each_row(
    "text",
    [
        None,
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"version": 1}',
        b'{"version": 1, "model": "m", "digest": "%s", "frames": 1, "amax": {}}' % (b"0" * 64),
        b'{"version": 2, "model": "m", "digest": "%s", "frames": 1, "amax": {"a": -1}}' % (b"0" * 64),
        b'{"version": 2, "model": "m", "digest": "%s", "frames": 1, "amax": {"a": NaN}}' % (b"0" * 64),
        b'{"version": 2, "model": "m", "digest": "0", "frames": 1, "amax": {}}',
    ],
)
def test_a_file_without_scales_is_refused(text: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    if text is not None:
        path.write_bytes(text)
    with refuses(EngineError, field="fp8"):
        quantize.Scales.load(path)


def test_scales_of_other_weights_are_refused(family: str, model: TrackerModel) -> None:
    other = tiny_stages(random_source(family, seed=1))
    with refuses(EngineError, field=("belong", "weights")):
        quantize.quantise_encoder(other, made_up(model))


def test_scales_serve_the_same_weights_in_bfloat16_alone(family: str, model: TrackerModel) -> None:
    half, brain = (tiny_stages(random_source(family).to(dtype)) for dtype in (torch.float16, torch.bfloat16))
    assert quantize.quantise_encoder(brain, made_up(model))
    with refuses(EngineError, field=("float32", "bfloat16", "torch.float16")):
        quantize.quantise_encoder(half, made_up(model))


def test_scales_must_cover_all_layers_of_the_recipe(family: str, model: TrackerModel) -> None:
    known = made_up(model)
    amax = {name: value for name, value in known.amax.items() if name != QKV[family]}
    with refuses(EngineError, field=str(QKV[family])):
        quantize.quantise_encoder(model, known.model_copy(update={"amax": amax}))


def test_the_default_recipe_is_the_file_and_fits_every_encoder(model: TrackerModel) -> None:
    assert quantize.load_recipe(DEFAULT) == quantize.Recipe()
    assert quantize.Recipe().select_layers(model.encode_stage)
    assert quantize.Recipe().select_layers(load_tracker("nano").encode_stage)


def test_an_exclusion_that_matches_no_layer_names_the_nearest(family: str, model: TrackerModel) -> None:
    recipe = quantize.Recipe(exclude=(quantize.Exclusion(layers=f"{QKV[family]}x", reason="misspelt"),))
    with refuses(EngineError, field=str(QKV[family])):
        recipe.select_layers(model.encode_stage)


def test_a_recipe_that_leaves_out_everything_is_refused(model: TrackerModel) -> None:
    with refuses(EngineError, field="leaves"):
        quantize.Recipe(exclude=(quantize.Exclusion(layers="*", reason="all"),)).select_layers(
            model.encode_stage
        )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('kinds = ["norm"]', "kinds.0"),
        ("kinds = []", "kinds"),
        ('[[exclude]]\nlayers = "a"', "exclude.0.reason"),
        ("other = 1", "other"),
        ("kinds = [", "TOML"),
    ],
)
def test_a_recipe_that_does_not_validate_is_an_error(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with refuses(SettingsError, field=told):
        quantize.load_recipe(path)


def test_the_export_is_standard_fp8_and_onnxruntime_agrees(model: TrackerModel, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    for module in ("onnxscript", "onnxruntime"):
        pytest.importorskip(module)
    from tests.support.onnx_run import OnnxRun

    path = quantize.export_quantised(model, made_up(model), tmp_path / "encode.onnx")
    graph = onnx.load(path).graph
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    rounded = [node for node in graph.node if node.op_type == "QuantizeLinear"]
    assert {kinds[node.input[2]] for node in rounded} == {onnx.TensorProto.FLOAT8E4M3FN}
    # two layers may share an input, but never weights
    count = Counter(node.input[0] in kinds for node in rounded)
    layers = quantize.Recipe().select_layers(model.encode_stage)
    assert count[True] == len(layers)
    assert 0 < count[False] <= len(layers)
    pixels = model.preprocess(images()[0])
    with torch.inference_mode():
        expected = quantize.quantise_encoder(model, made_up(model))(pixels)
    actual = OnnxRun(path, tracker_stages(model)["encode"])(pixels)
    assert all(cosine(*pair) > 0.999 for pair in zip(expected, actual, strict=True))


def test_an_encoder_with_two_pyramids_is_quantised() -> None:
    """SAM 3.1's prompts and tracking share the backbone, whose layers the recipe names."""
    model = random_model(56, 32)
    stage = quantize.quantise_encoder(model, made_up(model))
    rounded = {name for name, layer in stage.named_modules() if isinstance(layer, quantize.QuantisedLayer)}
    assert rounded == quantize.Recipe().select_layers(model.encode_stage).keys()
    pixels = model.preprocess(images()[0])
    with torch.inference_mode():
        pairs = zip(model.encode_stage(pixels), stage(pixels), strict=True)
    assert all(cosine(*pair) > 0.98 for pair in pairs)


def test_the_verb_calibrates_on_a_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("modelopt")
    out = tmp_path / "scales.json"
    assert cli.main(["calibrate", "fp8", str(TABLETOP), "-o", str(out), "--frames", "2"]) == 0
    told = capsys.readouterr()
    assert "2/2 frames" in told.err
    assert "layers of nano, from 2 frames" in told.out
    quantize.Scales.load(out).check(load_tracker("nano"))
    assert json.loads(out.read_text())["frames"] == 2


def test_the_verb_reports_a_source_without_frames(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("modelopt")
    (tmp_path / "broken.png").write_bytes(b"no image")
    out = tmp_path / "scales.json"
    assert cli.main(["calibrate", "fp8", str(tmp_path), "-o", str(out)]) == 2
    assert "expected images, found none that can be read" in capsys.readouterr().err
    assert not out.exists()
