"""Plans built by TensorRT 10.8 and newer, or TensorRT-RTX, from typed ONNX: one code path for all of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from ...errors import EngineError
from ..build_progress import Phases
from ..oom import ROOM
from ..specs import OBJECTS, StageSpec, TensorSpec
from .library import LOCAL, Library, find_library, log_of, target, told

USUAL_OBJECTS = 4  # what a plan is tuned for
POLL_S = 0.2
Progress = Callable[[float], None]
"""Is told, some times a second, how much of a build is done, 0 to 1."""

DTYPES = {
    torch.float32: "FLOAT",
    torch.float16: "HALF",
    torch.bfloat16: "BF16",
    torch.int64: "INT64",
    torch.bool: "BOOL",
}


def build(
    onnx: Path,
    stage: StageSpec,
    gpu: str = LOCAL,
    most_objects: int = 16,
    progress: Progress = lambda fraction: None,
) -> bytes:
    """The plan of a stage that was exported to `onnx`, for 1 to `most_objects` objects where the stage varies.

    gpu: "this", or a generation such as "sm89", which tensorrt_rtx builds for anywhere. `progress` is called in this
    thread; what it raises stops the build. Raises EngineError with the library's own errors, MissingExtraError.
    """
    library = find_library()
    generation = target(library, gpu).generation
    log = log_of(library.api)
    log.errors.clear()
    builder = _made(library.api.Builder(log), log, f"{library.name} has no builder")
    network, parser = _parsed(library, builder, onnx)
    _check(network, stage, onnx)
    config = _configured(library, builder, network, stage, generation, most_objects)
    plan = _run(library, builder, network, config, progress)
    del parser  # the network may read weights that it holds
    if plan is None:
        raise EngineError(
            f"{stage.name}: {library.name} {library.version} cannot build {onnx}: {told(log)}; where memory ran out, "
            f"{ROOM}"
        )
    return bytes(plan)


def fp8_layers(onnx: Path) -> int:
    """How many layers of the network in `onnx` turn numbers into FP8, as the library reads it.

    Raises EngineError where it cannot be read.
    """
    library = find_library()
    log = log_of(library.api)
    log.errors.clear()
    builder = _made(library.api.Builder(log), log, f"{library.name} has no builder")
    network, parser = _parsed(library, builder, onnx)
    layers = (network.get_layer(index) for index in range(network.num_layers))
    quantise, eight = library.api.LayerType.QUANTIZE, library.api.DataType.FP8
    count = sum(layer.type == quantise and layer.get_output(0).dtype == eight for layer in layers)
    del parser
    return count


def _made(thing: Any, log: Any, wrong: str) -> Any:
    if not thing:
        raise EngineError(f"{wrong}: {told(log)}")
    return thing


def _parsed(library: Library, builder: Any, onnx: Path) -> tuple[Any, Any]:
    """The network of a file, and the parser, which must outlive it."""
    flags = library.api.NetworkDefinitionCreationFlag
    typed = getattr(flags, "STRONGLY_TYPED", None)  # gone where networks are never anything else
    network = builder.create_network(0 if typed is None else 1 << int(typed))
    parser = library.api.OnnxParser(network, log_of(library.api))
    if not onnx.is_file():
        raise EngineError(f"expected an ONNX file to build, found none at {onnx}")
    if not parser.parse_from_file(str(onnx)):
        found = "; ".join(parser.get_error(index).desc() for index in range(parser.num_errors))
        raise EngineError(f"{library.name} {library.version} cannot read {onnx}: {found}")
    return network, parser


def _check(network: Any, stage: StageSpec, onnx: Path) -> None:
    """Raise EngineError unless the network takes and gives what the stage does."""
    found = [_described(network.get_input(index)) for index in range(network.num_inputs)]
    found += [_described(network.get_output(index)) for index in range(network.num_outputs)]
    expected = [(port.name, DTYPES[port.dtype], _open_shape(port)) for port in stage.inputs + stage.outputs]
    for index, have in enumerate(found):
        want = expected[index] if index < len(expected) else None
        if want is None or have[:2] != want[:2] or not _fits(have[2], want[2]):
            raise EngineError(f"{onnx} is not the stage {stage.name}: expected {want}, found {have}")
    if len(found) < len(expected):
        raise EngineError(f"{onnx} is not the stage {stage.name}: it lacks {expected[len(found)]}")


def _described(tensor: Any) -> tuple[str, str, tuple[int, ...]]:
    return tensor.name, tensor.dtype.name, tuple(tensor.shape)


def _open_shape(port: TensorSpec) -> tuple[int, ...]:
    """The shape with -1 where it varies."""
    return tuple(-1 if side == OBJECTS else int(side) for side in port.shape)


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether they are equal as far as the network knows its own."""
    return len(shape) == len(wanted) and all(
        have in (-1, want) for have, want in zip(shape, wanted, strict=True)
    )


def _configured(
    library: Library, builder: Any, network: Any, stage: StageSpec, generation: str, most_objects: int
) -> Any:
    config = builder.create_builder_config()
    config.clear_flag(library.api.BuilderFlag.TF32)  # float32 is float32
    if library.cross_builds:
        config.num_compute_capabilities = 1
        config.set_compute_capability(library.api.ComputeCapability.__members__[generation.upper()], 0)
    # tensorrt_rtx from 1.2 on; without it a plan may take memory as it runs, which no CUDA graph can hold
    given_memory = getattr(library.api.BuilderFlag, "REQUIRE_USER_ALLOCATION", None)
    if given_memory is not None:
        config.set_flag(given_memory)
    if stage.varies:
        profile = builder.create_optimization_profile()
        for port in stage.inputs:
            if OBJECTS in port.shape:
                sizes = (1, min(USUAL_OBJECTS, most_objects), most_objects)
                profile.set_shape(port.name, *(port.sized(objects) for objects in sizes))
        config.add_optimization_profile(profile)
    return config


def _run(library: Library, builder: Any, network: Any, config: Any, progress: Progress) -> Any:
    """Build in a thread of its own, so that an interrupt finds this one, never the library's callbacks."""
    phases = Phases()
    config.progress_monitor = monitor = _monitor(library.api, phases)
    with ThreadPoolExecutor(1, "tensorrt") as pool:
        building = pool.submit(builder.build_serialized_network, network, config)
        try:
            while wait([building], timeout=POLL_S).not_done:
                progress(phases.fraction)
        finally:
            phases.cancelled = not building.done()
        plan = building.result()
    del monitor
    return plan


def _monitor(api: Any, phases: Phases) -> Any:
    base: Any = api.IProgressMonitor

    class Monitor(base):
        def __init__(self) -> None:
            base.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            phases.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            phases.step(phase_name)
            return not phases.cancelled

        def phase_finish(self, phase_name: str) -> None:
            phases.finish(phase_name)

    return Monitor()
