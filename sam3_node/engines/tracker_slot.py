"""The tracker's engine slot: engines in the place of a model's four stages.

Faster stages of torch itself, for `engine.kind` torch: the encoder in FP8, the memory read by Triton kernels.

They need no build: they are made when the model is loaded, and the gate judges them then, every time.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import EngineError
from ..models import TrackerModel, load_tracker
from ..models.sam.stages import Run, Stages
from ..settings import Settings
from .inductor import INDUCTOR, InductorRun
from .oom import STAGE_ERRORS, reraise_out_of_memory, summarize_error
from .quantize import (
    CALIBRATE_HINT,
    MAX_E4M3,
    Quantisation,
    QuantisedLayer,
    Scales,
    load_recipe,
    quantise_encoder,
)
from .slot import EngineSlot, GateClip, LoadedEngines, attempt, read_gate_clip, require_gpu, shorten_reason
from .specs import STAGES, StageSpec, has_trunk, tracker_stages
from .store import FP8, EngineKey, StoredEngine, choose_model_dtype, compute_key, resolve_dtype
from .tensorrt.run import TensorRTRun, Workspace
from .validation import Report, compare_stages, fit_stages

_log = logging.getLogger(__name__)


def serve_tracker(model: TrackerModel, settings: Settings) -> None:
    """Put the engines that `settings` ask for into `model.stages`, once the gate has passed them.

    Torch still answers prompts. Where engines cannot serve and `engine.fallback` is on, the model keeps its stages and
    its name says why. See `EngineSlot.serve` for the errors.
    """
    if settings.engine.kind != "torch":
        TrackerSlot(model, settings).serve()


def check_tracker(settings: Settings, source: str | Path | None = None) -> Report:
    """Run the gate on the engines that `settings` ask for, and store its report beside them; see `EngineSlot.check`."""
    with reraise_out_of_memory(EngineError, f"while {settings.model.name} was loaded"):
        model = _load_model(settings)
    return TrackerSlot(model, settings).check(source)


def use_torch(model: TrackerModel, stages: Stages, settings: Settings, reason: EngineError) -> None:
    """Let the model's own torch stages serve in the place of engines that failed; the model's name says why."""
    _log.warning("engines cannot serve, torch does: %s", reason)
    model.stages, model.static_shapes = stages, settings.model.compile
    model.name = f"{model.name} (torch: {shorten_reason(reason)})"
    if model.device.type == "cuda":
        torch.cuda.empty_cache()


class TrackerSlot(EngineSlot):
    """The slot of a tracker's four stages."""

    subject = "engines"

    def __init__(self, model: TrackerModel, settings: Settings) -> None:
        super().__init__(settings)
        self.model, self._torch_stages = model, model.stages

    def require_device(self) -> None:
        if self.settings.engine.kind != INDUCTOR:
            require_gpu(self.model.device)

    def compute_key(self) -> EngineKey:
        return compute_key(self.model, self.settings)

    def load(self, stored: StoredEngine) -> LoadedEngines:
        dtype = resolve_dtype(self.settings.engine.precision)
        specs = tracker_stages(self.model, dtype=dtype, trunk=stored.manifest.key.trunk)
        load = self._load_packages if self.settings.engine.kind == INDUCTOR else self._load_plans
        return LoadedEngines(stored, load(stored, specs), specs)

    def _load_packages(self, stored: StoredEngine, specs: Mapping[str, StageSpec]) -> dict[str, Run]:
        device = self.model.device
        return {name: InductorRun(stored.read_plan(name), specs[name], device) for name in STAGES}

    def _load_plans(self, stored: StoredEngine, specs: Mapping[str, StageSpec]) -> dict[str, Run]:
        """Load plans that share one block of memory, and allocate it: it is known now whether it fits."""
        device = self.model.device
        workspace = Workspace(device)
        runs: dict[str, Run] = {
            name: TensorRTRun(
                stored.read_plan(name), specs[name], device, workspace, stored.kernels_path(name)
            )
            for name in STAGES
        }
        workspace.allocate()
        return runs

    def compare(self, engines: LoadedEngines, clip: GateClip) -> Report:
        engine = self.settings.engine
        reference = _load_model(self.settings, torch.float32)
        if has_trunk(engines.specs):
            reference.share_trunk()
        return compare_stages(
            reference,
            _list_runs(engines),
            clip.frames,
            engine.min_cosine,
            engine.min_iou,
            dtype=resolve_dtype(engine.precision),
            prompts=clip.prompts(reference.image_size),
            find_module=partial(self._load_module, engines),
            served=self.model,
        )

    def install(self, engines: LoadedEngines) -> None:
        self.model.stages = fit_stages(_list_runs(engines), engines.specs, self.model)
        self.model.static_shapes = True

    def fall_back(self, reason: EngineError) -> None:
        use_torch(self.model, self._torch_stages, self.settings, reason)

    def _load_module(self, engines: LoadedEngines, name: str) -> nn.Module | None:
        """Load the torch module of a stage in the dtype of its engine, to compare layers.

        None for an FP8 encoder whose scales and recipe are not stored beside its engines.
        """
        precision = self.settings.engine.precision
        model = _load_model(self.settings, resolve_dtype(precision))
        if has_trunk(engines.specs):
            model.share_trunk()
        if precision == FP8 and name == "encode":
            quantisation = Quantisation.load(engines.stored)
            return quantise_encoder(model, *quantisation) if quantisation else None
        return tracker_stages(model)[name].module


def _list_runs(engines: LoadedEngines) -> Stages:
    return Stages(*(engines.runs[name] for name in STAGES))


def _load_model(settings: Settings, dtype: torch.dtype | None = None) -> TrackerModel:
    """Load the model that the settings name, in the dtype that it serves in, or in another one."""
    source, chosen = settings.model, dtype or choose_model_dtype(settings)
    return load_tracker(source.name, device=source.device, dtype=chosen, image_size=source.image_size)


TRITON = "triton"
MULTIPLE = 16
"""The sides of FP8 matrices on a GPU are multiples of this."""


class Fp8Linear(nn.Module):
    """A linear layer whose product is computed in FP8 (`torch._scaled_mm`), with the scales of a `QuantisedLayer`.

    Inputs have one scale, weights one for each output channel. Sums, scales and bias are in float32 until the result is
    rounded once. torch.compile joins the rounding of the inputs with what comes before it, such as a GELU.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor
    bias: Tensor | None

    def __init__(self, rounded: QuantisedLayer) -> None:
        super().__init__()
        layer = rounded.layer
        scale = rounded.weight_scale.float()[:, None]
        self.register_buffer("weight", _to_fp8(layer.weight.detach() / scale), persistent=False)
        self.register_buffer("weight_scale", scale.T.contiguous(), persistent=False)  # [1, out]
        self.register_buffer("input_scale", rounded.input_scale.float().reshape(1, 1), persistent=False)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] to [..., out], in the dtype of x."""
        flat = _to_fp8(x.flatten(0, -2).float() / self.input_scale)
        scale = self.input_scale.repeat(len(flat), 1)
        out: Tensor = torch._scaled_mm(
            flat, self.weight.T, scale_a=scale, scale_b=self.weight_scale, bias=self.bias, out_dtype=x.dtype
        )
        return out.view(*x.shape[:-1], -1)


def _to_fp8(x: Tensor) -> Tensor:
    return x.clamp(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn)


def make_fp8_encoder(model: TrackerModel, settings: Settings) -> nn.Module:
    """Return a copy of the encoder whose linear layers of the recipe compute in FP8.

    Convolutions, and layers whose sides are no multiples of 16, round to FP8 and compute in the model's dtype. Raises
    EngineError without scales, or for scales or a recipe that do not fit.
    """
    engine = settings.engine
    if engine.scales is None:
        raise EngineError(
            "engine.precision fp8: expected engine.scales with the output of a calibration, found none; "
            + CALIBRATE_HINT
        )
    recipe = load_recipe(engine.recipe) if engine.recipe else None
    stage = quantise_encoder(model, Scales.load(engine.scales), recipe)
    for name, layer in list(stage.named_modules()):
        if isinstance(layer, QuantisedLayer) and _multiplies_in_fp8(layer.layer):
            stage.set_submodule(name, Fp8Linear(layer))
    return stage


def _multiplies_in_fp8(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and not (
        layer.in_features % MULTIPLE or layer.out_features % MULTIPLE
    )


def serve_fast_torch(model: TrackerModel, settings: Settings) -> None:
    """Put the faster stages that `settings` ask for into `model.stages`, once the gate has passed them.

    Where they cannot serve and `engine.fallback` is on, the model keeps its stages and its name says why. Otherwise
    raises EngineError or MissingExtraError.
    """
    engine = settings.engine
    if engine.kind != "torch" or (engine.precision != FP8 and engine.read_kernel != TRITON):
        return
    stages = model.stages

    def serve() -> None:
        fast = make_stages(model, settings)
        try:
            report = compare(fast, model, settings)
        except STAGE_ERRORS:
            raise
        except Exception as error:  # triton has errors of its own, such as for a GPU without the memory
            raise EngineError(f"torch's faster stages fail: {summarize_error(error)}") from error
        if refusal := report.refusal():
            raise EngineError(f"torch's faster stages refused by the gate: {refusal}")
        model.stages = fast

    if reason := attempt(serve, engine):
        use_torch(model, stages, settings, reason)


def make_stages(model: TrackerModel, settings: Settings) -> Stages:
    """Return the model's stages with those in place that the settings ask for. The model is not changed."""
    stages, replaced = model.stages, dict[str, nn.Module]()
    if settings.engine.precision == FP8:
        replaced["encode"] = make_fp8_encoder(model, settings)
    if settings.engine.read_kernel == TRITON:
        _require_half_on_gpu(model)
        read = copy.deepcopy(model.read_stage)
        read.use_kernels()
        replaced["read"] = read
    if settings.model.compile:
        for stage in replaced.values():
            stage.compile(dynamic=False)
    return stages._replace(**replaced)


def _require_half_on_gpu(model: TrackerModel) -> None:
    if model.device.type != "cuda" or model.dtype == torch.float32:
        raise EngineError(
            "engine.read_kernel triton: expected a model on CUDA in bfloat16 or float16, found one on "
            f"{model.device.type} in {str(model.dtype).removeprefix('torch.')}; use --engine.read_kernel torch"
        )


def compare(stages: Stages, model: TrackerModel, settings: Settings) -> Report:
    """Run the gate: compare stages with the model's in float32, whose memory read is the same, on the bundled clip."""
    source, engine = settings.model, settings.engine
    with reraise_out_of_memory(
        EngineError, "while torch's faster stages were compared with torch in float32"
    ):
        reference = load_tracker(
            source.name, device=source.device, dtype=torch.float32, image_size=source.image_size
        )
        reference.use_read(settings.tracker.read)
        clip = read_gate_clip()
        prompts = clip.prompts(reference.image_size)
        thresholds = engine.min_cosine, engine.min_iou
        return compare_stages(
            reference, stages, clip.frames, *thresholds, dtype=model.dtype, prompts=prompts, served=model
        )
