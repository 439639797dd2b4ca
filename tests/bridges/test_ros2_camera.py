"""A recording played as a camera of ROS 2, recorded again, and tracked bit for bit as the same frames over ZeroMQ."""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rosbags.rosbag2 import StoragePlugin, Writer

from sam3_node.bags import open_bag
from sam3_node.client import PerceptionClient
from sam3_node.transport import FramePublisher, FrameSubscriber
from sam3_node.types import Frame, MaskFrame
from sam3_node.wire import decode_depth
from tests.support import ros2
from tests.support.patience import PATIENCE_MS, PATIENCE_S
from tests.support.processes import until

RETRY_MS = 5_000
"""Time after which an image counts as lost. ROS 2 may drop it, where its receiver is busy."""

pytestmark = pytest.mark.verifies(
    "recording",
    "ROS 2 topics recorded from DDS",
    "own package",
    "rclpy 7.1 (Jazzy) sends and serialises, rosbags writes the folder",
    "a folder of ROS 2's own recorder",
)

TOPICS = {
    "/image/compressed": "sensor_msgs/msg/CompressedImage",
    "/depth_registered/image_raw": "sensor_msgs/msg/Image",
    "/camera_info": "sensor_msgs/msg/CameraInfo",
}
FRAMES = 6
TIMED = 20
SHIFT_NS = 10**9
"""The bundled recording begins at 0, which is no stamp in ROS: it is played from 1 s on."""


@pytest.fixture(scope="module")
def robot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ros2.Robot]:
    made = ros2.Robot(tmp_path_factory.mktemp("ros2"), DETECTOR__KIND="none")
    try:
        made.settings["TRANSPORT__FRAMES"] += f",ipc://{made.folder}/direct"
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def bag(robot: ros2.Robot) -> Path:
    """A folder in the layout of ROS 2 with the bundled recording, as its messages came over DDS."""
    path = robot.folder / "bag"
    messages = []
    ends = [
        robot.ros.create_subscription(
            ros2.import_type(kind),
            topic,
            lambda data, topic=topic: messages.append((topic, time.time_ns(), bytes(data))),
            ros2.qos_profile_sensor_data,
            raw=True,
        )
        for topic, kind in TOPICS.items()
    ]
    options = ["--ros-args", "-p", "loop:=false", "-p", "rate:=4.0", "-p", "stamps_as_recorded:=true"]
    process = robot.start(sys.executable, str(ros2.BIN / "player"), *options)
    assert process.process.wait(PATIENCE_S) == 0
    for end in ends:
        robot.ros.destroy_subscription(end)
    with Writer(path, version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        connections = {
            topic: writer.add_connection(topic, kind, typestore=ros2.open_store())
            for topic, kind in TOPICS.items()
        }
        for topic, log_ns, data in messages:
            writer.write(connections[topic], log_ns, data)
    return path


def test_a_recording_of_the_topics_has_the_frames_that_were_played(robot: ros2.Robot, bag: Path) -> None:
    played = {frame.capture_ns + SHIFT_NS: frame for frame in robot.clip.frames}
    with open_bag(bag) as opened:
        frames = list(opened)
    assert len(frames) > FRAMES + TIMED  # best effort: a slow machine may lose some
    for frame in frames:
        source = played[frame.capture_ns]
        assert bytes(frame.colour) == bytes(source.colour)
        assert frame.intrinsics == source.intrinsics
    paired = [frame for frame in frames if frame.depth]
    assert len(paired) > FRAMES
    assert all(frame.depth.aligned for frame in paired)
    for frame in paired[:3]:
        assert np.array_equal(decode_depth(frame.depth), decode_depth(played[frame.capture_ns].depth))


def find_way_ms(masks: MaskFrame, whole_ns: int) -> float:
    """Return the milliseconds of `whole_ns` that the node had neither the frame nor its masks."""
    return (whole_ns - (masks.published_ns - masks.received_ns)) / 1e6


class Twins:
    """One node with two cameras: `wrist` comes over ROS, `direct` over ZeroMQ."""

    def __init__(self, robot: ros2.Robot) -> None:
        self.robot = robot
        self.images, _, self.infos = (
            robot.ros.create_publisher(ros2.import_type(kind), topic, ros2.qos_profile_sensor_data)
            for topic, kind in TOPICS.items()
        )
        self.arrivals: dict[int, tuple[int, Any]] = {}
        kind = ros2.import_type("vision_msgs/msg/Detection2DArray")
        robot.ros.create_subscription(kind, "/sam3_bridge/detections", self._arrive, 10)
        self.direct = FramePublisher(f"ipc://{robot.folder}/direct", "newest")
        self.clients = {
            name: PerceptionClient(
                robot.places["masks"], robot.places["control"], cameras=[name], timeout_ms=PATIENCE_MS
            )
            for name in ("wrist", "direct")
        }

    def close(self) -> None:
        self.direct.close(0)
        for client in self.clients.values():
            client.close()

    def _arrive(self, message: Any) -> None:
        self.arrivals[ros2.stamp_ns(message)] = time.perf_counter_ns(), message

    def begin(self, camera: str, send: Callable[[], object]) -> MaskFrame:
        """Send a frame until the node serves the camera. Return the masks of the last one that was sent."""
        client = self.clients[camera]
        masks = until(lambda: send() or client.latest(300), camera)
        while newer := client.latest(1000):
            masks = newer
        return masks

    def send_ros(self, frame: Frame) -> None:
        header = ros2.make_header(frame.capture_ns)
        self.infos.publish(ros2.player.make_camera_info(frame.intrinsics, frame.width, frame.height, header))
        self.images.publish(ros2.player.make_image(frame, header))

    def step_ros(self, frame: Frame) -> tuple[MaskFrame, Any, float]:
        """Return masks and detections of a frame over ROS, and the milliseconds to these outside the node."""
        self.arrivals.pop(frame.capture_ns, None)
        self.clients["wrist"].list_objects()  # the node answers when it has finished the step before
        begin_ns = 0

        def attempt() -> MaskFrame | None:  # again if DDS lost the image: then the node never had it
            nonlocal begin_ns
            begin_ns = time.perf_counter_ns()
            self.send_ros(frame)
            # an image that was lost is sent again
            masks = self.clients["wrist"].latest(RETRY_MS)
            return masks if masks and masks.capture_ns == frame.capture_ns else None

        masks = until(attempt, "masks over ROS")
        end_ns, message = until(
            lambda: time.sleep(0.0005) or self.arrivals.get(frame.capture_ns), "detections"
        )
        return masks, message, find_way_ms(masks, end_ns - begin_ns)

    def step_direct(self, frame: Frame) -> tuple[MaskFrame, float]:
        """Return the masks of a frame over ZeroMQ, and the milliseconds to them outside the node."""
        self.clients["direct"].list_objects()
        begin_ns = time.perf_counter_ns()
        self.direct.send(replace(frame, camera="direct"))
        masks = self.take("direct", frame)
        return masks, find_way_ms(masks, time.perf_counter_ns() - begin_ns)

    def take(self, camera: str, frame: Frame) -> MaskFrame:
        """Return the newest masks of a camera's frame."""

        def attempt() -> MaskFrame | None:
            masks = self.clients[camera].latest(1000)
            return masks if masks and masks.capture_ns == frame.capture_ns else None

        return until(attempt, f"masks of {camera}")


@pytest.fixture(scope="module")
def twins(robot: ros2.Robot, bag: Path) -> Iterator[Twins]:
    # the bag is complete: its player has the same topics. Without depth: over DDS it may be lost, as sensor data may
    robot.start_bridge(image_topic="/image/compressed", depth_topic="''", camera_info_topic="/camera_info")
    assert robot.trigger("configure")
    assert robot.trigger("activate")
    robot.start_node()
    made = Twins(robot)
    yield made
    made.close()


def test_masks_of_a_camera_of_ros_are_those_over_zeromq_bit_for_bit(twins: Twins, bag: Path) -> None:
    with open_bag(bag) as opened:
        first, *rest = (replace(frame, depth=None) for frame in opened if frame.intrinsics)
    robot = twins.robot

    twins.begin("wrist", lambda: twins.send_ros(first))
    masks = twins.begin("direct", lambda: twins.direct.send(replace(first, camera="direct")))
    stamps = [frame.capture_ns + SHIFT_NS for frame in robot.clip.frames]
    truth = robot.clip.truth(stamps.index(first.capture_ns))
    for mask in list(truth.values())[:2]:
        rows, columns = np.nonzero(mask)
        box = int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1
        added = robot.call(
            "add_object", box=ros2.make_box(box), label="it", stamp=ros2.make_stamp(first.capture_ns)
        )
        assert added.success, added.message
        twins.clients["direct"].add_object(box=box, label="it", seq=masks.seq, camera="direct")
    times: dict[str, list[float]] = {"ROS 2": [], "ZeroMQ": []}
    for frame in rest[: FRAMES + TIMED]:
        by_ros, detections, ros_ms = twins.step_ros(frame)
        by_zeromq, zeromq_ms = twins.step_direct(frame)
        times["ROS 2"].append(ros_ms)
        times["ZeroMQ"].append(zeromq_ms)
        assert by_ros.instances
        for one, other in zip(by_ros.instances, by_zeromq.instances, strict=True):
            assert (one.box, one.score, one.state) == (other.box, other.score, other.state)
            assert np.array_equal(one.mask.full(), other.mask.full())
        shown = [one for one in by_zeromq.instances if one.area]
        assert [one.results[0].hypothesis.score for one in detections.detections] == [
            float(one.score) for one in shown
        ]
        image = robot.wait_for_past(lambda message: ros2.stamp_ns(message) == frame.capture_ns, "label_image")  # noqa: B023
        painted = np.zeros((frame.height, frame.width), "<u2")
        for one in sorted(shown, key=lambda one: one.paint_order):
            one.mask.paint(painted, one.id)
        assert bytes(image.data) == painted.tobytes()
    medians = {name: statistics.median(values[FRAMES:]) for name, values in times.items()}
    figures = ", ".join(f"{name} {value:.2f} ms" for name, value in medians.items())
    ratio = medians["ROS 2"] / medians["ZeroMQ"]
    print(f"\nframe to masks without the node's step, median of {TIMED}: {figures}, ratio {ratio:.2f}")


def test_stamps_without_time_take_that_of_a_simulation(robot: ros2.Robot, bag: Path) -> None:
    """With use_sim_time, an image without a stamp has the time of /clock."""
    place = f"ipc://{robot.folder}/simulated"
    topics = {"image_topic": "/simulated/image/compressed", "depth_topic": "''", "camera_info_topic": "''"}
    robot.start_bridge("sim", use_sim_time="true", frames=place, **topics)
    assert robot.trigger("configure", name="sim")
    assert robot.trigger("activate", name="sim")
    kind = ros2.import_type("sensor_msgs/msg/CompressedImage")
    image = robot.ros.create_publisher(kind, "/simulated/image/compressed", 5)
    clock = robot.ros.create_publisher(ros2.import_type("rosgraph_msgs/msg/Clock"), "/clock", 1)
    message = kind(format="jpeg", data=bytes(robot.clip.frames[0].colour))
    time_ns = 77 * 10**9 + 5
    with FrameSubscriber([place]) as frames:

        def attempt() -> Frame | None:
            clock.publish(ros2.import_type("rosgraph_msgs/msg/Clock")(clock=ros2.make_stamp(time_ns)))
            image.publish(message)
            received = frames.take(100)
            return received.frame if received and received.frame.capture_ns == time_ns else None

        assert until(attempt, "a frame with the simulation's time").clock == "device"
