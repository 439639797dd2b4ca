"""Compile stages by torch's inductor, for devices without TensorRT, and capture stages in CUDA graphs.

Engines are packages that torch compiles ahead of time (AOTInductor). They fit one machine: one kind of processor, or
one generation of GPU. `keep_compiled` keeps the cache of torch.compile for restarts. A CUDA graph is captured once for
each number of objects. Its replay launches all kernels of a stage at once, so the GPU does not wait for Python.
"""

import hashlib
import io
import logging
import os
import platform
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import EngineError, summarize_error
from ..files import describe_exposure, keep, make_private_dir, read_kept
from ..models import TrackerModel
from ..models.sam.stages import ReadLimits, Run, Stages, find_encode_limits, find_limits
from .export import MAX_OBJECTS, dynamic_axes, silence_exporters
from .oom import MEMORY_HINT, is_out_of_memory, reraise_as_engine_error, to_engine_error
from .specs import StageSpec, as_tuple, ensure_aligned, find_sizes
from .tensorrt.builder import LOCAL, Gpu, find_local_gpu, require_local

INDUCTOR = "inductor"
PRECISIONS = ("float32", "float16", "bfloat16")
CPU = "cpu"
REBUILD_HINT = "build it again here: sam3-node engine build --engine.kind inductor"
OPTIONS = {"cpp.dynamic_threads": True}  # without it the code fixes the thread count of the build
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
ARTIFACTS = ".artifacts"
"""Suffix of files with the artifacts of compiled stages."""
MAX_ARTIFACTS = 4
"""Number of such files that are kept: the newest ones."""
MAX_ARTIFACT_BYTES = 1 << 30
"""Size in bytes of the largest such file. More is not kept."""
_log = logging.getLogger(__name__)


class InductorRun:
    """A package that runs instead of a stage's module, for 1 to 64 objects where the stage varies.

    The caller owns the outputs: each call allocates them. Only one call may run at a time.
    """

    def __init__(self, package: bytes, stage: StageSpec, device: torch.device | str) -> None:
        """Load a package onto the kind of device that it was built for.

        Raises EngineError where it does not load, and torch's OutOfMemoryError.
        """
        self._stage = stage
        # a tensor's device has an index: a plain "cuda" would never equal it
        self._device = torch.empty(0, device=device).device
        self._run = _load(package, stage, self._device)
        self.max_objects = MAX_OBJECTS if stage.varies else 1
        self.limits = ReadLimits(max_objects=self.max_objects)

    def __call__(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the stage on tensors that fit its specs, and return its outputs.

        Raises EngineError for tensors of other shapes or dtypes, or on another device.
        """
        find_sizes(self._stage, inputs, self.max_objects, self._device)
        outputs: tuple[Tensor, ...] = self._run(*(ensure_aligned(tensor) for tensor in inputs))
        return outputs if len(outputs) > 1 else outputs[0]


def build_package(stage: StageSpec) -> bytes:
    """Compile a stage, with its weights, to one package for 1 to 64 objects.

    It fits the device of the stage's module and this machine's processor. Raises EngineError that names the stage where
    compilation fails, and EngineError without a C++ compiler.
    """
    require_compiler()
    with (
        tempfile.TemporaryDirectory(prefix="sam3_node_engine_") as folder,
        reraise_as_engine_error(f"{stage.name}: cannot be compiled"),
    ):
        path = Path(folder) / f"{stage.name}.pt2"
        with silence_exporters(), torch.no_grad():
            axes = (dynamic_axes(stage),) if stage.varies else None
            module = _TupleOutputs(stage.module)
            program = torch.export.export(module, stage.examples(), dynamic_shapes=axes, strict=False)
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs=dict(OPTIONS)
            )
        return path.read_bytes()


def require_compiler() -> None:
    """Raise EngineError where torch finds no C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise EngineError(
            "engine.kind inductor: expected a C++ compiler to build with, found none; install g++, or name one by the "
            "environment variable CXX. Packages that are built already run without a compiler"
        ) from error


def find_inductor_target(device: torch.device, gpu: str = LOCAL) -> Gpu:
    """Return the hardware that packages for `device` run on, of generation "cpu" for a processor.

    Raises EngineError for a `gpu` that is not the local one, because packages are built where they run.
    """
    return require_local(INDUCTOR, gpu, find_local_gpu() if device.type == "cuda" else Gpu(CPU))


def describe_processor() -> str:
    """Describe this machine's processor: its vector instructions, a digest of all its features, and its name.

    A package uses all features of the processor that built it. On a processor without one of them it would crash the
    process.
    """
    features = torch.cpu.get_capabilities()
    # some entries are no features, such as the processor's name
    names = sorted(name for name, present in features.items() if present is True)
    digest = hashlib.sha256(" ".join([platform.machine(), *names]).encode()).hexdigest()[:8]
    vectors = torch.backends.cpu.get_cpu_capability().lower()
    return " ".join([vectors, digest, str(features.get("cpu_name", ""))]).strip()


class _TupleOutputs(nn.Module):
    """A stage whose outputs are a plain tuple, because packages cannot return named ones."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return as_tuple(self.module(*inputs))


def _load(package: bytes, stage: StageSpec, device: torch.device) -> Any:
    # a processor has no index, and -1 is torch's default
    index = -1 if device.index is None else device.index
    try:
        with silence_exporters(), _temporary_unpacking(device):
            return torch._inductor.aoti_load_package(
                io.BytesIO(package), run_single_threaded=True, device_index=index
            )
    # also a RuntimeError, but the slot reports it with advice on memory
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        raise EngineError(
            f"{stage.name}: torch {torch.__version__} cannot load the package: {summarize_error(error)}; where memory "
            f"ran out, {MEMORY_HINT}; else {REBUILD_HINT}"
        ) from error


@contextmanager
def _temporary_unpacking(device: torch.device) -> Iterator[None]:
    """Let torch unpack a package for a CPU into a folder that is deleted as soon as the package is in memory.

    A process that is killed later then leaves no files. Packages for a GPU are not affected: their kernels are read
    later, and torch deletes them when the process ends.
    """
    if device.type != CPU:
        yield
        return
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="sam3_node_engine_") as folder:
        os.environ["TMPDIR"] = folder
        try:
            yield
        finally:
            os.environ.pop("TMPDIR")
            if before is not None:
                os.environ["TMPDIR"] = before


def keep_compiled(folder: Path) -> None:
    """Keep the cache of torch.compile in `folder`/compiled. Call this before anything is compiled.

    If the environment already names a cache folder, that one stays. If the folder cannot be written, or other users
    can change it, log a warning; torch then uses its own folder, which a reboot empties.
    """
    if CACHE_VARIABLE in os.environ:
        # here, because it imports the compiler, which takes a second
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        # torch sets the variable to its default when this is imported
        if os.environ[CACHE_VARIABLE] != default_cache_dir():
            return
    if cache := _make_cache_folder(folder):
        os.environ[CACHE_VARIABLE] = str(cache)


def _make_cache_folder(folder: Path) -> Path | None:
    """Return `folder`/compiled. Log a warning and return None where it cannot be written, or others can change it."""
    store = folder.expanduser().absolute()
    cache = store / "compiled"
    try:
        # whoever can write the store can replace the folder in it
        for path in (store, cache):
            make_private_dir(path)
            if reason := describe_exposure(path):  # torch runs what lies there
                _log.warning("compiled stages are not kept: %s", reason)
                return None
    except OSError as error:
        _log.warning("compiled stages are not kept: cannot write %s: %s", cache, error.strerror)
        return None
    return cache


class CompiledArtifacts:
    """One file with all that torch has compiled for some weights, for a machine or container with an empty cache.

    It is `folder`/compiled/KEY.artifacts, of the form of `torch.compiler.save_cache_artifacts`. At most MAX_ARTIFACTS
    such files are kept, each of at most MAX_ARTIFACT_BYTES.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._folder = folder
        self._name = f"{key}{ARTIFACTS}"
        self._loaded: frozenset[tuple[str, str]] = frozenset()

    def load(self) -> None:
        """Fill torch's cache from the file, if there is one. One that cannot be used is ignored with a warning."""
        path = self._folder.expanduser().absolute() / "compiled" / self._name
        data = read_kept(path, "stages are compiled anew")
        if data is None:
            return
        with silence_exporters():  # torch checks a sum over the bytes, and logs its traceback
            info = torch.compiler.load_cache_artifacts(data)
        if info is None:
            _log.warning("stages are compiled anew: %s is damaged, and is written again", path)
            return
        self._loaded = _list_artifacts(info)

    def save(self) -> None:
        """Write what this process has compiled, unless the loaded file holds it all."""
        saved = torch.compiler.save_cache_artifacts()
        if saved is None or _list_artifacts(saved[1]) <= self._loaded:
            return
        if len(saved[0]) > MAX_ARTIFACT_BYTES or (cache := _make_cache_folder(self._folder)) is None:
            return
        if not keep(cache / self._name, saved[0], "compiled stages are not kept in one file"):
            return
        with suppress(OSError):  # other processes may also remove some
            newest_first = sorted(
                cache.glob(f"*{ARTIFACTS}"), key=lambda path: path.stat().st_mtime, reverse=True
            )
            for old in newest_first[MAX_ARTIFACTS:]:
                old.unlink(missing_ok=True)


def _list_artifacts(info: Any) -> frozenset[tuple[str, str]]:
    return frozenset((kind, key) for kind, keys in info.artifacts.items() for key in keys)


WARM_UP_CALLS = 3  # before a capture: libraries choose their kernels, compiled stages compile

Inputs = tuple[Tensor | None, ...]


class CapturedGraph(NamedTuple):
    """A call that can be repeated: `replay` reads the inputs of the capture again, and writes `outputs`."""

    outputs: Tensor | tuple[Tensor, ...]
    replay: Callable[[], None]


Capture = Callable[[Run, Inputs], CapturedGraph]
"""Captures a call. Its inputs keep their addresses."""


class GraphedStage:
    """A stage that is captured at the first call with inputs of given shapes, and replayed afterwards.

    All graphs read an input of one shape from one buffer. The caller may write it there, else the call copies it. The
    caller owns the outputs: each call copies them. Threads and streams may share a stage: its calls run one after
    another.
    """

    def __init__(self, run: Run, capture: Capture) -> None:
        self.run = run
        self._capture = capture
        self.limits = find_limits(run)
        self.encode_limits = find_encode_limits(run)
        self._calling = threading.Lock()
        self._stream: torch.cuda.Stream | None = None
        """Stream of the last call"""
        self._graphs: dict[tuple[object, ...], CapturedGraph] = {}
        self._inputs: dict[tuple[int, tuple[int, ...], torch.dtype], Tensor] = {}

    def find_buffer(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Return where graphs read input `number` of a shape, to be written before a call; None if none does yet."""
        return self._inputs.get((number, shape, dtype))

    @torch.inference_mode()
    def __call__(self, *inputs: Tensor | None) -> Any:
        """Run the stage. Raises EngineError where it cannot be captured."""
        with self._calling:
            self._wait_for_last_call(inputs)
            return self._replay(inputs)

    def _replay(self, inputs: Inputs) -> Any:
        held = tuple(None if given is None else self._hold(i, given) for i, given in enumerate(inputs))
        # buffers are kept for good, so their ids stand for the inputs' shapes and dtypes
        key = tuple(map(id, held))
        if key not in self._graphs:
            self._graphs[key] = self._capture(self.run, held)
        graph = self._graphs[key]
        graph.replay()
        # the next replay writes the graph's own outputs again
        outputs = tuple(output.clone() for output in as_tuple(graph.outputs))
        return outputs if len(outputs) > 1 else outputs[0]

    def _wait_for_last_call(self, inputs: Inputs) -> None:
        """Let the current stream wait for the last call if that was on another one: all use the same buffers."""
        device = next((given.device for given in inputs if given is not None), None)
        if device is None or device.type != "cuda":
            return
        stream = torch.cuda.current_stream(device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def _hold(self, number: int, given: Tensor) -> Tensor:
        """Return the buffer of an input, with its values."""
        key = number, given.shape, given.dtype
        if key not in self._inputs:
            self._inputs[key] = torch.empty_like(given)
        buffer = self._inputs[key]
        return buffer if buffer is given else buffer.copy_(given)


def use_graphs(model: TrackerModel) -> None:
    """Run the model's stages in CUDA graphs, for each of the tracker's batch sizes. On a CPU, change nothing.

    All graphs but the encoder's share one memory pool. This is safe because only one of them is replayed at a time, and
    no result stays in the pool. The encoder may run beside them, so it has a pool of its own. It is also captured in a
    stream of its own, because cuBLAS keeps one workspace for each.
    """
    if model.device.type == "cuda":
        alone, others = (
            partial(capture_cuda_graph, pool=torch.cuda.graph_pool_handle(), stream=torch.cuda.Stream())
            for _ in range(2)
        )
        stages = Stages(*(GraphedStage(run, others) for run in model.stages))
        # each number of objects needs a graph of its own, so they are padded to few sizes
        model.serve_by(stages._replace(encode=GraphedStage(model.stages.encode, alone)), few_shapes=True)


def capture_cuda_graph(
    run: Run, inputs: Inputs, pool: Any, stream: torch.cuda.Stream | None = None
) -> CapturedGraph:
    """Capture a call on the current device. Raises EngineError where that fails, also where memory runs out.

    stream: by default torch's own for captures.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        _warm_up(run, inputs)
        # thread_local: other threads may use the device during the capture
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            outputs = run(*inputs)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise to_engine_error(error, "while a stage was captured in a CUDA graph") from error
        raise EngineError(
            f"a stage cannot be captured in a CUDA graph: {summarize_error(error)}; set engine.graphs = false"
        ) from error
    return CapturedGraph(outputs, graph.replay)


def _warm_up(run: Run, inputs: Inputs) -> None:
    """Run the stage on a side stream, because a capture must not contain the work of first calls."""
    current = torch.cuda.current_stream()
    side = torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_CALLS):
            run(*inputs)
    current.wait_stream(side)
