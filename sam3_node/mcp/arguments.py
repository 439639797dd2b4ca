"""The arguments of each tool for agents: a Struct each, whose fields are the schema that an agent reads.

A tool that requests an operation has the operation's own arguments, but those that it leaves out; what it adds is
written here. The docstring of a class is the tool's description. Wrong arguments are refused here, before the node
hears of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import msgspec
from msgspec import Meta

from ..errors import RequestError, WireError
from ..schema.describing import describe_json
from ..schema.fields import ABOVE_0, MAX_EPOCH, Text, convert
from ..schema.operations import AddObject, FindObjects, Operation, ReadPoints, RemoveObject
from ..schema.replies import Lease
from ..types import CAMERA_SILENT_S

MAX_TEXT = 256
"""Characters of a text in an argument, such as a label or a camera's name. A longer one is refused."""
MAX_NAMES = 64
"""Names that the tool `name` takes at once. More are refused."""
MAX_COUNT = 1000
"""Points of a surface in one answer. More would fill an agent's context."""
MIN_SIDE = 64
"""Smallest side of a picture that may be asked for, in pixels."""
MAX_SIDE = 1568
"""Largest side of a picture, in pixels. Hosts of agents scale larger ones down."""
DEFAULT_SIDE = 1024
"""Largest side of a picture, in pixels, unless an agent asks for another."""
MAX_WAIT_S = 60.0
"""Longest wait that an agent may ask for, in seconds: hosts end calls that take minutes."""
DEFAULT_AGE_MS = 1000 * CAMERA_SILENT_S
"""Age of masks, in milliseconds, above which they are not shown as the present, unless an agent asks for older."""
MAX_ERRORS = 5
"""Unknown arguments that one error names."""
MAX_SHOWN = 60
"""Characters of an unknown argument that an error shows."""

WORDS = {
    "id": "`find` lists it",
    "epoch": "`find` gives it with the id",
    "seq": "`look` gives it with its picture",
}
"""How an agent comes by arguments of these names. It follows on what they mean."""


class ToolArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the arguments of a tool."""

    left_out: ClassVar[frozenset[str]] = frozenset()
    """Arguments of the operation that an agent does not have"""

    @classmethod
    def describe(cls) -> str:
        """Return the description of the tool: the docstrings of the class and of the one that it extends."""
        kinds = [kind for kind in reversed(cls.__mro__) if issubclass(kind, ToolArguments)]
        return " ".join(" ".join((kind.__doc__ or "").split()) for kind in kinds[1:])

    @classmethod
    def list_names(cls) -> tuple[str, ...]:
        """Return the names of the arguments."""
        return tuple(name for name in cls.__struct_fields__ if name not in cls.left_out)

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """Return the JSON schema of the arguments."""
        schema = describe_json(cls, cls.left_out)
        for name, described in schema["properties"].items():
            meaning = described.get("description", "")
            if not meaning.startswith(("true", "false")):
                meaning = meaning[:1].upper() + meaning[1:]
            words = [meaning, WORDS.get(name, "")]
            described["description"] = ". ".join(part.rstrip(".") for part in words if part) + "."
            for part in _list_texts(described):
                part |= {"minLength": 1, "maxLength": MAX_TEXT}
        return schema

    @classmethod
    def read(cls, tool: str, given: Mapping[str, Any]) -> Self:
        """Return checked arguments. Raises RequestError that names what is wrong."""
        known = cls.list_names()
        unknown = [name for name in given if name not in known]
        if unknown:
            listed = ", ".join(repr(name[:MAX_SHOWN]) for name in unknown[:MAX_ERRORS])
            more = f", and {len(unknown) - MAX_ERRORS} more" if len(unknown) > MAX_ERRORS else ""
            noun = "argument" if len(unknown) == 1 else "arguments"
            raise RequestError(
                f"{tool}: unknown {noun} {listed}{more}; expected {', '.join(known) or 'none'}"
            )
        for name, value in given.items():
            for text in value if isinstance(value, list) else (value,):
                if isinstance(text, str) and not 1 <= len(text) <= MAX_TEXT:
                    raise RequestError(
                        f"{tool}: expected '{name}' to be 1 to {MAX_TEXT} characters, found {len(text)}"
                    )
        try:
            # models often write "3" for 3
            return convert(dict(given), cls, tool, strict=False)
        except WireError as error:
            raise RequestError(str(error)) from None


def _list_texts(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a JSON schema that describe texts."""
    if isinstance(schema, dict):
        if schema.get("type") == "string":
            yield schema
        for part in list(schema.values()):
            yield from _list_texts(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _list_texts(part)


def make_arguments(operation: type[Operation[Any]]) -> type[ToolArguments]:
    """Return the arguments of a tool that requests an operation and does nothing else."""
    made: Any = msgspec.defstruct(
        operation.__name__,
        [],
        bases=(operation, ToolArguments),
        namespace={"__doc__": operation.__doc__},
        frozen=True,
        kw_only=True,
    )
    return cast(type[ToolArguments], made)


class FindArguments(ToolArguments, frozen=True, kw_only=True):
    """List the objects that the node tracks now, or those of one name: id, label, box in pixels, position in metres,
    how sure each is, and how old its mask is. Masks older than `max_age_ms` are left out and named in `notes`. Do not
    act on an object that is `doubtful` or `hidden`."""

    name: Text | None = None
    """label to look for, in any case; leave it out for all objects"""
    camera: Text | None = None
    """name of the camera; leave it out for all cameras"""
    sure_only: bool = False
    """true: leave out objects that are doubtful, hidden or tentative"""
    max_age_ms: Annotated[float, Meta(ge=ABOVE_0, le=MAX_EPOCH)] = DEFAULT_AGE_MS
    """masks older than this, in milliseconds, are left out"""


class WaitArguments(ToolArguments, frozen=True, kw_only=True):
    """Wait until an object of a name is surely in view, or lies still, and return it as `find` does. After `timeout_s`
    the answer has no object, and a note says what there is."""

    name: Text
    """label to wait for, in any case"""
    until: Literal["seen", "still"] = "seen"
    """`seen`: in view, also when it is back; `still`: in view and at rest for a second"""
    camera: Text | None = None
    """name of the camera; leave it out for all cameras"""
    timeout_s: Annotated[float, Meta(ge=ABOVE_0, le=MAX_WAIT_S)] = 20.0
    """longest wait in seconds"""


class LookArguments(ToolArguments, frozen=True, kw_only=True):
    """Return a camera's newest picture with the masks of exactly that frame drawn on it, their ids and labels. A
    doubtful mask has a dashed outline. The text beside the picture has its age, its frame's `seq`, the objects with
    their boxes in pixels of the picture, and the `scale` from these to pixels of the camera's frame."""

    camera: Text | None = None
    """name of the camera; needed only if the node serves several"""
    masks: bool = True
    """false: the bare picture"""
    max_side: Annotated[int, Meta(ge=MIN_SIDE, le=MAX_SIDE)] = DEFAULT_SIDE
    """longest side of the picture, in pixels"""


class KeepingLookArguments(LookArguments, frozen=True, kw_only=True):
    """With `keep_s`, the node keeps the frame, so that `add` with this `seq` marks what the picture shows, however late
    it comes within that time."""

    keep_s: Lease = 0.0
    """seconds for which the node keeps this frame for `add`; it keeps at most four"""


class PointsArguments(ReadPoints, ToolArguments, frozen=True, kw_only=True):
    """Return where an object is in space, in metres: points of its visible surface on the latest frame, its position,
    and the boxes around it. `frame` says of which coordinates: `base` of the robot, or `camera`. It needs a camera with
    depth. With `count` 0, only what the masks say; a reader's key permits no more."""

    count: Annotated[int, Meta(ge=0, le=MAX_COUNT)] = 32
    """largest number of points"""


class WhereArguments(FindObjects, ToolArguments, frozen=True, kw_only=True):
    """Say where an object was seen last, also one that is out of view or that was lost: those in view first, each with
    `age_s`, the seconds since then, its position in metres and its box at that time. It may have been moved since: look
    at `held` and `hidden_by`. An empty list: the node does not know."""

    left_out = frozenset({"label"})  # which agents call a name

    name: Text | None = None
    """label to look for, as the node writes it; leave it out for all objects"""
    picture: bool = False
    """true: also the last picture of the first object of the list"""


class AddArguments(AddObject, ToolArguments, frozen=True, kw_only=True):
    """Track a new object, marked by points or a box in pixels. Without `seq` the marks are those of the next frame that
    arrives, so use the `seq` of the picture in which you have read them. A note says if the thing was tracked
    already."""

    left_out = frozenset({"mask", "priority", "choice", "stride", "epoch"})

    scale: Annotated[float, Meta(ge=ABOVE_0, le=1000.0)] = 1.0
    """the `scale` that `look` gave with its picture: the pixels are multiplied by it; leave it out for pixels of the
    camera's own frame"""


class NameArguments(ToolArguments, frozen=True, kw_only=True):
    """Set the names of the objects that the node looks for, on all cameras. They replace the ones before, which `find`
    lists as `looking_for`; the objects of names that stay keep their ids. An empty list ends the search."""

    names: Annotated[tuple[Text, ...], Meta(max_length=MAX_NAMES)]
    """all names, such as ["red mug", "bottle"]"""
    most: Annotated[int, Meta(ge=1, le=MAX_COUNT)] | None = None
    """largest number of objects of each name"""


class RemoveArguments(RemoveObject, ToolArguments, frozen=True, kw_only=True):
    """Stop tracking an object."""
