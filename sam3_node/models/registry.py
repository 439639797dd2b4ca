"""The families of trackers, and the questions about weights that a family answers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ..errors import ModelError
from ..files import CHECKPOINT_SUFFIXES
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
_FILES = tuple((family, family.weights) for family in FAMILIES if isinstance(family.weights, FileWeights))
KINDS: dict[str, tuple[Family, TransformersWeights]] = {
    kind: (family, family.weights)
    for family in FAMILIES
    if isinstance(family.weights, TransformersWeights)
    for kind in family.weights.kinds
}
"""The family of weights in transformers' layout, by the `model_type` of their config.json."""
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


def check_folder(folder: Path) -> None:
    """Raise ModelError for a folder without weights in transformers' layout. The message names what is there instead.

    A checkpoint in one file is found by its name alone, because other models come in such files, too.
    """
    files = weight_files.list_weight_files(folder)
    # the configuration is always listed, so a single file means that there are no weights
    if files[0].is_file() and len(files) > 1:
        return
    others = sorted(path.name for path in folder.iterdir() if path.suffix in CHECKPOINT_SUFFIXES)
    found = ", ".join(others[:3]) or "no such files"
    advice = "; rename it, or name the file itself" if others and not files[0].is_file() else ""
    raise ModelError(
        f"{folder}: expected {weight_files.CONFIG} and weights as .safetensors, or {FILE_HINTS}; found {found}{advice}"
    )


def find_family(name: str) -> Family | None:
    """Return the family of weights in a layout of their own, which are not opened; None for transformers' layout."""
    if found := find_local_file(name):
        return found.family
    return next((family for family, _ in _FILES if family.hub_name == name), None)


def find_reader(kind: str | None, name: str) -> tuple[Family, TransformersWeights]:
    """Return the family of the weights `name` whose `model_type` is `kind`. Raises ModelError if there is none."""
    if kind not in KINDS:
        raise ModelError(f"{name} holds a {kind} model; expected one of {', '.join(KINDS)}")
    return KINDS[kind]


def is_cached(name: str) -> bool:
    """Return True if the hub's cache has the weights with this name."""
    files = [weights.hub_file for family, weights in _FILES if family.hub_name == name]
    return weight_files.is_cached(name, *files)


def is_gated(name: str) -> bool:
    """Return True for weights that the hub gives to users with access alone, and that are not in the cache."""
    gated = [family.hub_name for family in FAMILIES if family.is_gated]
    return name in gated and not os.path.isdir(name) and not is_cached(name)
