"""Makes the planning scene for MoveIt from the node's: collision objects and markers, without ROS.

A scene is kept from one reply to the next, so that an object is sent only when it is new, has moved or has gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sam3_node.geometry import rotation_from_quaternion
from sam3_node.schema.replies import Container, SceneReply
from sam3_node.types import Plane

from .parts import Header, MessageParts, format_id, pose_of_plane

TABLE_M = (3.0, 3.0, 0.05)
"""Sides of the box that stands for the table, whose edges no camera tells."""
TABLE_GAP_M = 0.005
"""Distance of this box below the table, so that an object that is lifted off it does not begin in a collision."""
WALL_M = 0.01
"""Thickness of the walls and the floor of a container, outside its inside."""
MAX_BODIES = 256
"""Bodies that wait at most to be sent to a planner."""
MOVED_M = 0.005
"""Distance of a corner from where it was sent from which on an object is sent again."""
TEXT_M = 0.03
"""Height of the letters beside a container."""

# CollisionObject.ADD and .REMOVE, SolidPrimitive.BOX, Marker.CUBE, .TEXT_VIEW_FACING and .DELETEALL
ADD = b"\x00"
REMOVE = b"\x01"
BOX = 1
_CUBE = 1
_TEXT = 9
_DELETE_ALL = 3
_COLOURS = {"table": (0.6, 0.6, 0.6, 0.3), "container": (0.3, 0.4, 0.9, 0.4)}
_OBJECT = (0.1, 0.8, 0.2, 0.5)


class Box(NamedTuple):
    """A box in the robot's base."""

    centre_m: Sequence[float]
    quaternion_xyzw: Sequence[float]
    size_m: Sequence[float]

    def list_corners(self) -> Any:
        """Return its corners [8, 3] in metres."""
        signs = np.array(np.meshgrid(*[(-0.5, 0.5)] * 3)).reshape(3, 8).T
        return signs * self.size_m @ rotation_from_quaternion(self.quaternion_xyzw).T + self.centre_m


class Change(NamedTuple):
    """What happened to a body of the scene. Without boxes it has gone."""

    id: str
    boxes: Sequence[Box] = ()


class PlanningScene:
    """The bodies of one camera's scene that were sent, by their ids.

    Table and container keep the place that they were measured at first: what stands still must not tremble. Objects
    that the camera does not see stay where they were seen, until the node tracks them no longer or the gripper holds
    them.
    """

    def __init__(self, camera: str) -> None:
        self._camera = camera
        self._sent: dict[str, Sequence[Box]] = {}
        self._container: Container | None = None
        self._fill: float | None = None

    @property
    def container_text(self) -> str:
        """The size of the inside of the container in metres, and its fill; empty without a container."""
        if self._container is None:
            return ""
        size = " x ".join(f"{side:.3f}" for side in self._container.inside_m)
        return f"{size} m" + ("" if self._fill is None else f", {self._fill:.0%} full")

    @property
    def bodies(self) -> Mapping[str, Sequence[Box]]:
        """The boxes of each body that was sent."""
        return self._sent

    def update(self, reply: SceneReply) -> list[Change]:
        """Take the node's newest scene. Return what has changed, first what has gone."""
        if reply.container is not None:
            self._container = self._container or reply.container
            self._fill = reply.container.fill
        wanted = dict(self._list_bodies(reply))
        kept = {self._name(number, reply) for number in reply.unseen}
        fixed = {self._name_part("table"), self._name_part("container")}
        gone = [name for name in self._sent if name not in {*wanted, *kept, *fixed}]
        changes = [Change(name) for name in gone]
        for name in gone:
            del self._sent[name]
        for name, boxes in wanted.items():
            before = self._sent.get(name)
            if before is None or (name not in fixed and _have_moved(before, boxes)):
                self._sent[name] = boxes
                changes.append(Change(name, boxes))
        return changes

    def list_all(self) -> list[Change]:
        """Return all bodies as new ones, for a planner that comes later."""
        return [Change(name, boxes) for name, boxes in self._sent.items()]

    def clear(self) -> list[Change]:
        """Forget all bodies. Return that they have gone."""
        changes = [Change(name) for name in self._sent]
        self._sent = {}
        self._container = None
        return changes

    def _list_bodies(self, reply: SceneReply) -> Iterator[tuple[str, Sequence[Box]]]:
        if reply.table is not None:
            yield self._name_part("table"), [_make_table(reply.table)]
        if self._container is not None:
            yield self._name_part("container"), _make_container(self._container)
        for one in reply.objects:
            yield self._name(one.id, reply), [Box(one.centre_m, one.quaternion_xyzw, one.size_m)]

    def _name(self, object_id: int, reply: SceneReply) -> str:
        return self._name_part(format_id(object_id, reply.epoch))

    def _name_part(self, part: str) -> str:
        return f"{self._camera}/{part}"


def _have_moved(before: Sequence[Box], now: Sequence[Box]) -> bool:
    return any(_measure_way(one, other) > MOVED_M for one, other in zip(before, now, strict=True))


def _measure_way(before: Box, now: Box) -> float:
    """Return the largest distance of a corner to the nearest one of before: a box may be told by other axes."""
    ways = now.list_corners()[:, None] - before.list_corners()
    return float(np.linalg.norm(ways, axis=-1).min(axis=1).max())


def _make_table(table: Plane) -> Box:
    """Return the box below a table, whose upper side is TABLE_GAP_M below it."""
    point, quaternion = pose_of_plane(table)
    below_m = TABLE_GAP_M + TABLE_M[2] / 2
    centre = [at - below_m * along for at, along in zip(point, table.normal, strict=True)]
    return Box(centre, quaternion, TABLE_M)


def _make_container(container: Container) -> list[Box]:
    """Return the floor and the four walls of a container, which lie outside its inside."""
    length, width, depth = container.inside_m
    rotation = rotation_from_quaternion(container.quaternion_xyzw)
    outside = length + 2 * WALL_M, width + 2 * WALL_M
    parts = [((0.0, 0.0, -WALL_M / 2), (*outside, WALL_M))]
    for side in (-0.5, 0.5):
        parts.append(((side * (length + WALL_M), 0.0, depth / 2), (WALL_M, outside[1], depth)))
        parts.append(((0.0, side * (width + WALL_M), depth / 2), (length, WALL_M, depth)))
    return [
        Box((rotation @ middle + container.position_m).tolist(), container.quaternion_xyzw, size)
        for middle, size in parts
    ]


class SceneMessages(MessageParts):
    """Makes messages of the bodies of a scene, in the robot's base."""

    def make_collision_object(self, change: Change, header: Header) -> Any:
        """Return the moveit_msgs/CollisionObject that adds, replaces or removes a body."""
        return self._make(
            "moveit_msgs/msg/CollisionObject",
            header=self._header(self._in_frame(header, "base")),
            pose=self._pose((0.0, 0.0, 0.0), None),
            id=change.id,
            primitives=[
                self._make("shape_msgs/msg/SolidPrimitive", type=BOX, dimensions=list(map(float, box.size_m)))
                for box in change.boxes
            ],
            primitive_poses=[self._pose(box.centre_m, box.quaternion_xyzw) for box in change.boxes],
            operation=ADD if change.boxes else REMOVE,
        )

    def make_scene_markers(self, scene: PlanningScene, header: Header) -> Any:
        """Return the MarkerArray of all bodies. It replaces all earlier markers of the topic."""
        made = self._header(self._in_frame(header, "base"))
        markers = [self._make("visualization_msgs/msg/Marker", header=made, action=_DELETE_ALL)]
        for name, boxes in scene.bodies.items():
            part = name.rpartition("/")[2]
            red, green, blue, alpha = _COLOURS.get(part, _OBJECT)
            colour = self._make("std_msgs/msg/ColorRGBA", r=red, g=green, b=blue, a=alpha)
            for box in boxes:
                size = self._xyz("Vector3", box.size_m)
                pose = self._pose(box.centre_m, box.quaternion_xyzw)
                shape = {"type": _CUBE, "pose": pose, "scale": size, "color": colour}
                markers.append(self._marker(made, name, len(markers), shape))
            if part == "container":
                above = self._pose(
                    np.add(boxes[0].centre_m, (0, 0, boxes[1].size_m[2] + TEXT_M)).tolist(), None
                )
                size = self._xyz("Vector3", (0.0, 0.0, TEXT_M))
                white = self._make("std_msgs/msg/ColorRGBA", r=1.0, g=1.0, b=1.0, a=1.0)
                text = {"type": _TEXT, "pose": above, "scale": size, "color": white}
                text["text"] = scene.container_text
                markers.append(self._marker(made, name, len(markers), text))
        return self._make("visualization_msgs/msg/MarkerArray", markers=markers)

    def _marker(self, header: Any, namespace: str, number: int, fields: Mapping[str, Any]) -> Any:
        return self._make("visualization_msgs/msg/Marker", header=header, ns=namespace, id=number, **fields)
