"""Stand-in for rclpy.executors."""

from __future__ import annotations

import threading

from rclpy.lifecycle import LifecycleNode


class ExternalShutdownException(Exception):  # noqa: N818 - rclpy's name
    """Raised by `spin` when the context was shut down."""


class MultiThreadedExecutor:
    """Spins until `stop`, then raises as after Ctrl-C or a shutdown; the graph's own threads run the callbacks."""

    stop = threading.Event()
    reason: type[BaseException] = ExternalShutdownException

    def __init__(self, num_threads: int | None = None) -> None:
        assert num_threads is not None
        assert num_threads >= 2
        self.nodes: list[LifecycleNode] = []
        self.is_shut_down = False

    def add_node(self, node: LifecycleNode) -> bool:
        self.nodes.append(node)
        return True

    def spin(self) -> None:
        assert self.nodes
        self.stop.wait()
        raise self.reason

    def shutdown(self) -> bool:
        self.is_shut_down = True
        return True
