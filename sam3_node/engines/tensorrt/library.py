"""The TensorRT library: which of its two packages is installed, its logger, and the GPU that an engine is built for.

`tensorrt` (data-centre GPUs, Jetson) and `tensorrt_rtx` (RTX GPUs) have the same interface under two names.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ...errors import EngineError, MissingExtraError, install_advice, require

PACKAGES = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt-rtx"}  # module: extra, the preferred one first
LOCAL = "this"
_log = logging.getLogger(__name__)


class Library(NamedTuple):
    """One of the two packages: `name` of the module to import, `version`, and `api`, the module."""

    name: str
    version: str
    api: Any

    @property
    def cross_builds(self) -> bool:
        """True if it builds for GPUs that this machine does not have."""
        return self.name == "tensorrt_rtx"

    @property
    def compiles_at_run_time(self) -> bool:
        """True if plans contain no kernels: those for a number of objects are compiled when it first runs."""
        return self.name == "tensorrt_rtx"


class Gpu(NamedTuple):
    """A GPU generation such as "sm89", and the name of a particular GPU if one is meant."""

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
    raise MissingExtraError(
        "expected tensorrt or tensorrt_rtx for engines, found neither; for data-centre GPUs and Jetson: "
        f"{install_advice(PACKAGES['tensorrt'])}; for RTX GPUs: {install_advice(PACKAGES['tensorrt_rtx'])}"
    )


def find_local_gpu() -> Gpu | None:
    """Return torch's default GPU; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return Gpu(f"sm{major}{minor}", torch.cuda.get_device_name())


def find_target(library: Library, gpu: str = LOCAL) -> Gpu:
    """Return the GPU that an engine for `gpu` runs on: "this", or a generation such as "sm89". Raises EngineError.

    An engine of tensorrt_rtx runs on all GPUs of a generation, one of tensorrt on GPUs of the local one's name.
    """
    local = find_local_gpu()
    if gpu == LOCAL and local is None:
        raise EngineError(
            f"gpu: expected a GPU on this machine, torch finds none; {_describe_alternative(library)}"
        )
    if not library.cross_builds:
        return _require_local(library, gpu, local)
    generation = local.generation if gpu == LOCAL and local else gpu.lower()
    if generation not in list_generations(library):
        raise EngineError(
            f"gpu: {library.name} {library.version} builds for {', '.join(list_generations(library))}; found "
            f"{generation!r}; on data-centre GPUs and Jetson: {install_advice(PACKAGES['tensorrt'])}"
        )
    return Gpu(generation)


def list_generations(library: Library) -> list[str]:
    """Return the GPU generations that the library can build for by name."""
    members = library.api.ComputeCapability.__members__ if library.cross_builds else {}
    return [name.lower() for name in members if name.startswith("SM")]


def _require_local(library: Library, gpu: str, local: Gpu | None) -> Gpu:
    if local is None or gpu.lower() not in (LOCAL, local.generation):
        actual = f"{local.generation} ({local.name})" if local else "none"
        raise EngineError(
            f"gpu: {library.name} builds for the GPU of this machine alone: expected {gpu} here, found {actual}; "
            "build on the machine that will run it"
        )
    return local


def _describe_alternative(library: Library) -> str:
    if library.cross_builds:
        return f"name the generation to build for with --gpu: one of {', '.join(list_generations(library))}"
    return (
        f"build on the machine that will run it; {PACKAGES['tensorrt_rtx']} can build for RTX GPUs anywhere"
    )


class _ErrorLog:
    """Behaviour of the logger: it keeps the texts of errors, and passes other messages to Python's logging."""

    INTERNAL_ERROR: Any
    ERROR: Any
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
