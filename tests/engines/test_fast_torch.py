"""Faster arithmetic of torch behind the gate: an open dtype, FP8 and kernels."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sam3_node.engines import engine_store, fast_torch
from sam3_node.engines.fast_torch import (
    has_bfloat16,
    has_open_dtype,
    load_by_accuracy_check,
    make_fp8_encoder,
    make_stages,
    serve_fast_torch,
)
from sam3_node.engines.quantize import QuantisedLayer, Scales, find_layers, quantise_encoder, weights_digest
from sam3_node.engines.validation import Report, TrackFigures
from sam3_node.errors import EngineError, SettingsError
from sam3_node.models import TrackerModel, load_tracker
from sam3_node.models.capabilities import Capabilities
from sam3_node.models.sam.algebra import apply_mlp
from sam3_node.models.sam.fp8 import MAX_E4M3, Fp8Linear
from sam3_node.perception.loading import load_model
from sam3_node.settings import EngineSettings, ModelSettings, Settings, TrackerSettings
from tests.engines.test_graphs import on_tape
from tests.engines.test_validation import ALWAYS, CountedClock
from tests.support.patience import PATIENCE_S
from tests.support.refuses import refuses
from tests.support.tiny import noise_clip, random_source, stages_of

WHOLE_ISA = {"ONEDNN_MAX_CPU_ISA": "ALL"}
NANO_SCRIPT = """
import sys
from pathlib import Path
from sam3_node.engines.fast_torch import has_bfloat16
from sam3_node.engines.validation import Report
from sam3_node.perception.loading import load_models
from sam3_node.settings import Settings
if not has_bfloat16():
    sys.exit(3)
folder = Path(sys.argv[1])
settings = Settings(model={"device": "cpu"}, detector={"kind": "none"}, engine={"folder": folder})
for start in ("first", "second"):
    model, _ = load_models(settings)
    print(start, model.dtype)
(path,) = folder.glob("bfloat16/*.json")
print(Report.load(path).tracks.mean_iou)
"""


def figures(iou: float) -> Report:
    return Report(0.99, 0.99, 16, (), TrackFigures(iou, iou, 0, 1, 16))


class Loads:
    """A loader that keeps the dtypes that were asked for."""

    def __init__(self) -> None:
        self.dtypes: list[torch.dtype] = []

    def __call__(self, dtype: torch.dtype) -> TrackerModel:
        self.dtypes.append(dtype)
        return stages_of(random_source("sam2").to(dtype))


def settings_of(folder: Path, **model: object) -> Settings:
    return Settings(model={"device": "cpu", **model}, engine={"folder": folder})


@pytest.mark.parametrize(("iou", "expected"), [(0.995, torch.bfloat16), (0.98, torch.float32)])
def test_the_gate_decides_once(
    iou: float, expected: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_torch, "compare", lambda reference, candidate: figures(iou))
    load = Loads()
    settings = settings_of(tmp_path)
    assert load_by_accuracy_check(load, settings).dtype == expected
    assert load.dtypes == [torch.float32, torch.bfloat16]
    monkeypatch.delattr(fast_torch, "compare")
    assert load_by_accuracy_check(load, settings).dtype == expected  # by the report of the first start
    assert load.dtypes[2:] == [expected]


def test_another_image_size_is_judged_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = iter([figures(0.995), figures(0.5)])
    monkeypatch.setattr(fast_torch, "compare", lambda reference, candidate: next(verdicts))
    assert load_by_accuracy_check(Loads(), settings_of(tmp_path)).dtype == torch.bfloat16
    assert load_by_accuracy_check(Loads(), settings_of(tmp_path, image_size=224)).dtype == torch.float32


def test_weights_that_cannot_be_compared_stay_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(reference: TrackerModel, candidate: TrackerModel) -> Report:
        raise EngineError("expected objects on the clip, found none")

    monkeypatch.setattr(fast_torch, "compare", compare)
    assert load_by_accuracy_check(Loads(), settings_of(tmp_path)).dtype == torch.float32
    assert not list(tmp_path.rglob("*.json"))


def test_large_weights_stay_in_float32_without_a_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_torch, "MAX_PARAMETERS", 1000)
    load = Loads()
    assert load_by_accuracy_check(load, settings_of(tmp_path)).dtype == torch.float32
    assert load.dtypes == [torch.float32]


def test_a_damaged_report_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_torch, "compare", lambda reference, candidate: figures(0.995))
    load_by_accuracy_check(Loads(), settings_of(tmp_path))
    (path,) = tmp_path.rglob("*.json")
    path.write_text("{")
    assert load_by_accuracy_check(Loads(), settings_of(tmp_path)).dtype == torch.bfloat16
    assert Report.load(path).passed  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("isa", "flag", "expected"),
    [
        ("ALL", "avx512_bf16", True),
        ("AVX512_CORE_AMX", "amx_bf16", True),
        ("AVX512_CORE", "amx_bf16", False),
        ("ALL", "avx512_f", False),
    ],
)
def test_a_cpu_has_bfloat16_if_onednn_may_use_it(
    isa: str, flag: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(fast_torch.ISA_VARIABLE, isa)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {flag: True})
    assert has_bfloat16() is expected


@pytest.mark.parametrize(
    ("change", "expected"), [({}, True), ({"dtype": "float32"}, False), ({"compile": True}, False)]
)
def test_settings_that_name_a_dtype_decide(
    change: dict[str, object], expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_torch, "has_bfloat16", lambda: True)
    assert has_open_dtype(settings_of(tmp_path, **change)) is expected


@pytest.mark.engines
def test_the_bundled_weights_pass_on_a_cpu_with_bfloat16(tmp_path: Path) -> None:
    """Regression: oneDNN computed a convolution of the memory encoder wrongly in bfloat16, with a mean IoU of 0.886."""
    command = [sys.executable, "-c", NANO_SCRIPT, str(tmp_path)]
    run = subprocess.run(
        command, env=os.environ | WHOLE_ISA, capture_output=True, text=True, timeout=PATIENCE_S
    )
    if run.returncode == 3:
        pytest.skip("this CPU has no bfloat16 arithmetic")
    assert run.returncode == 0, run.stderr
    first, second, iou = run.stdout.strip().splitlines()
    assert (first, second) == ("first torch.bfloat16", "second torch.bfloat16")
    assert float(iou) >= fast_torch.MIN_IOU


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be compiled to machine code, which takes a minute."""
    monkeypatch.setattr(fast_torch, "BACKEND", "eager")


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


def make_settings(weights: Path, read: str = "exact", compile: bool = False, **engine: Any) -> Settings:
    return Settings(
        model=ModelSettings(name=str(weights), device="cpu", compile=compile),
        tracker=TrackerSettings(read=read),
        engine=EngineSettings(**{"folder": weights.parent / "engines", "max_time": 0} | engine),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_in_fp8_multiplies_the_rounded_numbers(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 96, bias=bias).to(dtype)
    scale = torch.tensor(6.0 / MAX_E4M3)
    x = (torch.randn(2, 33, 64) * 3).to(dtype)  # some inputs saturate
    with torch.inference_mode():
        found = Fp8Linear(layer, scale)(x)
        largest = layer.weight.abs().max().float() / MAX_E4M3
        weight = (layer.weight.float() / largest).to(torch.float8_e4m3fn).double() * largest
        rows = (x.float() / scale).clamp(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn).double() * scale
        expected = rows @ weight.T + (0 if layer.bias is None else layer.bias.double())
    assert (found.shape, found.dtype) == (expected.shape, dtype)
    limit = 1e-6 if dtype == torch.float32 else 2.0**-7
    assert (found - expected).abs().max() <= expected.abs().max() * limit


def test_one_scale_for_all_weights_rounds_as_well_as_one_for_each_channel() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(256, 512)
    with torch.inference_mode():
        # channels of very different sizes
        layer.weight.mul_(10.0 ** -(torch.arange(512) / 128)[:, None])
        x = torch.randn(64, 256)
        exact = layer(x)
        errors = [
            ((found - exact).square().mean(0) / exact.square().mean(0)).sqrt()
            for found in (Fp8Linear(layer, torch.tensor(5 / MAX_E4M3))(x), QuantisedLayer(layer, 5.0)(x))
        ]
    assert errors[0].max() <= 1.1 * errors[1].max()


def test_a_gelu_before_a_layer_in_fp8_is_a_part_of_it() -> None:
    torch.manual_seed(0)
    first = nn.Linear(32, 64)
    second = Fp8Linear(nn.Linear(64, 32), torch.tensor(4.0 / MAX_E4M3))
    x = torch.randn(5, 32)
    with torch.inference_mode():
        assert torch.equal(apply_mlp(first, nn.GELU(), second, x), second(F.gelu(first(x))))


def test_an_encoder_in_fp8_is_as_near_as_one_that_rounds(weights: Path, tmp_path: Path) -> None:
    scales = save_scales(weights, tmp_path / "scales.json", 8.0)
    model = load_tracker(str(weights), device="cpu")
    fast = make_fp8_encoder(model, make_settings(weights, precision="fp8", scales=scales))
    assert sum(isinstance(layer, Fp8Linear) for layer in fast.modules()) == 8  # four in each of two blocks
    pixels = noise_clip(model.image_size, 1)[0]
    with torch.inference_mode():
        exact = model.encode_stage(pixels)
        found = fast(pixels)
        rounded = quantise_encoder(model, Scales.load(scales))(pixels)
    for right, mine, theirs in zip(exact[:3], found[:3], rounded[:3], strict=True):
        assert (mine - right).norm() <= 1.25 * (theirs - right).norm()


@pytest.mark.engines
@pytest.mark.parametrize("compiled", [False, True])
def test_an_encoder_in_fp8_is_compiled_where_the_settings_ask_for_it(
    compiled: bool, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(fast_torch, "BACKEND", count)
    scales = save_scales(weights, tmp_path / "scales.json", 8.0)
    model = load_tracker(str(weights), device="cpu")
    stages = make_stages(model, make_settings(weights, compile=compiled, precision="fp8", scales=scales))
    with torch.inference_mode():
        stages.encode(noise_clip(model.image_size, 1)[0])
    products = [node for graph in graphs for node in graph.graph.nodes if node.target is torch._scaled_mm]
    assert (len(graphs), len(products)) == ((1, 8) if compiled else (0, 0))


def test_products_in_fp8_have_one_scale_for_each_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels with a scale for each row read beyond the scales if the rows are no multiple of 256."""
    multiply = torch._scaled_mm
    sizes = list[tuple[int, int]]()

    def note(*factors: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, **options: Any) -> Any:
        sizes.append((scale_a.numel(), scale_b.numel()))
        return multiply(*factors, scale_a=scale_a, scale_b=scale_b, **options)

    monkeypatch.setattr(torch, "_scaled_mm", note)
    layer = Fp8Linear(nn.Linear(64, 96), torch.tensor(0.1)).to("meta")  # stands for a GPU
    with torch.inference_mode():
        assert layer(torch.empty(33, 64, device="meta", dtype=torch.bfloat16)).shape == (33, 96)
    assert sizes == [(1, 1)]


@pytest.mark.engines
@pytest.mark.parametrize("graphed", [False, True])
def test_a_detector_shares_the_trunk_of_an_encoder_in_fp8(
    graphed: bool, weights: Path, tmp_path: Path
) -> None:
    scales = save_scales(weights, tmp_path / "scales.json", 8.0)
    model = load_tracker(str(weights), device="cpu")
    model.stages = make_stages(model, make_settings(weights, precision="fp8", scales=scales))
    encode = model.stages.encode
    pixels = noise_clip(model.image_size, 1)[0]
    if graphed:
        on_tape(model)
    with torch.inference_mode():
        assert model.encode(pixels).trunk is None
        assert model.share_trunk() is model.encode_stage.backbone
        trunk = model.encode(pixels).trunk
        assert torch.equal(trunk, encode.get_submodule("backbone")(pixels))
        assert (trunk - model.encode_stage.backbone(pixels)).abs().max() > 0  # the served encoder's own


@pytest.mark.engines
def test_fp8_serves_once_the_gate_has_passed_it(weights: Path, tmp_path: Path) -> None:
    scales = save_scales(weights, tmp_path / "scales.json", 8.0)
    settings = make_settings(
        weights, precision="fp8", scales=scales, fallback=False, min_cosine=0.9, min_iou=0.5
    )
    model = load_model(settings.model, settings.tracker, settings.engine)
    assert any(isinstance(layer, Fp8Linear) for layer in model.stages.encode.modules())
    assert "torch:" not in model.name
    assert model.stages.read is model.memory_attention


def serve_timed(settings: Settings, clock: CountedClock, encode_ms: float) -> str:
    """Serve stages of which the encoder takes this long, where torch's takes 14 ms; return the model's name."""
    model = load_tracker(settings.model.name, device="cpu")
    own = model.stages = model.stages._replace(encode=clock.delay(model.stages.encode, 0.014))
    fast = own._replace(encode=clock.delay(own.encode, encode_ms / 1e3 - 0.014))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_torch, "make_stages", lambda model, settings: fast)
        serve_fast_torch(model, settings, clock)
    assert model.stages is (own if "torch:" in model.name else fast)
    return model.name


@pytest.mark.engines
def test_the_slower_encoder_is_refused(weights: Path, tmp_path: Path) -> None:
    scales = save_scales(weights, tmp_path / "scales.json", 8.0)
    clock = CountedClock()

    def settings(folder: str, **engine: Any) -> Settings:
        return make_settings(
            weights, precision="fp8", scales=scales, folder=tmp_path / folder, **{"max_time": 1.1} | engine
        )

    assert "encode is slower here: 23 against 14 ms" in serve_timed(settings("slow"), clock, 23)
    assert serve_timed(settings("fast"), clock, 9) == weights.name
    # both reports are kept
    assert "encode is slower here: 23 against 14 ms" in serve_timed(settings("slow"), clock, 9)
    assert serve_timed(settings("fast"), clock, 23) == weights.name
    assert serve_timed(settings("slow", max_time=0), clock, 23) == weights.name
    with refuses(EngineError, field=("23 against 14 ms", "--engine.max_time 0")):
        serve_timed(settings("slow", fallback=False), clock, 23)


@pytest.mark.engines
def test_other_arithmetic_is_judged_again(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = list[object]()
    clock = CountedClock()

    def compare(*args: object) -> Report:
        judged.append(args)
        return figures(1.0)

    def count(read: str = "exact", amax: float = 8.0, **change: Any) -> int:
        scales = save_scales(weights, tmp_path / "scales.json", amax)
        options = {"precision": "fp8", "scales": scales, "folder": tmp_path} | change
        before = len(judged)
        for _ in range(2):
            serve_timed(make_settings(weights, read, **options), clock, 9)
        return len(judged) - before

    monkeypatch.setattr(fast_torch, "compare_fast", compare)
    assert count() == 1
    assert count() == 0
    assert count(amax=7.0) == 1
    assert count(read="pooled") == 1
    assert count(read_kernel="torch") == 1
    assert count(compile=True) == 1
    for module, name, other in (
        (torch, "__version__", "2.13.1"),
        (torch.version, "cuda", "13.9"),
        (engine_store, "describe_processor", lambda: "another"),
        (fast_torch, "_sources_digest", lambda: "another"),
        (fast_torch, "find_version", lambda package: "9.9"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, other)
            assert count() == 1, name
    assert count() == 0


@pytest.mark.parametrize(
    ("amax", "engine", "message"),
    [
        pytest.param(1e-3, {}, "refused by the gate", marks=pytest.mark.engines),
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
    assert model.stages.read is model.memory_attention
    strict = settings.engine.model_copy(update={"fallback": False})
    with pytest.raises(EngineError, match=message):
        load_model(settings.model, settings.tracker, strict)


def test_torch_serves_where_a_compiler_does_not_know_the_gpu(
    weights: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class PTXASError(Exception):  # triton's own is no RuntimeError either
        pass

    def fail(*_: object) -> None:
        raise PTXASError("PTXAS error: codegen\n`ptxas` stderr:\nValue 'sm_110a' is not defined")

    monkeypatch.setattr(fast_torch, "_check_kernels", fail)
    settings = make_settings(weights, precision="float32", read_kernel="triton")
    model = load_model(settings.model, settings.tracker, settings.engine)
    assert "PTXASError" in model.name
    assert "'sm_110a' is not defined" in caplog.text
    assert not model.memory_attention.attend.uses_kernels


def test_kernels_that_nobody_asked_for_fail_with_a_line_alone(
    weights: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise EngineError("an error of 0.5")

    caplog.set_level("INFO")
    monkeypatch.setattr(fast_torch, "_check_kernels", fail)
    monkeypatch.setattr(fast_torch, "are_kernels_worth_it", lambda model: True)
    settings = make_settings(weights, precision="float32", fallback=False)
    model = load_model(settings.model, settings.tracker, settings.engine)
    assert "torch:" not in model.name
    assert "an error of 0.5" in caplog.text
    assert not model.memory_attention.attend.uses_kernels


@pytest.mark.engines
def test_kernels_whose_numbers_are_wrong_do_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernels = pytest.importorskip("sam3_node.models.sam.kernels", reason="needs the extra triton")
    monkeypatch.setattr(kernels, "measure_error", lambda device, dtype, launch: 0.5)
    monkeypatch.setattr(kernels, "choose_launch", lambda device: kernels.LARGE[0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    model = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    with refuses(EngineError, field=("0.5", "engine.read_kernel")):
        fast_torch._check_kernels(model, tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"grid": (16, 16)}, False),
        ({"dtype": torch.float32}, False),
        ({"device": torch.device("cpu")}, False),
        ({"capabilities": Capabilities(following="last masks")}, False),
    ],
)
def test_kernels_are_for_large_models_in_half_precision(
    change: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(fast_torch.importlib.util, "find_spec", lambda name: object())
    model = {
        "device": torch.device("cuda"),
        "dtype": torch.bfloat16,
        "grid": (72, 72),
        "capabilities": Capabilities(),
    } | change
    assert fast_torch.are_kernels_worth_it(SimpleNamespace(**model)) is expected  # type: ignore[arg-type]


def test_engines_do_not_approximate(weights: Path) -> None:
    settings = make_settings(weights, read="pooled", kind="inductor", precision="float32")
    with refuses(SettingsError, field=("tracker.read", "engine.kind")):
        load_model(settings.model, settings.tracker, settings.engine)


@pytest.mark.parametrize("method", ["exact", "sparse"])
def test_the_settings_choose_how_memories_are_read(weights: Path, method: str) -> None:
    settings = make_settings(weights, read=method)
    model = load_model(settings.model, settings.tracker, settings.engine)
    assert model.memory_attention.tokens.method == method
