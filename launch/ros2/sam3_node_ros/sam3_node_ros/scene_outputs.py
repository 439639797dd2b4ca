"""Publishes the planning scene of a bridge: what has changed, and all of it to a planner that comes later."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from .link import Ros2Bridge
from .parts import Header
from .scene import Change, SceneMessages


class SceneOutputs:
    """The publishers of a scene; without moveit_msgs, `objects` is None. A thread may publish while another ends it."""

    def __init__(self, bridge: Ros2Bridge, make: SceneMessages, objects: Any, markers: Any) -> None:
        self._bridge = bridge
        self._make = make
        self._objects = objects
        self._markers = markers
        self._planners = 0
        self._is_active = False
        self._newest = Header(0, 0, "")
        self._lock = threading.Lock()

    @property
    def publishers(self) -> Sequence[Any]:
        """The publishers, to destroy them."""
        return [one for one in (self._objects, self._markers) if one is not None]

    def begin(self) -> None:
        """Publish from now on."""
        with self._lock:
            self._is_active = True

    def end(self) -> None:
        """Remove all bodies from the scene of planners, and publish no more. Idempotent."""
        with self._lock:
            if self._is_active:
                self._is_active = False
                # after Ctrl-C, ROS publishes no more
                with suppress(RuntimeError):
                    self._send(self._bridge.scene.clear(), self._newest)

    def publish(self) -> None:
        """Ask for the scene, and publish what has changed. It waits for the node's answer."""
        with self._lock:
            planners = 0 if self._objects is None else self._objects.get_subscription_count()
            has_come = planners > self._planners
            self._planners = planners
            if not self._is_active or not (planners or self._markers.get_subscription_count()):
                return
            update = self._bridge.update_scene()
            if update is None:
                # who has come meanwhile is told with the next answer
                self._planners = 0 if has_come else planners
                return
            changes = update.changes
            if has_come:
                changes = [*(one for one in changes if not one.boxes), *self._bridge.scene.list_all()]
            self._newest = update.header
            self._send(changes, update.header)

    def _send(self, changes: Sequence[Change], header: Header) -> None:
        if self._objects is not None:
            for change in changes:
                self._objects.publish(self._make.make_collision_object(change, header))
        if self._markers.get_subscription_count():
            self._markers.publish(self._make.make_scene_markers(self._bridge.scene, header))
