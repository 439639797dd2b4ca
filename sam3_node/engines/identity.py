"""What engines of a deployment must be of, from its settings and this machine."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from transformers.utils import cached_file

from ..errors import EngineError
from ..models import TrackerModel
from ..models.checkpoints import NANO
from ..models.sam import GPU_BATCH
from ..settings import Settings
from .store import Identity
from .tensorrt_library import LOCAL, find_library, target

CONFIG = "config.json"
FP8 = "fp8"


def identity_of(model: TrackerModel, settings: Settings, gpu: str = LOCAL) -> Identity:
    """The engines that `settings` ask for, of a model that was loaded as they say, in any dtype; for `gpu`.

    Raises EngineError for a GPU that they cannot be built for, MissingExtraError without TensorRT.
    """
    library = find_library()
    place = target(library, gpu)
    return Identity(
        model=model.name,
        weights=checkpoint_digest(settings.model.name),
        precision=settings.engine.precision,
        image_size=model.image_size,
        bank_size=settings.tracker.bank_size,
        most_objects=most_objects(settings.tracker.max_objects),
        library=library.name,
        version=library.version,
        gpu=place.generation,
        gpu_name=place.name,
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
