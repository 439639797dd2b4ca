"""Takes the messages of a camera in a thread of its own, beside the executor of the node.

An executor of rclpy builds its set of all that it waits for anew before each wait, in Python, and gives each callback to
another thread. That costs 1 to 2 ms an image. Here one thread waits for the camera's subscriptions alone, takes their
messages as bytes and calls back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rclpy.callback_groups import CallbackGroup
from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.node import Node
from rclpy.qos import QoSProfile

WAIT_NS = 50_000_000
"""Longest wait before the thread looks whether it shall end."""


class _OwnThread(CallbackGroup):  # type: ignore[misc]
    """Group of subscriptions that no executor waits for."""

    def can_execute(self, entity: Any) -> bool:
        return False

    def beginning_execution(self, entity: Any) -> bool:
        return False

    def ending_execution(self, entity: Any) -> None:
        pass


class CameraThread:
    """Subscribes to topics, and passes each message on as bytes, until it is closed. `take` must not raise."""

    def __init__(
        self, node: Node, topics: dict[str, Any], qos: QoSProfile, take: Callable[[str, bytes], object]
    ) -> None:
        """`topics` has the type of each topic. The messages of one topic come in their order."""
        self._node = node
        self._take = take
        self._group = _OwnThread()
        self._subscriptions = {
            topic: node.create_subscription(
                kind, topic, lambda _: None, qos, callback_group=self._group, raw=True
            )
            for topic, kind in topics.items()
        }
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ros2 camera", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and unsubscribe. Idempotent."""
        self._closing.set()
        self._thread.join()
        while self._subscriptions:
            self._node.destroy_subscription(self._subscriptions.popitem()[1])

    def _run(self) -> None:
        context = self._node.context
        # room for subscriptions alone, as in `rclpy.wait_for_message`
        waiting = rclpy_implementation.WaitSet(len(self._subscriptions), 0, 0, 0, 0, 0, context.handle)
        while not self._closing.is_set() and context.ok():
            # a wait leaves only what is ready in the set
            waiting.clear_entities()
            for subscription in self._subscriptions.values():
                waiting.add_subscription(subscription.handle)
            waiting.wait(WAIT_NS)
            ready = waiting.get_ready_entities("subscription")
            for topic, subscription in self._subscriptions.items():
                if subscription.handle.pointer in ready:
                    taken = subscription.handle.take_message(subscription.msg_type, True)
                    if taken is not None:
                        self._take(topic, taken[0])
