"""Weights for the package: the running average of training, in float16, beside its configuration and digest."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sam3_node.errors import ModelError
from sam3_node.models.weight_files import write_digest

from .network import nano_config

MAX_BYTES = 12_000_000


def read_checkpoint(
    path: Path, device: torch.device | str = "cpu", by: str = "training.nano"
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


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a model.safetensors. Raises ModelError if there is none or it is damaged."""
    if not path.is_file():
        raise ModelError(f"no weights {path}: expected a model.safetensors to begin from")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ModelError(f"expected weights in {path}, found damage: {error}") from error


def export(checkpoint: Path, folder: Path, beside: Sequence[Path] = (), start: Path | None = None) -> Path:
    """Write what `load_tracker(folder)` takes from a checkpoint of training; returns the weights' path.

    beside: checkpoints of runs that began from the same weights; the mean of all is written (Wortsman et al. 2022,
    "Model soups"). start: weights that the runs began from, a model.safetensors; what is written lies halfway between
    them and the mean (Wortsman et al. 2022, "Robust fine-tuning of zero-shot models"). Raises ModelError where there is
    no checkpoint, a damaged one, or one of another tracker.
    """
    averages = [read_checkpoint(path)["average"] for path in (checkpoint, *beside)]
    if any(average.keys() != averages[0].keys() for average in averages):
        raise ModelError(f"expected runs of the same tracker as {checkpoint}, found another among {beside}")
    weights = {
        name: torch.stack([average[name].float() for average in averages]).mean(dim=0) for name in averages[0]
    }
    if start is not None:
        begun = read_weights(start)
        if begun.keys() != weights.keys():
            raise ModelError(f"expected weights of the same tracker as {checkpoint}, found others in {start}")
        weights = {name: (value + begun[name].float()) / 2 for name, value in weights.items()}
    return write_weights(weights, folder)


def mix(all_weights: Sequence[dict[str, Tensor]], folder: Path) -> Path:
    """Write the mean of weights that `read_weights` gave. Raises ModelError where they are of different trackers."""
    first = all_weights[0]
    if any(weights.keys() != first.keys() for weights in all_weights):
        raise ModelError("expected weights of one tracker to mix, found several")
    mean = {name: torch.stack([w[name].float() for w in all_weights]).mean(dim=0) for name in first}
    return write_weights(mean, folder)


def write_weights(weights: dict[str, Tensor], folder: Path) -> Path:
    """Write weights in float16 as `load_tracker(folder)` takes them; return their path."""
    weights = {name: value.half().contiguous() for name, value in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    nano_config().save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    if path.stat().st_size > MAX_BYTES:
        raise ModelError(f"{path} holds {path.stat().st_size} bytes, expected at most {MAX_BYTES}")
    write_digest(path)
    return path
