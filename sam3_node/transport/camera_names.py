"""The camera names of a receiver: each is bound to the endpoint that it was first heard from."""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import WireError
from .connection import ReconnectingSocket
from .security import ClientKeys

CAMERA_IDLE_S = 10.0
REFUSAL_S = 0.05
"""Time for which an endpoint's other new names are refused, too, when all places are taken: a look costs time."""

log = logging.getLogger(__name__)


def choose_replaced(cameras: Mapping[str, tuple[str, bool]], endpoint: str, share: int) -> str | None:
    """Return the camera that loses its place to a new one of `endpoint`, or None if the new one has to wait.

    `cameras` maps each camera to its endpoint and whether it is idle, the longest silent first. An idle camera gives
    way to its own endpoint, and to any endpoint if its own holds more than `share` places. An endpoint that holds less
    than `share` also takes the place of an active camera of one that holds more, and of any idle camera.
    """
    counts = Counter(owner for owner, _ in cameras.values())
    below = counts[endpoint] < share
    idle_own, active, idle_any = [], [], []
    for camera, (owner, idle) in cameras.items():
        above = counts[owner] > share
        if idle and (owner == endpoint or above):
            idle_own.append(camera)
        elif below and above:
            active.append(camera)
        elif below and idle:
            idle_any.append(camera)
    return next(iter(idle_own + active + idle_any), None)


@dataclass(slots=True)
class _Binding:
    source: ReconnectingSocket
    handshakes: int
    heard_s: float

    @property
    def idle(self) -> bool:
        """True if the camera has been silent for CAMERA_IDLE_S."""
        return time.monotonic() - self.heard_s >= CAMERA_IDLE_S

    @property
    def free(self) -> bool:
        """True if another endpoint may have the name: idle, and the connection that it came over has ended."""
        return self.idle and not (self.source.alive and self.source.handshakes == self.handshakes)


class CameraNames:
    """At most `capacity` names of cameras, bound to their endpoints.

    While the connection lasts that a name came over, no other endpoint gets the name. When all places are taken,
    `choose_replaced` finds a place, with an equal share for each endpoint. So an endpoint that sends many names takes
    nothing from the others.
    """

    def __init__(self, capacity: int, endpoints: int) -> None:
        self.capacity = max(capacity, endpoints)
        self._share = self.capacity // endpoints
        self._bindings: OrderedDict[str, _Binding] = OrderedDict()  # the longest silent first
        self._warned: set[tuple[str, str]] = set()
        self._refused_until_s: dict[str, float] = {}  # by endpoint

    def admit(self, camera: str, source: ReconnectingSocket) -> str | None:
        """Record that `camera` was heard from `source`. Return the name that lost its place to it, or None.

        Raises WireError for a name of another endpoint, one that the endpoint's key may not send, and one beyond
        `capacity`.
        """
        if source.keys is not None and not source.keys.may_send(camera):
            raise self._refuse(camera, source, f"expected a camera of its key {_describe_key(source.keys)}")
        bound = self._bindings.get(camera)
        if bound is not None and bound.source is not source and not bound.free:
            expected = (
                f"expected each camera name at one endpoint, and {bound.source.endpoint} has sent it first; give each"
                " camera a name of its own"
            )
            raise self._refuse(camera, source, expected)
        replaced = None
        if bound is None and len(self._bindings) >= self.capacity:
            replaced = self._choose_replaced(source)
            if replaced is None:
                raise WireError(f"expected at most {self.capacity} cameras, found another: {camera}")
            del self._bindings[replaced]
        self._bindings[camera] = _Binding(source, source.handshakes, time.monotonic())
        self._bindings.move_to_end(camera)  # never absent for a moment: `silent_s` is called by other threads
        return replaced

    def silent_s(self, camera: str) -> float | None:
        """Return the seconds since the camera was last heard; None for a name that has no place."""
        binding = self._bindings.get(camera)
        return None if binding is None else time.monotonic() - binding.heard_s

    def _choose_replaced(self, source: ReconnectingSocket) -> str | None:
        if time.monotonic() < self._refused_until_s.get(source.endpoint, 0.0):
            return None
        bindings = {
            camera: (binding.source.endpoint, binding.idle) for camera, binding in self._bindings.items()
        }
        replaced = choose_replaced(bindings, source.endpoint, self._share)
        if replaced is None:
            self._refused_until_s[source.endpoint] = time.monotonic() + REFUSAL_S
        return replaced

    def _refuse(self, camera: str, source: ReconnectingSocket, expected: str) -> WireError:
        message = f"camera {camera} of {source.endpoint} is refused: {expected}"
        if (camera, source.endpoint) not in self._warned and len(self._warned) < self.capacity:
            self._warned.add((camera, source.endpoint))
            log.warning("%s", message)
        return WireError(message)


def _describe_key(keys: ClientKeys) -> str:
    return f"{keys.server}, which may send {', '.join(keys.server.cameras) or 'none'}"
