"""What of an encoder is quantised: kinds of layers, and those that are left out, each with its reason."""

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
NEAREST = 5
Layers = dict[str, nn.Module]


class Exclusion(Section):
    """Layers that stay as they are."""

    layers: str = Field(min_length=1)
    """Name within the encoder; * and ? as in the shell."""
    reason: str = Field(min_length=1)
    """Why."""


PATCHES = Exclusion(
    layers="*patch*",
    reason="it reads pixels, and is a thousandth of the work: nothing to win, detail to lose",
)


class Recipe(Section):
    """What is quantised; without arguments as calibration/fp8/default.toml has it."""

    kinds: tuple[Literal["linear", "convolution"], ...] = Field(("linear",), min_length=1)
    """Kinds of layers."""
    exclude: tuple[Exclusion, ...] = (PATCHES,)
    """Layers of these kinds that are left out."""

    def chosen(self, stage: nn.Module) -> Layers:
        """The layers of an encoder to quantise, by name.

        Raises EngineError for an exclusion that names no layer, telling the nearest, and where none is left.
        """
        known, out = layers_of(stage), set[str]()
        for exclusion in self.exclude:
            found = fnmatch.filter(known, exclusion.layers)
            if not found:
                raise EngineError(_unknown(exclusion.layers, list(known)))
            out.update(found)
        chosen = {name: layer for name, layer in layers_of(stage, self.kinds).items() if name not in out}
        if not chosen:
            raise EngineError("expected a recipe that quantises some layer, found one that leaves out all")
        return chosen


def load_recipe(path: Path) -> Recipe:
    """Read and check a recipe; SettingsError names each wrong field, what it needs and has."""
    try:
        return Recipe(**read_toml(path))
    except ValidationError as error:
        raise SettingsError(f"{path} does not validate: {wrong_fields(error)}") from error


def layers_of(stage: nn.Module, kinds: tuple[str, ...] = tuple(KINDS)) -> Layers:
    """The layers of these kinds by name, in their order."""
    classes = tuple(KINDS[kind] for kind in kinds)
    return {name: layer for name, layer in stage.named_modules() if isinstance(layer, classes)}


def wrong_fields(error: ValidationError) -> str:
    """Each wrong field, what it needs and what was found."""
    return "; ".join(
        f"{'.'.join(map(str, item['loc'])) or 'the whole'}: {item['msg']} (found {str(item['input'])[:80]!r})"
        for item in error.errors()
    )


def _unknown(pattern: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(pattern, known, NEAREST, cutoff=0.0)
    return f"the recipe leaves out {pattern!r}, but this encoder has no such layer; nearest: {', '.join(nearest)}"
