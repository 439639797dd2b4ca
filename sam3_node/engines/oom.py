"""What running a model can fail with, told as errors of this package: above all that memory runs out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import EngineError, ModelError, Sam3NodeError

FAILURES = (Sam3NodeError, RuntimeError, MemoryError)
"""What stages raise; torch tells of a device by RuntimeError."""
SIGNS = (
    "out of memory",
    "DefaultCPUAllocator",
    "CUBLAS_STATUS_ALLOC_FAILED",
)  # not all have a class of their own
ROOM = "end other processes that use it, or lower --tracker.max_objects or --model.image_size"
TORCH = "use --engine.kind torch, and leave out --engine.graphs"


def out_of_memory(error: BaseException) -> bool:
    """Whether memory of the device or the host ran out: this error says so, or what it was raised from."""
    root = root_of(error)
    return isinstance(root, torch.OutOfMemoryError | MemoryError) or any(sign in str(root) for sign in SIGNS)


def root_of(error: BaseException) -> BaseException:
    """The first of a chain of errors that were raised from one another."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def first_line(error: BaseException) -> str:
    """Type and first line of an error, bounded."""
    return f"{type(error).__name__}: {str(error).strip().split(chr(10))[0][:300]}".removesuffix(": ")


def engine_failure(error: BaseException, doing: str) -> EngineError:
    """Why engines or recordings cannot serve, with what to do; it holds nothing of the failed attempt in memory."""
    if isinstance(error, Sam3NodeError):
        return EngineError(str(error))
    if out_of_memory(error):
        return EngineError(f"memory ran out {doing}: {first_line(root_of(error))}; {ROOM}, or {TORCH}")
    return EngineError(f"engines failed {doing}: {first_line(error)}; {TORCH}")


@contextmanager
def telling_out_of_memory(kind: type[Sam3NodeError], doing: str, advice: str = ROOM) -> Iterator[None]:
    """Raise `kind` with advice where memory runs out; other errors, and those of engines, pass."""
    try:
        yield
    except (ModelError, RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise kind(f"memory ran out {doing}: {first_line(root_of(error))}; {advice}") from error
