"""What messages of ROS 2 are made of: headers, poses, and the ids of objects. It needs no ROS.

`find_type` returns the classes of the messages: ROS's, or others that take the same fields by keyword.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sam3_node.errors import RequestError
from sam3_node.schema.fields import MAX_EPOCH
from sam3_node.types import Plane

FindType = Callable[[str], Callable[..., Any]]
"""Returns the class of a message by its full name, package/msg/Name."""

ID = re.compile(r"(\d{1,15})(?:@([0-9a-f]{1,14}))?")
"""Number and epoch of an object"""


class Header(NamedTuple):
    """The header of an image: its stamp and coordinate frame."""

    sec: int
    nanosec: int
    frame_id: str


def import_type(name: str) -> Callable[..., Any]:
    """Return a message class of ROS, of its generated Python packages."""
    package, kind, message = name.split("/")
    message_type: Callable[..., Any] = getattr(importlib.import_module(f"{package}.{kind}"), message)
    return message_type


def read_header(message: Any) -> Header:
    """Return the header of a message."""
    stamp = message.header.stamp
    return Header(int(stamp.sec), int(stamp.nanosec), str(message.header.frame_id))


def format_id(object_id: int, epoch: int | None) -> str:
    """Return the id of an object as messages have it: its number, and the epoch of the camera's ids in hex.

    After a restart of the node the numbers begin again, so the number alone could name another object.
    """
    return str(object_id) if epoch is None else f"{object_id}@{epoch:x}"


def parse_id(text: str) -> tuple[int, int | None]:
    """Return number and epoch of an id; the epoch is None if the text is a number alone. Raises RequestError."""
    match = ID.fullmatch(text)
    epoch = int(match[2], 16) if match and match[2] else None
    if match is None or (epoch or 0) > MAX_EPOCH:
        raise RequestError(f"id: expected the id of a detection, such as 7@1f3a9c or 7, found {text[:40]!r}")
    return int(match[1]), epoch


def pose_of_plane(plane: Plane) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the point of a plane nearest to the origin, and the smallest turn that takes z to its normal."""
    x, y, z = plane.normal
    turn = np.array([-y, x, 0.0, 1.0 + z])
    # upside down, half a turn about any level axis
    turn = turn / np.linalg.norm(turn) if z > -1.0 + 1e-9 else np.array([1.0, 0.0, 0.0, 0.0])
    return tuple(plane.offset_m * side for side in plane.normal), tuple(map(float, turn))


class MessageParts:
    """Makes the parts that messages share. `base_frame` is the name of the robot's base in ROS."""

    def __init__(self, base_frame: str = "base_link", find_type: FindType = import_type) -> None:
        self._base_frame = base_frame
        self._find_type = find_type

    def _make(self, type_name: str, **fields: Any) -> Any:
        return self._find_type(type_name)(**fields)

    def _in_frame(self, header: Header, frame: str | None) -> Header:
        return header._replace(frame_id=self._base_frame) if frame == "base" else header

    def _header(self, header: Header) -> Any:
        stamp = self._make("builtin_interfaces/msg/Time", sec=header.sec, nanosec=header.nanosec)
        return self._make("std_msgs/msg/Header", stamp=stamp, frame_id=header.frame_id)

    def _stamped(self, header: Header, position: Sequence[float], quaternion_xyzw: Sequence[float]) -> Any:
        pose = self._pose(position, quaternion_xyzw)
        return self._make("geometry_msgs/msg/PoseStamped", header=self._header(header), pose=pose)

    def _pose(self, position: Sequence[float], quaternion_xyzw: Sequence[float] | None) -> Any:
        orientation = self._quaternion(quaternion_xyzw)
        return self._make(
            "geometry_msgs/msg/Pose", position=self._xyz("Point", position), orientation=orientation
        )

    def _quaternion(self, quaternion_xyzw: Sequence[float] | None) -> Any:
        x, y, z, w = map(float, quaternion_xyzw or (0.0, 0.0, 0.0, 1.0))
        return self._make("geometry_msgs/msg/Quaternion", x=x, y=y, z=z, w=w)

    def _xyz(self, name: str, values: Sequence[float]) -> Any:
        x, y, z = map(float, values)
        return self._make(f"geometry_msgs/msg/{name}", x=x, y=y, z=z)
