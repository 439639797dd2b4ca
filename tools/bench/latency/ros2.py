"""Compare the way of a frame and a request over ROS 2 with the same over ZeroMQ, in one run.

    .venv-ros2/bin/python -m tools.bench.latency.ros2 [--frames 60] [--runs 3]

It runs in the environment of `make ros2`. There are two cameras: `wrist` comes over ROS 2 through the bridge of
launch/ros2, `direct` over ZeroMQ. They take turns, a frame at a time, so that other load on the machine slows both.
Pictures are raw bgr8 of 640x480.

    frame     from the capture until the subscriber has its masks. A process in the place of the node answers each frame
              at once with the masks of five objects. Over ROS 2 the masks are detections and label image, over ZeroMQ
              they are decoded
    segment   a request with a point on the newest frame, answered with the mask: `~/segment` of the bridge beside
              `segment` of the client, of one node with the bundled weights. The client of ROS 2 waits for its answers
              alone, as one in C++ does; the figures of one in an executor of rclpy stand beside

The camera of ROS 2 sends bytes that were serialised before, as a driver in C++ does. The reader of ROS 2 takes them
raw. All use `fast_dds.xml`: without it Fast DDS loses most pictures of this size.
"""

from __future__ import annotations

import os
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import rclpy
from lifecycle_msgs.srv import ChangeState
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.qos import QoSProfile, qos_profile_sensor_data
from rclpy.serialization import serialize_message
from sam3_node_msgs.srv import Segment
from sam3_node_ros.process import make_room_in_fast_dds
from sensor_msgs.msg import Image
from vision_msgs.msg import Detection2DArray, Point2D

from sam3_node.client import PerceptionClient
from sam3_node.transport import FramePublisher, FrameSubscriber, MaskPublisher
from sam3_node.types import Frame, Instance, Mask, MaskFrame
from tools.bench.common import RATIO, ROOT, Figures, make_parser
from tools.bench.processes import end, spawned

WIDTH = 640
HEIGHT = 480
OBJECTS = 5
"""Objects of the stand-in's masks."""
IMAGE_TOPIC = "/wrist/image_raw"
RUNS = 3
"""Runs, if the command does not say how many."""
FRAMES = 100
"""Frames and requests of a run for each of the two ways."""
WARM_UP = 20
"""Frames and requests before each run that do not count."""
WAIT_S = 60.0
"""Longest wait for a process, an answer or the first masks."""
LOST_S = 2.0
"""Time after which an image counts as lost and is sent again. Sensor data may be lost."""
BRIDGE = Path(sys.prefix) / "lib/sam3_node_ros/bridge"
SHARE = Path(sys.prefix) / "share/sam3_node_bringup/config"
STAMP = struct.Struct("<iI")
STAMP_PLACE = 4
"""Place of the stamp in a serialised message whose first field is a header."""
TRANSITIONS = {"configure": 1, "activate": 3}
POINT = (WIDTH / 2, HEIGHT / 2)


def draw() -> np.ndarray:
    """Return a picture of a bright square on noise."""
    picture = np.random.default_rng(7).integers(0, 60, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    picture[HEIGHT // 2 - 60 : HEIGHT // 2 + 60, WIDTH // 2 - 60 : WIDTH // 2 + 60] = (40, 80, 220)
    return picture


def answer_frames(places: dict[str, str]) -> None:
    """Answer each frame at once with the same masks, in the place of a node, without end."""
    disc = np.hypot(*np.mgrid[-60:60, -60:60]) < 60
    boxes = [(100 * i, 40 * i, 100 * i + 120, 40 * i + 120) for i in range(OBJECTS)]
    instances = tuple(
        Instance(number, "disc", 0.9, "tracked", 1, 0, Mask((HEIGHT, WIDTH), box, disc))
        for number, box in enumerate(boxes, 1)
    )
    with (
        FrameSubscriber([places["frames"], places["direct"]]) as frames,
        MaskPublisher(places["masks"]) as node,
    ):
        while True:
            received = frames.take()
            if received is not None:
                frame = received.frame
                node.send(
                    MaskFrame(
                        frame.camera,
                        frame.seq,
                        frame.capture_ns,
                        frame.width,
                        frame.height,
                        received_ns=time.time_ns(),
                        instances=instances,
                    )
                )


class RosSide:
    """A camera, a reader and a client of ROS 2 in this process."""

    def __init__(self) -> None:
        rclpy.init()
        self._arrived = threading.Condition()
        self._arrivals: dict[str, dict[int, int]] = {"detections": {}, "label_image": {}}
        self.node = rclpy.create_node("bench")
        for topic, kind in (("detections", Detection2DArray), ("label_image", Image)):
            self.node.create_subscription(
                kind, f"/sam3_bridge/{topic}", self._keep(topic), QoSProfile(depth=10), raw=True
            )
        self._images = self.node.create_publisher(Image, IMAGE_TOPIC, qos_profile_sensor_data)
        message = Image(height=HEIGHT, width=WIDTH, step=3 * WIDTH, encoding="bgr8")
        message.header.frame_id = "optical"
        message.data.frombytes(draw().tobytes())
        self._message = bytearray(serialize_message(message))
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self.node)
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()

    def _keep(self, topic: str) -> Callable[[bytes], None]:
        def keep(data: bytes) -> None:
            arrived_ns = time.perf_counter_ns()
            sec, nanosec = STAMP.unpack_from(data, STAMP_PLACE)
            with self._arrived:
                self._arrivals[topic][sec * 10**9 + nanosec] = arrived_ns
                self._arrived.notify_all()

        return keep

    def _spin(self) -> None:
        with suppress(ExternalShutdownException):
            self._executor.spin()

    def send(self) -> int:
        """Send the picture, and return its stamp."""
        stamp_ns = time.time_ns()
        STAMP.pack_into(self._message, STAMP_PLACE, *divmod(stamp_ns, 10**9))
        self._images.publish(bytes(self._message))
        return stamp_ns

    def wait_for(self, stamp_ns: int, limit_s: float) -> int | None:
        """Return when both outputs of an image had come, in ns of the performance counter; None if they have not."""

        def both() -> bool:
            return all(stamp_ns in arrivals for arrivals in self._arrivals.values())

        with self._arrived:
            if not self._arrived.wait_for(both, limit_s):
                return None
            return max(arrivals[stamp_ns] for arrivals in self._arrivals.values())

    def step_ms(self) -> float:
        """Return the milliseconds from an image to its masks. An image that was lost is sent again."""
        end_s = time.monotonic() + WAIT_S
        while time.monotonic() < end_s:
            begin_ns = time.perf_counter_ns()
            arrived_ns = self.wait_for(self.send(), LOST_S)
            if arrived_ns is not None:
                return (arrived_ns - begin_ns) / 1e6
        raise SystemExit(f"expected masks over ROS 2 within {WAIT_S:.0f} s, found none")

    def call(self, client: Any, request: Any) -> Any:
        """Return the answer of a service."""
        done = threading.Event()
        future = client.call_async(request)
        future.add_done_callback(lambda _: done.set())
        if not done.wait(WAIT_S):
            raise SystemExit(f"expected an answer of {client.srv_name}, found none")
        return future.result()

    def open(self, kind: Any, name: str) -> Any:
        """Return a client of a service that is there."""
        client = self.node.create_client(kind, name)
        if not client.wait_for_service(WAIT_S):
            raise SystemExit(f"expected the service {name}, found none")
        return client

    def close(self) -> None:
        rclpy.shutdown()
        self._thread.join(WAIT_S)


class Asker:
    """A client of one service that waits for its answers alone, as a program in C++ does."""

    def __init__(self, kind: Any, name: str) -> None:
        # no executor spins this node
        self._node = rclpy.create_node("asker")
        self._client = self._node.create_client(kind, name)
        if not self._client.wait_for_service(WAIT_S):
            raise SystemExit(f"expected the service {name}, found none")
        self._waiting = rclpy_implementation.WaitSet(0, 0, 0, 1, 0, 0, self._node.context.handle)

    def ask(self, request: Any) -> Any:
        """Return the answer to a request."""
        self._client.handle.send_request(request)
        self._waiting.clear_entities()
        self._waiting.add_client(self._client.handle)
        self._waiting.wait(round(1e9 * WAIT_S))
        header, answer = self._client.handle.take_response(self._client.srv_type.Response)
        if header is None:
            raise SystemExit(
                f"expected an answer of {self._client.srv_name} within {WAIT_S:.0f} s, found none"
            )
        return answer


class DirectSide:
    """A camera and a client of ZeroMQ in this process."""

    def __init__(self, places: dict[str, str]) -> None:
        self._frames = FramePublisher(places["direct"], "newest")
        self._picture = draw().tobytes()
        self._seq = 0
        self.client = PerceptionClient(
            places["masks"], places["control"], cameras=["direct"], timeout_ms=60_000
        )

    def step_ms(self) -> float:
        """Return the milliseconds from a picture to its decoded masks."""
        end_s = time.monotonic() + WAIT_S
        while time.monotonic() < end_s:
            self._seq += 1
            stamp_ns = time.time_ns()
            begin_ns = time.perf_counter_ns()
            self._frames.send(Frame("direct", self._seq, stamp_ns, WIDTH, HEIGHT, "bgr8", self._picture))
            masks = self.client.latest(round(1000 * LOST_S))
            if masks is not None and masks.capture_ns == stamp_ns:
                for instance in masks.instances:
                    instance.mask.full()
                return (time.perf_counter_ns() - begin_ns) / 1e6
        raise SystemExit(f"expected masks over ZeroMQ within {WAIT_S:.0f} s, found none")

    def close(self) -> None:
        self._frames.close(0)
        self.client.close()


@contextmanager
def run_process(command: list[str], environment: dict[str, str]) -> Iterator[None]:
    """Run a program until the block ends. What it writes to standard error is shown."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, text=True)
    try:
        yield
    finally:
        end(process)


@contextmanager
def run_bridge(ros: RosSide, places: dict[str, str]) -> Iterator[None]:
    """Run the bridge of launch/ros2, active, until the block ends."""
    given = {"camera": "wrist", "timeout_ms": "20000", "image_topic": IMAGE_TOPIC}
    given |= {name: places[name] for name in ("frames", "masks", "control")}
    options = [part for item in given.items() for part in ("-p", ":=".join(item))]
    remapped = ["--ros-args", "-r", "__node:=sam3_bridge", "--params-file", str(SHARE / "sam3.yaml")]
    with run_process([sys.executable, str(BRIDGE), *remapped, *options], dict(os.environ)):
        change = ros.open(ChangeState, "/sam3_bridge/change_state")
        for transition in TRANSITIONS.values():
            request = ChangeState.Request()
            request.transition.id = transition
            if not ros.call(change, request).success:
                raise SystemExit("expected the bridge to become active, found that it refused")
        yield
        ros.node.destroy_client(change)


@contextmanager
def run_node(places: dict[str, str]) -> Iterator[None]:
    """Run a node with the bundled weights, in the project's own environment, until the block ends."""
    settings = {
        "SAM3_MODEL__DEVICE": "cpu",
        "SAM3_MODEL__THREADS": "1",
        "SAM3_TRACKER__MAX_PROMPT_AGE_S": "0",
        "SAM3_TRANSPORT__FRAMES": f"{places['frames']},{places['direct']}",
        "SAM3_TRANSPORT__MASKS": places["masks"],
        "SAM3_TRANSPORT__CONTROL": places["control"],
    }
    # libraries of ROS are not for torch
    own = {name: text for name, text in os.environ.items() if not name.startswith(("LD_", "_ROS", "PYTHON"))}
    with run_process([str(ROOT / ".venv/bin/python"), "-m", "sam3_node", "run"], own | settings):
        yield


def compare(ros_ms: Callable[[], float], direct_ms: Callable[[], float], count: int) -> tuple[float, float]:
    """Return the medians of both ways, which take turns."""
    pairs = [(ros_ms(), direct_ms()) for _ in range(WARM_UP + count)][WARM_UP:]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def add_figures(figures: Figures, name: str, medians: list[tuple[float, float]], target: str) -> None:
    """Add the times of both ways in some runs, and their ratios."""
    figures.add(f"{name} over ROS 2", [ros for ros, _ in medians], "ms")
    figures.add(f"{name} over ZeroMQ", [direct for _, direct in medians], "ms")
    figures.add(f"{name}, ROS 2 / ZeroMQ", [ros / direct for ros, direct in medians], RATIO, target)


def measure_frames(figures: Figures, places: dict[str, str], runs: int, count: int) -> None:
    """Measure the way of a frame, with a process in the place of the node."""
    ros = RosSide()
    direct = DirectSide(places)
    with spawned(answer_frames, places), run_bridge(ros, places):
        medians = [compare(ros.step_ms, direct.step_ms, count) for _ in range(runs)]
    direct.close()
    ros.close()
    add_figures(figures, "capture to masks at 640x480, without a model", medians, "at most 3")


def measure_requests(figures: Figures, places: dict[str, str], runs: int, count: int) -> None:
    """Measure requests to a node that has a frame of each camera."""
    ros = RosSide()
    direct = DirectSide(places)
    request = Segment.Request(points=[Point2D(x=POINT[0], y=POINT[1])])

    def measure(ask: Callable[[Any], Any]) -> float:
        begin_ns = time.perf_counter_ns()
        answer = ask(request)
        spent_ms = (time.perf_counter_ns() - begin_ns) / 1e6
        if not answer.success:
            raise SystemExit(f"segment: {answer.code}: {answer.message}")
        return spent_ms

    def ask_direct() -> float:
        begin_ns = time.perf_counter_ns()
        direct.client.segment(points=[POINT], camera="direct").mask.full()
        return (time.perf_counter_ns() - begin_ns) / 1e6

    with run_node(places), run_bridge(ros, places):
        ros.step_ms()
        direct.step_ms()
        asker = Asker(Segment, "/sam3_bridge/segment")
        alone = [compare(lambda: measure(asker.ask), ask_direct, count) for _ in range(runs)]
        service = ros.open(Segment, "/sam3_bridge/segment")
        by_executor = partial(ros.call, service)
        spun = [compare(lambda: measure(by_executor), ask_direct, count) for _ in range(runs)]
    direct.close()
    ros.close()
    add_figures(figures, "request to segment by a point, nano", alone, "at most 1.3")
    add_figures(figures, "request to segment by a point, nano, of a client in an executor of rclpy", spun, "")


def main() -> None:
    parser = make_parser(__doc__, RUNS)
    parser.add_argument("--frames", type=int, default=FRAMES, help="frames and requests of a run")
    args = parser.parse_args()
    figures = Figures("latency.ros2")
    os.environ |= {"ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST", "ROS_DOMAIN_ID": str(1 + os.getpid() % 100)}
    make_room_in_fast_dds()
    with tempfile.TemporaryDirectory() as folder:
        places = {place: f"ipc://{folder}/{place}" for place in ("frames", "direct", "masks", "control")}
        measure_frames(figures, places, args.runs, args.frames)
        measure_requests(figures, places, args.runs, args.frames)
    figures.write(args.json)


if __name__ == "__main__":
    main()
