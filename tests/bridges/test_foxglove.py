"""Tests of the Foxglove bridge by a client of its protocol that shares no code with the server."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest

from sam3_node.bags.messages import foxglove_out
from sam3_node.bridges import foxglove_server as bridge
from sam3_node.bridges.foxglove_server import MAX_BACKLOG, MAX_CAMERAS, FoxgloveServer
from sam3_node.errors import MissingExtraError, SettingsError, TransportError
from sam3_node.geometry import rotation_from_quaternion
from sam3_node.settings import Settings
from sam3_node.types import Depth, Frame, FramePose, MaskFrame
from sam3_node.visualization import pick_colour
from sam3_node.wire import encode_depth
from tests.support.foxglove_client import FoxgloveClient, stamp_ns
from tests.support.node_rig import until
from tests.support.paths import ROOT
from tests.support.refuses import refuses
from tests.support.wire_examples import jpeg_frame, masks, mug, raw_frame

POSE = ((0.1, 0.2, 0.3), (0.0, 0.0, 0.6, 0.8))
COVARIANCE = (0.04, 0.01, 0.0, 0.09, 0.0, 0.01)


def loopback(**bridge: Any) -> Settings:
    return Settings(bridge={"bind": "127.0.0.1:0", **bridge})  # type: ignore[arg-type]


@pytest.fixture
def server() -> Iterator[FoxgloveServer]:
    found = FoxgloveServer(loopback())
    yield found
    found.close()


@pytest.fixture
def client(server: FoxgloveServer) -> Iterator[FoxgloveClient]:
    with FoxgloveClient(server.url) as found:
        yield found


class Watch:
    """A client that has subscribed to topics of a camera, and what the server sends it."""

    def __init__(
        self, server: FoxgloveServer, client: FoxgloveClient, frame: Frame | None, masks: MaskFrame
    ) -> None:
        self.server = server
        self.client = client
        self.frame = frame
        self.masks = masks

    def take(self, *topics: str) -> dict[str, Any]:
        """Subscribe to topics, show the frame again, and return their messages."""
        self.server.show(self.frame, self.masks)
        self.client.subscribe(*topics)
        until(lambda: self.have_subscribers(topics), "subscriptions")
        self.server.show(self.frame, self.masks)
        found = {item.topic: item for item in (self.client.next() for _ in topics)}
        assert {item.time_ns for item in found.values()} == {self.masks.capture_ns}
        return {topic: found[topic].message for topic in topics}

    def have_subscribers(self, topics: tuple[str, ...]) -> bool:
        channels = {**self.server._shared, **self.server._channels[self.masks.camera]}
        return all(channels[topic].has_sinks() for topic in topics)


def placed() -> MaskFrame:
    """Return masks of an object with a position, a box and a covariance in the base, and with poses."""
    instance = mug(
        "red mug",
        position_m=(0.5, -0.25, 0.75),
        frame="base",
        extent_m=(0.08, 0.09, 0.1),
        extent_centre_m=(0.5, -0.25, 0.7),
        extent_quaternion_xyzw=(0.0, 0.0, 0.6, 0.8),
        covariance_m2=COVARIANCE,
    )
    other = replace(instance, id=4, frame="camera", extent_m=None, covariance_m2=None)
    unknown = replace(instance, id=5, position_m=None)
    pose = FramePose("camera", "base", 17, *POSE)
    gripper = FramePose("gripper", "base", 17, *POSE)
    found = replace(masks(), instances=(instance, other, unknown))
    return replace(found, camera_pose=pose, robot_pose=gripper)


def test_compressed_pictures_pass_as_they_came(server: FoxgloveServer, client: FoxgloveClient) -> None:
    frame = jpeg_frame()
    empty = MaskFrame(*frame.key, frame.width, frame.height)
    found = Watch(server, client, frame, empty).take("/cam0/image", "/cam0/annotations")
    image = found["/cam0/image"]
    assert image.data == bytes(frame.colour)
    assert (image.format, image.frame_id, stamp_ns(image.timestamp)) == ("jpeg", "cam0", frame.capture_ns)
    assert not found["/cam0/annotations"].points


def test_raw_pictures_depth_and_calibration(server: FoxgloveServer, client: FoxgloveClient) -> None:
    frame = raw_frame()
    names = [f"/wrist-1/{name}" for name in ("image", "depth", "calibration")]
    image, depth, calibration = Watch(server, client, frame, masks()).take(*names).values()
    assert (image.encoding, image.width, image.height, image.step) == ("bgr8", 3, 2, 9)
    assert image.data == frame.colour
    assert np.frombuffer(depth.data, "<u2").tolist() == [0, 1, 2, 500, 9, 65535]
    assert (depth.encoding, depth.step) == ("16UC1", 6)
    assert (calibration.K[0], calibration.K[2], calibration.frame_id) == (600.5, 1.5, "wrist-1")
    assert {stamp_ns(item.timestamp) for item in (image, depth, calibration)} == {frame.capture_ns}


@pytest.mark.parametrize("encoding", ["png16", "z16+zstd"])
def test_compressed_depth_is_what_viewers_can_read(
    server: FoxgloveServer, client: FoxgloveClient, encoding: Any
) -> None:
    pixels = np.arange(6, dtype=np.uint16).reshape(2, 3)
    frame = replace(raw_frame(), depth=encode_depth(pixels, encoding, 0.001, True))
    (depth,) = Watch(server, client, frame, masks()).take("/wrist-1/depth").values()
    if encoding == "png16":
        assert depth.format == "png"
        assert depth.data == bytes(frame.depth.data)  # type: ignore[union-attr]
    else:
        assert np.frombuffer(depth.data, "<u2").tolist() == pixels.ravel().tolist()


def test_damaged_depth_costs_nothing_else(server: FoxgloveServer, client: FoxgloveClient) -> None:
    good = raw_frame()
    name = "/wrist-1/depth"
    server.show(good, masks())
    client.subscribe(name, "/wrist-1/annotations")
    watch = Watch(server, client, good, masks())
    until(lambda: watch.have_subscribers((name, "/wrist-1/annotations")), "a subscription")
    server.show(replace(good, depth=Depth(3, 2, "z16+zstd", 0.001, True, b"no zstd")), masks())
    assert client.next().topic == "/wrist-1/annotations"


def test_outlines_have_labels_and_the_colours_of_the_ids(
    server: FoxgloveServer, client: FoxgloveClient
) -> None:
    shown = masks()
    (found,) = Watch(server, client, None, shown).take("/wrist-1/annotations").values()
    assert [text.text for text in found.texts] == ["3 red mug 0.88", "4 1.00?"]
    blue, green, red = pick_colour(3)
    colour = found.points[0].outline_color
    assert np.allclose([colour.r, colour.g, colour.b], np.array([red, green, blue]) / 255)
    x = [point.x for point in found.points[0].points]
    assert (min(x), max(x)) == (2.5, 5.5)  # the centres of the outermost pixels of the mug
    assert {stamp_ns(item.timestamp) for item in (*found.points, *found.texts)} == {shown.capture_ns}


def test_positions_boxes_and_covariances(server: FoxgloveServer, client: FoxgloveClient) -> None:
    (found,) = Watch(server, client, None, placed()).take("/wrist-1/scene").values()
    assert [deletion.type for deletion in found.deletions] == [1]  # all that was shown before
    first, second = found.entities
    assert (first.id, first.frame_id, second.frame_id) == ("3", "base", "wrist-1")
    assert [text.text for text in first.texts] == ["3 red mug 0.88"]
    (cube,) = first.cubes
    (ball,) = first.spheres
    assert np.allclose([cube.size.x, cube.size.y, cube.size.z], [0.08, 0.09, 0.1])
    assert (cube.pose.position.z, cube.pose.orientation.z) == (0.7, 0.6)
    turn = ball.pose.orientation
    axes = rotation_from_quaternion([turn.x, turn.y, turn.z, turn.w])
    deviations = np.array([ball.size.x, ball.size.y, ball.size.z]) / 4  # two on each side
    rebuilt = axes @ np.diag(deviations**2) @ axes.T
    assert np.allclose(rebuilt[np.triu_indices(3)], COVARIANCE)
    assert not second.cubes


def test_transforms_of_camera_and_gripper(server: FoxgloveServer, client: FoxgloveClient) -> None:
    (found,) = Watch(server, client, None, placed()).take("/tf").values()
    names = [(item.parent_frame_id, item.child_frame_id) for item in found.transforms]
    assert names == [("base", "wrist-1"), ("base", "gripper")]
    first = found.transforms[0]
    assert (first.translation.y, first.rotation.z, first.rotation.w) == (0.2, 0.6, 0.8)
    assert stamp_ns(first.timestamp) == placed().capture_ns


def test_the_layout_shows_topics_of_the_bridge(server: FoxgloveServer, client: FoxgloveClient) -> None:
    layout = json.loads((ROOT / "launch/foxglove/cam0.json").read_text())
    panels = layout["configById"]
    assert set(re.findall(r"\w+!\w+", json.dumps(layout["layout"]))) == set(panels)
    topics = set(re.findall(r'"(/\w+/\w+)', json.dumps(panels)))
    assert (len(topics), panels["3D!base"]["followTf"]) == (5, placed().camera_pose.parent)  # type: ignore[union-attr]
    server.show(replace(raw_frame(), camera="cam0"), replace(placed(), camera="cam0"))
    while not topics <= client.channels.keys():
        client.receive()


def test_only_what_somebody_subscribes_to_is_encoded(
    server: FoxgloveServer, client: FoxgloveClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.show(raw_frame(), placed())  # tells the types of all topics
    encoded: list[str] = []
    for name in ("image", "depth", "calibration", "annotations", "scene", "transforms"):
        real = getattr(foxglove_out, f"encode_{name}")
        wrapped = lambda *args, name=name, real=real: encoded.append(name) or real(*args)  # noqa: E731
        monkeypatch.setattr(foxglove_out, f"encode_{name}", wrapped)
    assert not server.show(raw_frame(), placed())
    assert not encoded
    client.subscribe("/wrist-1/scene")
    until(lambda: server.show(raw_frame(), placed()), "a subscription")
    assert set(encoded) == {"scene"}
    client.next("/wrist-1/scene")
    client.unsubscribe("/wrist-1/scene")
    until(lambda: not server.show(raw_frame(), placed()), "the end of the subscription")


def test_a_camera_may_change_its_encoding(server: FoxgloveServer, client: FoxgloveClient) -> None:
    frame = jpeg_frame()
    empty = MaskFrame(*frame.key, frame.width, frame.height)
    watch = Watch(server, client, frame, empty)
    watch.take("/cam0/image")
    raw = replace(frame, encoding="mono8", colour=bytes(64))
    server.show(raw, empty)
    client.until_advertised("/cam0/image", "foxglove.RawImage")
    watch.frame = raw
    assert watch.take("/cam0/image")["/cam0/image"].encoding == "mono8"


def test_a_client_that_does_not_read_gets_the_newest_and_costs_little_memory(
    server: FoxgloveServer, client: FoxgloveClient
) -> None:
    size = (1000, 1000)
    count = 100  # 3 MB each
    pixels = bytes(size[0] * size[1] * 3)
    watch = Watch(server, client, Frame("cam0", 0, 0, *size, "bgr8", pixels), MaskFrame("cam0", 0, 0, *size))
    watch.take("/cam0/image")
    before = psutil.Process().memory_info().rss
    for seq in range(1, count + 1):
        server.show(Frame("cam0", seq, seq, *size, "bgr8", pixels), MaskFrame("cam0", seq, seq, *size))
    assert psutil.Process().memory_info().rss - before < count * len(pixels) / 2
    received: list[int] = []
    while not received or received[-1] < count:
        received.append(client.next().time_ns)
    assert received == sorted(received)
    assert len(received) < count / 2
    assert received[-MAX_BACKLOG // 2 :] == list(range(count + 1 - MAX_BACKLOG // 2, count + 1))


def test_channels_of_many_cameras_are_bounded(server: FoxgloveServer, client: FoxgloveClient) -> None:
    for number in range(MAX_CAMERAS + 3):
        server.show(None, MaskFrame(f"cam{number}", 0, 0, 8, 8))
        # the SDK disconnects a client that is more than MAX_BACKLOG new channels behind
        client.until_advertised(f"/cam{number}/scene", "foxglove.SceneUpdate")
    cameras = {topic.split("/")[1] for topic in client.channels}
    assert cameras == {f"cam{number}" for number in range(3, MAX_CAMERAS + 3)}


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "192.0.2.1:8765", "[::]:0"])
def test_another_address_than_loopback_is_refused(bind: str) -> None:
    with refuses(SettingsError, field="bridge.insecure"):
        FoxgloveServer(loopback(bind=bind))
    assert bridge.safe_address(loopback(bind=bind, insecure=True)).host in bind


@pytest.mark.parametrize("bind", ["127.0.0.2:0", "localhost:0", "[0:0:0:0:0:0:0:1]:0"])
def test_every_address_of_loopback_is_safe(bind: str) -> None:
    assert bridge.safe_address(loopback(bind=bind)).host in bind


def test_a_malformed_address_is_named() -> None:
    with refuses(SettingsError, field=("bridge.bind", "HOST:PORT")):
        FoxgloveServer(loopback(bind="8765"))


def test_an_address_in_use_is_named(server: FoxgloveServer) -> None:
    with refuses(TransportError, field="127.0.0.1"):
        FoxgloveServer(loopback(bind=server.url.removeprefix("ws://")))


def test_a_missing_sdk_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "foxglove", None)
    with refuses(MissingExtraError, field="sam3-node"):
        FoxgloveServer(loopback())
