"""Building of engines, as `engine build` does it: export, quantise where asked, build or compile, and store."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ..errors import EngineError
from ..models import TrackerModel
from ..settings import EngineSettings, Settings
from .engine_store import FP8, EngineKey, EngineStore, StoredEngine, compute_key, load_stages
from .export import MAX_OBJECTS, BuildStep, ReportProgress, export, ignore_progress
from .inductor import INDUCTOR, build_package, require_compiler
from .oom import reraise_out_of_memory
from .quantize import Quantisation, Scales, export_quantised, load_recipe
from .specs import StageSpec, tracker_stages
from .tensorrt.builder import LOCAL, build, count_fp8_layers, find_library, find_local_gpu
from .tensorrt.runtime import require_fused

TIMINGS = "timing.cache"
USUAL_SIDE = 1008
"""Side in pixels of the input to which MAX_PLAN_BYTES applies. For another size, the bound grows with the area."""
MAX_PLAN_BYTES = 2e9
"""Device memory in bytes above which a plan has not fused its attention: it stores the attention scores of the read.
Those of 4 objects are 4 x 5184 x 51,964 x 2 bytes, 2.15 GB. A fused plan needs about half."""


def _build_plan(
    model: TrackerModel,
    key: EngineKey,
    quantisation: Quantisation | None,
    timings: Path,
    stage: StageSpec,
    step: BuildStep,
) -> bytes:
    """Build the plan of a model's stage; with a quantisation, the encoder's plan is in FP8."""
    with tempfile.TemporaryDirectory(prefix="sam3_node_engine_") as folder:
        # the parser takes a path, because weights above 1.5 GB lie in a second file beside the model
        path = Path(folder) / f"{stage.name}.onnx"
        if quantisation is not None and stage.name == "encode":
            _export_fp8(model, quantisation, path)
        else:
            export(stage, path)
        most = limit_objects(model, stage, key.max_objects)
        plan = build(path, stage, key.gpu, most, step.update, timings=timings)
    # the memory that a plan needs is known once it is loaded, which takes the GPU that it is for
    local = find_local_gpu()
    if local is not None and local.generation == key.gpu:
        require_fused(plan, stage, MAX_PLAN_BYTES * max(1.0, (key.image_size / USUAL_SIDE) ** 2))
    return plan


def limit_objects(model: TrackerModel, stage: StageSpec, max_objects: int) -> int:
    """Return the largest number of objects, or of groups of objects, that the plan of a stage takes.

    The tracker splits a frame's objects into calls, so a plan for fewer of them serves as well.
    """
    return model.capabilities.limit_rows(stage.name, min(max_objects, MAX_OBJECTS))


def build_engines(
    settings: Settings,
    gpu: str = LOCAL,
    quantisation: Quantisation | None = None,
    progress: ReportProgress = ignore_progress,
) -> StoredEngine:
    """Build and store the engines that `settings` ask for in their model, tracker and engine sections.

    gpu: "this", or a generation such as "sm89". Raises EngineError, ModelError or MissingExtraError that say what is
    wrong and what to do; nothing is stored then.
    """
    engine = settings.engine
    _check_scales(engine, quantisation)
    if engine.kind == INDUCTOR:  # check requirements before any slow step
        require_compiler()
    else:
        find_library()
    store = EngineStore(engine.folder)
    with reraise_out_of_memory(EngineError, "while engines were built"):
        model = load_stages(settings)
        key = compute_key(model, settings, gpu)
        plan = partial(_build_plan, model, key, quantisation, store.folder / TIMINGS)
        # torch's compiler reports no progress, so the step is not passed on
        builder = (lambda stage, step: build_package(stage)) if engine.kind == INDUCTOR else plan
        plans, build_s = _build_stages(model, key, store, builder, progress)
    # nothing is stored before all stages are built, so a failure leaves earlier engines as they were
    stored = store.save(key, plans, build_s, scales=quantisation.digest if quantisation else "")
    if quantisation is not None:
        quantisation.save(stored)
    return stored


def read_quantisation(scales: Path | None, recipe: Path | None) -> Quantisation | None:
    """Read the files that the command line names; None without scales. Raises EngineError or SettingsError."""
    if scales is None:
        if recipe is not None:
            raise EngineError(f"expected --scales FILE with --recipe {recipe}, found the recipe alone")
        return None
    return Quantisation(Scales.load(scales), load_recipe(recipe))


def _build_stages(
    model: TrackerModel,
    key: EngineKey,
    store: EngineStore,
    builder: Callable[[StageSpec, BuildStep], bytes],
    progress: ReportProgress,
) -> tuple[dict[str, bytes], dict[str, float]]:
    """Return the plan of each stage, and the seconds that it took."""
    stages = tracker_stages(model, key.bank_size)
    plans = {}
    build_s = {}
    for number, (name, stage) in enumerate(stages.items(), start=1):
        title = f"{name} ({number} of {len(stages)})"
        step = BuildStep(title, progress, store.expected_s(key, name))
        plans[name] = builder(stage, step)
        build_s[name] = step.finish()
    return plans, build_s


def _export_fp8(model: TrackerModel, quantisation: Quantisation, path: Path) -> None:
    """Write the quantised encoder. Raises EngineError unless TensorRT reads FP8 layers from it."""
    export_quantised(model, quantisation.scales, path, quantisation.recipe)
    if not count_fp8_layers(path):
        raise EngineError(
            f"{model.name}: expected an encoder with FP8 layers, TensorRT finds none in it; check the recipe"
        )


def _check_scales(engine: EngineSettings, quantisation: Quantisation | None) -> None:
    """Raise EngineError if there are no scales for fp8, or if there are scales for any other engine."""
    needs_scales = engine.kind != INDUCTOR and engine.precision == FP8
    if needs_scales and quantisation is None:
        raise EngineError(
            "engine.precision fp8: expected the scales of a calibration, found none; make them with `sam3-node "
            "calibrate fp8 SOURCE -o FILE` and build with --scales FILE"
        )
    if quantisation is not None and not needs_scales:
        raise EngineError(
            "scales are for fp8 engines of TensorRT: expected --engine.kind tensorrt --engine.precision fp8 with "
            f"scales, found {engine.kind} and {engine.arithmetic}"
        )
