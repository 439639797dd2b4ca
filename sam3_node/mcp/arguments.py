"""The arguments of each tool for agents: a frozen model each, whose fields are the schema that an agent reads.

The docstring of a model is the tool's description. Wrong arguments are refused here, before the node hears of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import RequestError
from ..schema.operations import MAX_POINTS
from ..schema.replies import MAX_LEASE_S
from ..types import CAMERA_SILENT_S

MAX_NAME = 256
"""Characters of a label or a camera's name in an argument. A longer one is refused."""
MAX_NAMES = 64
"""Names that the tool `name` takes at once. More are refused."""
MAX_PROMPT_POINTS = MAX_POINTS
"""Points of one prompt. More are refused."""
MAX_COUNT = 1000
"""Points of a surface in one answer. More would fill an agent's context."""
MAX_INTEGER = 2**53
"""Largest integer of an argument: every host reads it exactly."""
MIN_SIDE = 64
"""Smallest side of a picture that may be asked for, in pixels."""
MAX_SIDE = 1568
"""Largest side of a picture, in pixels. Hosts of agents scale larger ones down."""
DEFAULT_SIDE = 1024
"""Largest side of a picture, in pixels, unless an agent asks for another."""
MAX_KEEP_S = MAX_LEASE_S
"""Longest time for which `look` keeps its frame for a later `add`, in seconds."""
DEFAULT_AGE_MS = 1000 * CAMERA_SILENT_S
"""Age of masks, in milliseconds, above which they are not shown as the present, unless an agent asks for older."""
MAX_ERRORS = 5
"""Wrong arguments that one error names."""
EXPECTED = "Input should be "
"""Beginning of most errors of pydantic."""
MAX_SHOWN = 60
"""Characters of a wrong value that an error shows."""

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
Whole = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
Pixels = Annotated[list[float], Field(min_length=2, max_length=2)]

CAMERA = "Name of the camera. Needed only if the node serves several."
EPOCH = "The epoch that `find` gave with the id. The node then refuses an id that names another object since a restart."
SCALE = (
    "The `scale` that `look` gave with its picture: the pixels are multiplied by it. Leave it out for pixels of the "
    "camera's own frame."
)


class ToolArguments(BaseModel):
    """Base of the arguments of a tool."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def describe(cls) -> str:
        """Return the description of the tool: the docstrings of the model and of the one that it extends."""
        kinds = [kind for kind in reversed(cls.__mro__) if issubclass(kind, ToolArguments)]
        return " ".join(" ".join((kind.__doc__ or "").split()) for kind in kinds[1:])

    @classmethod
    def read(cls, tool: str, given: Mapping[str, Any]) -> Self:
        """Return checked arguments. Raises RequestError that names each wrong one."""
        try:
            return cls.model_validate(dict(given))
        except ValidationError as error:
            wrong = [_describe(dict(item), cls) for item in error.errors(include_url=False)]
            more = ""
            if len(wrong) > MAX_ERRORS:
                more = f"; and {len(wrong) - MAX_ERRORS} more"
            raise RequestError(f"{tool}: {'; '.join(wrong[:MAX_ERRORS])}{more}") from None


def _describe(wrong: Mapping[str, Any], kind: type[ToolArguments]) -> str:
    """Return what is wrong with one argument: its name, what was expected, what was found."""
    place = ".".join(str(part) for part in wrong["loc"])[:MAX_SHOWN] or "arguments"
    if wrong["type"] == "extra_forbidden":
        expected = ", ".join(kind.model_fields) or "none"
        return f"unknown argument {place!r}; expected {expected}"
    if wrong["type"] == "missing":
        return f"{place}: expected a value, found none"
    message = str(wrong["msg"])
    if message.startswith(EXPECTED):
        message = f"expected {message.removeprefix(EXPECTED)}"
    # a value of megabytes is not copied before it is cut
    found = wrong["input"]
    shown = found[:MAX_SHOWN] if isinstance(found, str | list) else found
    return f"{place}: {message}, found {shown!r:.{MAX_SHOWN}}"


class FindArguments(ToolArguments):
    """List the objects that the node tracks now, or those of one name: id, label, box in pixels, position in metres,
    how sure each is, and how old its mask is. Masks older than `max_age_ms` are left out and named in `notes`. Do not
    act on an object that is `doubtful` or `hidden`."""

    name: Name | None = Field(
        None, description="Label to look for, in any case. Leave it out for all objects."
    )
    camera: Name | None = Field(None, description="Name of the camera. Leave it out for all cameras.")
    sure_only: bool = Field(
        False, description="true: leave out objects that are doubtful, hidden or tentative."
    )
    max_age_ms: float = Field(
        DEFAULT_AGE_MS,
        gt=0,
        le=MAX_INTEGER,
        description="Masks older than this, in milliseconds, are left out.",
    )


class LookArguments(ToolArguments):
    """Return a camera's newest picture with the masks of exactly that frame drawn on it, their ids and labels. A
    doubtful mask has a dashed outline. The text beside the picture has its age, its frame's `seq`, and the `scale` from
    pixels of the picture to pixels of the camera's frame."""

    camera: Name | None = Field(None, description=CAMERA)
    masks: bool = Field(True, description="false: the bare picture.")
    max_side: int = Field(
        DEFAULT_SIDE, ge=MIN_SIDE, le=MAX_SIDE, description="Longest side of the picture, in pixels."
    )


class KeepingLookArguments(LookArguments):
    """With `keep_s`, the node keeps the frame, so that `add` with this `seq` marks what the picture shows, however late
    it comes within that time."""

    keep_s: float = Field(
        0.0,
        ge=0,
        le=MAX_KEEP_S,
        description="Seconds for which the node keeps this frame for `add`. It keeps at most four.",
    )


class PointsArguments(ToolArguments):
    """Return where an object is in space, in metres: points of its visible surface on the latest frame, its position,
    and the boxes around it. `frame` says of which coordinates: `base` of the robot, or `camera`. It needs a camera with
    depth. With `count` 0, only what the masks say; a reader's key permits no more."""

    id: Whole = Field(description="Id of the object, from `find`.")
    camera: Name | None = Field(None, description=CAMERA)
    count: int = Field(32, ge=0, le=MAX_COUNT, description="Largest number of points.")
    epoch: Whole | None = Field(None, description=EPOCH)


class WhereArguments(ToolArguments):
    """Say where an object was seen last, also one that is out of view or that was lost: those in view first, each with
    `age_s`, the seconds since then, its position in metres and its box at that time. It may have been moved since: look
    at `held` and `hidden_by`. An empty list: the node does not know."""

    name: Name | None = Field(
        None, description="Label to look for, as the node writes it. Leave it out for all objects."
    )
    id: Whole | None = Field(None, description="Id of one object, in place of a name.")
    camera: Name | None = Field(
        None, description="Name of the camera. Needed with an id if the node serves several."
    )
    epoch: Whole | None = Field(None, description=EPOCH)
    picture: bool = Field(False, description="true: also the last picture of the first object of the list.")


class AddArguments(ToolArguments):
    """Track a new object, marked by points or a box in pixels. Without `seq` the marks are those of the next frame that
    arrives, so use the `seq` of the picture in which you have read them."""

    points: list[Pixels] | None = Field(
        None,
        min_length=1,
        max_length=MAX_PROMPT_POINTS,
        description="Points [x, y], by default inside the object.",
    )
    labels: list[Annotated[int, Field(ge=0, le=1)]] | None = Field(
        None,
        max_length=MAX_PROMPT_POINTS,
        description="For each point 1 if it is inside the object, 0 if outside.",
    )
    box: list[float] | None = Field(
        None, min_length=4, max_length=4, description="Box [x0, y0, x1, y1] around the object."
    )
    label: Name | None = Field(None, description="Name of the object.")
    camera: Name | None = Field(None, description=CAMERA)
    seq: Whole | None = Field(None, description="The `seq` that `look` gave with its picture.")
    scale: float = Field(1.0, gt=0, le=1000, description=SCALE)


class NameArguments(ToolArguments):
    """Set the names of the objects that the node looks for, on all cameras. They replace the ones before, which `find`
    lists as `looking_for`; the objects of names that stay keep their ids. An empty list ends the search."""

    names: list[Name] = Field(max_length=MAX_NAMES, description='All names, such as ["red mug", "bottle"].')
    most: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = Field(
        None, description="Largest number of objects of each name."
    )


class RemoveArguments(ToolArguments):
    """Stop tracking an object."""

    id: Whole = Field(description="Id of the object, from `find`.")
    camera: Name | None = Field(None, description=CAMERA)
    epoch: Whole | None = Field(None, description=EPOCH)
