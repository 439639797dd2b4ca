"""Where torch.compile keeps what it has made, so that a restart finds it.

Stages compiled ahead of time by torch itself (AOTInductor), for devices without TensorRT: packages to run."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from ..errors import EngineError
from .export import MAX_OBJECTS, dynamic_axes, quiet, telling_failures
from .oom import ROOM, first_line
from .specs import StageSpec, as_tuple, objects_of, placed
from .tensorrt.library import LOCAL, local_gpu

CACHE = "TORCHINDUCTOR_CACHE_DIR"
_log = logging.getLogger(__name__)


def keep_compiled(folder: Path) -> None:
    """Keep what torch.compile makes in `folder`/compiled; to be called before anything is compiled.

    Where the environment already names a place, that one stays; where the folder cannot be written, torch's own, which
    a reboot empties, with a warning.
    """
    if (
        os.environ.get(CACHE, default_cache_dir()) != default_cache_dir()
    ):  # torch sets its own when it is imported
        return
    kept = folder.expanduser().absolute() / "compiled"
    try:
        kept.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _log.warning("compiled stages are not kept: cannot write %s: %s", kept, error.strerror)
        return
    os.environ[CACHE] = str(kept)


INDUCTOR = "inductor"
PRECISIONS = ("float32", "float16", "bfloat16")
CPU = "cpu"
AGAIN = "build it again here: sam3-node engine build --engine.kind inductor"
OPTIONS = {"cpp.dynamic_threads": True}  # else the number of threads of the build is in the code


class InductorRun:
    """Runs a package in the place of a stage's module, for 1 to 64 objects where the stage varies.

    Outputs are the caller's to keep: each call allocates them. One call at a time.
    """

    def __init__(self, package: bytes, stage: StageSpec, device: torch.device | str) -> None:
        """Load a package onto the kind of device that it was built for. Raises EngineError where it does not load, and
        torch's OutOfMemoryError."""
        self._stage = stage
        self._device = torch.empty(0, device=device).device
        self._run = _load(package, stage, self._device)
        self.most_objects = MAX_OBJECTS if stage.varies else 1

    def __call__(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The ports' tensors in, the ports' tensors out.

        Raises EngineError for tensors of other shapes or dtypes, or on another device.
        """
        objects_of(self._stage, inputs, self.most_objects, self._device)
        outputs: tuple[Tensor, ...] = self._run(*(placed(tensor) for tensor in inputs))
        return outputs if len(outputs) > 1 else outputs[0]


def build_package(stage: StageSpec) -> bytes:
    """Compile a stage for the device that its module is on, and this machine's processor: one package for 1 to 64
    objects, with the weights.

    Raises EngineError naming the stage where that cannot be, or where there is no C++ compiler.
    """
    require_compiler()
    with (
        tempfile.TemporaryDirectory(prefix="sam3_node_engine_") as folder,
        telling_failures(stage, "compiled"),
    ):
        path = Path(folder) / f"{stage.name}.pt2"
        with quiet(), torch.no_grad():
            torch._inductor.aoti_compile_and_package(
                _exported(stage), package_path=str(path), inductor_configs=dict(OPTIONS)
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
            "environment variable CXX. What is built runs without"
        ) from error


def target_gpu(device: torch.device, gpu: str = LOCAL) -> tuple[str, str]:
    """What packages for `device` run on, as generation and name of a GPU, or ("cpu", "").

    Raises EngineError for a `gpu` that is not the local one: packages are built where they run.
    """
    here = local_gpu() if device.type == "cuda" else None
    found = here.generation if here else CPU
    if gpu.lower() not in (LOCAL, found):
        raise EngineError(
            f"gpu: {INDUCTOR} builds for this machine alone: expected {found} or {LOCAL}, found {gpu}; build on the "
            "machine that will run it"
        )
    return (here.generation, here.name) if here else (CPU, "")


def local_processor() -> str:
    """The processor that packages built here run on: its vector instructions, a digest of all that it offers, and its
    name. What is compiled uses them all, and another processor would end the process."""
    offered = torch.cpu.get_capabilities()
    names = sorted(name for name, has in offered.items() if has is True)
    digest = hashlib.sha256(" ".join([platform.machine(), *names]).encode()).hexdigest()[:8]
    vectors = torch.backends.cpu.get_cpu_capability().lower()
    return " ".join([vectors, digest, str(offered.get("cpu_name", ""))]).strip()


class _InTuple(nn.Module):
    """Gives a stage's outputs as a plain tuple: packages know no named ones."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return as_tuple(self.module(*inputs))


def _exported(stage: StageSpec) -> torch.export.ExportedProgram:
    return torch.export.export(
        _InTuple(stage.module),
        stage.examples(),
        dynamic_shapes=(dynamic_axes(stage),) if stage.varies else None,
        strict=False,
    )


def _load(package: bytes, stage: StageSpec, device: torch.device) -> Any:
    index = -1 if device.index is None else device.index
    try:
        with quiet(), _unpacked_briefly(device):
            return torch._inductor.aoti_load_package(
                io.BytesIO(package), run_single_threaded=True, device_index=index
            )
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        raise EngineError(
            f"{stage.name}: torch {torch.__version__} cannot load the package: {first_line(error)}; where memory ran "
            f"out, {ROOM}; else {AGAIN}"
        ) from error


@contextmanager
def _unpacked_briefly(device: torch.device) -> Iterator[None]:
    """Let torch unpack a package for a CPU where it is deleted once it is in memory: a process that is killed leaves
    nothing then. Kernels of a GPU are read later, so torch deletes those when it ends."""
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
