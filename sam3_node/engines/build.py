"""`engine build`: a model's stages exported, quantised where asked for, built by TensorRT, and kept."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import NamedTuple, Self

from pydantic import ValidationError

from ..errors import EngineError
from ..models import TrackerModel, load_tracker
from ..settings import Settings
from .export import export
from .failures import telling_out_of_memory
from .identity import FP8, arithmetic, identity_of
from .phases import ProgressLine
from .ports import stages_of
from .quantize import Scales, export_quantised
from .recipes import Recipe, load_recipe
from .store import Built, EngineStore, Identity
from .tensorrt import build, fp8_layers
from .tensorrt_library import LOCAL, find_library

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


class _Plans(NamedTuple):
    plans: dict[str, bytes]
    build_s: dict[str, float]
    fp8_layers: int


def build_engines(settings: Settings, gpu: str = LOCAL, quantisation: Quantisation | None = None) -> Built:
    """Build and keep the engines that `settings` ask for: model, tracker and engine sections.

    gpu: "this", or a generation such as "sm89". Tells of its progress on stderr. Raises EngineError, ModelError or
    MissingExtraError that say what is wrong and what to do; then nothing is kept.
    """
    engine = settings.engine
    if (engine.precision == FP8) != (quantisation is not None):
        raise EngineError(_scales_advice(engine.precision))
    find_library()  # its absence is told before anything takes time
    store = EngineStore(engine.folder)
    with telling_out_of_memory(EngineError, "while engines were built"):
        model = _load(settings)
        identity = identity_of(model, settings, gpu)
        made = _build_all(model, identity, store, quantisation)
    built = store.save(
        identity,
        made.plans,
        made.build_s,
        scales=quantisation.digest if quantisation else "",
        fp8_layers=made.fp8_layers,
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
    model: TrackerModel, identity: Identity, store: EngineStore, quantisation: Quantisation | None
) -> _Plans:
    stages = stages_of(model, identity.bank_size)
    made = _Plans({}, {}, 0)
    with tempfile.TemporaryDirectory(prefix="sam3_node_engine_") as folder:
        for number, (name, stage) in enumerate(stages.items(), start=1):
            title, before_s = f"{name} ({number} of {len(stages)})", store.expected_s(identity, name)
            path = Path(folder) / f"{name}.onnx"
            with ProgressLine(title, before_s) as line:
                line.say("exporting")
                if quantisation is not None and name == "encode":
                    made = made._replace(fp8_layers=_export_fp8(model, quantisation, path))
                else:
                    export(stage, path)
                made.plans[name] = build(path, stage, identity.gpu, identity.most_objects, line)
            made.build_s[name] = round(line.elapsed_s, 1)
    return made


def _export_fp8(model: TrackerModel, quantisation: Quantisation, path: Path) -> int:
    """Write the quantised encoder; how many FP8 layers TensorRT finds in it."""
    export_quantised(model, quantisation.scales, quantisation.recipe, path)
    count = fp8_layers(path)
    if not count:
        raise EngineError(
            f"{model.name}: expected an encoder with FP8 layers, TensorRT finds none in it; check the recipe"
        )
    return count


def _scales_advice(precision: str) -> str:
    if precision == FP8:
        return (
            "engine.precision fp8: expected the scales of a calibration, found none; make them with `sam3-node "
            "calibrate fp8 SOURCE -o FILE` and build with --scales FILE"
        )
    return f"scales are for fp8: expected --engine.precision fp8 with them, found {precision}"
