"""The operations of the control socket: one table for node, clients, console, rights of readers, and documentation.

A new operation needs a row here, a function of the same name in `node.operations`, and its results in
`tools/docs/operations.py`. Operations of wire version 1 are frozen: add, never change.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ..errors import RequestError, did_you_mean
from ..types import Priority
from .codec import Fields, Read, Schema, choice, integer, number
from .frame_prompt import FramePrompt
from .masks import read_mask

MAX_STRIDE = 6
"""Largest number of frames from one that an object is tracked on to the next: 6 costs 0.02 of IoU on DAVIS, 8 0.07."""
MIN_SCORE = 0.01  # with a lower threshold, nearly every box would be a detection
MAX_SURFACE_POINTS = 10_000
MAX_LEASE_S = 120.0
MAX_LINE_CHARACTERS = 200
PROMPT = ("points", "labels", "box", "mask")
"""Arguments of a prompt: one of points and box, or both, or a mask."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: its arguments, and who may use it."""

    kind: Literal["change", "query", "node", "snapshot"]
    """A change of perception is published as an event, a query changes nothing. The others concern the node itself."""
    arguments: Schema = field(default_factory=lambda: Schema({}))
    takes_prompt: bool = False
    """True: PROMPT is read as the one value `prompt`."""
    is_repeatable: bool = False
    """True: to run it twice has the result of once, so that a client may send it again."""
    is_for_readers: bool = False
    is_in_console: bool = False
    is_superseded: bool = False
    """True: a newer request of the same client for the same camera makes an older one useless."""

    def read(self, op: str, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the arguments, each checked once. Raises RequestError or WireError for others."""
        allowed = (*self.arguments.readers, *(PROMPT if self.takes_prompt else ()))
        if unknown := sorted(args.keys() - set(allowed)):
            raise RequestError(
                f"{op}: unknown argument {unknown[0]!r:.60}; expected {', '.join(allowed) or 'none'}"
            )
        fields = Fields(args, op)
        values = fields.read(self.arguments)
        if self.takes_prompt:
            points, labels, box, mask = map(args.get, PROMPT)
            if mask is not None:  # its pixels are decoded when they are first used
                mask = read_mask(fields.fields("mask"), is_lazy=True)
            values["prompt"] = FramePrompt(points, labels, box, mask)
        return values


def _map(read: Read) -> Read:
    """Return the reader of a map whose values `read` reads."""

    def read_all(fields: Fields, name: str) -> dict[str, Any]:
        values = fields.fields(name)
        return {key: read(values, key) for key in values.names()}

    return read_all


def _line(fields: Fields, name: str) -> str:
    """Read a text for logs and probes: one line, printable and not too long."""
    text = fields.text(name)
    if not 0 < len(text) <= MAX_LINE_CHARACTERS or not text.isprintable():
        raise RequestError(
            f"{fields.what}: {name}: expected 1 to {MAX_LINE_CHARACTERS} printable characters, found {text!r:.80}"
        )
    return text


def _boxes(fields: Fields, name: str) -> list[FramePrompt]:
    """Read boxes, each a list of four numbers."""
    return [FramePrompt(box=box) for box in fields.sequence(name)]


def _box_labels(fields: Fields, name: str) -> tuple[int, ...]:
    return fields.integers(name, len(fields.sequence("boxes")), 0, 1)


_CAMERA: dict[str, Read] = {"camera?": Fields.text}
_FRAME: dict[str, Read] = {**_CAMERA, "seq?": Fields.integer}
_ID: dict[str, Read] = {"id": Fields.integer}
_OBJECT: dict[str, Read] = {**_ID, **_CAMERA, "epoch?": Fields.integer}
_TRACKING: dict[str, Read] = {**_FRAME, "stride?": integer(1, MAX_STRIDE), "epoch?": Fields.integer}
_PRIORITY = choice(get_args(Priority))

_ADD = Schema({"label?": Fields.text, "priority?": _PRIORITY, "choice?": integer(0), **_TRACKING})
_SEGMENT = Schema({**_FRAME, "multimask?": Fields.flag})
_PIN = Schema(
    {**_CAMERA, "seq": Fields.integer, "epoch?": Fields.integer, "lease_s?": number(0.0, MAX_LEASE_S)}
)
_SET_PROMPTS = Schema(
    {
        "prompts": Fields.texts,
        "scores?": _map(number(MIN_SCORE, 1.0)),
        "most?": _map(integer(1)),
        "priorities?": _map(_PRIORITY),
    }
)
_EXEMPLAR = Schema(
    {"name": Fields.text, "boxes": _boxes, "labels?": _box_labels, "text?": Fields.text, **_FRAME}
    | {"epoch?": Fields.integer, "photo?": Fields.blob}
)
_EVERYTHING = Schema(
    {
        **_FRAME,
        "grid?": Fields.integer,
        **dict.fromkeys(("min_iou?", "min_stability?", "max_overlap?"), Fields.number),
        "most?": Fields.integer,
    }
)
_SEARCH: Any = {"is_repeatable": True, "is_superseded": True}
_SWITCH: Any = {"is_repeatable": True, "is_in_console": True}
_STATE: Any = {"is_repeatable": True, "is_for_readers": True}

OPERATIONS = {
    "add_object": Operation("change", _ADD, takes_prompt=True, is_in_console=True),
    "refine_object": Operation("change", Schema(_ID | _TRACKING), takes_prompt=True, is_in_console=True),
    "pin_frame": Operation("change", _PIN, **_SWITCH),
    "remove_object": Operation("change", Schema(_OBJECT), is_in_console=True),
    "rename_object": Operation("change", Schema(_OBJECT | {"label": Fields.text}), is_in_console=True),
    "set_prompts": Operation("change", _SET_PROMPTS, **_SWITCH),
    "add_exemplar": Operation("change", _EXEMPLAR, is_in_console=True),
    "reset": Operation("change", Schema(_CAMERA), is_in_console=True),
    "pause": Operation("change", **_SWITCH),
    "resume": Operation("change", **_SWITCH),
    "list_objects": Operation("query", Schema(_CAMERA), is_repeatable=True),
    "segment": Operation("query", _SEGMENT, takes_prompt=True, is_in_console=True, **_SEARCH),
    "segment_everything": Operation("query", _EVERYTHING, **_SEARCH),
    "points": Operation(
        "query", Schema(_OBJECT | {"count?": integer(1, MAX_SURFACE_POINTS)}), is_repeatable=True
    ),
    "status": Operation("node", **_STATE),
    "describe": Operation("node", **_STATE),
    "snapshot": Operation("snapshot", Schema({"name?": Fields.text})),
    "read_snapshot": Operation(
        "snapshot", Schema({"snapshot": Fields.integer, "offset": Fields.integer}), is_repeatable=True
    ),
    "restore": Operation("snapshot", Schema({"name": Fields.text})),
    "hand_over": Operation("snapshot", Schema({"taker?": _line, "token?": _line})),
    "confirm_hand_over": Operation("snapshot", Schema({"token": _line, "accepted?": Fields.flag})),
}
CHANGES = tuple(op for op, operation in OPERATIONS.items() if operation.kind == "change")
FOR_READERS = tuple(op for op, operation in OPERATIONS.items() if operation.is_for_readers)
REPEATABLE = tuple(op for op, operation in OPERATIONS.items() if operation.is_repeatable)
IN_CONSOLE = tuple(op for op, operation in OPERATIONS.items() if operation.is_in_console)


def find_operation(op: str) -> Operation:
    """Return the row of an operation; RequestError for a name that is not in the table."""
    if op not in OPERATIONS:
        raise RequestError(
            f"unknown operation {op!r:.60}: expected one of {', '.join(OPERATIONS)}{did_you_mean(op[:60], OPERATIONS)}"
        )
    return OPERATIONS[op]
