"""Say where weights lie, without loading them: bundled, in a folder, in a file of SAM 3.1, or in the hub's cache."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ModelError
from ..files import check_weights_name
from .sam31.checkpoint import read_sizes
from .sam31.loading import STEM, find_local_checkpoint, read_tensors
from .weight_files import CONFIG, SAM31, check_weight_files, is_cached, list_weight_files


def locate_weights(name: str) -> str:
    """Say where the files of weights lie. Raises ModelError where nothing can be loaded."""
    if name == "nano":
        return "nano, bundled"
    check_weights_name(name)
    if checkpoint := find_local_checkpoint(name):
        return _describe_checkpoint(name, checkpoint)
    if not os.path.isdir(name):
        place = "in the cache" if is_cached(name) else "not here yet: the first start fetches them"
        return f"{name}, {place} of the hub"
    check_weight_files(Path(name))
    files = list_weight_files(Path(name))
    # the configuration is always listed, so a single file means that there are no weights
    if not files[0].is_file() or len(files) == 1:
        raise ModelError(
            f"{name}: expected {CONFIG} and weights as .safetensors, or SAM 3.1's {STEM}.safetensors or .pt; found no "
            "such files"
        )
    return f"{name}, {sum(path.stat().st_size for path in files) / 1e6:.0f} MB"


def is_sam31(name: str) -> bool:
    """Return True if these are SAM 3.1's weights: by their name on the hub, a file, or a folder with one."""
    return find_local_checkpoint(name) is not None or name == SAM31


def _describe_checkpoint(name: str, checkpoint: Path) -> str:
    """Describe a file of SAM 3.1 by the shapes of its tensors, whose values stay in the file."""
    sizes = read_sizes(read_tensors(checkpoint), name)
    megabytes = checkpoint.stat().st_size / 1e6
    return f"{checkpoint}, SAM 3.1 at {sizes.image_size} px in groups of {sizes.slots} objects, {megabytes:.0f} MB"
