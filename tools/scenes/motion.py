"""Smooth motion over an array of times: minimum-jerk keyframes, wobble, rotations as quaternions (w, x, y, z)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Rng = np.random.Generator

WAVES = 3  # sinusoids in a wobble


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
    w1, x1, y1, z1 = np.moveaxis(first, -1, 0)
    w2, x2, y2, z2 = np.moveaxis(second, -1, 0)
    w = w1 * w2 - x1 * x2 - y1 * y2 - z1 * z2
    x = w1 * x2 + x1 * w2 + y1 * z2 - z1 * y2
    y = w1 * y2 - x1 * z2 + y1 * w2 + z1 * x2
    z = w1 * z2 + x1 * y2 - y1 * x2 + z1 * w2
    return np.stack([w, x, y, z], -1)


def unit(vectors: Array) -> Array:
    """Return vectors of length one along the last axis."""
    units: Array = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-9)
    return units


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
    m = matrices
    trace = m[:, 0, 0] + m[:, 1, 1] + m[:, 2, 2]
    # the outer product 4 q qᵀ, of which the row with the largest diagonal is well conditioned
    outer = np.empty((len(m), 4, 4))
    outer[:, 0, 0] = 1 + trace
    for i in range(3):
        j, k = (i + 1) % 3, (i + 2) % 3
        outer[:, i + 1, i + 1] = 1 + 2 * m[:, i, i] - trace
        outer[:, 0, i + 1] = outer[:, i + 1, 0] = m[:, k, j] - m[:, j, k]
        outer[:, i + 1, j + 1] = outer[:, j + 1, i + 1] = m[:, j, i] + m[:, i, j]
    best = np.argmax(np.einsum("nii->ni", outer), -1)
    return unit(outer[np.arange(len(m)), best])
