"""Velocities of objects, by a Kalman filter with constant velocity for each object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..geometry import Array
from ..types import NANOSECONDS, State

ACCELERATION_MPS2 = 1.0
"""Standard deviation of an object's acceleration, white noise."""
START_SPEED_MPS = 0.5
"""Standard deviation of the speed before the second position."""
MAX_AGE_S = 1.0
"""A velocity is not given, and the filter starts anew, this long after the last position."""
MIN_POSITIONS = 3
"""Positions that a velocity needs."""
_IDENTITY = np.eye(3)


class Velocity(NamedTuple):
    """The velocity of an object."""

    frame: str
    mps: Array
    """[3]"""
    age_s: float
    """time since the position that it is from"""


@dataclass(slots=True)
class _Filter:
    frame: str
    stamp_ns: int
    mean: Array
    """[6], position and velocity"""
    covariance: Array
    """[6, 6]"""
    count: int = 1


class VelocityFilters:
    """The filters of all objects of one camera. Positions of another frame, or older ones, start a filter anew."""

    def __init__(self) -> None:
        self._filters: dict[int, _Filter] = {}

    def observe(
        self, ids: Sequence[int], stamp_ns: int, frame: str, positions_m: Array, covariances_m2: Array
    ) -> None:
        """Take positions [n, 3] of objects at one time, with the covariances [n, 3, 3] of their errors."""
        known = []
        for row, object_id in enumerate(ids):
            found = self._filters.get(object_id)
            if (
                found is not None
                and found.frame == frame
                and 0 < stamp_ns - found.stamp_ns <= MAX_AGE_S * NANOSECONDS
            ):
                known.append((row, found))
                continue
            covariance = np.zeros((6, 6))
            covariance[:3, :3], covariance[3:, 3:] = covariances_m2[row], START_SPEED_MPS**2 * _IDENTITY
            mean = np.append(positions_m[row], np.zeros(3))
            self._filters[object_id] = _Filter(frame, stamp_ns, mean, covariance)
        if known:
            rows = [row for row, _ in known]
            _update([item for _, item in known], stamp_ns, positions_m[rows], covariances_m2[rows])

    def velocity(self, object_id: int, stamp_ns: int) -> Velocity | None:
        """Return the velocity of an object; None if it is unknown or too old."""
        found = self._filters.get(object_id)
        if found is None or found.count < MIN_POSITIONS:
            return None
        age_s = (stamp_ns - found.stamp_ns) / NANOSECONDS
        return Velocity(found.frame, found.mean[3:], age_s) if 0 <= age_s <= MAX_AGE_S else None

    def remove(self, object_id: int) -> None:
        """Forget an object."""
        self._filters.pop(object_id, None)

    def state(self) -> State:
        """Return the state that `restore` takes."""
        return {
            str(object_id): {
                "frame": item.frame,
                "stamp_ns": item.stamp_ns,
                "mean": item.mean.tolist(),
                "covariance": item.covariance.ravel().tolist(),
                "count": item.count,
            }
            for object_id, item in self._filters.items()
        }

    def restore(self, state: State) -> None:
        """Continue from the moment at which `state` was called."""
        self._filters = {
            int(object_id): _Filter(
                item["frame"],
                item["stamp_ns"],
                np.array(item["mean"]),
                np.array(item["covariance"]).reshape(6, 6),
                item["count"],
            )
            for object_id, item in state.items()
        }


def _update(filters: Sequence[_Filter], stamp_ns: int, positions_m: Array, covariances_m2: Array) -> None:
    """Predict n filters at a time, and correct them by positions [n, 3] with covariances [n, 3, 3]."""
    stamps_ns = np.array([item.stamp_ns for item in filters])
    dt = ((stamp_ns - stamps_ns) / NANOSECONDS)[:, None, None]
    means = np.array([item.mean for item in filters])[:, :, None]
    old = np.array([item.covariance for item in filters])
    noise = ACCELERATION_MPS2**2 * dt * _IDENTITY
    # blocks of the covariances [n, 6, 6]: of position, of position and velocity, of velocity
    old_cross, speed = old[:, :3, 3:], old[:, 3:, 3:]
    place = old[:, :3, :3] + dt * (old_cross + old_cross.transpose(0, 2, 1) + dt * (speed + noise / 3))
    cross = old_cross + dt * (speed + noise / 2)
    predicted = np.concatenate([place, cross.transpose(0, 2, 1)], axis=1)  # [n, 6, 3], with the position
    gain = predicted @ np.linalg.inv(place + covariances_m2)
    means[:, :3] += dt * means[:, 3:]
    means += gain @ (positions_m[:, :, None] - means[:, :3])
    covariances = np.empty_like(old)
    covariances[:, :3, :3], covariances[:, :3, 3:] = place, cross
    covariances[:, 3:, :3], covariances[:, 3:, 3:] = cross.transpose(0, 2, 1), speed + noise
    covariances -= gain @ predicted.transpose(0, 2, 1)
    covariances = (covariances + covariances.transpose(0, 2, 1)) / 2
    for item, mean, covariance in zip(filters, means[:, :, 0], covariances, strict=True):
        item.mean, item.covariance, item.stamp_ns, item.count = mean, covariance, stamp_ns, item.count + 1
