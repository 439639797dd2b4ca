"""The key that decides whether a stored engine fits: made from the settings, the weights and this machine."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file

from ..errors import EngineError, ModelError
from ..models import TrackerModel
from ..models.checkpoints import NANO
from ..models.sam.tracker_model import GPU_BATCH
from ..models.weight_files import CONFIG, check_weight_files, list_weight_files
from ..models.weight_loading import pick_device
from ..settings import EngineSettings, Settings
from .export import MAX_OBJECTS
from .inductor import INDUCTOR, PRECISIONS, describe_processor, find_inductor_target
from .store import EngineKey
from .tensorrt.library import LOCAL, find_library, find_target

FP8 = "fp8"
MIN_GENERATION = {"bfloat16": 80, FP8: 89}
"""Oldest generation of GPU, as in sm80, that computes in a precision."""


def compute_key(model: TrackerModel, settings: Settings, gpu: str = LOCAL) -> EngineKey:
    """Build the key of the engines that `settings` ask for, to run on `gpu`.

    model: loaded as the settings say, in any dtype. Raises EngineError for a GPU or a precision that no engine can be
    built for, MissingExtraError without TensorRT.
    """
    describe_target = _inductor_fields if settings.engine.kind == INDUCTOR else _tensorrt_fields
    return EngineKey(
        model=model.name,
        weights=checkpoint_digest(settings.model.name),
        precision=settings.engine.precision,
        image_size=model.image_size,
        bank_size=settings.tracker.bank_size,
        **describe_target(model.device, settings, gpu),
    )


def _tensorrt_fields(device: torch.device, settings: Settings, gpu: str) -> dict[str, Any]:
    library = find_library()
    target = find_target(library, gpu)
    _require_arithmetic(settings.engine.precision, target.generation)
    return {
        "max_objects": round_up_objects(settings.tracker.max_objects),
        "library": library.name,
        "version": library.version,
        "gpu": target.generation,
        "gpu_name": target.name,
    }


def _require_arithmetic(precision: str, generation: str) -> None:
    """Raise EngineError for a precision that GPUs of a generation, such as sm89, do not compute in."""
    needed = MIN_GENERATION.get(precision, 0)
    if int(generation.removeprefix("sm")) < needed:
        raise EngineError(
            f"engine.precision {precision}: expected a GPU of generation sm{needed} or newer, found {generation}; use "
            f"--engine.precision {'float16' if precision == 'bfloat16' else 'bfloat16'}"
        )


def _inductor_fields(device: torch.device, settings: Settings, gpu: str) -> dict[str, Any]:
    require_compilable(settings.engine, device)
    generation, name = find_inductor_target(device, gpu)
    return {
        "max_objects": MAX_OBJECTS,
        "library": INDUCTOR,
        "version": str(torch.__version__),
        "gpu": generation,
        "gpu_name": name,
        "cpu": describe_processor(),
    }


def require_compilable(engine: EngineSettings, device: torch.device) -> None:
    """Raise EngineError for a precision that inductor does not take on this device: float16 is slow on a CPU."""
    usable = [name for name in PRECISIONS if (device.type, name) != ("cpu", "float16")]
    if engine.precision not in usable:
        raise EngineError(
            f"engine.precision: {INDUCTOR} takes {', '.join(usable)} on {device.type}, found {engine.precision}; use "
            "--engine.precision float32"
        )


def resolve_dtype(precision: str) -> torch.dtype:
    """Return the dtype of the inputs and outputs of engines. With fp8, all that is not in FP8 is in bfloat16.

    Not in float16: fused attention would add up the products of tens of thousands of keys in float16, and the products
    of FP8 numbers can leave its range before their scales apply.
    """
    dtype = getattr(torch, "bfloat16" if precision == FP8 else precision)
    assert isinstance(dtype, torch.dtype)
    return dtype


def choose_model_dtype(settings: Settings) -> str | torch.dtype:
    """Return the dtype to load the tracker in: on a GPU that of its engines, unless `model.dtype` names another.

    Nothing is rounded then between the stages, and torch answers prompts in the same arithmetic.
    """
    model, engine = settings.model, settings.engine
    if engine.kind == "torch" or model.dtype != "auto" or pick_device(model.device).type != "cuda":
        return model.dtype
    return resolve_dtype(engine.precision)


def round_up_objects(max_objects: int) -> int:
    """Return the largest batch that the tracker makes for up to `max_objects` objects: a power of two."""
    return int(min(1 << (max_objects - 1).bit_length(), GPU_BATCH))


def checkpoint_digest(name: str) -> str:
    """Compute the SHA-256 of the configuration and weights that `--model.name` names; it is the same for any dtype.

    Raises EngineError where they are not files on this machine, or lie outside their folder.
    """
    folder = NANO if name == "nano" else Path(name).expanduser()
    if not folder.is_dir():
        config = cached_file(name, CONFIG, _raise_exceptions_for_missing_entries=False)
        folder = Path(config).parent if config else folder
    digest, path = hashlib.sha256(), folder
    try:
        check_weight_files(folder)
        for path in list_weight_files(folder):
            with path.open("rb") as file:
                digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    except (OSError, ModelError) as error:
        raise EngineError(f"cannot read the weights {path} to identify their engines: {error}") from error
    return digest.hexdigest()
