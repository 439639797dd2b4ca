"""Building of plans from typed ONNX, with one code path for TensorRT 10.8 and newer and for TensorRT-RTX."""

from __future__ import annotations

import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from ...errors import EngineError
from ..build_progress import BuildProgress
from ..oom import MEMORY_HINT
from ..specs import MIN_MEMORIES, OBJECTS, Sizes, StageSpec, TensorSpec
from .library import LOCAL, Library, describe_errors, find_library, find_target, get_logger

USUAL_MEMORIES = 7  # of one prompted frame and six others; plans are tuned for them
OPTIMAL_OBJECTS = 4  # the number of objects that a plan is tuned for
POLL_S = 0.2

DTYPES = {
    torch.float32: "FLOAT",
    torch.float16: "HALF",
    torch.bfloat16: "BF16",
    torch.int64: "INT64",
    torch.bool: "BOOL",
}
TensorDescription = tuple[str, str, tuple[int, ...]]
"""Name, dtype as TensorRT names it, and shape with -1 where it varies."""


def build(
    onnx: Path,
    stage: StageSpec,
    gpu: str = LOCAL,
    max_objects: int = 16,
    progress: Callable[[float], None] = lambda fraction: None,
    notes: list[str] | None = None,
) -> bytes:
    """Build the plan of a stage that was exported to `onnx`, for 1 to `max_objects` objects where the stage varies.

    gpu: "this", or a generation such as "sm89"; tensorrt_rtx builds for a generation on any machine. `progress` is
    called in this thread a few times a second with the fraction done, 0 to 1; what it raises stops the build. `notes`
    receives all messages of the library, among them a description of each layer. Raises EngineError with the library's
    own errors, MissingExtraError.
    """
    library = find_library()
    generation = find_target(library, gpu).generation
    logger = get_logger(library.api)
    logger.errors.clear()
    builder = _make_builder(library)
    network, parser = _parse(library, builder, onnx)
    _check_network(network, stage, onnx)
    config = _configure(library, builder, network, stage, generation, max_objects)
    if notes is not None:
        config.profiling_verbosity = library.api.ProfilingVerbosity.DETAILED
    with logger.listen(notes):
        plan = _run_builder(library, builder, network, config, progress)
    del parser  # only now: the network may read weights that the parser holds
    if plan is None:
        raise EngineError(
            f"{stage.name}: {library.name} {library.version} cannot build {onnx}: {describe_errors(logger)}; where "
            f"memory ran out, {MEMORY_HINT}"
        )
    return bytes(plan)


def count_fp8_layers(onnx: Path) -> int:
    """Count the layers of the network in `onnx` that convert numbers to FP8, as the library reads it.

    Raises EngineError where it cannot be read.
    """
    library = find_library()
    get_logger(library.api).errors.clear()
    builder = _make_builder(library)
    network, parser = _parse(library, builder, onnx)
    layers = (network.get_layer(index) for index in range(network.num_layers))
    quantise, eight = library.api.LayerType.QUANTIZE, library.api.DataType.FP8
    count = sum(1 for layer in layers if layer.type == quantise and layer.get_output(0).dtype == eight)
    del parser
    return count


def _make_builder(library: Library) -> Any:
    logger = get_logger(library.api)
    builder = library.api.Builder(logger)
    if not builder:
        raise EngineError(f"{library.name} has no builder: {describe_errors(logger)}")
    return builder


def _parse(library: Library, builder: Any, onnx: Path) -> tuple[Any, Any]:
    """Return the network of a file, and its parser, which must outlive the network."""
    flags = library.api.NetworkDefinitionCreationFlag
    typed = getattr(flags, "STRONGLY_TYPED", None)  # absent in versions whose networks are always typed
    network = builder.create_network(0 if typed is None else 1 << int(typed))
    parser = library.api.OnnxParser(network, get_logger(library.api))
    if not onnx.is_file():
        raise EngineError(f"expected an ONNX file to build, found none at {onnx}")
    if not parser.parse_from_file(str(onnx)):
        errors = "; ".join(parser.get_error(index).desc() for index in range(parser.num_errors))
        raise EngineError(f"{library.name} {library.version} cannot read {onnx}: {errors}")
    return network, parser


def _check_network(network: Any, stage: StageSpec, onnx: Path) -> None:
    """Raise EngineError unless the network's inputs and outputs are those of the stage."""
    actual = [_describe_tensor(network.get_input(index)) for index in range(network.num_inputs)]
    actual += [_describe_tensor(network.get_output(index)) for index in range(network.num_outputs)]
    expected = [_describe_spec(spec) for spec in stage.inputs + stage.outputs]
    for index, tensor in enumerate(actual):
        spec = expected[index] if index < len(expected) else None
        if spec is None or tensor[:2] != spec[:2] or not _fits(tensor[2], spec[2]):
            raise EngineError(f"{onnx} is not the stage {stage.name}: expected {spec}, found {tensor}")
    if len(actual) < len(expected):
        raise EngineError(f"{onnx} is not the stage {stage.name}: it lacks {expected[len(actual)]}")


def _describe_tensor(tensor: Any) -> TensorDescription:
    return tensor.name, tensor.dtype.name, tuple(tensor.shape)


def _describe_spec(spec: TensorSpec) -> TensorDescription:
    shape = tuple(side if isinstance(side, int) else -1 for side in spec.shape)
    return spec.name, DTYPES[spec.dtype], shape


def _fits(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Return True if the shapes are equal in every dimension that the network knows."""
    return len(shape) == len(expected) and all(
        side in (-1, other) for side, other in zip(shape, expected, strict=True)
    )


def _configure(
    library: Library, builder: Any, network: Any, stage: StageSpec, generation: str, max_objects: int
) -> Any:
    """Return the build configuration: target GPU, flags, and the shapes that the plan is tuned for."""
    config = builder.create_builder_config()
    config.clear_flag(library.api.BuilderFlag.TF32)  # TF32 would compute float32 with a shorter mantissa
    if library.cross_builds:
        config.num_compute_capabilities = 1
        config.set_compute_capability(library.api.ComputeCapability.__members__[generation.upper()], 0)
    # tensorrt_rtx 1.2 and newer; without it a plan may allocate memory as it runs, which no CUDA graph can hold
    require_allocation = getattr(library.api.BuilderFlag, "REQUIRE_USER_ALLOCATION", None)
    if require_allocation is not None:
        config.set_flag(require_allocation)
    if stage.varies:
        profile = builder.create_optimization_profile()
        most = stage.max_memories
        sizes = (  # least, usual and greatest
            Sizes(1, min(MIN_MEMORIES, most)),
            Sizes(min(OPTIMAL_OBJECTS, max_objects), min(USUAL_MEMORIES, most)),
            Sizes(max_objects, most),
        )
        for spec in stage.inputs:
            if OBJECTS in spec.shape:
                profile.set_shape(spec.name, *(spec.shape_for(*each) for each in sizes))
        config.add_optimization_profile(profile)
    return config


def _run_builder(
    library: Library, builder: Any, network: Any, config: Any, progress: Callable[[float], None]
) -> Any:
    """Build in a thread of its own, so that an interrupt is raised here and not in the library's callbacks."""
    phases = BuildProgress()
    config.progress_monitor = monitor = _make_monitor(library.api, phases)
    with ThreadPoolExecutor(1, "tensorrt", *_on_current_device()) as pool:
        building = pool.submit(builder.build_serialized_network, network, config)
        try:
            progress(phases.fraction)  # once at least: a small stage is built before the first timeout
            while wait([building], timeout=POLL_S).not_done:
                progress(phases.fraction)
        finally:
            phases.cancelled = not building.done()
        plan = building.result()
    del monitor
    return plan


def _on_current_device() -> tuple[Callable[[int], None], tuple[int]] | tuple[()]:
    """Return what a new thread must call to use this thread's GPU: threads begin on the first one."""
    if not torch.cuda.is_available():
        return ()
    return torch.cuda.set_device, (torch.cuda.current_device(),)


class _ProgressMonitor:
    """Behaviour of the library's progress monitor: it passes the phases of a build on."""

    def __init__(self, phases: BuildProgress) -> None:
        super().__init__()  # the library's own base class, which must be initialised
        self._progress = phases

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        self._progress.start(phase_name, parent_phase, num_steps)

    def step_complete(self, phase_name: str, step: int) -> bool:
        self._progress.step(phase_name)
        return not self._progress.cancelled

    def phase_finish(self, phase_name: str) -> None:
        self._progress.finish(phase_name)


def _make_monitor(api: Any, phases: BuildProgress) -> Any:
    """Return a monitor for `phases`; its base class is the library's, which is imported only here."""
    make: Callable[[BuildProgress], Any] = types.new_class(
        "Monitor", (_ProgressMonitor, api.IProgressMonitor)
    )
    return make(phases)
