"""Stand-in for rclpy.lifecycle: a managed node on the graph of `tests.support.ros2.graph`."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.qos import QoSProfile, ReliabilityPolicy
from tests.support.ros2 import graph
from tests.support.ros2.graph import Endpoint


class TransitionCallbackReturn(enum.Enum):
    SUCCESS = 0
    FAILURE = 1
    ERROR = 2


class LifecycleState(NamedTuple):
    label: str
    state_id: int


class Parameter(NamedTuple):
    name: str
    value: Any


class Logger:
    def warning(self, message: str) -> bool:
        graph.GRAPH.log.append(("warning", message))
        return True

    def error(self, message: str) -> bool:
        graph.GRAPH.log.append(("error", message))
        return True


class LifecyclePublisher:
    """Publishes while its node is active, and is silent otherwise."""

    def __init__(self, msg_type: Any, topic: str, qos_profile: QoSProfile) -> None:
        self.msg_type, self.topic, self.qos_profile = msg_type, topic, qos_profile
        self._is_reliable = qos_profile.reliability is ReliabilityPolicy.RELIABLE
        self.enabled = False
        self.destroyed = False

    def publish(self, msg: Any) -> None:
        assert not self.destroyed, "InvalidHandle"
        if self.enabled:
            if not isinstance(msg, self.msg_type):
                raise TypeError(f"Expected {self.msg_type}, got {type(msg)}")
            graph.GRAPH.publish(self.topic, msg, self._is_reliable)

    def get_subscription_count(self) -> int:
        assert not self.destroyed, "InvalidHandle"
        return graph.GRAPH.count(self.topic, self.msg_type.type_name, self._is_reliable)


_TRANSITIONS = {
    "configure": (("unconfigured",), "on_configure", "inactive"),
    "activate": (("inactive",), "on_activate", "active"),
    "deactivate": (("active",), "on_deactivate", "inactive"),
    "cleanup": (("inactive",), "on_cleanup", "unconfigured"),
    "shutdown": (("unconfigured", "inactive", "active"), "on_shutdown", "finalized"),
}


class LifecycleNode:
    """A node with the states of a managed node. `trigger` does what the service change_state does."""

    def __init__(self, node_name: str) -> None:
        self._name = node_name
        self._parameters: dict[str, Parameter] = {}
        self._publishers: list[LifecyclePublisher] = []
        self._subscriptions: list[Endpoint] = []
        self._services: list[Endpoint] = []
        self.default_callback_group = MutuallyExclusiveCallbackGroup()
        self.state = "unconfigured"
        self.destroyed = False

    def declare_parameter(self, name: str, value: Any) -> Parameter:
        assert value is not None
        assert name not in self._parameters, "ParameterAlreadyDeclaredException"
        given = graph.GRAPH.parameters.get(name, value)
        assert type(given) is type(value), "InvalidParameterTypeException"
        self._parameters[name] = Parameter(name, given)
        return self._parameters[name]

    def get_parameter(self, name: str) -> Parameter:
        return self._parameters[name]

    def resolve_topic_name(self, topic: str) -> str:
        return self._expand(topic)

    def get_logger(self) -> Logger:
        return Logger()

    def create_lifecycle_publisher(
        self, msg_type: Any, topic: str, qos_profile: QoSProfile | int
    ) -> LifecyclePublisher:
        profile = QoSProfile(depth=qos_profile) if isinstance(qos_profile, int) else qos_profile
        publisher = LifecyclePublisher(msg_type, self._expand(topic), profile)
        self._publishers.append(publisher)
        return publisher

    def create_subscription(
        self, msg_type: Any, topic: str, callback: Callable[[Any], None], qos_profile: QoSProfile
    ) -> Endpoint:
        group = self.default_callback_group.lock
        subscription = Endpoint(
            self._expand(topic),
            msg_type,
            callback,
            group,
            qos_profile.reliability is ReliabilityPolicy.RELIABLE,
        )
        self._subscriptions.append(subscription)
        graph.GRAPH.subscriptions.append(subscription)
        return subscription

    def create_service(
        self,
        srv_type: Any,
        srv_name: str,
        callback: Callable[[Any, Any], Any],
        *,
        callback_group: MutuallyExclusiveCallbackGroup | None = None,
    ) -> Endpoint:
        group = callback_group or self.default_callback_group
        service = Endpoint(self._expand(srv_name), srv_type, callback, group.lock, True)
        self._services.append(service)
        assert service.name not in graph.GRAPH.services
        graph.GRAPH.services[service.name] = service
        return service

    def destroy_lifecycle_publisher(self, publisher: LifecyclePublisher) -> bool:
        self._publishers.remove(publisher)
        publisher.destroyed = True
        return True

    def destroy_subscription(self, subscription: Endpoint) -> bool:
        self._subscriptions.remove(subscription)
        graph.GRAPH.subscriptions.remove(subscription)
        return True

    def destroy_service(self, service: Endpoint) -> bool:
        self._services.remove(service)
        del graph.GRAPH.services[service.name]
        return True

    def destroy_node(self) -> None:
        assert not self.destroyed
        self.destroyed = True
        for publisher in list(self._publishers):
            self.destroy_lifecycle_publisher(publisher)
        for subscription in list(self._subscriptions):
            self.destroy_subscription(subscription)
        for service in list(self._services):
            self.destroy_service(service)

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        return TransitionCallbackReturn.SUCCESS

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        return self._enable(True)

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        return self._enable(False)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        return TransitionCallbackReturn.SUCCESS

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        return TransitionCallbackReturn.SUCCESS

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        return TransitionCallbackReturn.SUCCESS

    def trigger(self, transition: str) -> TransitionCallbackReturn:
        """Run a transition in the default callback group. An error leads to on_error."""
        froms, callback, goal = _TRANSITIONS[transition]
        assert self.state in froms, f"{transition} from {self.state}"
        state = LifecycleState(self.state, 0)
        with self.default_callback_group.lock:
            try:
                result = getattr(self, callback)(state)
                assert isinstance(result, TransitionCallbackReturn)
            except Exception:
                result = TransitionCallbackReturn.ERROR
            if result is TransitionCallbackReturn.SUCCESS:
                self.state = goal
            elif result is TransitionCallbackReturn.ERROR:
                recovered = self.on_error(state) is TransitionCallbackReturn.SUCCESS
                self.state = "unconfigured" if recovered else "finalized"
        return result

    def _enable(self, enabled: bool) -> TransitionCallbackReturn:
        for publisher in self._publishers:
            publisher.enabled = enabled
        return TransitionCallbackReturn.SUCCESS

    def _expand(self, name: str) -> str:
        return (
            f"/{self._name}/{name[2:]}"
            if name.startswith("~/")
            else name
            if name.startswith("/")
            else f"/{name}"
        )
