"""The tracker's engine slot: engines in the place of a model's four stages."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn

from ..errors import EngineError
from ..models import TrackerModel, load_tracker
from ..models.sam.stages import Run, Stages
from ..settings import Settings
from .gate_clip import GateClip
from .inductor import INDUCTOR, InductorRun
from .key import FP8, choose_model_dtype, compute_key, resolve_dtype
from .oom import reraise_out_of_memory
from .quantize import Quantisation, quantise_encoder
from .report import Report
from .slot import EngineSlot, LoadedEngines, require_gpu, shorten_reason
from .specs import STAGES, StageSpec, WholeBankRead, fix_memories, has_trunk, tracker_stages
from .store import EngineKey, StoredEngine
from .tensorrt.run import TensorRTRun, Workspace
from .validation import compare_stages, fit_stages

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
        built = {**specs, "read": fix_memories(specs["read"])} if not stored.manifest.any_memories else specs
        load = self._load_packages if self.settings.engine.kind == INDUCTOR else self._load_plans
        runs = load(stored, built)
        if built is not specs:
            runs["read"] = WholeBankRead(runs["read"], specs["read"].max_memories)
        return LoadedEngines(stored, runs, specs)

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
