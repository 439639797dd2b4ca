"""TensorRT plans that run as stages: they read and write torch's device tensors in the order of torch's stream.

Each number of objects and memories has an execution context of its own, so that its shapes never change. The stages of
a tracker run one after another, so that all their contexts share one block of memory.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import EngineError
from ...files import keep, read_kept
from ...models.sam.stages import ReadLimits
from ..oom import MEMORY_HINT
from ..specs import OBJECTS, Sizes, StageSpec, allocate_aligned, ensure_aligned, find_sizes
from .builder import Library, describe_errors, find_library, get_logger, start_library

REBUILD_HINT = "build it again here: sam3-node engine build"
_log = logging.getLogger(__name__)


class Workspace:
    """One block of device memory for the intermediate values of several engines, of which one runs at a time.

    Its address never changes, because execution contexts and CUDA graphs keep it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._needed = 0
        self._block: Tensor | None = None

    def reserve(self, size: int) -> None:
        """Make the block at least this large, in bytes. Raises EngineError once it is in use and smaller."""
        # contexts keep the block's address, so it cannot grow any more
        if self._block is not None and size > self._block.numel():
            raise EngineError(
                f"expected all engines of a tracker to be loaded before one runs, found one that needs {size} bytes "
                f"where {self._block.numel()} are in use"
            )
        self._needed = max(self._needed, size)

    def allocate(self) -> Tensor:
        """Return the block, uint8; the first call allocates it, and raises torch's OutOfMemoryError."""
        if self._block is None:
            self._block = allocate_aligned((self._needed,), torch.uint8, self._device)
        return self._block


class KernelCache:
    """The kernels that TensorRT-RTX compiles at run time, kept in a file for the next start.

    The library itself refuses what another version, GPU or driver has compiled. A file that it refuses, or that cannot
    be read, is ignored and written again. Kernels are code: the file is for its user alone, as a plan is.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._cache: Any = None
        self._saved = b""

    def attach(self, config: Any) -> None:
        """Let the contexts of a runtime configuration take their kernels from here, and add new ones."""
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            self._load()
        config.set_runtime_cache(self._cache)

    def save(self) -> None:
        """Write the kernels to the file if there are new ones. Where that fails, log it: the next start compiles."""
        if self._cache is None or self._path is None:
            return
        kernels = bytes(self._cache.serialize())
        if kernels == self._saved:
            return
        if keep(self._path, kernels, "kernels are not kept"):
            self._saved = kernels

    def _load(self) -> None:
        kernels = read_kept(self._path, "kernels are compiled again") if self._path else None
        if not kernels:
            return
        if self._cache.deserialize(kernels):
            self._saved = kernels
        else:
            _log.info(
                "kernels in %s are compiled again: they are of another GPU, driver or version", self._path
            )


class TensorRTRun:
    """A plan that runs instead of a stage's module, for 1 to `max_objects` objects where the stage varies.

    The caller owns the outputs. Each call takes them from torch's allocator, which costs microseconds, so that features
    kept for later frames are never overwritten. Within the capture of a CUDA graph the outputs, and so all addresses,
    are fixed; run a number of objects once before it is captured, and only in the graph afterwards. Only one call may
    run at a time, also of runs that share a workspace.

    Each execution context is made at the first use of its sizes, and kept. All of them use optimisation profile 0,
    which TensorRT 10 and newer, and TensorRT-RTX, let contexts share. Their shapes never change, so a CUDA graph of
    some sizes stays valid when others are added.
    """

    def __init__(
        self,
        plan: bytes,
        stage: StageSpec,
        device: torch.device | str = "cuda",
        workspace: Workspace | None = None,
        kernels: Path | None = None,
    ) -> None:
        """Load a plan onto a CUDA device.

        workspace: shared with other engines; by default, one of its own. kernels: the file that keeps what is compiled
        at run time. Raises EngineError where the plan cannot run here, MissingExtraError, and torch's OutOfMemoryError.
        """
        self._library = find_library()
        if not torch.cuda.is_available():
            raise EngineError(
                f"{stage.name}: expected a GPU to run a TensorRT plan on, torch finds none; use --engine.kind torch"
            )
        self._stage = stage
        # a tensor's device has an index: a plain "cuda" would never equal it
        self._device = torch.empty(0, device=device).device
        with torch.cuda.device(self._device):
            # a context keeps neither engine nor runtime alive
            self._runtime, self._engine = _load_plan(self._library, plan, stage)
            self._stream = torch.cuda.Stream()
        self._workspace = workspace or Workspace(self._device)
        self._kernels = KernelCache(kernels)
        self._workspace.reserve(self._engine.device_memory_size_v2)
        self._contexts: dict[Sizes, Any] = {}
        self.max_objects = _read_max_objects(self._engine, stage)
        self.limits = ReadLimits(max_objects=self.max_objects)

    def __call__(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run in the order of torch's current stream, with device tensors that fit the specs; return the outputs.

        Raises EngineError for tensors of other shapes or dtypes, or on another device.
        """
        sizes = find_sizes(self._stage, inputs, self.max_objects, self._device)
        with torch.cuda.device(self._device):
            # `held` keeps copies alive for as long as TensorRT has their addresses
            held = [ensure_aligned(tensor) for tensor in inputs]
            outputs = tuple(
                allocate_aligned(spec.shape_for(*sizes), spec.dtype, self._device)
                for spec in self._stage.outputs
            )
            with self._leave_default_stream() as stream:
                self._run(sizes, (*held, *outputs), stream)
        return outputs if len(outputs) > 1 else outputs[0]

    @contextmanager
    def _leave_default_stream(self) -> Iterator[int]:
        """Yield the handle of the current stream, or of one of its own that is ordered like it.

        On the default stream TensorRT would synchronise the whole device at each call, and so wait for the detector.
        """
        current = torch.cuda.current_stream()
        # 0 is the default stream
        if current.cuda_stream:
            yield current.cuda_stream
            return
        self._stream.wait_stream(current)
        yield self._stream.cuda_stream
        current.wait_stream(self._stream)

    def _run(self, sizes: Sizes, tensors: tuple[Tensor, ...], stream: int) -> None:
        """Run on aligned inputs and outputs, in the order of the specs. Raises EngineError where that fails."""
        is_first = sizes not in self._contexts
        if is_first:
            self._contexts[sizes] = self._create(sizes)
        context = self._contexts[sizes]
        name = self._stage.name
        for spec, tensor in zip(self._stage.inputs + self._stage.outputs, tensors, strict=True):
            if not context.set_tensor_address(spec.name, tensor.data_ptr()):
                raise EngineError(
                    f"{name}: {spec.name}: the plan does not take this tensor: {self._describe()}"
                )
        if torch.cuda.is_current_stream_capturing() and not self._is_capturable(context, stream):
            raise EngineError(
                f"{name}: TensorRT cannot be captured in a CUDA graph; set engine.graphs = false"
            )
        if not context.execute_async_v3(stream):
            raise EngineError(f"{name}: TensorRT did not run for {sizes.objects} objects: {self._describe()}")
        # kernels are compiled at the first run with new sizes
        if is_first:
            self._kernels.save()

    def _create(self, sizes: Sizes) -> Any:
        """Return a new context for these sizes, its shapes set. Raises EngineError where it cannot be made."""
        get_logger(self._library.api).errors.clear()
        context = self._engine.create_execution_context(self._configure())
        if context is None:
            raise EngineError(
                f"{self._stage.name}: cannot prepare the plan for {sizes.objects} objects: {self._describe()}; where "
                f"memory ran out, {MEMORY_HINT}"
            )
        block = self._workspace.allocate()
        if block.numel():  # an empty block has no address, which TensorRT reports as an error
            context.set_device_memory(block.data_ptr(), block.numel())
        for spec in self._stage.inputs:
            shape = spec.shape_for(*sizes)
            if not context.set_input_shape(spec.name, shape):
                raise EngineError(
                    f"{self._stage.name}: {spec.name}: the plan does not take {list(shape)}: {self._describe()}"
                )
        for spec in self._stage.outputs:
            shape = spec.shape_for(*sizes)
            actual = tuple(context.get_tensor_shape(spec.name))
            # -1 is a side that TensorRT knows only when it runs
            if any(side not in (-1, other) for side, other in zip(actual, shape, strict=True)):
                # it would write beyond the tensor
                raise EngineError(
                    f"{self._stage.name}: {spec.name}: expected a plan that gives {list(shape)} for {sizes.objects} "
                    f"objects, found {list(actual)}; {REBUILD_HINT}"
                )
        return context

    def _configure(self) -> Any:
        """Return the configuration of a context: this class gives it memory, and it compiles all kernels at once.

        The latter concerns TensorRT-RTX, whose kernels must exist before accuracy is checked and graphs captured.
        """
        api = self._library.api
        user_managed = api.ExecutionContextAllocationStrategy.USER_MANAGED
        # plain TensorRT takes the strategy instead of a configuration
        if not self._library.is_rtx:
            return user_managed
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(user_managed)
        config.dynamic_shapes_kernel_specialization_strategy = (
            api.DynamicShapesKernelSpecializationStrategy.EAGER
        )
        self._kernels.attach(config)
        return config

    def _is_capturable(self, context: Any, stream: int) -> bool:
        """Return False if the library says that a capture would fail. Plain TensorRT cannot say it."""
        return not self._library.is_rtx or bool(context.is_stream_capturable(stream))

    def _describe(self) -> str:
        return describe_errors(get_logger(self._library.api))


def _load_plan(library: Library, plan: bytes, stage: StageSpec) -> tuple[Any, Any]:
    """Return runtime and engine of a plan on the current device."""
    logger = get_logger(library.api)
    logger.errors.clear()
    runtime = start_library(library, "Runtime")
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise EngineError(
            f"{stage.name}: {library.name} {library.version} cannot load the plan: {describe_errors(logger)}; where "
            f"memory ran out, {MEMORY_HINT}; else {REBUILD_HINT}"
        )
    # a plan of another stage loads just as well
    names = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    expected = {spec.name for spec in stage.inputs + stage.outputs}
    if names != expected:
        raise EngineError(
            f"{stage.name}: expected a plan of {sorted(expected)}, found {sorted(names)}; {REBUILD_HINT}"
        )
    return runtime, engine


def require_fused(plan: bytes, stage: StageSpec, max_bytes: float) -> None:
    """Raise EngineError for a plan that needs so much device memory that it must hold the scores of attention.

    Fused attention never holds them. Needs the GPU that the plan is for.
    """
    library = find_library()
    _runtime, engine = _load_plan(library, plan, stage)
    needed = engine.device_memory_size_v2
    if needed >= max_bytes:
        raise EngineError(
            f"{stage.name}: attention was not fused: expected a plan that needs less than {max_bytes / 1e9:.1f} GB of "
            f"device memory, found one of {needed / 1e9:.1f}; use --engine.precision bfloat16, another version of "
            f"{library.name} than {library.version}, or --engine.kind torch"
        )


def _read_max_objects(engine: Any, stage: StageSpec) -> int:
    """Return the largest number of objects that the engine takes."""
    for spec in stage.inputs:
        if OBJECTS in spec.shape:
            # a profile has the least, the usual and the greatest shape
            return int(engine.get_tensor_profile_shape(spec.name, 0)[2][spec.shape.index(OBJECTS)])
    return 1
