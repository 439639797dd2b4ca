"""Picks and the planning scene as messages of ROS, by a node that the test plays. It needs the environment of ROS."""

import time
from typing import Any

import pytest
from sam3_node_ros.scene import ADD, SceneMessages
from sam3_node_ros.scene_outputs import SceneOutputs

from sam3_node.client import PerceptionClient
from sam3_node.schema.operations import NextPick
from sam3_node.schema.replies import (
    ParallelGrip,
    Pick,
    PicksReply,
    RefusedObject,
    SceneBox,
    SceneReply,
    SuctionPoint,
)
from sam3_node.types import Plane
from tests.support.refuses import mentions
from tests.support.ros2 import deserialise, import_type, serialise
from tests.support.ros2_site import IMAGE, OpenSite, Site, image


def make_picks(seq: int) -> PicksReply:
    place = {"position_m": (0.5, 0.25, 0.125), "quaternion_xyzw": (1.0, 0.0, 0.0, 0.0)}
    suction = SuctionPoint(**place, normal=(0.0, 0.0, 1.0), radius_m=0.02)
    grip = ParallelGrip(**place, approach=(0.0, 0.0, -1.0), width_m=0.06)
    picks = (
        Pick(7, "mug", 1, "nothing lies on it", free_above=True, confidence=0.75, grip=grip),
        Pick(8, "can", 2, "after the 1 that is free", under=(7,), suction=suction),
    )
    refused = (RefusedObject(9, "bowl", "it is hidden"),)
    known = {"epoch": 31, "age_ms": 40.0, "frame": "base", "up": (0.0, 0.0, 1.0)}
    return PicksReply(camera="cam0", seq=seq, picks=picks, refused=refused, **known)


def test_picks_have_the_stamp_of_their_image_and_poses_in_the_base(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp_ns = time.time_ns()
    site.bridge.take(IMAGE, image(stamp_ns))
    asked: list[dict[str, Any]] = []

    def next_pick(_: PerceptionClient, **given: Any) -> PicksReply:
        asked.append(given)
        return make_picks(len(asked) - 1)

    monkeypatch.setattr(PerceptionClient, "next_pick", next_pick)
    kind = import_type("sam3_node_msgs/srv/NextPick")
    request = kind.Request(label="mug", most=2, opening_m=0.1, covered=True)
    answer = site.bridge.services["next_pick"](request, kind.Response())
    assert answer.success, answer.message
    given = {"label": "mug", "most": 2, "opening_m": 0.1, "covered": True, "camera": "cam0"}
    assert asked == [{**dict.fromkeys(NextPick.__struct_fields__), **given}]
    stamp = answer.header.stamp
    assert (stamp.sec, stamp.nanosec) == divmod(stamp_ns, 10**9)
    assert (answer.age_ms, answer.up.z, answer.header.frame_id) == (40.0, 1.0, "base_link")
    first, second = answer.picks
    assert (first.id, first.label, first.rank, first.free_above) == ("7@1f", "mug", 1, True)
    assert (first.has_grip, first.has_suction, second.has_grip, second.has_suction) == (
        True,
        False,
        False,
        True,
    )
    assert first.grip.pose.header == answer.header
    assert (first.grip.pose.pose.position.x, first.grip.pose.pose.orientation.x) == (0.5, 1.0)
    assert (first.grip.approach.z, first.grip.width_m, second.suction.radius_m) == (-1.0, 0.06, 0.02)
    assert list(second.under) == ["7@1f"]
    assert [(one.id, one.reason) for one in answer.refused] == [("9@1f", "it is hidden")]
    # of an image that another process has sent, the stamp is not known
    answer = site.bridge.services["next_pick"](request, kind.Response())
    assert (answer.success, answer.code) == (False, "unknown_frame")


class Publisher:
    """Keeps what is published."""

    def __init__(self) -> None:
        self.readers = 0
        self.sent: list[Any] = []

    def get_subscription_count(self) -> int:
        return self.readers

    def publish(self, message: Any) -> None:
        self.sent.append(message)

    def take(self) -> list[tuple[str, bool]]:
        """Return ids and presence of the collision objects since the last call. ROS itself checks their fields."""
        taken = [(one.id, one.operation == ADD) for one in map(read_again, self.sent)]
        self.sent.clear()
        return taken


def read_again(message: Any) -> Any:
    return deserialise(serialise(message), "moveit_msgs/msg/CollisionObject")


def test_a_planner_gets_the_scene_also_if_it_comes_later(
    open_site: OpenSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = open_site(collision_objects_topic="/collision_object", container=True)
    site.bridge.take(IMAGE, image(time.time_ns()))
    box = SceneBox(7, "mug", (0.5, 0.0, 0.05), (0.0, 0.0, 0.0, 1.0), (0.08, 0.08, 0.1))
    reply = SceneReply(camera="cam0", epoch=31, seq=0, objects=())
    asked: list[dict[str, Any]] = []

    def planning_scene(_: PerceptionClient, **given: Any) -> SceneReply:
        asked.append(given)
        return reply

    monkeypatch.setattr(PerceptionClient, "planning_scene", planning_scene)
    objects = Publisher()
    markers = Publisher()
    scene = SceneOutputs(site.bridge, SceneMessages("base_link"), objects, markers)
    scene.publish()
    scene.begin()
    scene.publish()
    # nobody listens
    assert not asked
    objects.readers = 1
    scene.publish()
    assert asked == [{"container": True, "camera": "cam0"}]
    assert mentions(site.warnings[0], "/collision_object", "table")
    table = Plane((0.0, 0.0, 1.0), 0.0, 0.001)
    reply = SceneReply(camera="cam0", epoch=31, seq=0, frame="base", table=table, objects=(box,))
    scene.publish()
    assert mentions(site.warnings[1], "/collision_object", "spatial.container")
    assert objects.take() == [("cam0/table", True), ("cam0/7@1f", True)]
    scene.publish()
    assert objects.take() == []
    objects.readers = 2
    reply = SceneReply(camera="cam0", epoch=31, seq=0, frame="base", table=table, objects=(), unseen=(7,))
    scene.publish()
    assert objects.take() == [("cam0/table", True), ("cam0/7@1f", True)]
    markers.readers = 1
    reply = SceneReply(camera="cam0", epoch=31, seq=0, frame="base", table=table, objects=())
    scene.publish()
    assert objects.take() == [("cam0/7@1f", False)]
    assert [marker.ns for marker in markers.sent[-1].markers] == ["", "cam0/table"]
    scene.end()
    assert objects.take() == [("cam0/table", False)]
    scene.publish()
    assert objects.take() == []
