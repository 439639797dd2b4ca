"""Message classes like those that rosidl generates for Python, from the same definitions; and their CDR by rosbags.

Fields are checked as generated setters check them: no conversion between int and float, ranges of integers, array.array
for sequences of numbers (other sequences are copied into one), numpy arrays for arrays of numbers.
"""

from __future__ import annotations

import importlib
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from rosbags.interfaces import Nodetype
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

from tests.support.paths import ROOT

SERVICES = sorted((ROOT / "launch/ros2/sam3_node_msgs/srv").glob("*.srv"))
VISION_MSGS = {
    "Point2D": "float64 x\nfloat64 y",
    "Pose2D": "vision_msgs/Point2D position\nfloat64 theta",
    "BoundingBox2D": "vision_msgs/Pose2D center\nfloat64 size_x\nfloat64 size_y",
    "BoundingBox3D": "geometry_msgs/Pose center\ngeometry_msgs/Vector3 size",
    "ObjectHypothesis": "string class_id\nfloat64 score",
    "ObjectHypothesisWithPose": "ObjectHypothesis hypothesis\ngeometry_msgs/PoseWithCovariance pose",
    "Detection2D": "std_msgs/Header header\nObjectHypothesisWithPose[] results\nBoundingBox2D bbox\nstring id",
    "Detection2DArray": "std_msgs/Header header\nDetection2D[] detections",
    "Detection3D": "std_msgs/Header header\nObjectHypothesisWithPose[] results\nBoundingBox3D bbox\nstring id",
    "Detection3DArray": "std_msgs/Header header\nDetection3D[] detections",
    "VisionClass": "uint16 class_id\nstring class_name",
    "LabelInfo": "std_msgs/Header header\nvision_msgs/VisionClass[] class_map\nfloat32 threshold",
}
"""The definitions of vision_msgs 4, which Humble, Iron, Jazzy and Kilted have, without comments."""
RELEASES = {"humble": Stores.ROS2_HUMBLE, "jazzy": Stores.ROS2_JAZZY}

_CODES = {"uint8": "B", "int32": "i", "float32": "f", "float64": "d"}
_RANGES = {f"{'u' * unsigned}int{bits}": (0, 2**bits) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1))
           for unsigned in (0, 1) for bits in (8, 16, 32, 64)}  # fmt: skip


@cache
def open_store(release: str = "jazzy") -> Any:
    """Return rosbags' types of a release, with vision_msgs and our own services."""
    store = get_typestore(RELEASES[release])
    types: dict[str, Any] = {}
    for name, text in VISION_MSGS.items():
        types |= get_types_from_msg(text, f"vision_msgs/msg/{name}")
    for path in SERVICES:
        for part, text in zip(("Request", "Response"), path.read_text().split("\n---\n"), strict=True):
            types |= get_types_from_msg(text, f"sam3_node_msgs/msg/{path.stem}_{part}")
    store.register(types)
    return store


class Message:
    """Base of generated classes: fields by keyword, each with its default."""

    fields: dict[str, tuple[Nodetype, Any]]
    type_name: str
    __slots__ = ("_values",)

    def __init__(self, **values: Any) -> None:
        assert values.keys() <= self.fields.keys(), (
            f"invalid arguments {sorted(values.keys() - self.fields.keys())}"
        )
        object.__setattr__(self, "_values", {})
        for name, kind in self.fields.items():
            setattr(self, name, values[name] if name in values else _default(kind))

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "_values")[name]
        except KeyError:
            raise AttributeError(f"{self.type_name} has no field {name}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.fields:
            raise AttributeError(f"{self.type_name} has no field {name}")
        self._values[name] = _checked(self.fields[name], value, f"{self.type_name}.{name}")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in self.fields
        )

    __hash__ = None  # type: ignore[assignment]


@cache
def find_class(type_name: str) -> type[Message]:
    """Return the class of a message by its full name."""
    fields = {
        name: kind
        for name, kind in open_store().fielddefs[type_name][1]
        if name != "structure_needs_at_least_one_member"
    }
    name = type_name.rpartition("/")[2]
    return type(name, (Message,), {"fields": fields, "type_name": type_name, "__slots__": ()})


def _default(kind: tuple[Nodetype, Any]) -> Any:
    node, detail = kind
    if node is Nodetype.NAME:
        return find_class(detail)()
    if node is Nodetype.BASE:
        return {"string": "", "bool": False}.get(detail[0], 0.0 if detail[0].startswith("float") else 0)
    (inner, base), count = detail
    if node is Nodetype.ARRAY:
        return np.zeros(count, base[0])
    return array(_CODES[base[0]]) if inner is Nodetype.BASE and base[0] in _CODES else []


def _checked(kind: tuple[Nodetype, Any], value: Any, what: str) -> Any:
    node, detail = kind
    if node is Nodetype.NAME:
        assert isinstance(value, find_class(detail)), f"{what}: expected {detail}, found {type(value)}"
        return value
    if node is Nodetype.BASE:
        return _checked_number(detail[0], value, what)
    inner, count = detail
    number = inner[1][0] if inner[0] is Nodetype.BASE else None
    if node is Nodetype.ARRAY:
        assert isinstance(value, np.ndarray), f"{what}: expected a numpy array"
        assert (value.dtype, value.size) == (np.dtype(number), count), f"{what}: {value.dtype} {value.size}"
        return value
    if isinstance(value, array):
        assert value.typecode == _CODES[str(number)], f"{what}: typecode {value.typecode}"
        return value
    assert isinstance(value, list | tuple), f"{what}: expected a sequence, found {type(value)}"
    items = [_checked(inner, item, what) for item in value]
    return array(_CODES[number], items) if number in _CODES else items


def _checked_number(name: str, value: Any, what: str) -> Any:
    kind = {"string": str, "bool": bool}.get(name, float if name.startswith("float") else int)
    assert isinstance(value, kind), f"{what}: expected {kind}, found {type(value)}"
    if name in _RANGES:
        low, high = _RANGES[name]
        assert low <= value < high, f"{what}: {value}"
    return value


def serialise(message: Message, release: str = "jazzy") -> bytes:
    """Return a message as CDR, by rosbags."""
    return bytes(open_store(release).serialize_cdr(_convert(message, open_store(release)), message.type_name))


def deserialise(data: bytes, type_name: str) -> Message:
    """Return the message of CDR, by rosbags."""
    return _revert(open_store().deserialize_cdr(data, type_name))


def _convert(value: Any, store: Any) -> Any:
    if isinstance(value, Message):
        return store.types[value.type_name](
            **{name: _convert(getattr(value, name), store) for name in value.fields}
        )
    if isinstance(value, array):
        return np.array(value)
    return [_convert(item, store) for item in value] if isinstance(value, list) else value


def _revert(value: Any) -> Any:
    if hasattr(value, "__msgtype__"):
        kind = find_class(value.__msgtype__)
        return kind(
            **{name: _revert_field(field, getattr(value, name)) for name, field in kind.fields.items()}
        )
    return value


def _revert_field(kind: tuple[Nodetype, Any], value: Any) -> Any:
    if kind[0] is Nodetype.SEQUENCE and isinstance(value, np.ndarray):
        found = array(_CODES[kind[1][0][1][0]])
        found.frombytes(value.tobytes())
        return found
    return [_revert(item) for item in value] if isinstance(value, list) else _revert(value)


class Service:
    """Base of generated service classes."""

    Request: type[Message]
    Response: type[Message]


@contextmanager
def installed() -> Iterator[None]:
    """Provide the Python packages of the messages and services, and rclpy's stand-in, to imports."""
    packages: dict[str, dict[str, Any]] = {}
    for type_name in open_store().fielddefs:
        package, kind, name = type_name.split("/")
        if kind == "msg":
            packages.setdefault(f"{package}.msg", {})[name] = find_class(type_name)
    for path in SERVICES:
        parts = {
            part: find_class(f"sam3_node_msgs/msg/{path.stem}_{part}") for part in ("Request", "Response")
        }
        packages.setdefault("sam3_node_msgs.srv", {})[path.stem] = type(path.stem, (Service,), parts)
    before = set(sys.modules)
    stand_in = str(ROOT / "tests/support/ros2/stand_in")
    node = str(ROOT / "launch/ros2/sam3_node_ros")
    for name, content in packages.items():
        sys.modules.setdefault(name.split(".")[0], ModuleType(name.split(".")[0]))
        module = ModuleType(name)
        vars(module).update(content)
        sys.modules[name] = module
    sys.path[:0] = [stand_in, node]
    try:
        importlib.invalidate_caches()
        yield
    finally:
        sys.path.remove(stand_in)
        sys.path.remove(node)
        for name in set(sys.modules) - before:
            if name.split(".")[0] in (
                "rclpy",
                "sam3_node_ros",
                *(package.split(".")[0] for package in packages),
            ):
                del sys.modules[name]
