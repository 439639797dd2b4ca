"""Makes messages of ROS 2 (sensor_msgs, and vision_msgs 4) from masks, and reads prompts of its requests, without ROS.

`find_type` returns the classes of the messages: ROS's, or others that take the same fields by keyword. All messages of
a frame have the stamp of its image, and all but 3-D ones its frame_id. As in `types`, pixel coordinates
have their origin at the corner of the top-left pixel.
"""

from __future__ import annotations

import importlib
import math
import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sam3_node.bags.messages.ros_images import MessageError, read_payload
from sam3_node.bags.samples import Colour
from sam3_node.errors import RequestError
from sam3_node.types import Instance, MaskFrame
from sam3_node.wire import MAX_EPOCH

FindType = Callable[[str], Callable[..., Any]]
"""Returns the class of a message by its full name, package/msg/Name."""

MAX_VALUE = 65534
"""Largest value of a label image; vision_msgs keeps 65535 for what has no label."""
ROTATION_VARIANCE_RAD2 = math.pi**2 / 3
"""Variance of an angle of which nothing is known: it is uniform within half a turn to either side."""

_ID = re.compile(r"(\d{1,15})(?:@([0-9a-f]{1,14}))?")


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
    match = _ID.fullmatch(text)
    epoch = int(match[2], 16) if match and match[2] else None
    if match is None or (epoch or 0) > MAX_EPOCH:
        raise RequestError(f"id: expected the id of a detection, such as 7@1f3a9c or 7, found {text[:40]!r}")
    return int(match[1]), epoch


def assign_values(ids: Iterable[int]) -> list[int]:
    """Return a value of the label image for each object: its id, or the next free one beyond MAX_VALUE."""
    taken: dict[int, None] = {}
    for object_id in ids:
        value = (object_id - 1) % MAX_VALUE + 1
        while value in taken:
            value = value % MAX_VALUE + 1
        taken[value] = None
    return list(taken)


class MaskMessages:
    """Makes messages of masks and the header of their image. Instances without a mask are skipped.

    Entry k of the table belongs to detection k of the same stamp. `base_frame` is the name, in ROS, of the frame that
    the node calls "base".
    """

    def __init__(self, base_frame: str = "base_link", find_type: FindType = import_type) -> None:
        self._base_frame = base_frame
        self._find_type = find_type

    def make_detections_2d(self, masks: MaskFrame, header: Header) -> Any:
        """Return the Detection2DArray: box, label and score of each instance, in pixels of the frame."""
        detections = [
            self._make(
                "vision_msgs/msg/Detection2D",
                header=self._header(header),
                results=[self._hypothesis(instance)],
                bbox=self._box_2d(instance),
                id=format_id(instance.id, masks.epoch),
            )
            for instance in _list_shown(masks)
        ]
        return self._make(
            "vision_msgs/msg/Detection2DArray", header=self._header(header), detections=detections
        )

    def make_detections_3d(self, masks: MaskFrame, header: Header) -> Any:
        """Return the Detection3DArray of the instances with a position, in metres.

        Its frame_id is the image's, or `base_frame` if the node gives positions in the base. The hypothesis has the
        position and its covariance, which is zero if it is not known. The box is the oriented one around the visible
        surface; its size is zero where only the position is known.
        """
        placed = [instance for instance in _list_shown(masks) if instance.position_m is not None]
        if placed and placed[0].frame == "base":
            header = header._replace(frame_id=self._base_frame)
        detections = [
            self._make(
                "vision_msgs/msg/Detection3D",
                header=self._header(header),
                results=[self._hypothesis(instance, self._pose_with_covariance(instance))],
                bbox=self._box_3d(instance),
                id=format_id(instance.id, masks.epoch),
            )
            for instance in placed
            if instance.frame == placed[0].frame
        ]
        return self._make(
            "vision_msgs/msg/Detection3DArray", header=self._header(header), detections=detections
        )

    def make_label_image(self, masks: MaskFrame, header: Header) -> Any:
        """Return the mono16 Image of the frame's size: 0 is no object, where masks overlap the best score is on top."""
        shown = _list_shown(masks)
        image = np.zeros((masks.height, masks.width), "<u2")
        pairs = zip(shown, assign_values(instance.id for instance in shown), strict=True)
        for instance, value in sorted(pairs, key=lambda pair: pair[0].paint_order):
            instance.mask.paint(image, value)
        data = array("B")  # other sequences are checked byte by byte in Python
        data.frombytes(image.data.cast("B"))
        return self._make(
            "sensor_msgs/msg/Image",
            header=self._header(header),
            height=masks.height,
            width=masks.width,
            encoding="mono16",
            is_bigendian=0,
            step=2 * masks.width,
            data=data,
        )

    def make_label_table(self, masks: MaskFrame, header: Header) -> Any:
        """Return the LabelInfo of a label image: value and label of each instance, in the order of the detections."""
        shown = _list_shown(masks)
        classes = [
            self._make("vision_msgs/msg/VisionClass", class_id=value, class_name=instance.label)
            for instance, value in zip(shown, assign_values(instance.id for instance in shown), strict=True)
        ]
        return self._make(
            "vision_msgs/msg/LabelInfo", header=self._header(header), class_map=classes, threshold=0.0
        )

    def _make(self, type_name: str, **fields: Any) -> Any:
        return self._find_type(type_name)(**fields)

    def _header(self, header: Header) -> Any:
        stamp = self._make("builtin_interfaces/msg/Time", sec=header.sec, nanosec=header.nanosec)
        return self._make("std_msgs/msg/Header", stamp=stamp, frame_id=header.frame_id)

    def _hypothesis(self, instance: Instance, pose: Any = None) -> Any:
        pose = pose or self._with_covariance(self._pose((0.0, 0.0, 0.0), None), np.zeros(36))
        hypothesis = self._make(
            "vision_msgs/msg/ObjectHypothesis", class_id=instance.label, score=float(instance.score)
        )
        return self._make("vision_msgs/msg/ObjectHypothesisWithPose", hypothesis=hypothesis, pose=pose)

    def _box_2d(self, instance: Instance) -> Any:
        x0, y0, x1, y1 = instance.box
        position = self._make("vision_msgs/msg/Point2D", x=(x0 + x1) / 2, y=(y0 + y1) / 2)
        centre = self._make("vision_msgs/msg/Pose2D", position=position, theta=0.0)
        return self._make(
            "vision_msgs/msg/BoundingBox2D", center=centre, size_x=float(x1 - x0), size_y=float(y1 - y0)
        )

    def _box_3d(self, instance: Instance) -> Any:
        centre = self._pose(
            instance.extent_centre_m or instance.position_m or (), instance.extent_quaternion_xyzw
        )
        size = self._xyz("Vector3", instance.extent_m or (0.0, 0.0, 0.0))
        return self._make("vision_msgs/msg/BoundingBox3D", center=centre, size=size)

    def _pose_with_covariance(self, instance: Instance) -> Any:
        covariance = np.zeros((6, 6))
        if instance.covariance_m2 is not None:
            xx, xy, xz, yy, yz, zz = instance.covariance_m2
            covariance[:3, :3] = [[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]]
            covariance[3:, 3:] = np.eye(3) * ROTATION_VARIANCE_RAD2
        pose = self._pose(instance.position_m or (), instance.extent_quaternion_xyzw)
        return self._with_covariance(pose, covariance.ravel())

    def _with_covariance(self, pose: Any, covariance: Any) -> Any:
        return self._make("geometry_msgs/msg/PoseWithCovariance", pose=pose, covariance=covariance)

    def _pose(self, position: Sequence[float], quaternion_xyzw: Sequence[float] | None) -> Any:
        x, y, z, w = map(float, quaternion_xyzw or (0.0, 0.0, 0.0, 1.0))
        orientation = self._make("geometry_msgs/msg/Quaternion", x=x, y=y, z=z, w=w)
        return self._make(
            "geometry_msgs/msg/Pose", position=self._xyz("Point", position), orientation=orientation
        )

    def _xyz(self, name: str, values: Sequence[float]) -> Any:
        x, y, z = map(float, values)
        return self._make(f"geometry_msgs/msg/{name}", x=x, y=y, z=z)


def read_prompt(request: Any) -> dict[str, Any]:
    """Return the points, labels, box and mask of a request, as arguments of the client. Raises RequestError."""
    prompt: dict[str, Any] = {}
    if len(request.points):
        prompt["points"] = [(float(point.x), float(point.y)) for point in request.points]
    if len(request.labels):
        prompt["labels"] = [int(label) for label in request.labels]
    box = request.box
    if box.size_x or box.size_y:
        if box.center.theta:
            raise RequestError(f"box: expected theta 0, found {box.center.theta}")
        x, y = box.center.position.x, box.center.position.y
        half_x, half_y = box.size_x / 2, box.size_y / 2
        prompt["box"] = (x - half_x, y - half_y, x + half_x, y + half_y)
    if len(request.mask.data):
        prompt["mask"] = _read_mask(request.mask)
    return prompt


def _read_mask(image: Any) -> Any:
    if image.encoding not in ("mono8", "8UC1"):
        raise RequestError(f"mask: expected an image of encoding mono8, found {image.encoding!r}")
    try:
        payload = read_payload(image, "sensor_msgs/msg/Image", "mask")
    except MessageError as error:
        raise RequestError(str(error)) from error
    assert isinstance(payload, Colour)
    return np.frombuffer(payload.data, np.uint8).reshape(payload.height, payload.width) != 0


def _list_shown(masks: MaskFrame) -> list[Instance]:
    """Return the instances that have a mask on this frame."""
    return [instance for instance in masks.instances if instance.area]
