"""What engines of a deployment must be of, from its settings and this machine."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file

from ..errors import EngineError
from ..models import TrackerModel
from ..models.checkpoints import NANO
from ..models.sam.tracker_model import GPU_BATCH
from ..settings import EngineSettings, Settings
from .export import MAX_OBJECTS
from .inductor import INDUCTOR, PRECISIONS, local_processor, target_gpu
from .store import Identity
from .tensorrt.library import LOCAL, find_library, target

CONFIG = "config.json"
FP8 = "fp8"


def identity_of(model: TrackerModel, settings: Settings, gpu: str = LOCAL) -> Identity:
    """The engines that `settings` ask for, of a model that was loaded as they say, in any dtype; for `gpu`.

    Raises EngineError for a GPU or a precision that they cannot be built for, MissingExtraError without TensorRT.
    """
    made_by = _by_inductor if settings.engine.kind == INDUCTOR else _by_tensorrt
    return Identity(
        model=model.name,
        weights=checkpoint_digest(settings.model.name),
        precision=settings.engine.precision,
        image_size=model.image_size,
        bank_size=settings.tracker.bank_size,
        **made_by(model.device, settings, gpu),
    )


def _by_tensorrt(device: torch.device, settings: Settings, gpu: str) -> dict[str, Any]:
    library = find_library()
    place = target(library, gpu)
    return {
        "most_objects": most_objects(settings.tracker.max_objects),
        "library": library.name,
        "version": library.version,
        "gpu": place.generation,
        "gpu_name": place.name,
    }


def _by_inductor(device: torch.device, settings: Settings, gpu: str) -> dict[str, Any]:
    require_compilable(settings.engine, device)
    generation, name = target_gpu(device, gpu)
    return {
        "most_objects": MAX_OBJECTS,
        "library": INDUCTOR,
        "version": str(torch.__version__),
        "gpu": generation,
        "gpu_name": name,
        "cpu": local_processor(),
    }


def require_compilable(engine: EngineSettings, device: torch.device) -> None:
    """Raise EngineError for a precision that stages are not compiled in for this device: float16 is slow on a CPU."""
    usable = [name for name in PRECISIONS if (device.type, name) != ("cpu", "float16")]
    if engine.precision not in usable:
        raise EngineError(
            f"engine.precision: {INDUCTOR} takes {', '.join(usable)} on {device.type}, found {engine.precision}; use "
            "--engine.precision float32"
        )


def arithmetic(precision: str) -> torch.dtype:
    """The dtype of the ports of engines of this precision: with fp8, what is not in FP8 is in float16."""
    found = getattr(torch, "float16" if precision == FP8 else precision)
    assert isinstance(found, torch.dtype)
    return found


def most_objects(max_objects: int) -> int:
    """The largest batch that the tracker makes of so many objects: a power of two."""
    return int(min(1 << (max_objects - 1).bit_length(), GPU_BATCH))


def checkpoint_digest(name: str) -> str:
    """SHA-256 of the configuration and weights that `--model.name` names, whatever they are loaded as.

    Raises EngineError where they are not files on this machine.
    """
    folder = NANO if name == "nano" else Path(name).expanduser()
    if not folder.is_dir():
        found = cached_file(name, CONFIG, _raise_exceptions_for_missing_entries=False)
        folder = Path(found).parent if found else folder
    files = [folder / CONFIG, *sorted(folder.glob("*.safetensors"))]
    digest = hashlib.sha256()
    try:
        for path in files:
            with path.open("rb") as file:
                digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    except OSError as error:
        raise EngineError(f"cannot read the weights {path} to know their engines by: {error}") from error
    return digest.hexdigest()
