"""Scenes of one hard object each, by sphere tracing of signed distances: thin, hollow, half occluded, transparent."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sam3_node.geometry import Array
from sam3_node.types import Intrinsics

SIZE = (480, 640)
CAMERA = Intrinsics(600.0, 600.0, 319.5, 239.5)
STEPS = 160
MAX_DEPTH_M = 3.0
SEEN_THROUGH, LOST = 0.6, 0.3
"""Of a transparent object's pixels: shares with the depth behind it, and without depth. The rest has its own."""

Distance = Callable[[Array], Array]
"""Signed distances [n] of points [n, 3]."""


class Case(NamedTuple):
    """An object on a table: exact depth [h, w], the depth that a sensor sees, and the object's mask [h, w]."""

    name: str
    depth_m: Array
    seen_m: Array
    inside: npt.NDArray[np.bool_]


def make_cases(random: np.random.Generator) -> list[Case]:
    """Make one scene of each kind, with the object at a random place."""
    shift = np.append(random.uniform(-0.05, 0.05, 2), random.uniform(-0.08, 0.08))
    glass = _render("transparent", _capsule((0.0, -0.03, 0.75), (0.0, 0.05, 0.79), 0.035), shift)
    chance = random.random(SIZE)
    seen = np.where(glass.inside & (chance < SEEN_THROUGH), _trace(_table), glass.depth_m)
    seen = np.where(glass.inside & (chance > 1 - LOST), 0.0, seen)
    return [
        _render("thin", _capsule((-0.1, 0.0, 0.82), (0.1, 0.03, 0.84), 0.003), shift),
        _render("hollow", _ring((0.0, 0.0, 0.8), 0.06, 0.012), shift),
        _render("half occluded", _ball((0.03, 0.0, 0.8), 0.05), shift, _ball((-0.03, 0.01, 0.6), 0.05)),
        glass._replace(seen_m=seen),
    ]


def _render(name: str, shape: Distance, shift: Array, occluder: Distance | None = None) -> Case:
    def object_distance(points: Array) -> Array:
        return shape(points - shift)

    others = [_table] if occluder is None else [_table, lambda points: occluder(points - shift)]
    alone, behind = _trace(object_distance), np.min([_trace(other) for other in others], axis=0)
    inside = (alone < behind) & (alone < MAX_DEPTH_M)
    depth = np.minimum(alone, behind)
    return Case(name, depth, depth, inside)


def _trace(distance: Distance) -> Array:
    """Return the depth [h, w] along the optical axis; MAX_DEPTH_M and more where nothing is met."""
    rows, columns = np.indices(SIZE)
    rays = np.stack([(columns - CAMERA.cx) / CAMERA.fx, (rows - CAMERA.cy) / CAMERA.fy, np.ones(SIZE)], -1)
    rays = rays.reshape(-1, 3)
    lengths = np.linalg.norm(rays, axis=1)
    depth = np.full(len(rays), 0.3)
    active = np.arange(len(rays))
    for _ in range(STEPS):
        step = distance(rays[active] * depth[active, None])
        depth[active] += step / lengths[active]
        active = active[(np.abs(step) > 1e-5) & (depth[active] < MAX_DEPTH_M)]
    depth[active] = MAX_DEPTH_M + 1  # grazing rays
    return depth.reshape(SIZE)


def _table(points: Array) -> Array:
    normal = np.array([0.0, -0.8, -0.6])
    values: Array = points @ normal + 0.62
    return values


def _ball(centre: tuple[float, float, float], radius: float) -> Distance:
    return lambda points: np.linalg.norm(points - centre, axis=1) - radius


def _capsule(
    first: tuple[float, float, float], second: tuple[float, float, float], radius: float
) -> Distance:
    start, along = np.array(first), np.subtract(second, first)

    def distance(points: Array) -> Array:
        share = np.clip((points - start) @ along / (along @ along), 0, 1)
        found: Array = np.linalg.norm(points - start - share[:, None] * along, axis=1) - radius
        return found

    return distance


def _ring(centre: tuple[float, float, float], radius: float, thickness: float) -> Distance:
    axis = np.array([0.0, -0.8, -0.6])

    def distance(points: Array) -> Array:
        offset = points - centre
        height = offset @ axis
        flat = np.linalg.norm(offset - height[:, None] * axis, axis=1) - radius
        values: Array = np.hypot(flat, height) - thickness
        return values

    return distance
