"""Objects with their poses over time, the hand of the arm, and the motions that both make.

An action adds its displacement to an object's path. Actions in succession therefore compose, and an action outside the
filmed times still moves the object to its destination. Quaternions are w, x, y, z.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from scipy.spatial.transform import Rotation

from tools.scenes.objects import ObjectModel

Array = npt.NDArray[np.float64]
Rng = np.random.Generator

WAVES = 3  # sinusoids in a wobble
APPROACH_S = 0.7
RETREAT_S = 0.6
HOVER = 0.1  # metres above what is grasped or pushed
OPEN = 0.018  # metres that each finger opens beyond the object
WIDEST = 0.05  # half width between the fingers; wider objects are held by the rim


def minimum_jerk(fraction: Array) -> Array:
    """Ease fractions from 0 to 1 with minimum jerk (Flash and Hogan 1985); clamp fractions outside."""
    u = np.clip(fraction, 0.0, 1.0)
    return u**3 * (10 - 15 * u + 6 * u**2)


def eased(times: Array, start: float, end: float) -> Array:
    """Return 0 until `start`, 1 from `end`, and an eased value between, [n]."""
    return minimum_jerk((times - start) / max(end - start, 1e-6))


def keyframes(times: Array, keys: Sequence[tuple[float, Array]]) -> Array:
    """Return values [n, d] that move from key to key with minimum jerk; keys are (time, value [d])."""
    ordered = sorted(keys, key=lambda key: key[0])
    values = np.repeat(ordered[0][1][None], len(times), 0)
    for (start, first), (end, second) in pairwise(ordered):
        values = values + eased(times, start, end)[:, None] * (second - first)
    return values


def wobble(rng: Rng, times: Array, period: float, size: int) -> Array:
    """Return smooth noise [n, size] of about unit amplitude, whose slowest wave has this period in seconds."""
    total = np.zeros((len(times), size))
    for wave in range(WAVES):
        rate = 2 * np.pi * 1.7**wave / period * rng.uniform(0.8, 1.2, size)
        total += np.sin(rate * times[:, None] + rng.uniform(0, 2 * np.pi, size)) / 1.6**wave
    return total / 1.5


def turn(axis: Sequence[float] | Array, angles: Array) -> Array:
    """Return quaternions [n, 4] of turns about a unit axis."""
    half = np.asarray(angles)[:, None] / 2
    return np.concatenate([np.cos(half), np.sin(half) * np.asarray(axis)], -1)


def compose(first: Array, second: Array) -> Array:
    """Return quaternion products [n, 4]: `second` is applied before `first`."""
    turned = Rotation.from_quat(first, scalar_first=True) * Rotation.from_quat(second, scalar_first=True)
    return np.asarray(turned.as_quat(scalar_first=True))


def unit(vectors: Array) -> Array:
    """Return vectors of length one along the last axis."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-9)


def frames(z: Array, near_x: Array) -> Array:
    """Return rotation matrices [n, 3, 3]: the third column is z, the first as close as possible to `near_x`."""
    z = unit(z)
    near_x = np.broadcast_to(near_x, z.shape)
    y = np.cross(z, near_x)
    spare = np.cross(z, np.where(np.abs(z[:, :1]) < 0.9, (1.0, 0.0, 0.0), (0.0, 1.0, 0.0)))
    y = unit(np.where(np.linalg.norm(y, axis=-1, keepdims=True) > 1e-6, y, spare))
    return np.stack([np.cross(y, z), y, z], -1)


def quaternions(matrices: Array) -> Array:
    """Return unit quaternions [n, 4] of rotation matrices [n, 3, 3]."""
    return np.asarray(Rotation.from_matrix(matrices).as_quat(scalar_first=True))


@dataclass
class Actor:
    """An object of a clip. label 0 is background; place [3] is the position of its base after the actions so far."""

    model: ObjectModel
    label: int
    place: Array
    positions: Array  # [n, 3]
    quats: Array  # [n, 4]

    @classmethod
    def stand(cls, model: ObjectModel, label: int, place: Array, yaw: float, count: int) -> Actor:
        """Return an object that stands still."""
        positions = np.repeat(np.asarray(place, np.float64)[None], count, 0)
        return cls(model, label, np.array(place, np.float64), positions, turn((0, 0, 1), np.full(count, yaw)))

    def shift(self, weight: Array, destination: Array) -> None:
        """Add the way from its place to a destination, weighted over time [n]."""
        self.positions += weight[:, None] * (destination - self.place)
        self.place = np.array(destination, np.float64)

    def rotate(self, axis: Array, angles: Array) -> None:
        """Turn about an axis of the world through its middle, by angles [n]."""
        middle = np.array([0.0, 0.0, self.model.height / 2])
        before = rotated(self.quats, middle)
        self.quats = compose(turn(axis, angles), self.quats)
        self.positions += before - rotated(self.quats, middle)


@dataclass
class Hand:
    """The tool centre point over time: keys (time, position [3]), grips (time, half opening) and held objects.

    holds: from, to, object, offset of the hand from the object's base [3] or [n, 3]. lean: how far the tool leans away
    from the arm's base, as a tangent; tool: metres from the wrist to the fingertips; yaw: of the fingers' line.
    """

    base: Array
    lean: float
    tool: float
    yaw: float
    keys: list[tuple[float, Array]] = field(default_factory=list)
    grips: list[tuple[float, float]] = field(default_factory=list)
    holds: list[tuple[float, float, Actor, Array]] = field(default_factory=list)
    busy_until: float = -np.inf

    def path(self, times: Array) -> Array:
        """Return positions [n, 3]: along the keys, or along a held object."""
        positions = keyframes(times, self.keys)
        for start, end, actor, offset in self.holds:
            held = (times >= start) & (times <= end)
            positions[held] = (actor.positions + offset)[held]
        return positions

    def approach(self, positions: Array) -> Array:
        """Return the direction of the fingers [n, 3]: down, leaning away from the base."""
        away = positions - self.base
        away[:, 2] = 0
        return unit(np.array([0.0, 0.0, -1.0]) + self.lean * unit(away))

    def opening(self, times: Array) -> Array:
        """Half of the fingers' distance [n]."""
        grips = self.grips or [(0.0, 0.03)]
        return keyframes(times, [(time, np.array([grip])) for time, grip in grips])[:, 0]

    def hold(self, actor: Actor, start: float, end: float, offset: Array, before: Array) -> None:
        """Come from `offset` + `before`, stay `offset` [3] from the object from start to end, then leave upward."""
        self.keys += [(start - APPROACH_S, actor.place + offset + before), (start, actor.place + offset)]
        self.holds.append((start, end, actor, offset))
        self.busy_until = end + RETREAT_S

    def grip(self, start: float, end: float, half: float) -> None:
        """Close the fingers at `start` on a width of 2 `half`, and open them at `end`."""
        self.grips += [(start - 0.2, half + OPEN), (start, half), (end, half), (end + 0.2, half + OPEN)]

    def release(self, actor: Actor, end: float, offset: Array) -> None:
        """Leave an object where it now stands."""
        up = np.array([0.0, 0.0, HOVER])
        self.keys += [(end, actor.place + offset), (end + RETREAT_S, actor.place + offset + up)]


def rotated(quats: Array, vector: Array) -> Array:
    """Return a vector [3] rotated by each quaternion [n, 4]: [n, 3]."""
    return np.asarray(Rotation.from_quat(quats, scalar_first=True).apply(vector))


def slide(
    actor: Actor, times: Array, start: float, end: float, destination: Array, spin: float = 0.0
) -> None:
    """Move along the table, turning by `spin` radians."""
    weight = eased(times, start, end)
    actor.shift(weight, destination)
    if spin:
        actor.rotate(np.array([0.0, 0.0, 1.0]), spin * weight)


def roll(actor: Actor, times: Array, start: float, end: float, destination: Array) -> None:
    """Roll without slipping; the caller sets the direction of anything but a ball."""
    weight = eased(times, start, end)
    way = destination - actor.place
    axis = np.cross((0.0, 0.0, 1.0), way)
    length = float(np.linalg.norm(way))
    actor.shift(weight, destination)
    if length > 1e-6 and actor.model.roll:
        actor.rotate(axis / length, weight * length / actor.model.roll)


def carry(
    hand: Hand, actor: Actor, times: Array, start: float, end: float, destination: Array, lift: float
) -> None:
    """Grasp from above, lift, move through the air, put down."""
    offset, half = grasp(hand, actor)
    hand.hold(actor, start, end, offset, np.array([0.0, 0.0, HOVER]))
    third = (end - start) / 3
    actor.positions[:, 2] += lift * (eased(times, start, start + third) - eased(times, end - third, end))
    actor.shift(eased(times, start + 0.4 * third, end - 0.4 * third), destination)
    hand.release(actor, end, offset)
    hand.grip(start, end, half)


def push(hand: Hand, actor: Actor, times: Array, start: float, end: float, destination: Array) -> None:
    """Push along the table with closed fingers."""
    way = destination - actor.place
    back = -way / max(float(np.linalg.norm(way)), 1e-6)
    offset = back * (actor.model.grasp + 0.012) + np.array([0.0, 0.0, 0.4 * actor.model.height])
    hand.hold(actor, start, end, offset, 0.04 * back + np.array([0.0, 0.0, HOVER]))
    actor.shift(eased(times, start, end), destination)
    hand.release(actor, end, offset)
    hand.grips += [(start - 0.3, 0.012), (end + 0.3, 0.012)]


def grasp(hand: Hand, actor: Actor) -> tuple[Array, float]:
    """Return the point of an object between the fingertips, from its base [3], and half its width there.

    Objects that are too wide are held by the rim.
    """
    model = actor.model
    height = max(0.55 * model.height, model.height - 0.035)
    if model.grasp <= WIDEST:
        _, _, z = actor.quats[-1, 1:]
        hand.yaw = 2 * float(np.arctan2(z, actor.quats[-1, 0])) + model.grasp_yaw
        return np.array([0.0, 0.0, height]), model.grasp
    across = np.array([np.cos(hand.yaw), np.sin(hand.yaw), 0.0])
    return 0.92 * model.grasp * across + np.array([0.0, 0.0, model.height - 0.012]), 0.006
