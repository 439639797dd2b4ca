"""Read a tracker in transformers' layout, without transformers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..errors import ModelError
from ..files import check_weights_name, read_regular
from .family import Reading
from .sam.configuration import AnyConfig, Sam1Config
from .sam.sam1_weights import Sam1Weights
from .sam.weights import TrackerWeights
from .weight_files import (
    CONFIG,
    MAX_JSON_BYTES,
    check_elements,
    check_weight_files,
    explain_loading,
    fetch_folder,
    read_state,
)

Renames = tuple[tuple[re.Pattern[str], str], ...]
"""Patterns of names in a file, and what stands for each match."""
RENAMES = (
    (re.compile(r"^(tracker_model\.)+"), ""),
    (re.compile(r"^detector_model\.vision_encoder\.backbone\."), "vision_encoder.backbone."),
    (re.compile(r"^tracker_neck\."), "vision_encoder.neck."),
)
"""Names in files of SAM 3, which may hold its detector too, and the tracker's names for them; applied in this order."""
SAM1_RENAMES = (
    (re.compile(r"\.out_proj\."), ".o_proj."),
    (re.compile(r"\.lin1\."), ".proj_in."),
    (re.compile(r"\.lin2\."), ".proj_out."),
    (
        re.compile(r"^prompt_encoder\.shared_embedding\."),
        "shared_image_embedding.",
    ),  # one tensor, by either name
)
"""Names in files of SAM 1, and those of SAM 2."""


def read_tracker(
    config_type: type[AnyConfig | Sam1Config], name: str, configure: Callable[[Any], Any]
) -> Reading:
    """Read the tracker in the folder or hub repository `name`; tensors that it lacks are zeros.

    `configure` changes the configuration before the modules are built. Raises ModelError if files are missing or
    damaged, lie outside their folder, or hold tensors of another shape.
    """
    check_weights_name(name)
    with explain_loading(name, "config.json and safetensors"):
        folder = Path(name) if os.path.isdir(name) else fetch_folder(name)
        check_weight_files(folder)
        config = configure(read_config(folder / CONFIG, config_type))
        is_first = isinstance(config, Sam1Config)
        with torch.device("meta"):
            source = Sam1Weights(config) if is_first else TrackerWeights(config)
        check_elements(source, folder)
        state = _rename(read_state(folder), SAM1_RENAMES if is_first else RENAMES)
    expected = source.state_dict()
    found = {key: value for key, value in state.items() if key in expected}
    wrong = [key for key, value in found.items() if value.shape != expected[key].shape]
    if wrong:
        raise ModelError(
            f"{name} has {len(wrong)} tensors of another shape, for example {', '.join(wrong[:3])}"
        )
    missing = sorted(expected.keys() - found.keys())
    for key in missing:
        found[key] = torch.zeros(expected[key].shape)
    source.load_state_dict({key: value.float() for key, value in found.items()}, assign=True)
    return Reading(source.requires_grad_(False).eval(), missing)


def read_config(path: Path, config_type: type[AnyConfig | Sam1Config]) -> Any:
    """Read a tracker's configuration. Raises OSError, or ValueError where it is damaged."""
    config = msgspec.json.decode(read_regular(path, MAX_JSON_BYTES), type=config_type)
    part = getattr(config, "tracker_config", None)
    return config if part is None else part


def _rename(state: dict[str, Tensor], renames: Renames) -> dict[str, Tensor]:
    renamed = {}
    for name, value in state.items():
        for pattern, replacement in renames:
            name = pattern.sub(replacement, name)
        renamed[name] = value
    return renamed
