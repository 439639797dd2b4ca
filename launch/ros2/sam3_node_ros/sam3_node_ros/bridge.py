"""Lifecycle node of ROS 2 that sends the images of one camera to sam3-node and publishes its masks.

Images, services and `segment_everything` each have a thread of their own. The first never waits for the network, the
others wait for the answers of sam3-node. Another thread waits for masks, makes the messages and publishes them. The
executor serves transitions, parameters and diagnostics. Diagnostics wait up to a second for sam3-node: run the node by
`main`, or in another executor of two threads or more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Any

import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from geometry_msgs.msg import PoseStamped
from rcl_interfaces.msg import SetParametersResult
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.clock import Clock, ClockType
from rclpy.exceptions import InvalidHandle
from rclpy.executors import MultiThreadedExecutor
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.qos import QoSProfile, qos_profile_sensor_data
from sam3_node_msgs.srv import (
    AddExemplar,
    AddObject,
    NextPick,
    RefineObject,
    RemoveObject,
    Segment,
    SegmentEverything,
    SetPrompts,
    Where,
)
from sensor_msgs.msg import Image, PointCloud2
from tf2_msgs.msg import TFMessage
from vision_msgs.msg import Detection2DArray, Detection3DArray, LabelInfo
from visualization_msgs.msg import MarkerArray

from sam3_node.errors import Sam3NodeError, did_you_mean
from sam3_node.types import MaskFrame

from .link import CHANGEABLE, VIDEO_QUEUE, VIDEO_TYPES, Ros2Bridge, Ros2Settings
from .messages import (
    MaskMessages,
    choose_instance,
    write_detections_2d,
    write_label_image,
    write_mask,
)
from .own_thread import OwnThread
from .parts import Header, import_type
from .process import end_with_context, prepare_for_images
from .scene import MAX_BODIES, SceneMessages
from .scene_outputs import SceneOutputs

try:
    from isaac_ros_segment_anything2_interfaces.srv import AddObjects
    from isaac_ros_segment_anything2_interfaces.srv import RemoveObject as RemoveNamedObject
except ImportError:  # an optional package
    AddObjects = RemoveNamedObject = None
try:
    from moveit_msgs.msg import CollisionObject
except ImportError:  # an optional package
    CollisionObject = None

DIAGNOSTICS_S = 1.0
SCENE_S = 1.0
"""Time from one look at the planning scene to the next."""


class Sam3Bridge(LifecycleNode):
    """Configured: connected, services answer. Active: images are sent, masks are published."""

    def __init__(self) -> None:
        super().__init__("sam3_bridge")
        self._bridge: Ros2Bridge | None = None
        self._make = MaskMessages()
        self._camera: OwnThread | None = None
        self._control: OwnThread | None = None
        self._search: OwnThread | None = None
        self._outputs: list[tuple[Any, Callable[..., Any]]] = []
        self._points: Any = None
        self._diagnostics: Any = None
        self._diagnostics_timer: Any = None
        self._scene_timer: Any = None
        # diagnostics and the planning scene, which both wait for answers of sam3-node
        self._asking = MutuallyExclusiveCallbackGroup()
        self._scene: SceneOutputs | None = None
        for field in fields(Ros2Settings):
            self.declare_parameter(field.name, field.default)
        self.declare_parameter("autostart", False)
        self.add_on_set_parameters_callback(self._check_parameters)

    def _check_parameters(self, changed: list[Any]) -> SetParametersResult:
        """Refuse a change that would have no effect, because the parameter was read when the node was configured."""
        own = {field.name for field in fields(Ros2Settings)}
        late = [one.name for one in changed if one.name in own and one.name not in CHANGEABLE]
        if self._bridge is None or not late:
            return SetParametersResult(successful=True)
        return SetParametersResult(
            successful=False,
            reason=f"{', '.join(late)}: expected a node that is not configured yet, found one that has read it: "
            f"deactivate it and clean it up first (only {', '.join(CHANGEABLE)} may change at any time)",
        )

    def start(self) -> bool:
        """Configure and activate the node. Return False if that fails; the log says why."""
        done = TransitionCallbackReturn.SUCCESS
        return bool(self.trigger_configure() == done and self.trigger_activate() == done)

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Connect, and create publishers and services."""
        names = [field.name for field in fields(Ros2Settings)]
        logger = self.get_logger()
        settings = Ros2Settings(**{name: self.get_parameter(name).value for name in names})
        for name in self._parameter_overrides.keys() - {*names, "autostart"}:
            # a file of parameters may hold those of other nodes, so only what is nearly one of these is told
            if near := did_you_mean(name, [*names, "autostart"]):
                logger.warning(
                    f"parameter {name}: expected one of this node, found another: it has no effect{near}"
                )
        try:
            self._bridge = Ros2Bridge(
                settings,
                lambda text: logger.warning(text),
                self.resolve_topic_name,
                lambda: int(self.get_clock().now().nanoseconds),
            )
        except Sam3NodeError as error:
            self.get_logger().error(str(error))
            return TransitionCallbackReturn.FAILURE
        for topic, type_name in self._bridge.subscriptions:
            try:
                import_type(type_name)
            except ImportError:
                package = type_name.split("/")[0]
                self.get_logger().error(
                    f"{topic}: expected the package {package}, found none; install "
                    f"ros-$ROS_DISTRO-{package.replace('_', '-')}"
                )
                self._bridge.close()
                self._bridge = None
                return TransitionCallbackReturn.FAILURE
        self._make = MaskMessages(settings.base_frame, import_type)
        self._open_outputs(settings)
        self._open_scene(settings)
        self._open_services(self._bridge.services)
        return super().on_configure(state)

    def _open_outputs(self, settings: Ros2Settings) -> None:
        make = self._make

        def write_chosen(masks: MaskFrame, header: Header) -> bytes:
            return write_mask(masks, header, self.get_parameter("object").value)

        outputs: list[tuple[Any, str, Callable[..., Any]]] = [
            (Detection2DArray, "~/detections", write_detections_2d),
            (Detection3DArray, "~/detections_3d", make.make_detections_3d),
            (Detection3DArray, "~/upright_boxes", make.make_upright_boxes),
            (PoseStamped, "~/table", make.make_table),
            (Image, "~/label_image", write_label_image),
            (LabelInfo, "~/label_table", make.make_label_table),
            (Image, "~/mask", write_chosen),
            (MarkerArray, "~/markers", make.make_markers),
        ]
        if settings.publish_tf:
            outputs.append((TFMessage, "/tf", make.make_transforms))
        for kind, topic, build in outputs:
            depth = 100 if topic == "/tf" else 10  # as tf2's broadcaster
            self._outputs.append(
                (self.create_lifecycle_publisher(kind, topic, QoSProfile(depth=depth)), build)
            )
        self._points = self.create_lifecycle_publisher(PointCloud2, "~/points", QoSProfile(depth=10))
        self._diagnostics = self.create_publisher(DiagnosticArray, "/diagnostics", QoSProfile(depth=10))
        self._diagnostics_timer = self.create_timer(
            DIAGNOSTICS_S,
            self._publish_diagnostics,
            callback_group=self._asking,
            clock=Clock(clock_type=ClockType.STEADY_TIME),  # a simulation may stand still
        )

    def _open_scene(self, settings: Ros2Settings) -> None:
        if not settings.collision_objects_topic:
            return
        objects = None
        if CollisionObject is None:
            self.get_logger().warning(
                "collision_objects_topic: expected the package moveit_msgs, found none: only ~/scene_markers shows the "
                "planning scene; install ros-$ROS_DISTRO-moveit-msgs"
            )
        else:
            # all bodies may be sent at once
            profile = QoSProfile(depth=MAX_BODIES)
            objects = self.create_publisher(CollisionObject, settings.collision_objects_topic, profile)
        markers = self.create_publisher(MarkerArray, "~/scene_markers", QoSProfile(depth=1))
        assert self._bridge is not None
        self._scene = SceneOutputs(self._bridge, SceneMessages(settings.base_frame), objects, markers)
        self._scene_timer = self.create_timer(
            SCENE_S,
            self._scene.publish,
            callback_group=self._asking,
            clock=Clock(clock_type=ClockType.STEADY_TIME),
        )

    def _open_services(self, services: dict[str, Callable[..., Any]]) -> None:
        kinds = [
            (AddObject, "~/add_object", "add_object"),
            (RefineObject, "~/refine_object", "refine_object"),
            (RemoveObject, "~/remove_object", "remove_object"),
            (SetPrompts, "~/set_prompts", "set_prompts"),
            (AddExemplar, "~/add_exemplar", "add_exemplar"),
            (Segment, "~/segment", "segment"),
            (Where, "~/where", "where"),
            (NextPick, "~/next_pick", "next_pick"),
            (AddObjects, "add_objects", "isaac_add_objects"),
            (RemoveNamedObject, "remove_object", "isaac_remove_object"),
        ]
        self._control = OwnThread(self, "ros2 services")
        for kind, topic, name in kinds:
            if kind is not None:
                self._control.serve(kind, topic, services[name])
        self._control.start()
        # it takes seconds, and must not let others wait
        self._search = OwnThread(self, "ros2 search")
        self._search.serve(SegmentEverything, "~/segment_everything", services["segment_everything"])
        self._search.start()

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Subscribe to the camera, and publish masks."""
        assert self._bridge is not None
        self._camera = OwnThread(self, "ros2 camera")
        for topic, type_name in self._bridge.subscriptions:
            take = partial(self._bridge.take, topic)
            qos = QoSProfile(depth=VIDEO_QUEUE) if type_name in VIDEO_TYPES else qos_profile_sensor_data
            self._camera.subscribe(import_type(type_name), topic, qos, take)
        self._camera.start()
        result = super().on_activate(state)
        self._bridge.start(self._publish)
        if self._scene is not None:
            self._scene.begin()
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

    def _LifecycleNodeMixin__on_change_state(self, request: Any, response: Any) -> Any:  # noqa: N802
        """Refuse a transition that the present state does not have: in rclpy 7.1 such a request ends the process."""
        try:
            return super()._LifecycleNodeMixin__on_change_state(request, response)
        except RuntimeError as error:  # RCLError
            self.get_logger().warning(f"transition {request.transition.id}: {error}")
            response.success = False
            return response

    def _publish(self, masks: MaskFrame, header: Header) -> None:
        wanted = [output for output in self._outputs if output[0].get_subscription_count()]
        # all or none of a stamp
        for publisher, message in [(publisher, build(masks, header)) for publisher, build in wanted]:
            # there is no table before the node has found one
            if message is not None:
                publisher.publish(message)
        if self._points.get_subscription_count():
            self._publish_points(masks, header)

    def _publish_points(self, masks: MaskFrame, header: Header) -> None:
        assert self._bridge is not None
        instance = choose_instance(masks, self.get_parameter("object").value)
        surface = instance and self._bridge.find_points(masks, header, instance)
        if surface:
            self._points.publish(self._make.make_points(*surface))

    def _publish_diagnostics(self) -> None:
        bridge = self._bridge
        publisher = self._diagnostics
        if bridge is None or publisher is None:
            return
        level, message, values = bridge.check_health()
        now = self.get_clock().now().to_msg()
        name = f"{self.get_fully_qualified_name()}: camera {self.get_parameter('camera').value}"
        header = Header(now.sec, now.nanosec, "")
        array = self._make.make_diagnostics(level, name, message, values, header)
        with suppress(InvalidHandle):  # a transition may have closed the publisher meanwhile
            publisher.publish(array)

    def _end_streams(self) -> None:
        if self._scene is not None:
            self._scene.end()
        if self._bridge is not None:
            self._bridge.stop()
        if self._camera is not None:
            self._camera.close()
            self._camera = None

    def _release(self) -> None:
        self._end_streams()
        for thread in (self._control, self._search):
            if thread is not None:
                thread.close()
        self._control = None
        self._search = None
        if self._scene is not None:
            self.destroy_timer(self._scene_timer)
            for publisher in self._scene.publishers:
                self.destroy_publisher(publisher)
            self._scene = None
        if self._diagnostics is not None:
            self.destroy_timer(self._diagnostics_timer)
            self.destroy_publisher(self._diagnostics)
            self.destroy_lifecycle_publisher(self._points)
            self._diagnostics = None
        while self._outputs:
            self.destroy_lifecycle_publisher(self._outputs.pop()[0])
        if self._bridge is not None:
            self._bridge.close()
            self._bridge = None


def main() -> None:
    """Run the node until Ctrl-C, with the parameter `autostart` configured and active."""
    prepare_for_images()
    rclpy.init()
    node = Sam3Bridge()
    executor = MultiThreadedExecutor(num_threads=3)
    executor.add_node(node)
    try:
        if node.get_parameter("autostart").value and not node.start():
            sys.exit("error: the node could not be started; its log above says why")
        with end_with_context():
            # `spin` of rclpy 7.1 may wait for ever if the signal comes just before its wait
            while rclpy.ok():
                executor.spin_once(timeout_sec=1.0)
    finally:
        executor.shutdown()
        node.destroy_node()
        if rclpy.ok():
            rclpy.shutdown()
