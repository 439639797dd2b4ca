"""A kinematic robot arm: a column, two links, a wrist and a gripper, whose parts are placed along the hand's path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tools.scenes.colors import Color, any_color, contrast, scaled
from tools.scenes.motion import Array, Rng, frames, quaternions, unit, wobble

Solid = Literal["capsule", "cylinder", "box", "ellipsoid"]

LIVERIES: tuple[tuple[Color, Color], ...] = (
    ((0.9, 0.9, 0.92), (0.2, 0.2, 0.22)),
    ((0.15, 0.15, 0.17), (0.55, 0.55, 0.58)),
    ((0.95, 0.45, 0.08), (0.12, 0.12, 0.12)),
    ((0.85, 0.85, 0.87), (0.15, 0.35, 0.7)),
    ((0.6, 0.62, 0.65), (0.1, 0.1, 0.1)),
    ((0.95, 0.8, 0.1), (0.2, 0.2, 0.2)),
)
SLACK = 1.06  # of the reach beyond the farthest point


@dataclass(frozen=True)
class Limb:
    """A rigid part of the arm: size as MuJoCo has it of a geom.

    positions [n, 3] and quaternions [n, 4] over time.
    """

    solid: Solid
    size: tuple[float, float, float]
    color: Color
    positions: Array
    quats: Array


def reach(rng: Rng, times: Array, hand: Array, opening: Array, base: Array, thickness: float) -> list[Limb]:
    """The parts of an arm that stands at `base` [3] and whose fingertips follow `hand` [n, 3]; metres."""
    main, trim = LIVERIES[rng.integers(len(LIVERIES))]
    if rng.random() < 0.3:
        main = any_color(rng)
        trim = contrast(rng, main)
    approach = _approach(rng, times, hand, base)
    tool = rng.uniform(0.13, 0.19)
    wrist = hand - tool * approach
    shoulder = np.broadcast_to(base + np.array([0.0, 0.0, rng.uniform(0.2, 0.35)]), hand.shape)
    elbow = _elbow(shoulder, wrist)
    arm = [
        _between("cylinder", np.broadcast_to(base, hand.shape), shoulder, thickness * 1.3, trim),
        _between("capsule", shoulder, elbow, thickness, main),
        _between("capsule", elbow, wrist, thickness * 0.8, main),
        *(
            _joint(point, shoulder, wrist, thickness * size, trim)
            for point, size in ((shoulder, 1.35), (elbow, 1.2))
        ),
    ]
    return arm + _gripper(rng, hand, wrist, approach, opening, (main, trim), thickness)


def _approach(rng: Rng, times: Array, hand: Array, base: Array) -> Array:
    """The direction in which the fingers point [n, 3]: mostly down, leaning away from the base."""
    away = hand - base
    away[:, 2] = 0
    lean = rng.uniform(0.0, 0.5) + 0.08 * wobble(rng, times, 3.0, 1)
    return unit(np.array([0.0, 0.0, -1.0]) + lean * unit(away))


def _elbow(shoulder: Array, wrist: Array) -> Array:
    """The elbow of two equal links, above the line from shoulder to wrist."""
    line = wrist - shoulder
    distance = np.linalg.norm(line, axis=-1, keepdims=True)
    link = SLACK * distance.max() / 2
    along = unit(line)
    up = np.array([0.0, 0.0, 1.0]) - along * along[:, 2:]
    return shoulder + line / 2 + np.sqrt(link**2 - distance**2 / 4) * unit(up)


def _gripper(
    rng: Rng,
    hand: Array,
    wrist: Array,
    approach: Array,
    opening: Array,
    livery: tuple[Color, Color],
    thickness: float,
) -> list[Limb]:
    yaw = rng.uniform(0, np.pi)
    across = np.array([np.cos(yaw), np.sin(yaw), 0.0])
    matrices = frames(approach, across)
    quats = quaternions(matrices)
    finger, palm = rng.uniform(0.055, 0.08), 0.018
    top = hand - finger * approach
    limbs = [
        _between("capsule", wrist, top - palm * approach, thickness * 0.65, livery[1]),
        Limb("box", (0.055, 0.026, palm), livery[0], top - palm * approach, quats),
    ]
    color = scaled(livery[1], rng.uniform(0.5, 1.2))
    for side in (-1.0, 1.0):
        offset = side * (opening + 0.006)[:, None] * matrices[:, :, 0]
        limbs.append(
            Limb("box", (0.006, 0.011, finger / 2), color, top + finger / 2 * approach + offset, quats)
        )
    return limbs


def _between(solid: Solid, start: Array, end: Array, radius: float, color: Color) -> Limb:
    line = end - start
    half = float(np.linalg.norm(line, axis=-1).mean()) / 2
    quats = quaternions(frames(line, np.array([1.0, 0.0, 0.0])))
    return Limb(solid, (radius, half, 0.0), color, (start + end) / 2, quats)


def _joint(point: Array, shoulder: Array, wrist: Array, radius: float, color: Color) -> Limb:
    line = wrist - shoulder
    axis = np.cross(line, (0.0, 0.0, 1.0))
    return Limb("cylinder", (radius, radius, 0.0), color, np.array(point), quaternions(frames(axis, line)))
