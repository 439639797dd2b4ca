"""Errors of running models and engines, above all memory and lost devices, converted to errors of this package."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import DeviceError, EngineError, ModelError, Sam3NodeError, summarize_error

STAGE_ERRORS = (Sam3NodeError, RuntimeError, MemoryError)
"""Errors that stages raise; torch reports errors of a device as RuntimeError."""
OUT_OF_MEMORY_SIGNS = (  # in messages: not all such errors have a class of their own
    "out of memory",
    "DefaultCPUAllocator",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
PASSING_CUDA_ERRORS = (1, 2, 9, 98, 209, 701)
"""Codes of CUDA errors that concern one call: invalid value, memory allocation, invalid configuration, invalid device
function, no kernel for this GPU, and too many resources requested."""
LIBRARY_SIGNS = (
    "CUBLAS_STATUS_",
    "CUDNN_STATUS_",
    "CUSOLVER_STATUS_",
    "CUFFT_",
    "CUDA error",
    "Triton Error [CUDA]",
)
"""Signs of an error of a CUDA library, which does not say whether the device has failed or the call was wrong."""
MEMORY_HINT = "end other processes that use it, or lower --tracker.max_objects or --model.image_size"
TORCH_HINT = "use --engine.kind torch, and --engine.graphs false"


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if device or host memory ran out, as this error or its root cause says."""
    root = find_root_cause(error)
    is_memory_error = isinstance(root, torch.OutOfMemoryError | MemoryError)
    return is_memory_error or any(sign in str(root) for sign in OUT_OF_MEMORY_SIGNS)


def find_device_error(error: BaseException) -> DeviceError | None:
    """Return a DeviceError if this error or its root cause says that the process has lost its device; otherwise None.

    After most errors that CUDA reports, every later call of the process fails with the same error.
    """
    root = find_root_cause(error)
    # an inner layer has found it already
    if isinstance(root, DeviceError):
        return root
    # memory can be freed, so the device still works
    if is_out_of_memory(root):
        return None
    # a library reports what it met, so the device itself is asked whether it still works
    if any(sign in str(root) for sign in LIBRARY_SIGNS) and not isinstance(root, torch.AcceleratorError):
        root = _probe_device() or root
    if not isinstance(root, torch.AcceleratorError):
        return None
    if getattr(root, "error_code", None) in PASSING_CUDA_ERRORS:
        return None
    return DeviceError(
        f"the GPU has failed, and this process can use it no longer: {summarize_error(root)}; start the "
        "process again, as launch/start does"
    )


def _probe_device() -> Exception | None:
    """Return the error with which the GPU answers every call now; None if it answers well, or without a GPU."""
    if not torch.cuda.is_initialized():
        return None
    try:
        # CUDA reports errors of running kernels at the next synchronisation
        torch.cuda.synchronize()
    except RuntimeError as error:
        return error
    return None


def find_root_cause(error: BaseException) -> BaseException:
    """Return the first error of a chain in which each was raised from another."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def to_engine_error(error: BaseException, doing: str) -> EngineError:
    """Make an EngineError that says why engines or CUDA graphs cannot serve, and what to do.

    It has no reference to `error`, so that the memory of the failed attempt can be freed.
    """
    # its text already says what to do
    if isinstance(error, Sam3NodeError):
        return EngineError(str(error))
    if is_out_of_memory(error):
        root = summarize_error(find_root_cause(error))
        return EngineError(f"memory ran out {doing}: {root}; {MEMORY_HINT}, or {TORCH_HINT}")
    return EngineError(f"engines failed {doing}: {summarize_error(error)}; {TORCH_HINT}")


@contextmanager
def reraise_out_of_memory(kind: type[Sam3NodeError], doing: str, hint: str = MEMORY_HINT) -> Iterator[None]:
    """Raise `kind` with a hint if memory runs out within the block. Other errors pass, and so does any EngineError."""
    try:
        yield
    except (ModelError, RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise kind(f"memory ran out {doing}: {summarize_error(find_root_cause(error))}; {hint}") from error


@contextmanager
def reraise_as_engine_error(subject: str) -> Iterator[None]:
    """Raise EngineError with the root cause for any error within the block. subject: "STAGE: cannot be exported"."""
    try:
        yield
    except Exception as error:  # torch.onnx.OnnxExporterError, OSError, onnx.checker.ValidationError and more
        hint = f"; {MEMORY_HINT}" if is_out_of_memory(error) else ""
        raise EngineError(f"{subject}: {summarize_error(find_root_cause(error))}{hint}") from error
