"""The planning scene for MoveIt: what is sent when bodies come, move and go. It needs no ROS."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from sam3_node_ros.parts import Header
from sam3_node_ros.scene import (
    ADD,
    REMOVE,
    TABLE_GAP_M,
    WALL_M,
    Box,
    Change,
    PlanningScene,
    SceneMessages,
)

from sam3_node.schema.replies import Container, SceneBox, SceneReply
from sam3_node.types import Plane

UPRIGHT = (0.0, 0.0, 0.0, 1.0)
TABLE = Plane((0.0, 0.0, 1.0), 0.02, 0.001)
BIN = Container((0.5, 0.1, 0.02), UPRIGHT, (0.36, 0.26, 0.12), 0.25)
MAKE = SceneMessages("base_link", lambda name: lambda **fields: SimpleNamespace(type_name=name, **fields))
HEADER = Header(1, 2, "optical")


def cup(x: float = 0.5, **fields: Any) -> SceneBox:
    return SceneBox(7, "cup", (x, 0.0, 0.07), UPRIGHT, (0.08, 0.06, 0.1), **fields)


def show(*objects: SceneBox, **fields: Any) -> SceneReply:
    given = {"camera": "wrist", "seq": 3, "epoch": 31, "frame": "base", "table": TABLE, "objects": objects}
    return SceneReply(**given | fields)


def ids(changes: Sequence[Change]) -> dict[str, bool]:
    """Return the ids of bodies that have changed: True for those that are there, False for those that have gone."""
    return {change.id: bool(change.boxes) for change in changes}


def test_bodies_are_sent_when_they_are_new_have_moved_or_have_gone() -> None:
    scene = PlanningScene("wrist")
    assert ids(scene.update(show(cup()))) == {"wrist/table": True, "wrist/7@1f": True}
    # less than the noise of depth is no motion, and a table stands still
    assert scene.update(show(cup(0.503), table=replace(TABLE, offset_m=0.03))) == []
    assert ids(scene.update(show(cup(0.52)))) == {"wrist/7@1f": True}
    # the same box, told by its other sides
    turned = replace(cup(0.52), quaternion_xyzw=(0.0, 0.0, 0.5**0.5, 0.5**0.5), size_m=(0.06, 0.08, 0.1))
    assert scene.update(show(turned)) == []
    # hidden or doubtful, it is still there; a frame without a table tells nothing else
    assert scene.update(show(unseen=(7,))) == []
    assert scene.update(show(unseen=(7,), frame=None, table=None)) == []
    assert ids(scene.list_all()) == {"wrist/table": True, "wrist/7@1f": True}
    assert ids(scene.update(show())) == {"wrist/7@1f": False}
    assert scene.update(show()) == []


def test_what_the_gripper_holds_is_no_body_of_the_world() -> None:
    scene = PlanningScene("wrist")
    scene.update(show(cup()))
    assert ids(scene.update(show(held=(7,)))) == {"wrist/7@1f": False}
    assert ids(scene.update(show(cup()))) == {"wrist/7@1f": True}


def test_ids_that_begin_again_are_other_bodies() -> None:
    scene = PlanningScene("wrist")
    scene.update(show(cup()))
    assert ids(scene.update(show(cup(), epoch=32))) == {"wrist/7@1f": False, "wrist/7@20": True}
    assert ids(scene.clear()) == {"wrist/table": False, "wrist/7@20": False}
    assert ids(scene.update(show(cup(), epoch=32))) == {"wrist/table": True, "wrist/7@20": True}


def test_a_container_is_measured_once_and_only_its_fill_goes_on() -> None:
    scene = PlanningScene("wrist")
    assert scene.container_text == ""
    (container,) = (one for one in scene.update(show(container=BIN)) if one.id == "wrist/container")
    assert scene.container_text == "0.360 x 0.260 x 0.120 m, 25% full"
    larger = replace(BIN, inside_m=(0.4, 0.3, 0.12), fill=0.5)
    assert scene.update(show(container=larger)) == []
    assert scene.container_text == "0.360 x 0.260 x 0.120 m, 50% full"
    assert scene.update(show()) == []
    # the inside is free, and what is just outside it is not
    floor_m = np.array(BIN.position_m)
    half = np.array(BIN.inside_m) / 2
    middle = np.add(floor_m, (0, 0, half[2]))
    assert not any(map(is_in(middle), container.boxes))
    for way in ((1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0), (0, 0, -1)):
        free = middle + half * way * 0.98
        wall = middle + half * way + np.multiply(way, WALL_M / 2)
        assert not any(map(is_in(free), container.boxes))
        assert any(map(is_in(wall), container.boxes))
    assert not any(map(is_in(np.add(middle, (0, 0, 1.1 * half[2]))), container.boxes))


def is_in(point_m: Any) -> Any:
    """Return whether a point lies in a box that is not turned."""
    return lambda box: bool((np.abs(point_m - np.array(box.centre_m)) <= np.array(box.size_m) / 2).all())


def test_the_table_is_a_box_below_its_plane() -> None:
    slope = np.array([0.1, 0.0, 1.0]) / np.linalg.norm([0.1, 0.0, 1.0])
    plane = Plane(tuple(slope.tolist()), 0.3, 0.001)
    ((name, boxes),) = PlanningScene("wrist").update(show(table=plane))
    assert name == "wrist/table"
    heights = boxes[0].list_corners() @ slope - 0.3
    assert sorted(heights)[-4:] == pytest.approx([-TABLE_GAP_M] * 4)
    assert heights.min() == pytest.approx(-TABLE_GAP_M - boxes[0].size_m[2])


def test_a_collision_object_adds_or_removes_a_body_in_the_base() -> None:
    box = Box((0.5, 0.0, 0.07), UPRIGHT, (0.08, 0.06, 0.1))
    made = MAKE.make_collision_object(Change("wrist/7@1f", [box]), HEADER)
    assert (made.id, made.operation, made.header.frame_id) == ("wrist/7@1f", ADD, "base_link")
    assert (made.header.stamp.sec, made.header.stamp.nanosec) == (1, 2)
    (shape,) = made.primitives
    (pose,) = made.primitive_poses
    assert (shape.type, shape.dimensions) == (1, [0.08, 0.06, 0.1])
    assert (pose.position.x, pose.orientation.w) == (0.5, 1.0)
    gone = MAKE.make_collision_object(Change("wrist/7@1f"), HEADER)
    assert (gone.id, gone.operation, gone.primitives) == ("wrist/7@1f", REMOVE, [])


def test_markers_show_all_bodies_and_the_fill() -> None:
    scene = PlanningScene("wrist")
    scene.update(show(cup(), container=BIN))
    first, *markers = MAKE.make_scene_markers(scene, HEADER).markers
    assert first.action == 3
    names = [marker.ns for marker in markers]
    assert names == ["wrist/table", *["wrist/container"] * 6, "wrist/7@1f"]
    assert len({marker.id for marker in markers}) == len(markers)
    (text,) = (marker for marker in markers if marker.type == 9)
    assert text.text == scene.container_text
    assert text.pose.position.z > BIN.position_m[2] + BIN.inside_m[2]
