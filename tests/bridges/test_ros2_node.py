"""The node of `launch/ros2`, on rclpy's stand-in, with a running sam3-node."""

from __future__ import annotations

import sys
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sam3_node.bags import LabelledClip
from sam3_node.bags.native.reader import TABLETOP
from tests.support.node_rig import PATIENCE_S, Process, Rig, until
from tests.support.paths import ROOT
from tests.support.ros2 import graph
from tests.support.ros2.messages import Message, find_class, installed

pytestmark = pytest.mark.verifies(
    "viewer", "ROS 2 node", "layout", "a stand-in for rclpy with its interface", "a run under ROS"
)

EDGE = ROOT / "launch/ros2/sam3_node_ros/sam3_node_ros/bridge.py"
IMAGE, DEPTH, INFO = "/wrist/color/image_raw", "/wrist/aligned_depth_to_color/image_raw", "/wrist/camera_info"
LABEL = "red mug"


class Robot:
    """A camera's topics, the edge, a node as a process, and a subscriber of all that the edge publishes."""

    def __init__(self, folder: Path) -> None:
        self.rig = Rig(folder)
        self.rig.environment |= {
            "SAM3_MODEL__NAME": "nano",
            "SAM3_DETECTOR__KIND": "yolo-world",
            "SAM3_TRACKER__FEATURE_CACHE": "32",  # a loaded machine may take long from masks to a prompt
            "SAM3_TRACKER__MAX_AGE_MS": "0",
            "SAM3_TRACKER__MAX_PROMPT_AGE_S": "0",
        }
        self.graph = graph.renew()
        topics = {"image_topic": IMAGE, "depth_topic": DEPTH, "camera_info_topic": INFO}
        places = {"frames": self.rig.frames[0], "masks": self.rig.masks, "control": self.rig.control}
        self.graph.parameters = {"camera": "wrist", "timeout_ms": 60_000, **topics, **places}
        self.clip = LabelledClip.load(TABLETOP)
        self.sent: dict[tuple[int, int], int] = {}  # place in the clip, by stamp
        self.received = {
            topic: self.graph.subscribe(f"/sam3_bridge/{topic}", find_class(type_name))
            for topic, type_name in (
                ("detections", "vision_msgs/msg/Detection2DArray"),
                ("detections_3d", "vision_msgs/msg/Detection3DArray"),
                ("label_image", "sensor_msgs/msg/Image"),
                ("label_table", "vision_msgs/msg/LabelInfo"),
            )
        }
        from sam3_node_ros.bridge import Sam3Bridge

        self.edge = Sam3Bridge()
        self.edge.trigger("configure")
        self.edge.trigger("activate")
        self.node = self.start_node()

    def start_node(self) -> Process:
        return self.rig.node(TRANSPORT__FRAMES=self.rig.frames[0])

    def close(self) -> None:
        self.edge.destroy_node()
        self.rig.close()

    def show(self) -> None:
        """Publish what the camera sees next: colour, depth of 1 m, and CameraInfo. Wait until all are taken."""
        index = len(self.sent) % 40
        now_ns = time.time_ns()
        stamp = find_class("builtin_interfaces/msg/Time")(sec=now_ns // 10**9, nanosec=now_ns % 10**9)
        self.sent[stamp.sec, stamp.nanosec] = index
        colour = np.ascontiguousarray(self.clip.image(index)[:, :, ::-1])
        height, width = colour.shape[:2]
        header = find_class("std_msgs/msg/Header")(stamp=stamp, frame_id="wrist_optical")
        size = {"header": header, "height": height, "width": width}
        matrix = np.array([width, 0, width / 2, 0, width, height / 2, 0, 0, 1.0])
        info = find_class("sensor_msgs/msg/CameraInfo")(**size, distortion_model="plumb_bob", k=matrix)
        depth = np.full((height, width), 1000, "<u2")
        taken = self.graph.publish(INFO, info)
        for topic, encoding, pixels in ((IMAGE, "rgb8", colour), (DEPTH, "16UC1", depth)):
            data = array("B", pixels.tobytes())
            step = len(data) // height
            image = find_class("sensor_msgs/msg/Image")(**size, encoding=encoding, step=step, data=data)
            taken += self.graph.publish(topic, image, reliable=False)
        for future in taken:
            future.result(PATIENCE_S)

    def wait_for(self, accept: Any, what: str, topic: str = "detections") -> Message:
        """Show images until a message of a topic is accepted, and return it."""
        received = self.received[topic]
        received.clear()

        def attempt() -> Message | None:
            self.show()
            time.sleep(0.1)
            return next((message for message in list(received) if accept(message)), None)

        return until(attempt, what)

    def detect(self, accept: Any, what: str) -> tuple[Message, Message]:
        """Return the first detections with an accepted one, and that one."""
        found = self.wait_for(lambda message: any(map(accept, message.detections)), what)
        return found, next(filter(accept, found.detections))

    def is_true(self, message: Message, detection: Message) -> bool:
        """Return True for the mug at its true place on the image of the message's stamp: its colours are right, too."""
        index = self.sent[message.header.stamp.sec, message.header.stamp.nanosec]
        mug_id = next(id for id, label in self.clip.labels.items() if label == LABEL)
        rows, columns = np.nonzero(self.clip.truth(index)[mug_id])
        centre = detection.bbox.center.position
        return is_mug(detection) and max(abs(centre.x - columns.mean()), abs(centre.y - rows.mean())) < 8

    def call(self, name: str, **fields: Any) -> Message:
        kind = "".join(word.capitalize() for word in name.split("_"))
        request = find_class(f"sam3_node_msgs/msg/{kind}_Request")(**fields)
        return self.graph.call(f"/sam3_bridge/{name}", request).result(PATIENCE_S)


@pytest.fixture(scope="module")
def robot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Robot]:
    with installed():
        made = Robot(tmp_path_factory.mktemp("ros2"))
        yield made
        made.close()
        assert not made.graph.failures  # rclpy would have ended


def is_mug(detection: Message) -> bool:
    return bool(detection.results[0].hypothesis.class_id == LABEL)


def make_box(box: tuple[int, int, int, int]) -> Message:
    x0, y0, x1, y1 = box
    found = find_class("vision_msgs/msg/BoundingBox2D")(size_x=float(x1 - x0), size_y=float(y1 - y0))
    found.center.position.x, found.center.position.y = (x0 + x1) / 2, (y0 + y1) / 2
    return found


def test_an_object_by_name_comes_back_with_the_stamp_of_its_image(robot: Robot) -> None:
    robot.wait_for(lambda message: True, "masks")
    response = robot.call("set_prompts", prompts=[LABEL], scores=[0.3])
    assert response.success, response.message
    is_right = lambda message: any(robot.is_true(message, one) for one in message.detections)  # noqa: E731
    found = robot.wait_for(is_right, "the mug")
    assert found.header.frame_id == "wrist_optical"
    assert all(one.header == found.header for one in found.detections)


def test_label_image_table_and_3d_agree_with_the_detections(robot: Robot) -> None:
    assert robot.call("set_prompts", prompts=[LABEL]).success
    is_found = lambda message: message.detections and is_mug(message.detections[0])  # noqa: E731
    found = robot.wait_for(is_found, "3-D", "detections_3d")
    mug = found.detections[0]
    assert found.header.frame_id == "wrist_optical"
    assert abs(mug.results[0].pose.pose.position.z - 1.0) < 0.01
    assert mug.results[0].pose.covariance[0] > 0

    def of_stamp(topic: str) -> Message:
        received = lambda: (one for one in list(robot.received[topic]) if one.header == found.header)  # noqa: E731
        return until(lambda: next(received(), None), topic)

    # publications of one frame, in this order
    table, image, flat = of_stamp("label_table"), of_stamp("label_image"), of_stamp("detections")
    place = next(index for index, one in enumerate(flat.detections) if one.id == mug.id)
    assert table.class_map[place].class_name == LABEL
    values = np.frombuffer(image.data, "<u2").reshape(image.height, image.width)
    rows, columns = np.nonzero(values == table.class_map[place].class_id)
    box = flat.detections[place].bbox
    assert (columns.min() + columns.max() + 1) / 2 == pytest.approx(box.center.position.x, abs=2)
    assert rows.max() + 1 - rows.min() == pytest.approx(box.size_y, abs=2)


def test_an_object_is_added_on_a_past_image_refined_and_removed(robot: Robot) -> None:
    assert robot.call("set_prompts", prompts=[]).success
    shown = robot.wait_for(lambda message: True, "masks")
    stamp = shown.header.stamp
    index = robot.sent[stamp.sec, stamp.nanosec]
    rows, columns = np.nonzero(robot.clip.truth(index)[next(iter(robot.clip.labels))])
    box = (int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1)
    added = robot.call("add_object", box=make_box(box), label="by hand", stamp=stamp)
    assert added.success, added.message
    robot.detect(lambda one: one.id == added.id and one.results[0].hypothesis.class_id == "by hand", "it")
    point = find_class("vision_msgs/msg/Point2D")(x=(box[0] + box[2]) / 2, y=(box[1] + box[3]) / 2)
    refined = robot.call("refine_object", id=added.id, points=[point], labels=[1])
    assert refined.success, refined.message
    assert 0 < refined.score <= 1
    number, epoch = added.id.split("@")
    other = robot.call("remove_object", id=f"{number}@{int(epoch, 16) ^ 1:x}")
    assert (other.success, other.code) == (False, "node_restarted")
    assert robot.call("remove_object", id=added.id).success
    robot.wait_for(lambda message: all(one.id != added.id for one in message.detections), "its absence")
    again = robot.call("remove_object", id=added.id)
    assert (again.success, again.code) == (False, "unknown_object")


def test_an_inactive_node_neither_subscribes_nor_publishes_and_goes_on_when_activated(robot: Robot) -> None:
    robot.wait_for(lambda message: True, "masks")
    assert robot.edge.trigger("deactivate").name == "SUCCESS"
    robot.graph.settle()
    robot.received["detections"].clear()
    assert not robot.graph.count(IMAGE, "sensor_msgs/msg/Image", reliable=True)
    robot.show()
    assert robot.call("set_prompts", prompts=[]).success  # services answer all the same
    assert not robot.received["detections"]
    assert robot.edge.trigger("activate").name == "SUCCESS"
    robot.wait_for(lambda message: True, "masks")


def test_a_node_that_went_away_comes_back_unseen_with_other_ids(robot: Robot) -> None:
    assert robot.call("set_prompts", prompts=[LABEL]).success
    _, before = robot.detect(is_mug, "the mug")
    robot.node.kill()
    robot.show()
    robot.node = robot.start_node()
    robot.wait_for(lambda message: True, "masks of the new node")
    assert robot.call("set_prompts", prompts=[LABEL]).success
    _, after = robot.detect(is_mug, "the mug")
    assert before.id.split("@")[1] != after.id.split("@")[1]
    log = robot.graph.log
    assert any("object ids of camera wrist have begun again" in text for _, text in log), log
    stale = robot.call("remove_object", id=before.id)
    assert (stale.success, stale.code) == (False, "node_restarted")


def test_cleanup_releases_all_and_the_node_can_be_configured_again(robot: Robot) -> None:
    robot.edge.trigger("deactivate")
    robot.edge.trigger("cleanup")
    assert robot.edge.state == "unconfigured"
    assert not robot.graph.services
    robot.graph.log.clear()
    robot.edge.trigger("configure")
    robot.edge.trigger("activate")
    robot.wait_for(lambda message: True, "masks")
    assert not [text for level, text in robot.graph.log if level == "error"]


def test_main_ends_after_a_shutdown(robot: Robot) -> None:
    import rclpy
    from rclpy.executors import MultiThreadedExecutor
    from sam3_node_ros.bridge import main

    MultiThreadedExecutor.stop.clear()
    running = threading.Thread(target=main)
    running.start()
    until(rclpy.ok, "rclpy.init")
    MultiThreadedExecutor.stop.set()
    running.join(PATIENCE_S)
    assert not running.is_alive()
    assert not rclpy.ok()


def test_an_endpoint_in_use_leaves_the_node_unconfigured(robot: Robot) -> None:
    bridge = sys.modules["sam3_node_ros.bridge"]
    second = bridge.Sam3Bridge()  # on the same endpoint
    assert second.trigger("configure").name == "FAILURE"
    assert second.state == "unconfigured"
    level, text = robot.graph.log[-1]
    assert level == "error"
    assert robot.rig.frames[0] in text
    second.destroy_node()


def test_the_edge_is_thin() -> None:
    assert EDGE.read_text().count("\n") < 150
