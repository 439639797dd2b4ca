"""Weights for the package: the running average of training, in float16, beside its configuration and digest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sam3_node.errors import ModelError
from sam3_node.models.weight_loading import write_digest

from .config import nano_config

MAX_BYTES = 12_000_000


def read_checkpoint(
    path: Path, device: torch.device | str = "cpu", by: str = "tools.train_nano"
) -> dict[str, Any]:
    """Read a checkpoint of the module `by`. Raises ModelError if there is none or it is damaged."""
    if not path.is_file():
        raise ModelError(f"no checkpoint {path}: train first, python -m {by}")
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch raises RuntimeError, EOFError, UnpicklingError and more
        raise ModelError(
            f"expected a checkpoint of training in {path}, found it damaged ({type(error).__name__}); "
            "move it away to begin anew"
        ) from error


def export(checkpoint: Path, folder: Path, beside: Sequence[Path] = ()) -> Path:
    """Write what `load_tracker(folder)` takes from a checkpoint of training; returns the weights' path.

    beside: checkpoints of runs that began from the same weights; the mean of all is written (Wortsman et al. 2022,
    "Model soups"). Raises ModelError where there is no checkpoint, a damaged one, or one of another tracker.
    """
    averages = [read_checkpoint(path)["average"] for path in (checkpoint, *beside)]
    if any(average.keys() != averages[0].keys() for average in averages):
        raise ModelError(f"expected runs of the same tracker as {checkpoint}, found another among {beside}")
    weights = {
        name: torch.stack([average[name].float() for average in averages]).mean(dim=0).half().contiguous()
        for name in averages[0]
    }
    folder.mkdir(parents=True, exist_ok=True)
    nano_config().save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    if path.stat().st_size > MAX_BYTES:
        raise ModelError(f"{path} holds {path.stat().st_size} bytes, expected at most {MAX_BYTES}")
    write_digest(path)
    return path
