"""A robot of too many joints, or of a clock that was ahead: masks go on, status says why, and later joints count."""

import re
import time
from threading import Event

import msgpack
import pytest
import zmq

from sam3_node.bags.native.reader import TABLETOP
from sam3_node.client import PerceptionClient
from sam3_node.transport import PosePublisher
from sam3_node.types import JointState
from sam3_node.wire import joints_topic
from tests.support.node_rig import Process, Rig, has_ids, masks_where, until
from tests.support.threads import in_thread

pytest.importorskip("yourdfpy", reason="needs the extra robot")

MS = 1_000_000
HOUR_NS = 3600 * 1000 * MS
HOSTILE_JOINTS = 4096
RATE = 1000.0
WARM_MASKS = 60
FLOODED_MASKS = 60
MAX_GROWTH_BYTES = 64 << 20
JOINTS = {"base_z": 0.1, "upper_y": 0.2}


@pytest.fixture(scope="module")
def robot_endpoint(rig: Rig) -> str:
    return f"ipc://{rig.folder}/robot"


@pytest.fixture(scope="module")
def node(rig: Rig, robot_endpoint: str) -> Process:
    """A node with a robot, which serves a camera that draws a scene."""
    rig.environment |= {
        "SAM3_SPATIAL__POSES": robot_endpoint,
        "SAM3_SPATIAL__CALIBRATION": str(TABLETOP.with_suffix(".toml")),
        "SAM3_SPATIAL__MAX_POSE_GAP_MS": "1000",
        "SAM3_SPATIAL__MAX_POSE_AHEAD_MS": "1000",
        "SAM3_ROBOT__URDF": str(TABLETOP.with_suffix(".urdf")),
        "SAM3_ROBOT__BASE": "camera",
    }
    node = rig.node()
    rig.camera()
    return node


def flood(endpoint: str, stop: Event) -> None:
    """Publish joint states of HOSTILE_JOINTS joints, RATE a second."""
    positions = {f"j{number}": number + 0.5 for number in range(HOSTILE_JOINTS)}
    body = {"v": 1, "kind": "joints", "robot": "robot", "clock": "system", "positions": positions}
    # packed once: the publisher must be fast
    packed = msgpack.packb(body | {"stamp_ns": 1 << 60})
    begin, end = packed.split(msgpack.packb(1 << 60))
    with zmq.Context() as context, context.socket(zmq.PUB) as robot:
        robot.linger = 0
        robot.bind(endpoint)
        begin_s = time.monotonic()
        sent = 0
        while not stop.wait(max(0.0, begin_s + sent / RATE - time.monotonic())):
            robot.send_multipart([joints_topic("robot"), begin + msgpack.packb(time.time_ns()) + end])
            sent += 1


def spatial_problem(client: PerceptionClient) -> str:
    return str(client.status()["cameras"]["cam0"]["spatial_problem"])


def tracked_object(client: PerceptionClient) -> int:
    """Return an object that is tracked for so long that the node's memory has settled."""
    tracked = client.add_object(points=[(160, 120)], camera="cam0").id
    take_masks(client, tracked, WARM_MASKS)
    return tracked


def take_masks(client: PerceptionClient, tracked: int, count: int) -> None:
    """Wait for masks of the object on several frames."""
    for _ in range(count):
        masks_where(client, has_ids("cam0", tracked), "masks of the object")


def send_until_found(robot: PosePublisher, client: PerceptionClient) -> None:
    """Publish joints until the node's masks have them."""

    def is_found() -> bool:
        robot.send(JointState("robot", time.time_ns(), JOINTS))
        masks = client.latest(timeout_ms=50)
        return (
            masks is not None and masks.joints is not None and masks.joints.positions.keys() == JOINTS.keys()
        )

    until(is_found, "the robot")


def test_a_flood_of_joints_stops_no_masks(client: PerceptionClient, robot_endpoint: str) -> None:
    tracked = tracked_object(client)
    before_bytes = client.status()["rss_bytes"]
    with in_thread(lambda stop: flood(robot_endpoint, stop)):
        until(lambda: f"found {HOSTILE_JOINTS}" in spatial_problem(client), "the reason")
        take_masks(client, tracked, FLOODED_MASKS)
        assert "too fast" in spatial_problem(client)
    assert client.status()["rss_bytes"] - before_bytes < MAX_GROWTH_BYTES
    with PosePublisher(robot_endpoint) as robot:
        send_until_found(robot, client)


def test_a_clock_that_was_an_hour_ahead_costs_no_later_frame(
    client: PerceptionClient, robot_endpoint: str, node: Process
) -> None:
    with PosePublisher(robot_endpoint) as robot:

        def is_told() -> bool:
            robot.send(JointState("robot", time.time_ns() + HOUR_NS, JOINTS))
            return (
                re.search(r"found 3[56]\d\d\.\d s; synchronise clocks", spatial_problem(client)) is not None
            )

        until(is_told, "the refusal")
        send_until_found(robot, client)
    assert len(re.findall("robot: expected stamps at most 1 s ahead", node.log.read_text())) == 1
