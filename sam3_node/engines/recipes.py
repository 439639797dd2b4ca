"""Recipes: which layers of an encoder are quantised, and which are left out for which reason."""

from __future__ import annotations

import difflib
import fnmatch
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError
from torch import nn

from ..errors import EngineError, SettingsError
from ..settings import Section, read_toml

KINDS: dict[str, type[nn.Module]] = {"linear": nn.Linear, "convolution": nn.Conv2d}
NEAREST_NAMES = 5
Layers = dict[str, nn.Module]


class Exclusion(Section):
    """Layers that a recipe leaves out."""

    layers: str = Field(min_length=1)
    """Pattern of names within the encoder; * and ? as in the shell."""
    reason: str = Field(min_length=1)
    """Why they are left out."""


# its text is part of the digest of stored fp8 engines
PATCHES = Exclusion(
    layers="*patch*",
    reason="it reads pixels, and is a thousandth of the work: nothing to win, detail to lose",
)


class Recipe(Section):
    """The layers to quantise. The defaults are those of calibration/fp8/default.toml."""

    kinds: tuple[Literal["linear", "convolution"], ...] = Field(("linear",), min_length=1)
    """Kinds of layers to quantise."""
    exclude: tuple[Exclusion, ...] = (PATCHES,)
    """Layers of these kinds to leave out."""

    def select_layers(self, stage: nn.Module) -> Layers:
        """Return the layers of an encoder to quantise, by name.

        Raises EngineError for an exclusion that matches no layer, with the nearest names, and where no layer is of the
        kinds or is left.
        """
        if not find_layers(stage, self.kinds):
            raise EngineError(
                f"FP8: expected an encoder with layers of the kinds {', '.join(self.kinds)}, found none, as in "
                "EdgeTAM's of convolutions alone; use --engine.precision bfloat16"
            )
        names, excluded = list(find_layers(stage)), set[str]()
        for exclusion in self.exclude:
            matches = fnmatch.filter(names, exclusion.layers)
            if not matches:
                raise EngineError(_describe_unknown(exclusion.layers, names))
            excluded.update(matches)
        layers = {
            name: layer for name, layer in find_layers(stage, self.kinds).items() if name not in excluded
        }
        if not layers:
            raise EngineError("expected a recipe that quantises some layer, found one that leaves out all")
        return layers


def load_recipe(path: Path) -> Recipe:
    """Read and check a recipe. Raises SettingsError with each wrong field, what it needs and what it has."""
    try:
        return Recipe(**read_toml(path))
    except ValidationError as error:
        raise SettingsError(f"{path} does not validate: {describe_wrong_fields(error)}") from error


def find_layers(stage: nn.Module, kinds: tuple[str, ...] = tuple(KINDS)) -> Layers:
    """Return the layers of these kinds by name, in the order of the stage."""
    classes = tuple(KINDS[kind] for kind in kinds)
    return {name: layer for name, layer in stage.named_modules() if isinstance(layer, classes)}


def describe_wrong_fields(error: ValidationError) -> str:
    """Describe each wrong field: what it needs and what was found."""
    return "; ".join(
        f"{'.'.join(map(str, item['loc'])) or 'the whole'}: {item['msg']} (found {str(item['input'])[:80]!r})"
        for item in error.errors()
    )


def _describe_unknown(pattern: str, names: list[str]) -> str:
    nearest = difflib.get_close_matches(pattern, names, NEAREST_NAMES, cutoff=0.0)
    return f"the recipe leaves out {pattern!r}, but this encoder has no such layer; nearest: {', '.join(nearest)}"
