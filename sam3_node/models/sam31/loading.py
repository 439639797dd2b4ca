"""Build the tracker from the modules of a checkpoint."""

from __future__ import annotations

import torch

from ..weight_files import CENTRED
from .model import Sam31Model
from .source import Source

FREQUENCIES = ("inv_freq", "positional_embedding")


def build_model(source: Source, name: str, device: torch.device, dtype: torch.dtype) -> Sam31Model:
    """Build the stages on a device, in a dtype. Frequencies of positions stay exact."""
    from ..checkpoints import cast_source

    cast_source(source, device, dtype)
    return Sam31Model(source, name=name, mean=CENTRED.mean, std=CENTRED.std).to(device)
