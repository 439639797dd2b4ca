"""TensorRT itself: which of its two packages is here, its one logger, and the GPU that an engine is for.

`tensorrt` (data-centre GPUs, Jetson) and `tensorrt_rtx` (RTX GPUs) have the same interface under two names.
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ...errors import EngineError, MissingExtraError, install_advice, require

PACKAGES = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt-rtx"}  # by preference: module, extra
LOCAL = "this"
_log = logging.getLogger(__name__)


class Library(NamedTuple):
    """One of the packages: `name` as it is imported, `version`, and `api`, the module."""

    name: str
    version: str
    api: Any

    @property
    def cross_builds(self) -> bool:
        """Whether it builds for GPUs that are not here."""
        return self.name == "tensorrt_rtx"

    @property
    def compiles_at_run_time(self) -> bool:
        """Whether plans hold no kernels yet: those for a number of objects are made when it first runs."""
        return self.name == "tensorrt_rtx"


class Gpu(NamedTuple):
    """A generation such as "sm89" and, of a particular GPU, its name."""

    generation: str
    name: str = ""


def find_library() -> Library:
    """TensorRT as installed, `tensorrt` before `tensorrt_rtx`.

    Raises MissingExtraError where there is neither, EngineError where one does not load.
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


def local_gpu() -> Gpu | None:
    """The GPU that torch runs on by default, if there is one."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return Gpu(f"sm{major}{minor}", torch.cuda.get_device_name())


def target(library: Library, gpu: str = LOCAL) -> Gpu:
    """What an engine for `gpu` runs on: "this", or a generation such as "sm89". Raises EngineError.

    An engine of tensorrt_rtx is for all GPUs of a generation, one of tensorrt for those of the local one's name.
    """
    here = local_gpu()
    if gpu == LOCAL and here is None:
        raise EngineError(f"gpu: expected a GPU on this machine, torch finds none; {_instead(library)}")
    if not library.cross_builds:
        return _only_local(library, gpu, here)
    wanted = here.generation if gpu == LOCAL and here else gpu.lower()
    if wanted not in generations(library):
        raise EngineError(
            f"gpu: {library.name} {library.version} builds for {', '.join(generations(library))}; found {wanted!r}"
            f"; on data-centre GPUs and Jetson: {install_advice(PACKAGES['tensorrt'])}"
        )
    return Gpu(wanted)


def generations(library: Library) -> list[str]:
    """The GPU generations that the library can build for by name."""
    found = library.api.ComputeCapability.__members__ if library.cross_builds else {}
    return [name.lower() for name in found if name.startswith("SM")]


def _only_local(library: Library, gpu: str, here: Gpu | None) -> Gpu:
    if here is None or gpu.lower() not in (LOCAL, here.generation):
        found = f"{here.generation} ({here.name})" if here else "none"
        raise EngineError(
            f"gpu: {library.name} builds for the GPU of this machine alone: expected {gpu} here, found {found}; "
            "build on the machine that will run it"
        )
    return here


def _instead(library: Library) -> str:
    if library.cross_builds:
        return f"name the generation to build for with --gpu: one of {', '.join(generations(library))}"
    return (
        f"build on the machine that will run it; {PACKAGES['tensorrt_rtx']} can build for RTX GPUs anywhere"
    )


@cache
def log_of(api: ModuleType) -> Any:
    """The library's logger, whose `errors` (text) are for the caller to clear and read.

    One a process: the library keeps to the first that it is given.
    """
    logger: Any = api.ILogger

    class Log(logger):
        def __init__(self) -> None:
            logger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (logger.INTERNAL_ERROR, logger.ERROR):
                self.errors.append(message)
            elif severity != logger.VERBOSE:
                _log.debug("%s", message)

    return Log()


def told(log: Any) -> str:
    """The errors that the library has logged, in one line."""
    return "; ".join(dict.fromkeys(" ".join(text.split()) for text in log.errors)) or "it gave no reason"
