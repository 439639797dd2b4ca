"""Parts of an object: meshes, each with its colour or texture and finish."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tools.scenes.colors import Color
from tools.scenes.meshes import Array, Mesh
from tools.scenes.textures import Texture


class Finish(NamedTuple):
    """Reflection of a surface, each value 0..1."""

    specular: float
    shininess: float


@dataclass(frozen=True)
class Part:
    """A mesh with a colour, or with a texture that replaces it; alpha below 1 is glass."""

    mesh: Mesh
    color: Color = (1.0, 1.0, 1.0)
    texture: Texture | None = None
    alpha: float = 1.0
    finish: Finish = Finish(0.2, 0.3)  # noqa: RUF009


@dataclass(frozen=True)
class Shape:
    """An object before it is placed on a table. rolls: lies along y and rolls along x; ball: rolls any way."""

    color: str
    parts: tuple[Part, ...]
    rolls: bool = False
    ball: bool = False


Maker = Callable[[np.random.Generator], Shape]

ALONG_X: Array = np.array([(0.0, 0.0, 1.0), (0.0, 1.0, 0.0), (-1.0, 0.0, 0.0)])  # z becomes x
ALONG_Y: Array = np.array([(1.0, 0.0, 0.0), (0.0, 0.0, 1.0), (0.0, -1.0, 0.0)])  # z becomes y


def gloss(rng: np.random.Generator) -> Finish:
    """Draw a finish: usually matt, sometimes shiny."""
    if rng.random() < 0.35:
        return Finish(rng.uniform(0.6, 1.0), rng.uniform(0.6, 1.0))
    return Finish(rng.uniform(0.0, 0.35), rng.uniform(0.1, 0.5))


def profile(*points: tuple[float, float]) -> Array:
    """Return a lathe's profile of (radius, z)."""
    return np.array(points, np.float64)


def arc(
    start: tuple[float, float], end: tuple[float, float], bulge: float, count: int = 8
) -> list[tuple[float, float]]:
    """Return points from start to end whose middle is pushed out along the first axis."""
    t = np.linspace(0, 1, count)
    first = start[0] + (end[0] - start[0]) * t + 4 * bulge * t * (1 - t)
    second = start[1] + (end[1] - start[1]) * t
    return [(float(a), float(b)) for a, b in zip(first, second, strict=True)]
