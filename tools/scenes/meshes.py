"""Meshes as the surfaces of simple solids, and the parts of objects that are made of them.

Texture coordinates are 0..1; a mesh's triangles wind counter-clockwise seen from outside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tools.scenes.textures import Color, Texture

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int32]

DEGENERATE = 1e-14  # twice the area of a triangle, squared
ALONG_X: Array = np.array([(0.0, 0.0, 1.0), (0.0, 1.0, 0.0), (-1.0, 0.0, 0.0)])  # z becomes x
ALONG_Y: Array = np.array([(1.0, 0.0, 0.0), (0.0, 0.0, 1.0), (0.0, -1.0, 0.0)])  # z becomes y


@dataclass(frozen=True)
class Mesh:
    """vertices [n, 3] in metres, faces [m, 3], texcoords [k, 2] in 0..1, texfaces [m, 3] into texcoords."""

    vertices: Array
    faces: Indices
    texcoords: Array
    texfaces: Indices

    def moved(self, offset: tuple[float, float, float]) -> Mesh:
        """Return the same mesh, moved."""
        return Mesh(self.vertices + np.array(offset), self.faces, self.texcoords, self.texfaces)

    def turned(self, matrix: Array) -> Mesh:
        """Return the same mesh with each vertex multiplied by a matrix [3, 3] of positive determinant."""
        return Mesh(self.vertices @ matrix.T, self.faces, self.texcoords, self.texfaces)


def lathe(profile: Array, segments: int = 24) -> Mesh:
    """Return a surface of revolution about z; profile [m, 2] of (radius, z), from the bottom outside to the top.

    u runs around, v along the profile. A profile that goes up outside and down inside makes a vessel.
    """
    angles = 2 * np.pi * np.arange(segments) / segments
    circle = np.stack([np.cos(angles), np.sin(angles)], -1)
    rings = profile[:, None, :1] * circle[None]
    heights = np.broadcast_to(profile[:, None, 1:], (*rings.shape[:2], 1))
    return _grid(np.concatenate([rings, heights], -1), _lengths(profile))


def tube(path: Array, radii: float | Array, segments: int = 10) -> Mesh:
    """Return a tube along a path [n, 3], closed at both ends; radii one or [n]. v runs along, u around."""
    radius = np.broadcast_to(np.asarray(radii, np.float64), (len(path),))
    path = np.concatenate([path[:1], path, path[-1:]])
    radius = np.concatenate([[0.0], radius, [0.0]])
    first, second = _frames(path)
    angles = 2 * np.pi * np.arange(segments) / segments
    around = np.cos(angles)[None, :, None] * first[:, None] + np.sin(angles)[None, :, None] * second[:, None]
    return _grid(path[:, None] + radius[:, None, None] * around, _lengths(path))


def superellipsoid(half: tuple[float, float, float], vertical: float, horizontal: float) -> Mesh:
    """Return a rounded body about the origin; exponents near 0 give a box, 1 an ellipsoid."""
    latitude = np.linspace(-np.pi / 2, np.pi / 2, 15)
    longitude = 2 * np.pi * np.arange(24) / 24
    ring = _power(np.cos(latitude), vertical)
    height = _power(np.sin(latitude), vertical)
    x = _power(np.cos(longitude), horizontal)
    y = _power(np.sin(longitude), horizontal)
    points = np.stack([ring[:, None] * x, ring[:, None] * y, np.broadcast_to(height[:, None], (15, 24))], -1)
    return _grid(points * np.array(half), np.linspace(0, 1, 15))


def box(size: tuple[float, float, float]) -> Mesh:
    """Return a box on the plane z = 0 with a 3 x 2 texture atlas: front, back, left; right, top, bottom."""
    x = size[0] / 2
    y = size[1] / 2
    z = size[2]
    sides = (
        ((-x, -y, 0), (x, -y, 0), (x, -y, z), (-x, -y, z)),
        ((x, y, 0), (-x, y, 0), (-x, y, z), (x, y, z)),
        ((-x, y, 0), (-x, -y, 0), (-x, -y, z), (-x, y, z)),
        ((x, -y, 0), (x, y, 0), (x, y, z), (x, -y, z)),
        ((-x, -y, z), (x, -y, z), (x, y, z), (-x, y, z)),
        ((-x, y, 0), (x, y, 0), (x, -y, 0), (-x, -y, 0)),
    )
    vertices = np.array(sides, np.float64).reshape(-1, 3)
    corners = np.array([(0, 0), (1, 0), (1, 1), (0, 1)], np.float64)
    cells = [(0.02 + 0.96 * corners + (side % 3, side // 3)) / (3, 2) for side in range(6)]
    faces = np.concatenate([[(4 * s, 4 * s + 1, 4 * s + 2), (4 * s, 4 * s + 2, 4 * s + 3)] for s in range(6)])
    return Mesh(vertices, faces.astype(np.int32), np.concatenate(cells), faces.astype(np.int32))


def prism(outline: Array, height: float) -> Mesh:
    """Return an outline [n, 2], star-shaped about the origin and counter-clockwise, raised from z = 0."""
    count = len(outline)
    low, high = (np.column_stack([outline, np.full(count, z)]) for z in (0.0, height))
    vertices = np.concatenate([low, high, low, high, [(0, 0, 0), (0, 0, height)]])  # walls, then lids
    faces = []
    for a in range(count):
        b = (a + 1) % count
        faces += [(a, b, count + b), (a, count + b, count + a)]
        faces += [(2 * count + b, 2 * count + a, 4 * count), (3 * count + a, 3 * count + b, 4 * count + 1)]
    reach = np.abs(outline).max()
    texcoords = vertices[:, :2] / (2 * reach) + 0.5
    indices = np.array(faces, np.int32)
    return Mesh(vertices, indices, texcoords, indices)


def _grid(points: Array, along: Array) -> Mesh:
    """Return rings of vertices [m, n, 3] joined; texture v is `along` [m], u runs around with a seam."""
    rings, count = points.shape[:2]
    row, column = np.meshgrid(np.arange(rings - 1), np.arange(count), indexing="ij")
    wide = count + 1
    vertices = points.reshape(-1, 3)
    low = row * count
    high = (row + 1) * count
    next_column = (column + 1) % count
    faces = _triangles(low + column, low + next_column, high + next_column, high + column)
    low = row * wide + column
    high = (row + 1) * wide + column
    texfaces = _triangles(low, low + 1, high + 1, high)
    edges = vertices[faces]
    normal = np.cross(edges[:, 1] - edges[:, 0], edges[:, 2] - edges[:, 0])
    solid = (normal**2).sum(-1) > DEGENERATE**1.2
    u, v = np.meshgrid(np.linspace(0, 1, wide), along)
    return Mesh(vertices, faces[solid], np.stack([u, v], -1).reshape(-1, 2), texfaces[solid])


def _triangles(*corners: npt.NDArray[np.int64]) -> Indices:
    """Return two triangles for each quadrangle of four corners, counter-clockwise."""
    a, b, c, d = (corner.ravel() for corner in corners)
    return np.concatenate([np.stack([a, b, c], -1), np.stack([a, c, d], -1)]).astype(np.int32)


def _lengths(path: Array) -> Array:
    steps = np.linalg.norm(np.diff(path, axis=0), axis=-1)
    total = np.concatenate([[0.0], np.cumsum(steps)])
    return total / max(total[-1], 1e-9)


def _frames(path: Array) -> tuple[Array, Array]:
    """Return two unit vectors across a path at each point, carried along without twist."""
    tangents = np.gradient(path, axis=0)
    tangents[0] = path[2] - path[1]
    tangents[-1] = path[-2] - path[-3]
    tangents /= np.linalg.norm(tangents, axis=-1, keepdims=True)
    first = np.zeros_like(path)
    axis = np.eye(3)[np.argmin(np.abs(tangents[0]))]
    for index, tangent in enumerate(tangents):
        axis = axis - (axis @ tangent) * tangent
        axis /= np.linalg.norm(axis)
        first[index] = axis
    return first, np.cross(tangents, first)


def _power(value: Array, exponent: float) -> Array:
    return np.sign(value) * np.abs(value) ** exponent


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

    def turned(self, matrix: Array, rolls: bool = False) -> Shape:
        """Return the same shape with each vertex multiplied by a matrix [3, 3]."""
        parts = (replace(part, mesh=part.mesh.turned(matrix)) for part in self.parts)
        return Shape(self.color, tuple(parts), rolls)


Maker = Callable[[np.random.Generator], Shape]


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
