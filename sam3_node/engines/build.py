"""`engine build`: a model's stages exported, quantised where asked for, built by TensorRT or compiled, and kept."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import NamedTuple, Self

from pydantic import ValidationError

from ..errors import EngineError
from ..models import TrackerModel, load_tracker
from ..settings import EngineSettings, Settings
from .build_progress import ProgressLine
from .export import export
from .inductor import INDUCTOR, build_package, require_compiler
from .key import FP8, arithmetic, identity_of
from .oom import telling_out_of_memory
from .quantize import Scales, export_quantised
from .recipes import Recipe, load_recipe
from .specs import StageSpec, stages_of
from .store import Built, EngineStore, Identity
from .tensorrt.build import build, fp8_layers
from .tensorrt.library import LOCAL, find_library

SCALES, RECIPE = "scales.json", "recipe.json"


class Quantisation(NamedTuple):
    """How an encoder becomes FP8; without a recipe as `Recipe()`."""

    scales: Scales
    recipe: Recipe | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of all that it changes in an engine."""
        recipe = self.recipe or Recipe()
        text = f"{self.scales.model_dump_json()} {recipe.model_dump_json()}"
        return hashlib.sha256(text.encode()).hexdigest()

    def keep(self, built: Built) -> None:
        """Write it beside the engines that it is in, so that the gate can tell which layers differ."""
        recipe = self.recipe or Recipe()
        for name, section in ((SCALES, self.scales), (RECIPE, recipe)):
            (built.folder / name).write_text(section.model_dump_json(indent=1) + "\n")

    @classmethod
    def kept(cls, built: Built) -> Self | None:
        """What `keep` wrote; None where that is absent or not what these engines were built with."""
        try:
            scales = Scales.load(built.folder / SCALES)
            recipe = Recipe.model_validate_json((built.folder / RECIPE).read_bytes())
        except (OSError, EngineError, ValidationError):
            return None
        found = cls(scales, recipe)
        return found if found.digest == built.manifest.scales else None


class _TensorRT:
    """Makes plans of a model's stages, the encoder's in FP8 where a quantisation says how."""

    def __init__(self, model: TrackerModel, identity: Identity, quantisation: Quantisation | None) -> None:
        self._model, self._identity, self._quantisation = model, identity, quantisation
        self.fp8_layers = 0

    def __call__(self, stage: StageSpec, line: ProgressLine) -> bytes:
        line.say("exporting")
        with tempfile.TemporaryDirectory(prefix="sam3_node_engine_") as folder:
            path = Path(folder) / f"{stage.name}.onnx"
            if self._quantisation is not None and stage.name == "encode":
                self.fp8_layers = _export_fp8(self._model, self._quantisation, path)
            else:
                export(stage, path)
            return build(path, stage, self._identity.gpu, self._identity.most_objects, line)


class _Inductor:
    """Makes packages of stages."""

    fp8_layers = 0

    def __call__(self, stage: StageSpec, line: ProgressLine) -> bytes:
        line.say("compiling")
        return build_package(stage)


def build_engines(settings: Settings, gpu: str = LOCAL, quantisation: Quantisation | None = None) -> Built:
    """Build and keep the engines that `settings` ask for: model, tracker and engine sections.

    gpu: "this", or a generation such as "sm89". Tells of its progress on stderr. Raises EngineError, ModelError or
    MissingExtraError that say what is wrong and what to do; then nothing is kept.
    """
    engine = settings.engine
    _require_scales(engine, quantisation)
    if engine.kind == INDUCTOR:  # what is absent is told before anything takes time
        require_compiler()
    else:
        find_library()
    store = EngineStore(engine.folder)
    with telling_out_of_memory(EngineError, "while engines were built"):
        model = _load(settings)
        identity = identity_of(model, settings, gpu)
        make = _Inductor() if engine.kind == INDUCTOR else _TensorRT(model, identity, quantisation)
        plans, build_s = _build_all(model, identity, store, make)
    built = store.save(
        identity,
        plans,
        build_s,
        scales=quantisation.digest if quantisation else "",
        fp8_layers=make.fp8_layers,
    )
    if quantisation is not None:
        quantisation.keep(built)
    return built


def read_quantisation(scales: Path | None, recipe: Path | None) -> Quantisation | None:
    """From the files that the command line names; None for neither. Raises EngineError or SettingsError."""
    if scales is None:
        if recipe is not None:
            raise EngineError(f"expected --scales FILE with --recipe {recipe}, found the recipe alone")
        return None
    return Quantisation(Scales.load(scales), load_recipe(recipe) if recipe else None)


def _load(settings: Settings) -> TrackerModel:
    """The model in the engines' arithmetic."""
    wanted = settings.model
    dtype = arithmetic(settings.engine.precision)
    model = load_tracker(wanted.name, device=wanted.device, dtype=dtype, image_size=wanted.image_size)
    if not model.can_track:
        raise EngineError(f"{model.name} has no memory modules: expected weights that can track for engines")
    return model


def _build_all(
    model: TrackerModel, identity: Identity, store: EngineStore, make: _TensorRT | _Inductor
) -> tuple[dict[str, bytes], dict[str, float]]:
    """The plan of each stage, and the seconds that it took."""
    stages = stages_of(model, identity.bank_size)
    plans, build_s = {}, {}
    for number, (name, stage) in enumerate(stages.items(), start=1):
        title = f"{name} ({number} of {len(stages)})"
        with ProgressLine(title, store.expected_s(identity, name)) as line:
            plans[name] = make(stage, line)
        build_s[name] = round(line.elapsed_s, 1)
    return plans, build_s


def _export_fp8(model: TrackerModel, quantisation: Quantisation, path: Path) -> int:
    """Write the quantised encoder; how many FP8 layers TensorRT finds in it."""
    export_quantised(model, quantisation.scales, quantisation.recipe, path)
    count = fp8_layers(path)
    if not count:
        raise EngineError(
            f"{model.name}: expected an encoder with FP8 layers, TensorRT finds none in it; check the recipe"
        )
    return count


def _require_scales(engine: EngineSettings, quantisation: Quantisation | None) -> None:
    """Raise EngineError unless there are scales for fp8, and for nothing else."""
    if engine.kind == INDUCTOR and quantisation is None:
        return
    if engine.kind == INDUCTOR:
        raise EngineError(
            "scales are for fp8, which TensorRT has: expected none of them with engine.kind inductor"
        )
    if engine.precision == FP8 and quantisation is None:
        raise EngineError(
            "engine.precision fp8: expected the scales of a calibration, found none; make them with `sam3-node "
            "calibrate fp8 SOURCE -o FILE` and build with --scales FILE"
        )
    if engine.precision != FP8 and quantisation is not None:
        raise EngineError(
            f"scales are for fp8: expected --engine.precision fp8 with them, found {engine.precision}"
        )
