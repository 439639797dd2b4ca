"""A graph of ROS 2 in one process: messages travel as CDR, and callbacks run in the threads of an executor."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from tests.support.ros2.messages import Message, deserialise, serialise

Group = threading.Lock
"""A mutually exclusive callback group."""


class Endpoint:
    """A subscription or a service of a node."""

    def __init__(
        self, name: str, kind: Any, callback: Callable[..., Any], group: Any, reliable: bool
    ) -> None:
        if hasattr(kind, "type_name"):
            inspect.signature(callback).bind(object())  # rclpy binds it so, too
        self.name, self.kind, self.callback, self.group, self.reliable = name, kind, callback, group, reliable


class Graph:
    """Topics and services by their full names. A callback that raises ends the spinning, as in rclpy."""

    def __init__(self) -> None:
        self.subscriptions: list[Endpoint] = []
        self.services: dict[str, Endpoint] = {}
        self.parameters: dict[str, Any] = {}
        self.log: list[tuple[str, str]] = []
        self.failures: list[BaseException] = []
        self._deliveries: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(2)

    def publish(self, topic: str, message: Message, reliable: bool = True) -> list[Future[None]]:
        """Deliver a message to the subscriptions that are compatible; return the callbacks' futures."""
        data = serialise(message)
        futures = [
            self._pool.submit(self._run, one, deserialise(data, message.type_name))
            for one in self._find(topic, message.type_name, reliable)
        ]
        self._deliveries = [future for future in self._deliveries if not future.done()] + futures
        return futures

    def settle(self) -> None:
        """Wait until all that was published has been delivered. Nobody may publish meanwhile."""
        wait(self._deliveries)

    def count(self, topic: str, type_name: str, reliable: bool) -> int:
        """Return the number of subscriptions that a publisher has."""
        return len(self._find(topic, type_name, reliable))

    def call(self, name: str, request: Message) -> Future[Message]:
        """Request a service; its response comes through CDR."""
        service = self.services[name]
        sent = deserialise(serialise(request), request.type_name)

        def answer() -> Message:
            response = self._run(service, sent, service.kind.Response())
            assert isinstance(response, service.kind.Response)
            return deserialise(serialise(response), response.type_name)

        return self._pool.submit(answer)

    def subscribe(self, topic: str, kind: Any, reliable: bool = True) -> list[Message]:
        """Return a list to which the messages of a topic are appended as they come."""
        received: list[Message] = []
        self.subscriptions.append(Endpoint(topic, kind, received.append, threading.Lock(), reliable))
        return received

    def close(self) -> None:
        self._pool.shutdown()

    def _find(self, topic: str, type_name: str, reliable: bool) -> list[Endpoint]:
        # a subscription that asks for reliable messages is not connected to a best-effort publisher
        return [
            one
            for one in list(self.subscriptions)
            if one.name == topic and one.kind.type_name == type_name and (reliable or not one.reliable)
        ]

    def _run(self, endpoint: Endpoint, *arguments: Any) -> Any:
        with endpoint.group:
            try:
                return endpoint.callback(*arguments)
            except BaseException as error:
                self.failures.append(error)
                raise


GRAPH = Graph()


def renew() -> Graph:
    """Begin with an empty graph."""
    global GRAPH
    GRAPH.close()
    GRAPH = Graph()
    return GRAPH
