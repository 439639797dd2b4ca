"""Values that all packages share and messages carry.

A field that messages carry has its type and bounds here; `wire.messages` says in which order they are written.

Pixel coordinates have their origin at the corner of the top-left pixel. Boxes are (x0, y0, x1, y1), with x1 and y1
exclusive. Times are integers in nanoseconds, lengths are in metres.
"""

from __future__ import annotations

from dataclasses import Field, field, make_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
from msgspec import NODEFAULT

from .fields import Finite, Name, Natural, PixelBox, Side, Vector3

MaskEncoding = Literal["bits+zstd", "rle"]
TrackState = Literal["tentative", "tracked", "occluded"]
Clock = Literal["system", "monotonic", "device"]
Priority = Literal["normal", "low"]
"""Priority of an object. Those of low priority are the first not to be tracked on every frame under load."""
Box = tuple[int, int, int, int]


class _DataclassFields:
    """Lets `dataclasses.replace`, `fields` and `asdict` take values, as they take the dataclasses of programs."""

    def __get__(self, value: object, kind: type[Value]) -> dict[str, Field[Any]]:
        return _list_dataclass_fields(kind)


class Value(msgspec.Struct, frozen=True):
    """Base of the values. They cannot be changed."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    else:
        __dataclass_fields__ = _DataclassFields()


@cache
def _list_dataclass_fields(kind: type[Value]) -> dict[str, Field[Any]]:
    names = kind.__struct_fields__
    defaults = (NODEFAULT,) * (len(names) - len(kind.__struct_defaults__)) + kind.__struct_defaults__
    # all are required, then none: order does not matter to those who only list or copy them
    parts = [
        (name, Any, field(kw_only=True) if default is NODEFAULT else field(default=None, kw_only=True))
        for name, default in zip(names, defaults, strict=True)
    ]
    fields: dict[str, Field[Any]] = make_dataclass(kind.__name__, parts).__dataclass_fields__  # type: ignore[attr-defined]
    return fields


class FramePose(Value, frozen=True, rename={"position_m": "position", "quaternion_xyzw": "quaternion"}):
    """Pose of the coordinate frame `frame` in its `parent` at `stamp_ns` of `clock`: position and unit quaternion.

    The robot's is frame "gripper" in parent "base". Points of the frame become points of the parent by rotation, then
    translation.
    """

    frame: Name
    parent: Name
    stamp_ns: Natural
    position_m: Vector3
    quaternion_xyzw: tuple[Finite, Finite, Finite, Finite]
    clock: Clock = "system"


class MaskMap(Value, frozen=True):
    """A mask as messages carry it; `wire.masks` says what `data` holds."""

    encoding: MaskEncoding
    size: tuple[Side, Side]
    """height and width of the image"""
    box: PixelBox
    data: bytes
