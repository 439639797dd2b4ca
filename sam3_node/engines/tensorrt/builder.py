"""Build plans from typed ONNX, with one code path for TensorRT 10.3 to 11 and for TensorRT-RTX.

`tensorrt` (data-centre GPUs, Jetson) and `tensorrt_rtx` (RTX GPUs) have the same interface under two names;
`find_library` says which is installed.
"""

import logging
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ...errors import EngineError, MissingExtraError, install_advice, require
from ...files import keep, read_kept
from ..oom import MEMORY_HINT
from ..specs import MIN_MEMORIES, OBJECTS, Sizes, StageSpec
from .packages import PACKAGES, make_missing

LOCAL = "this"
_log = logging.getLogger(__name__)


class Library(NamedTuple):
    """One of the two packages: `name` of the module to import, `version`, and `api`, the module."""

    name: str
    version: str
    api: Any

    @property
    def is_rtx(self) -> bool:
        """True for TensorRT-RTX. It builds for GPUs that this machine does not have, because its plans contain no
        kernels: those for a number of objects are compiled when it first runs.
        """
        return self.name == "tensorrt_rtx"


class Gpu(NamedTuple):
    """A GPU generation such as "sm89", and the name of a particular GPU if one is meant.

    The name holds multiprocessors and memory: all Jetson Orins have the same name, and plans of one may fail on others.
    """

    generation: str
    name: str = ""


def find_library() -> Library:
    """Return the installed TensorRT, `tensorrt` before `tensorrt_rtx`.

    Raises MissingExtraError if neither is installed, EngineError if one does not load.
    """
    for name, extra in PACKAGES.items():
        try:
            api = require(name, extra)
        except MissingExtraError:
            continue
        except (ImportError, OSError, RuntimeError) as error:
            raise EngineError(
                f"{name} is installed but does not load: {error}; install it again: {install_advice(extra)}"
            ) from error
        return Library(name, api.__version__, api)
    raise make_missing()


def find_local_gpu() -> Gpu | None:
    """Return torch's default GPU; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    gpu = torch.cuda.get_device_properties()
    name = f"{gpu.name}, {gpu.multi_processor_count} SMs, {round(gpu.total_memory / 2**30)} GiB"
    return Gpu(f"sm{gpu.major}{gpu.minor}", name)


def find_target(library: Library, gpu: str = LOCAL) -> Gpu:
    """Return the GPU that an engine for `gpu` runs on: "this", or a generation such as "sm89". Raises EngineError.

    An engine of tensorrt_rtx runs on all GPUs of a generation, one of tensorrt on GPUs of the local one's name.
    """
    local = find_local_gpu()
    if gpu == LOCAL and local is None:
        raise EngineError(
            f"gpu: expected a GPU on this machine, torch finds none; {_describe_alternative(library)}"
        )
    if not library.is_rtx:
        return require_local(library.name, gpu, local)
    generation = local.generation if gpu == LOCAL and local else gpu.lower()
    if generation not in list_generations(library):
        raise EngineError(
            f"gpu: {library.name} {library.version} builds for {', '.join(list_generations(library))}; found "
            f"{generation!r}; on data-centre GPUs and Jetson: {install_advice(PACKAGES['tensorrt'])}"
        )
    return Gpu(generation)


def list_generations(library: Library) -> list[str]:
    """Return the GPU generations that the library can build for by name."""
    # tensorrt has no list of targets: it builds for the local GPU alone
    members = library.api.ComputeCapability.__members__ if library.is_rtx else {}
    return [name.lower() for name in members if name.startswith("SM")]


def require_local(library: str, gpu: str, local: Gpu | None) -> Gpu:
    """Return the hardware of this machine. Raises EngineError where `gpu` names another, for which none builds."""
    if local is None or gpu.lower() not in (LOCAL, local.generation):
        actual = f"{local.generation} {local.name}".strip() if local else "none"
        raise EngineError(
            f"gpu: {library} builds for this machine alone: expected {gpu} here, found {actual}; build on the machine "
            "that will run it"
        )
    return local


def _describe_alternative(library: Library) -> str:
    if library.is_rtx:
        return f"name the generation to build for with --gpu: one of {', '.join(list_generations(library))}"
    return (
        f"build on the machine that will run it; {PACKAGES['tensorrt_rtx']} can build for RTX GPUs anywhere"
    )


class _ErrorLog:
    """Behaviour of the logger: it keeps the texts of errors, and passes other messages to Python's logging.

    Warnings stay warnings: one says that a plan of another model of GPU may fail.
    """

    INTERNAL_ERROR: Any
    ERROR: Any
    WARNING: Any
    VERBOSE: Any

    def __init__(self) -> None:
        super().__init__()  # the library's own base class, which must be initialised
        self.errors: list[str] = []
        self._notes: list[str] | None = None

    @contextmanager
    def listen(self, notes: list[str] | None) -> Iterator[None]:
        """Add all messages to `notes` within the block."""
        self._notes = notes
        try:
            yield
        finally:
            self._notes = None

    def log(self, severity: Any, message: str) -> None:
        if self._notes is not None:
            self._notes.append(message)
        if severity in (self.INTERNAL_ERROR, self.ERROR):
            self.errors.append(message)
        elif severity == self.WARNING:
            _log.warning("%s", message)
        elif severity != self.VERBOSE:
            _log.debug("%s", message)


@cache
def get_logger(api: ModuleType) -> Any:
    """Return the library's logger. Callers clear and read its `errors`, a list of texts.

    There is one for the process, because the library keeps the first that it is given.
    """
    return types.new_class("Logger", (_ErrorLog, api.ILogger))()


def describe_errors(logger: Any) -> str:
    """Return the errors that the library has logged, in one line."""
    return "; ".join(dict.fromkeys(" ".join(text.split()) for text in logger.errors)) or "it gave no reason"


def start_library(library: Library, kind: str) -> Any:
    """Make the library's object "Builder" or "Runtime". Raises EngineError where it does not start on this machine."""
    logger = get_logger(library.api)
    try:
        return getattr(library.api, kind)(logger)
    except TypeError as error:  # what pybind11 makes of the null that the library returns
        raise EngineError(
            f"{library.name} {library.version} does not start here: {describe_errors(logger)}; expected a GPU driver "
            "for its version of CUDA: 580 or newer for CUDA 13, which `pip install tensorrt` brings; for drivers "
            "525 to 575: pip install tensorrt-cu12"
        ) from error


WORKSPACE_BYTES = 2 << 30
"""Largest scratch memory of a kernel. TensorRT would try kernels that take the whole GPU, for the life of the node."""
USUAL_MEMORIES = 7  # of one prompted frame and six others; plans are tuned for them
POLL_S = 0.2

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
    max_objects: int = 16,
    progress: Callable[[float], None] = lambda fraction: None,
    notes: list[str] | None = None,
    timings: Path | None = None,
) -> bytes:
    """Build the plan of a stage that was exported to `onnx`, for 1 to `max_objects` objects where the stage varies.

    gpu: "this", or a generation such as "sm89"; tensorrt_rtx builds for a generation on any machine. `progress` is
    called in this thread a few times a second with the fraction done, 0 to 1; what it raises stops the build. `notes`
    receives all messages of the library, among them a description of each layer. `timings` is a file that keeps what
    plain TensorRT measured of kernels for the next build. Raises EngineError with the library's own errors,
    MissingExtraError.
    """
    library = find_library()
    generation = find_target(library, gpu).generation
    logger = get_logger(library.api)
    # errors of an earlier call must not explain a failure of this one
    logger.errors.clear()
    builder = start_library(library, "Builder")
    network, parser = _parse(library, builder, onnx)
    _check_network(network, stage, onnx)
    config = _configure(library, builder, network, stage, generation, max_objects)
    if notes is not None:
        # at lower levels the library does not describe each layer
        config.profiling_verbosity = library.api.ProfilingVerbosity.DETAILED
    # plans of tensorrt_rtx contain no kernels, so its builds time none
    cache = None if timings is None or library.is_rtx else _read_timings(config, timings)
    with logger.listen(notes):
        plan = _run_builder(library, builder, network, config, progress)
    del parser  # only now: the network may read weights that the parser holds
    if plan is None:
        raise EngineError(
            f"{stage.name}: {library.name} {library.version} cannot build {onnx}: {describe_errors(logger)}; where "
            f"memory ran out, {MEMORY_HINT}"
        )
    if cache is not None and timings is not None:
        keep(timings, bytes(cache.serialize()), "kernels are timed again at the next build")
    return bytes(plan)


def _read_timings(config: Any, path: Path) -> Any:
    """Return the timing cache that a build adds to; empty where the file is absent, or of another version or GPU."""
    cache = config.create_timing_cache(read_kept(path, "kernels are timed again") or b"")
    # False refuses what was measured on another GPU
    if cache is None or not config.set_timing_cache(cache, False):
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return cache


def count_fp8_layers(onnx: Path) -> int:
    """Count the layers of the network in `onnx` that convert numbers to FP8, as the library reads it.

    Raises EngineError where it cannot be read.
    """
    library = find_library()
    get_logger(library.api).errors.clear()
    builder = start_library(library, "Builder")
    network, parser = _parse(library, builder, onnx)
    layers = (network.get_layer(index) for index in range(network.num_layers))
    quantise = library.api.LayerType.QUANTIZE
    eight = library.api.DataType.FP8
    count = sum(1 for layer in layers if layer.type == quantise and layer.get_output(0).dtype == eight)
    del parser  # only now, as in `build`
    return count


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
    """Raise EngineError unless the network has the inputs and outputs of the stage, in their dtypes.

    Shapes are checked when a plan runs.
    """
    tensors = [network.get_input(index) for index in range(network.num_inputs)]
    tensors += [network.get_output(index) for index in range(network.num_outputs)]
    actual = [(tensor.name, tensor.dtype.name) for tensor in tensors]
    expected = [(spec.name, DTYPES[spec.dtype]) for spec in stage.inputs + stage.outputs]
    if actual != expected:
        raise EngineError(f"{onnx} is not the stage {stage.name}: expected {expected}, found {actual}")


def _configure(
    library: Library, builder: Any, network: Any, stage: StageSpec, generation: str, max_objects: int
) -> Any:
    """Return the build configuration: target GPU, flags, and the shapes that the plan is tuned for."""
    config = builder.create_builder_config()
    config.clear_flag(library.api.BuilderFlag.TF32)  # TF32 would compute float32 with a shorter mantissa
    if not library.is_rtx:
        config.set_memory_pool_limit(library.api.MemoryPoolType.WORKSPACE, WORKSPACE_BYTES)
    else:
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
            Sizes(min(stage.usual_objects, max_objects), min(USUAL_MEMORIES, most)),
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
    config.progress_monitor = monitor = make_monitor(library.api)
    with ThreadPoolExecutor(1, "tensorrt", *_on_current_device()) as pool:
        building = pool.submit(builder.build_serialized_network, network, config)
        try:
            progress(monitor.fraction)  # once at least: a small stage is built before the first timeout
            while wait([building], timeout=POLL_S).not_done:
                progress(monitor.fraction)
        finally:
            # the pool waits for its thread, so an interrupted build must be told to stop
            monitor.cancelled = not building.done()
        plan = building.result()
    return plan


def _on_current_device() -> tuple[Callable[[int], None], tuple[int]] | tuple[()]:
    """Return what a new thread must call to use this thread's GPU: threads begin on the first one."""
    if not torch.cuda.is_available():
        return ()
    return torch.cuda.set_device, (torch.cuda.current_device(),)


@dataclass(slots=True)
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


class BuildProgress:
    """Phases of a build, nested in steps of other phases: the behaviour of the library's progress monitor.

    Any thread may report phases. cancelled: set it to make the builder stop.
    """

    def __init__(self) -> None:
        super().__init__()  # the library's own base class, which must be initialised
        self.cancelled = False
        self._phases: dict[str, _Phase] = {}
        self._highest = 0.0
        self._lock = Lock()

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        """Begin a phase within a step of a parent, or at the top level for None."""
        with self._lock:
            self._phases[phase_name] = _Phase(parent_phase, max(1, num_steps))

    def step_complete(self, phase_name: str, step: int) -> bool:
        """Count one more step of a phase as done. Return False to stop the build."""
        with self._lock:
            if phase := self._phases.get(phase_name):
                phase.done += 1
        return not self.cancelled

    def phase_finish(self, phase_name: str) -> None:
        """End a phase."""
        with self._lock:
            ended = self._phases.pop(phase_name, None)
            if ended is not None and ended.parent is None:
                self._highest = 1.0

    @property
    def fraction(self) -> float:
        """Fraction done, 0 to 1. All steps of a phase count as equally long. The value never falls."""
        with self._lock:
            roots = [name for name, phase in self._phases.items() if phase.parent is None]
            self._highest = max(self._highest, *(self._measure(name) for name in roots), 0.0)
            return self._highest

    def _measure(self, name: str) -> float:
        phase = self._phases[name]
        nested = [self._measure(child) for child, other in self._phases.items() if other.parent == name]
        return min(1.0, (phase.done + max(nested, default=0.0)) / phase.steps)


def make_monitor(api: Any) -> Any:
    """Return a BuildProgress that is also of the library's class, which is imported only where it is used."""
    return types.new_class("Monitor", (BuildProgress, api.IProgressMonitor))()
