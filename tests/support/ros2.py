"""A robot on ROS 2: a camera's topics, the node of launch/ros2 and sam3-node as processes, and what both answer.

It runs in the environment of `make ros2` alone. sam3-node runs in the project's own environment.
"""

# ruff: noqa: E402 - the check for rclpy comes first

import os
import subprocess
import sys
import threading
import time
import tomllib
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

rclpy: Any = pytest.importorskip(
    "rclpy", reason="no rclpy: `make ros2` installs it, `make ros2-test` runs this"
)

from lifecycle_msgs.srv import ChangeState, GetState
from rcl_interfaces.srv import SetParameters
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile, qos_profile_sensor_data
from rclpy.serialization import deserialize_message, serialize_message
from sam3_node_ros import player
from sam3_node_ros.parts import import_type

from sam3_node.bags import LabelledClip
from sam3_node.bags.native.reader import TABLETOP
from sam3_node.types import Depth
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.processes import Process, until

RELEASES = {"humble": Stores.ROS2_HUMBLE, "jazzy": Stores.ROS2_JAZZY}
DEFINITIONS = tomllib.loads((ROOT / "launch/ros2/definitions.toml").read_text())
BIN = Path(sys.prefix) / "lib/sam3_node_ros"
YAML = Path(sys.prefix) / "share/sam3_node_bringup/config/sam3.yaml"
IMAGE = "/wrist/color/image_raw"
DEPTH = "/wrist/aligned_depth_to_color/image_raw"
INFO = "/wrist/camera_info"
OUTPUTS = {
    "/sam3_bridge/detections": "vision_msgs/msg/Detection2DArray",
    "/sam3_bridge/detections_3d": "vision_msgs/msg/Detection3DArray",
    "/sam3_bridge/upright_boxes": "vision_msgs/msg/Detection3DArray",
    "/sam3_bridge/table": "geometry_msgs/msg/PoseStamped",
    "/sam3_bridge/label_image": "sensor_msgs/msg/Image",
    "/sam3_bridge/label_table": "vision_msgs/msg/LabelInfo",
    "/sam3_bridge/mask": "sensor_msgs/msg/Image",
    "/sam3_bridge/points": "sensor_msgs/msg/PointCloud2",
    "/sam3_bridge/markers": "visualization_msgs/msg/MarkerArray",
    "/sam3_bridge/scene_markers": "visualization_msgs/msg/MarkerArray",
    "/collision_object": "moveit_msgs/msg/CollisionObject",
    "/tf": "tf2_msgs/msg/TFMessage",
    "/diagnostics": "diagnostic_msgs/msg/DiagnosticArray",
    "/rosout": "rcl_interfaces/msg/Log",
}
TRANSITIONS = {"configure": 1, "cleanup": 2, "activate": 3, "deactivate": 4, "shutdown_inactive": 6}


SETTINGS = {
    "MODEL__NAME": "nano",
    "MODEL__DEVICE": "cpu",
    "TRACKER__MAX_AGE_MS": "0",
    "TRACKER__MAX_PROMPT_AGE_S": "0",
    "TRACKER__FEATURE_CACHE": "32",  # a loaded machine may take long from masks to a prompt
}
TOPICS = {"image_topic": IMAGE, "depth_topic": DEPTH, "camera_info_topic": INFO}


def name_type(message: Any) -> str:
    """Return the full name of a message's type."""
    kind = type(message)
    return f"{kind.__module__.split('.')[0]}/msg/{kind.__name__}"


@cache
def open_store(release: str = "jazzy") -> Any:
    """Return rosbags' types of a release, with those of vision_msgs and ffmpeg_image_transport_msgs."""
    store = get_typestore(RELEASES[release])
    types: dict[str, Any] = {}
    for package in ("vision_msgs", "ffmpeg_image_transport_msgs"):
        for name, text in DEFINITIONS[package]["msg"].items():
            types |= get_types_from_msg(text, f"{package}/msg/{name}")
    store.register(types)
    return store


def serialise(message: Any) -> bytes:
    """Return a message as CDR, by ROS."""
    return bytes(serialize_message(message))


def deserialise(data: bytes, type_name: str) -> Any:
    """Return the message of CDR, by ROS."""
    return deserialize_message(data, import_type(type_name))


def make_stamp(stamp_ns: int) -> Any:
    sec, nanosec = divmod(stamp_ns, 10**9)
    return import_type("builtin_interfaces/msg/Time")(sec=sec, nanosec=nanosec)


def make_header(stamp_ns: int, frame_id: str = "optical") -> Any:
    return import_type("std_msgs/msg/Header")(stamp=make_stamp(stamp_ns), frame_id=frame_id)


def make_image(header: Any, pixels: np.ndarray, encoding: str, padding: int = 0) -> Any:
    """Return an Image of pixels [h, w] or [h, w, c], with unused bytes at the end of each row."""
    rows = np.ascontiguousarray(pixels).reshape(len(pixels), -1).view(np.uint8)
    rows = np.pad(rows, ((0, 0), (0, padding)), constant_values=77)
    size = {"height": len(pixels), "width": pixels.shape[1], "step": rows.shape[1]}
    data = array("B", rows.tobytes())
    return import_type("sensor_msgs/msg/Image")(header=header, encoding=encoding, data=data, **size)


def make_box(box: tuple[int, int, int, int]) -> Any:
    x0, y0, x1, y1 = box
    made = import_type("vision_msgs/msg/BoundingBox2D")(size_x=float(x1 - x0), size_y=float(y1 - y0))
    made.center.position.x = (x0 + x1) / 2
    made.center.position.y = (y0 + y1) / 2
    return made


class Robot:
    """The processes, and a node of ROS in this one that is the camera, calls services and keeps all outputs."""

    bridge: Process
    node: Process

    def __init__(self, folder: Path, **settings: str) -> None:
        os.environ |= {
            "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST",
            "ROS_DOMAIN_ID": str(1 + os.getpid() % 100),
        }
        self.folder = folder
        self.processes = []  # type: ignore[var-annotated]
        self.places = {name: f"ipc://{folder}/{name}" for name in ("frames", "masks", "control")}
        self.joints = f"ipc://{folder}/joints"
        self.settings = SETTINGS | {
            f"TRANSPORT__{name.upper()}": place for name, place in self.places.items()
        }
        self.settings |= settings
        self.clip = LabelledClip.load(TABLETOP)
        self.sent: dict[int, int] = {}  # place in the clip, by stamp
        self.received: dict[str, list[Any]] = {topic: [] for topic in OUTPUTS}
        rclpy.init()
        self.ros = rclpy.create_node("robot")
        for topic, kind in OUTPUTS.items():
            keep = self.received[topic].append
            self.ros.create_subscription(import_type(kind), topic, keep, QoSProfile(depth=100))
        self.cameras = {
            topic: self.ros.create_publisher(kind, topic, qos_profile_sensor_data)
            for topic, kind in ((IMAGE, player.Image), (DEPTH, player.Image), (INFO, player.CameraInfo))
        }
        self._clients: dict[str, Any] = {}
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self.ros)
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()

    def _spin(self) -> None:
        with suppress(ExternalShutdownException):
            self._executor.spin()

    def start(self, *command: str, environment: dict[str, str] | None = None) -> Process:
        """Start a program; its output is read as lines, stderr goes to a file."""
        log = self.folder / f"log{len(self.processes)}.txt"
        pipes = {"stdout": subprocess.PIPE, "stderr": log.open("w"), "text": True}
        process = Process(subprocess.Popen(command, env=environment, **pipes), log)  # type: ignore[call-overload]
        self.processes.append(process)
        return process

    def start_node(self) -> Process:
        """Start sam3-node, and wait until it serves. Libraries of ROS are not for torch."""
        own = {
            name: text for name, text in os.environ.items() if not name.startswith(("LD_", "_ROS", "PYTHON"))
        }
        environment = own | {f"SAM3_{name}": value for name, value in self.settings.items()}
        process = self.start(
            str(ROOT / ".venv/bin/python"), "-m", "sam3_node", "run", environment=environment
        )
        process.next_line()
        return process

    def start_bridge(self, name: str = "sam3_bridge", **parameters: str) -> Process:
        """Start the node of launch/ros2 with the shipped parameters and others, and wait for its services."""
        given = {"camera": "wrist", "timeout_ms": "20000"} | TOPICS | self.places | parameters
        options = [part for item in given.items() for part in ("-p", ":=".join(item))]
        remapped = ("--ros-args", "-r", f"__node:={name}", "--params-file", str(YAML))
        process = self.start(sys.executable, str(BIN / "bridge"), *remapped, *options)
        assert self.find_client(f"/{name}/change_state", ChangeState).wait_for_service(PATIENCE_S)
        # a node drops the answer to a client that it has not found yet; what may be asked again tells that it has
        state = (f"/{name}/get_state", GetState, GetState.Request())
        until(lambda: self._ask(*state, timeout_s=5), f"an answer of {name}")
        return process

    def find_client(self, name: str, kind: Any) -> Any:
        if name not in self._clients:
            self._clients[name] = self.ros.create_client(kind, name)
        return self._clients[name]

    def request(self, name: str, kind: Any, request: Any) -> Any:
        """Call a service of ROS, and return its answer."""
        answer = self._ask(name, kind, request)
        assert answer is not None, name
        return answer

    def _ask(self, name: str, kind: Any, request: Any, timeout_s: float = PATIENCE_S) -> Any:
        client = self.find_client(name, kind)
        done = threading.Event()
        assert client.wait_for_service(PATIENCE_S), name
        future = client.call_async(request)
        future.add_done_callback(lambda _: done.set())
        return future.result() if done.wait(timeout_s) else None

    def find(self, name: str) -> Any:
        """Return the client of a service of ours by its last name."""
        kind = import_type(f"sam3_node_msgs/srv/{''.join(map(str.capitalize, name.split('_')))}")
        return self.find_client(f"/sam3_bridge/{name}", kind)

    def call(self, name: str, /, **fields: Any) -> Any:
        """Call a service of ours by its last name."""
        kind = self.find(name).srv_type
        return self.request(f"/sam3_bridge/{name}", kind, kind.Request(**fields))

    def trigger(self, transition: str, name: str = "sam3_bridge") -> bool:
        """Change the state of the lifecycle node. Return whether it succeeded."""
        request = ChangeState.Request()
        request.transition.id = TRANSITIONS[transition]
        return bool(self.request(f"/{name}/change_state", ChangeState, request).success)

    def state(self, name: str = "sam3_bridge") -> str:
        answer = self.request(f"/{name}/get_state", GetState, GetState.Request())
        return str(answer.current_state.label)

    def set_parameter(self, parameter: str, value: Any, name: str = "sam3_bridge") -> str:
        """Return why a parameter was not set; empty if it was."""
        changed = Parameter(parameter, value=value).to_parameter_msg()
        request = SetParameters.Request(parameters=[changed])
        answer = self.request(f"/{name}/set_parameters", SetParameters, request)
        result = answer.results[0]
        return "" if result.successful else str(result.reason)

    def show(self, stamp_ns: int | None = None, index: int | None = None) -> int:
        """Publish what the camera sees next: colour, depth of 1 m, and CameraInfo. Return the stamp."""
        stamp_ns = time.time_ns() if stamp_ns is None else stamp_ns
        index = len(self.sent) % 40 if index is None else index
        self.sent[stamp_ns] = index
        frame = self.clip.frames[index]
        header = make_header(stamp_ns, "wrist_optical")
        width = frame.width
        height = frame.height
        pixels = self.clip.image(index).tobytes()
        depth = Depth(width, height, "z16", 0.001, True, np.full((height, width), 1000, "<u2").tobytes())
        self.cameras[INFO].publish(player.make_camera_info(frame.intrinsics, width, height, header))
        self.cameras[IMAGE].publish(player.make_image(replace(frame, encoding="bgr8", colour=pixels), header))
        self.cameras[DEPTH].publish(player.make_depth(depth, header))
        return stamp_ns

    def poll(self, accept: Callable[[Any], Any], topic: str = "detections") -> Any:
        """Return the first message of a topic that came and is accepted, or None, after a short time."""
        time.sleep(0.1)
        received = list(self.received[topic if topic.startswith("/") else f"/sam3_bridge/{topic}"])
        return next((message for message in received if accept(message)), None)

    def wait_for_past(self, accept: Callable[[Any], Any], topic: str) -> Any:
        """Return a message that came or comes without another image."""
        return until(lambda: self.poll(accept, topic), topic)

    def wait_for(self, accept: Callable[[Any], Any], what: str, topic: str = "detections") -> Any:
        """Show images until a new message of a topic is accepted, and return it."""
        self.received[topic if topic.startswith("/") else f"/sam3_bridge/{topic}"].clear()
        return until(lambda: self.show() and self.poll(accept, topic), what)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        rclpy.shutdown()
        self._thread.join(PATIENCE_S)
        self._executor.shutdown()


def stamp_ns(message: Any) -> int:
    """Return the stamp of a message in nanoseconds."""
    stamp = message.header.stamp
    return int(stamp.sec) * 10**9 + int(stamp.nanosec)
