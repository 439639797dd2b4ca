"""The families of trackers, and the questions about weights that a family answers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ModelError
from . import weight_files
from .families import edgetam, sam1, sam2, sam3, sam31
from .family import Family, FileWeights, TransformersWeights

FAMILIES: tuple[Family, ...] = (
    sam31.FAMILY,
    sam3.FAMILY,
    sam2.FAMILY,
    edgetam.FAMILY,
    sam1.FAMILY,
)
"""All families. A new one is a line here, and a file of `families`. The first that knows weights loads them."""
_TRANSFORMERS = tuple(
    (family, family.weights) for family in FAMILIES if isinstance(family.weights, TransformersWeights)
)
_FILES = tuple((family, family.weights) for family in FAMILIES if isinstance(family.weights, FileWeights))
CLASSES: dict[str, Any] = {
    kind: reader for _, weights in _TRANSFORMERS for kind, reader in weights.classes.items()
}
"""transformers' class that reads weights, by the `model_type` of their config.json."""
FILE_HINTS = ", ".join(weights.hint for _, weights in _FILES)
"""What a folder may hold instead of transformers' layout, in words."""


class WeightsFile(NamedTuple):
    """A file that holds the weights of a family in a layout of its own."""

    path: Path
    family: Family
    weights: FileWeights


def find_local_file(name: str) -> WeightsFile | None:
    """Return the file of weights in a layout of their own that `name` is, or that lies in the folder `name`."""
    for family, weights in _FILES:
        if path := weights.find_local(name):
            return WeightsFile(path, family, weights)
    return None


def find_file(name: str, fetch: bool = True) -> WeightsFile | None:
    """Return the local file of weights in a layout of their own; None for weights in transformers' layout.

    If `name` is a family's name on the hub, the file is fetched, or taken from the hub's cache. Raises ModelError where
    that fails.
    """
    for family, weights in _FILES:
        if path := weights.find(name, fetch):
            return WeightsFile(path, family, weights)
    return None


def find_family(name: str) -> Family | None:
    """Return the family of weights in a layout of their own, which are not opened; None for transformers' layout."""
    if found := find_local_file(name):
        return found.family
    return next((family for family, _ in _FILES if family.hub_name == name), None)


def find_reader(source: Any) -> tuple[Family, TransformersWeights]:
    """Return the family whose class has read weights in transformers' layout, or has this configuration."""
    # a class that extends that of another family is of its own family, wherever that stands in the list
    by_class = {
        kind: (family, weights)
        for family, weights in _TRANSFORMERS
        for reader in weights.classes.values()
        for kind in (reader, reader.config_class)
    }
    for kind in type(source).__mro__:
        if kind in by_class:
            return by_class[kind]
    raise ModelError(f"expected the model of a family in models/registry.py, found a {type(source).__name__}")


def is_cached(name: str) -> bool:
    """Return True if the hub's cache has the weights with this name."""
    files = [weights.hub_file for family, weights in _FILES if family.hub_name == name]
    return weight_files.is_cached(name, *files)


def is_gated(name: str) -> bool:
    """Return True for weights that the hub gives to users with access alone, and that are not in the cache."""
    gated = [family.hub_name for family in FAMILIES if family.is_gated]
    return name in gated and not os.path.isdir(name) and not is_cached(name)
