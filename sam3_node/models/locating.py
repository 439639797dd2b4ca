"""Say where weights lie, without loading them: bundled, in a folder or a file, or in the hub's cache."""

from __future__ import annotations

import os
from pathlib import Path

from ..files import check_weights_name
from . import registry
from .weight_files import check_weight_files, list_weight_files


def locate_weights(name: str) -> str:
    """Say where the files of weights lie. Raises ModelError where nothing can be loaded."""
    if name == "nano":
        return "nano, bundled"
    check_weights_name(name)
    if found := registry.find_local_file(name):
        size_mb = found.path.stat().st_size / 1e6
        return f"{found.path}, {found.weights.describe(name, found.path)}, {size_mb:.0f} MB"
    if not os.path.isdir(name):
        where = "in the cache" if registry.is_cached(name) else "not here yet: the first start fetches them"
        return f"{name}, {where} of the hub"
    check_weight_files(Path(name))
    registry.check_folder(Path(name))
    files = list_weight_files(Path(name))
    return f"{name}, {sum(path.stat().st_size for path in files) / 1e6:.0f} MB"
