"""A kinematic robot arm, or a person's: column, two links, wrist and gripper or hand, placed along the tool's path."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tools.scenes.stage import Array, Hand, Rng, frames, quaternions, unit
from tools.scenes.textures import Color, any_color, contrast, scaled

Solid = Literal["capsule", "cylinder", "box", "ellipsoid"]

LIVERIES: tuple[tuple[Color, Color], ...] = (
    ((0.9, 0.9, 0.92), (0.2, 0.2, 0.22)),
    ((0.15, 0.15, 0.17), (0.55, 0.55, 0.58)),
    ((0.95, 0.45, 0.08), (0.12, 0.12, 0.12)),
    ((0.85, 0.85, 0.87), (0.15, 0.35, 0.7)),
    ((0.6, 0.62, 0.65), (0.1, 0.1, 0.1)),
    ((0.95, 0.8, 0.1), (0.2, 0.2, 0.2)),
)
SKINS: tuple[Color, ...] = ((0.95, 0.76, 0.65), (0.82, 0.6, 0.46), (0.6, 0.4, 0.28), (0.36, 0.23, 0.17))
PEOPLE = 0.25  # of the arms
SLACK = 1.06  # of the reach beyond the farthest point
PALM = 0.018  # half of the gripper's body, along the fingers


@dataclass(frozen=True)
class Limb:
    """A rigid part of the arm; its size has the meaning of MuJoCo's geom sizes.

    positions [n, 3] and quaternions [n, 4] over time.
    """

    solid: Solid
    size: tuple[float, float, float]
    color: Color
    positions: Array
    quats: Array


@dataclass(frozen=True)
class Look:
    """Thickness of the links and of the wrist's housing in metres, and colours of links and joints."""

    person: bool
    thickness: float
    housing: float
    main: Color
    trim: Color


def draw_look(rng: Rng, scale: float, person: bool | None = None) -> Look:
    """Draw the look of an arm at random; scale 1 is a robot for objects about ten centimetres long."""
    thickness = rng.uniform(0.022, 0.042) * scale
    if rng.random() < PEOPLE if person is None else person:
        return Look(True, thickness, 0.0, any_color(rng), SKINS[rng.integers(len(SKINS))])
    main, trim = LIVERIES[rng.integers(len(LIVERIES))]
    if rng.random() < 0.3:
        main = any_color(rng)
        trim = contrast(rng, main)
    housing = rng.uniform(0.04, 0.06) * scale if rng.random() < 0.5 else 0.0
    return Look(False, thickness, housing, main, trim)


def reach(rng: Rng, times: Array, hand: Hand, look: Look) -> list[Limb]:
    """Return the parts of an arm whose fingertips follow the hand."""
    tip = hand.path(times)
    approach = hand.approach(tip)
    wrist = tip - hand.tool * approach
    shoulder = np.broadcast_to(hand.base + np.array([0.0, 0.0, rng.uniform(0.2, 0.35)]), tip.shape)
    elbow = _elbow(shoulder, wrist)
    thick = look.thickness
    trim = look.trim
    limbs = [
        _between("capsule", shoulder, elbow, thick, look.main),
        _between("capsule", elbow, wrist, thick * 0.8, look.main),
        _between("capsule", wrist, tip - 0.5 * hand.tool * approach, thick * 0.65, trim),
    ]
    if not look.person:
        limbs.append(_between("cylinder", np.broadcast_to(hand.base, tip.shape), shoulder, thick * 1.3, trim))
        joints = ((shoulder, 1.35), (elbow, 1.2))
        limbs += [_joint(point, shoulder, wrist, thick * size, trim) for point, size in joints]
    if look.housing:
        limbs.append(_joint(wrist, shoulder, wrist, look.housing, trim))
    matrices = frames(approach, np.array([np.cos(hand.yaw), np.sin(hand.yaw), 0.0]))
    return limbs + gripper(rng, tip, matrices, hand.opening(times), look)


def gripper(rng: Rng, tip: Array, matrices: Array, opening: Array, look: Look) -> list[Limb]:
    """Return a palm and fingers whose tips are at `tip` [n, 3].

    matrices [n, 3, 3]: x is the line of the fingers, z where they point. opening [n]: half of their distance.
    """
    return (_person_hand if look.person else _two_fingers)(rng, tip, matrices, opening, look)


def _two_fingers(rng: Rng, tip: Array, matrices: Array, opening: Array, look: Look) -> list[Limb]:
    quats = quaternions(matrices)
    approach = matrices[:, :, 2]
    finger = rng.uniform(0.055, 0.08)
    top = tip - finger * approach
    wide = max(0.045, float(opening.max()) + 0.012)
    limbs = [Limb("box", (wide, 0.026, PALM), look.main, top - PALM * approach, quats)]
    color = scaled(look.trim, rng.uniform(0.5, 1.2))
    for side in (-1.0, 1.0):
        offset = side * (opening + 0.006)[:, None] * matrices[:, :, 0]
        middle = top + finger / 2 * approach + offset
        limbs.append(Limb("box", (0.006, 0.011, finger / 2), color, middle, quats))
    return limbs


def _person_hand(rng: Rng, tip: Array, matrices: Array, opening: Array, look: Look) -> list[Limb]:
    """Return a palm, four fingers on one side of what is held and a thumb on the other."""
    approach = matrices[:, :, 2]
    across = matrices[:, :, 0]
    along = matrices[:, :, 1]
    palm = tip - 0.075 * approach
    limbs = [Limb("ellipsoid", (0.026, 0.042, 0.04), look.trim, palm, quaternions(matrices))]
    for finger in range(5):
        thumb = finger == 4
        side = -1.0 if thumb else 1.0
        spread = 0.0 if thumb else 0.019 * (finger - 1.5)
        root = palm + 0.02 * approach + 0.016 * side * across + spread * along
        knuckle = palm + 0.045 * approach + side * (opening[:, None] + 0.016) * across + spread * along
        end = tip + side * (opening[:, None] + 0.007) * across + 0.8 * spread * along
        limbs += [_between("capsule", *bone, 0.0085, look.trim) for bone in ((root, knuckle), (knuckle, end))]
    return limbs


def _elbow(shoulder: Array, wrist: Array) -> Array:
    """Return the elbow of two equal links, above the line from shoulder to wrist."""
    line = wrist - shoulder
    distance = np.linalg.norm(line, axis=-1, keepdims=True)
    link = SLACK * distance.max() / 2
    along = unit(line)
    up = np.array([0.0, 0.0, 1.0]) - along * along[:, 2:]
    return shoulder + line / 2 + np.sqrt(link**2 - distance**2 / 4) * unit(up)


def _between(solid: Solid, start: Array, end: Array, radius: float, color: Color) -> Limb:
    line = end - start
    half = float(np.linalg.norm(line, axis=-1).max()) / 2
    quats = quaternions(frames(line, np.array([1.0, 0.0, 0.0])))
    return Limb(solid, (radius, half, 0.0), color, (start + end) / 2, quats)


def _joint(point: Array, shoulder: Array, wrist: Array, radius: float, color: Color) -> Limb:
    line = wrist - shoulder
    axis = np.cross(line, (0.0, 0.0, 1.0))
    return Limb("cylinder", (radius, radius, 0.0), color, np.array(point), quaternions(frames(axis, line)))
