"""Velocities of objects, by a Kalman filter with constant velocity for each object."""

from __future__ import annotations

from dataclasses import dataclass, field

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


@dataclass(slots=True)
class _Filter:
    frame: str
    stamp_ns: int
    mean: Array
    """[6], position and velocity"""
    covariance: Array
    """[6, 6]"""
    count: int = field(default=1)

    def update(self, stamp_ns: int, position_m: Array, covariance_m2: Array) -> None:
        dt = (stamp_ns - self.stamp_ns) / NANOSECONDS
        noise = ACCELERATION_MPS2**2 * _IDENTITY
        # blocks of the covariance [6, 6]: of position, of position and velocity, of velocity
        old_cross, speed = self.covariance[:3, 3:], self.covariance[3:, 3:]
        place = self.covariance[:3, :3] + dt * (old_cross + old_cross.T) + dt * dt * speed + dt**3 / 3 * noise
        cross = old_cross + dt * speed + dt * dt / 2 * noise
        speed = speed + dt * noise
        inverse = np.linalg.inv(place + covariance_m2)
        mean = self.mean[:3] + dt * self.mean[3:]
        correction = inverse @ (position_m - mean)
        self.mean = np.concatenate([mean + place @ correction, self.mean[3:] + cross.T @ correction])
        gain = place @ inverse
        covariance = np.empty((6, 6))
        covariance[:3, :3] = place - gain @ place
        covariance[:3, 3:] = cross - gain @ cross
        covariance[3:, :3] = covariance[:3, 3:].T
        covariance[3:, 3:] = speed - cross.T @ inverse @ cross
        self.covariance = (covariance + covariance.T) / 2
        self.stamp_ns, self.count = stamp_ns, self.count + 1


class VelocityFilters:
    """The filters of all objects of one camera. Positions of another frame, or older ones, start a filter anew."""

    def __init__(self) -> None:
        self._filters: dict[int, _Filter] = {}

    def observe(
        self, object_id: int, stamp_ns: int, frame: str, position_m: Array, covariance_m2: Array
    ) -> None:
        """Take the position [3] of an object at a time, with the covariance [3, 3] of its error."""
        found = self._filters.get(object_id)
        if (
            found is None
            or found.frame != frame
            or not 0 < stamp_ns - found.stamp_ns <= MAX_AGE_S * NANOSECONDS
        ):
            covariance = np.zeros((6, 6))
            covariance[:3, :3], covariance[3:, 3:] = covariance_m2, START_SPEED_MPS**2 * np.eye(3)
            mean = np.append(position_m, np.zeros(3))
            self._filters[object_id] = _Filter(frame, stamp_ns, mean, covariance)
        else:
            found.update(stamp_ns, position_m, covariance_m2)

    def velocity(self, object_id: int, stamp_ns: int) -> tuple[str, Array, float] | None:
        """Return the frame, the velocity [3] in m/s, and the seconds since the last position; None if unknown."""
        found = self._filters.get(object_id)
        if found is None or found.count < MIN_POSITIONS:
            return None
        age_s = (stamp_ns - found.stamp_ns) / NANOSECONDS
        return (found.frame, found.mean[3:], age_s) if 0 <= age_s <= MAX_AGE_S else None

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
