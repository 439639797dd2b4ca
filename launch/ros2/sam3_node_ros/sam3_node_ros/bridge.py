"""Lifecycle node of ROS 2 that sends the images of one camera to sam3-node and publishes its masks.

Callbacks of images run in the node's default callback group: they convert an image and never wait. A thread of the
bridge waits for masks, makes the messages and publishes them. Services have a callback group of their own, in which
they wait up to `timeout_ms` for sam3-node. So run the node by `main`, or in another executor of two threads or more.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Any

import rclpy
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.executors import ExternalShutdownException, MultiThreadedExecutor
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.qos import QoSProfile, qos_profile_sensor_data
from sam3_node_msgs.srv import AddObject, RefineObject, RemoveObject, SetPrompts
from sensor_msgs.msg import Image
from vision_msgs.msg import Detection2DArray, Detection3DArray, LabelInfo

from sam3_node.errors import Sam3NodeError
from sam3_node.types import MaskFrame

from .link import Ros2Bridge, Ros2Settings
from .messages import Header, MaskMessages, import_type


class Sam3Bridge(LifecycleNode):
    """Configured: connected, services answer. Active: images are sent, masks are published."""

    def __init__(self) -> None:
        super().__init__("sam3_bridge")
        self._bridge: Ros2Bridge | None = None
        self._camera_subscriptions: list[Any] = []
        self._control_services: list[Any] = []
        self._outputs: list[tuple[Any, Callable[..., Any]]] = []
        self._service_group = MutuallyExclusiveCallbackGroup()
        for field in fields(Ros2Settings):
            self.declare_parameter(field.name, field.default)

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Connect, and create publishers and services."""
        names, logger = [field.name for field in fields(Ros2Settings)], self.get_logger()
        settings = Ros2Settings(**{name: self.get_parameter(name).value for name in names})
        try:
            self._bridge = Ros2Bridge(settings, lambda text: logger.warning(text), self.resolve_topic_name)
        except Sam3NodeError as error:
            self.get_logger().error(str(error))
            return TransitionCallbackReturn.FAILURE
        make = MaskMessages(settings.base_frame, import_type)
        for kind, topic, build in (
            (Detection2DArray, "detections", make.make_detections_2d),
            (Detection3DArray, "detections_3d", make.make_detections_3d),
            (Image, "label_image", make.make_label_image),
            (LabelInfo, "label_table", make.make_label_table),
        ):
            self._outputs.append(
                (self.create_lifecycle_publisher(kind, f"~/{topic}", QoSProfile(depth=10)), build)
            )
        for name, kind in (
            ("add_object", AddObject),
            ("refine_object", RefineObject),
            ("remove_object", RemoveObject),
            ("set_prompts", SetPrompts),
        ):
            serve = self._bridge.services[name]
            service = self.create_service(kind, f"~/{name}", serve, callback_group=self._service_group)
            self._control_services.append(service)
        return super().on_configure(state)

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Subscribe to the camera, and publish masks."""
        assert self._bridge is not None
        for topic, type_name in self._bridge.subscriptions:
            callback = partial(self._bridge.take, topic)
            subscription = self.create_subscription(
                import_type(type_name), topic, callback, qos_profile_sensor_data
            )
            self._camera_subscriptions.append(subscription)
        result = super().on_activate(state)
        self._bridge.start(self._publish)
        return result

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Unsubscribe, and publish no more. What sam3-node tracks is kept."""
        self._end_streams()
        return super().on_deactivate(state)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Disconnect."""
        self._release()
        return super().on_cleanup(state)

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Disconnect, from any state."""
        self._release()
        return super().on_shutdown(state)

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Disconnect after a failed transition; the node may be configured again."""
        self._release()
        return super().on_error(state)

    def destroy_node(self) -> None:
        """Disconnect, and destroy the node."""
        self._release()
        super().destroy_node()

    def _publish(self, masks: MaskFrame, header: Header) -> None:
        wanted = [output for output in self._outputs if output[0].get_subscription_count()]
        # all or none of a stamp
        for publisher, message in [(publisher, build(masks, header)) for publisher, build in wanted]:
            publisher.publish(message)

    def _end_streams(self) -> None:
        if self._bridge is not None:
            self._bridge.stop()
        while self._camera_subscriptions:
            self.destroy_subscription(self._camera_subscriptions.pop())

    def _release(self) -> None:
        self._end_streams()
        while self._control_services:
            self.destroy_service(self._control_services.pop())
        while self._outputs:
            self.destroy_lifecycle_publisher(self._outputs.pop()[0])
        if self._bridge is not None:
            self._bridge.close()
            self._bridge = None


def main() -> None:
    """Run the node until Ctrl-C."""
    rclpy.init()
    node = Sam3Bridge()
    executor = MultiThreadedExecutor(num_threads=2)
    executor.add_node(node)
    try:
        with suppress(KeyboardInterrupt, ExternalShutdownException):
            executor.spin()
    finally:
        executor.shutdown()
        node.destroy_node()
        if rclpy.ok():
            rclpy.shutdown()
