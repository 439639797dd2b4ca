"""Serves some topics and services of a node in a thread of their own, beside the executor of the node.

An executor of rclpy builds its set of all that it waits for anew before each wait, in Python, and gives each callback
to another thread. That costs 1 to 2 ms an image or request. A thread here waits for its own few alone. It takes the
messages of topics as bytes.
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


class _NoExecutor(CallbackGroup):
    """Group of subscriptions and services that no executor waits for."""

    def can_execute(self, entity: Any) -> bool:
        return False

    def beginning_execution(self, entity: Any) -> bool:
        return False

    def ending_execution(self, entity: Any) -> None:
        pass


class OwnThread:
    """A thread that serves topics and services from `start` to `close`. What they call must not raise."""

    def __init__(self, node: Node, name: str) -> None:
        self._node = node
        self._group = _NoExecutor()
        self._subscriptions: list[Any] = []
        self._services: list[Any] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def subscribe(self, kind: Any, topic: str, qos: QoSProfile, take: Callable[[bytes], object]) -> None:
        """Let the thread pass each message of a topic to `take`, serialised. Call it before `start`."""
        self._subscriptions.append(
            self._node.create_subscription(kind, topic, take, qos, callback_group=self._group, raw=True)
        )

    def serve(self, kind: Any, name: str, answer: Callable[[Any, Any], Any]) -> None:
        """Let the thread answer the requests of a service, one after another. Call it before `start`."""
        self._services.append(self._node.create_service(kind, name, answer, callback_group=self._group))

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, and close its topics and services."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        while self._subscriptions:
            self._node.destroy_subscription(self._subscriptions.pop())
        while self._services:
            self._node.destroy_service(self._services.pop())

    def _run(self) -> None:
        context = self._node.context
        # with room for these alone, as in `rclpy.wait_for_message`
        sizes = (len(self._subscriptions), 0, 0, 0, len(self._services), 0)
        waiting = rclpy_implementation.WaitSet(*sizes, context.handle)
        while not self._closing.is_set() and context.ok():
            # a wait leaves only what is ready in the set
            waiting.clear_entities()
            for subscription in self._subscriptions:
                waiting.add_subscription(subscription.handle)
            for service in self._services:
                waiting.add_service(service.handle)
            waiting.wait(WAIT_NS)

            # one bad message or a client that has gone must not end the thread
            try:
                self._serve_ready(waiting)
            except Exception as error:
                self._node.get_logger().warning(f"{type(error).__name__}: {error}")

    def _serve_ready(self, waiting: Any) -> None:
        topics = waiting.get_ready_entities("subscription")
        requests = waiting.get_ready_entities("service")
        for subscription in self._subscriptions:
            if subscription.handle.pointer in topics:
                taken = subscription.handle.take_message(subscription.msg_type, True)
                if taken is not None:
                    subscription.callback(taken[0])
        for service in self._services:
            if service.handle.pointer in requests:
                request, header = service.handle.service_take_request(service.srv_type.Request)
                if header is not None:
                    response = service.callback(request, service.srv_type.Response())
                    service.send_response(response, header)
