"""Make the tables of control operations and of places: from the schema, with words that no field says."""

from collections.abc import Iterator
from typing import Any

import msgspec

from sam3_node.schema.describing import FieldFacts, list_fields
from sam3_node.schema.operations import CHANGES, EPISODE_MARKS, OPERATIONS, PROMPT, Operation, PromptOperation
from sam3_node.schema.replies import ObjectPlace, OperationReply

from .tables import code, table

MAX_LISTED = 3
"""Operations that the table of fields names. A field of more has one meaning in all of them."""
WORDS = {
    "add_object": "With `seq` the reply has the mask. `choice` is 0 for the first of `segment`'s `masks` for the same "
    "prompt",
    "add_like": "The object `like` of `like_camera` may be lost. Refused unless one place on the latest frame looks "
    "like it for sure",
    "pin_frame": "60 s if `lease_s` is absent, see below",
    "rename_object": "Detections no longer change the label",
    "set_prompts": "Refused without a detector. `prompts` are at most 256 texts of at most 200 characters; the others "
    "map some of them",
    "add_exemplar": "See [exemplars](objects-by-name.md#all-like-this)",
    "reset": "Lost objects are forgotten, too",
    "segment": "Points and/or a box",
    "segment_everything": "`grid` is 1..32 points a side (16), `min_iou` (0.88), `min_stability` (0.95) and "
    "`max_overlap` (0.7) are in 0..1, `most` is 1..256 (100)",
    "segment_photo": "`photo` is a JPEG or PNG of no camera. `objects` are 1 to 64, with a mask each in their order; "
    "or `names`: a mask of each thing found, the best first. `multimask` is for one object",
    "points": "1000 if `count` is absent; as in a masks message",
    "where": "See below. Without `id` and `label`, all",
    "picture": "Also of an object that was lost. Refused if there is none",
    "snapshot": "The node copies what it tracks between two frames. With `name` (1 to 64 letters, digits, _ and -) it "
    "writes a file beside `snapshot.path`, else it keeps the bytes for 2 minutes",
    "restore": "Published as the event `restored`",
    "hand_over": "`taker` names itself, and chooses the `token`. The node pauses in the same moment, published as the "
    "event `pause`, and refuses changes. Without `taker` it is confirmed at once; see below",
    "confirm_hand_over": "After `confirmed`, the ids are the taker's, and if this node is resumed, its ids begin "
    "again; after `expired` or `cancelled`, it works on with the same ids; after `taken_back`, it was resumed. "
    "`accepted`: false cancels",
    "begin_episode": "Refused while an episode is open. See [LeRobot](lerobot.md)",
    "end_episode": "The events of both operations have these results as `args`",
}
"""What the fields and the docstring of an operation do not say"""


def operation_table() -> str:
    """Return the table of operations."""
    published = CHANGES + EPISODE_MARKS
    rows = [
        [code(op), _list_arguments(kind), _describe(kind), "yes" if op in published else ""]
        for op, kind in OPERATIONS.items()
    ]
    return table(["op", "args", "what it does, and its result", "published as an event"], rows)


def place_table() -> str:
    """Return the table of the fields of a place."""
    return _field_table(ObjectPlace)


def reply_table() -> str:
    """Return the table of what fields of results mean; a meaning that several results share stands once."""
    users: dict[tuple[str, str], list[str]] = {}
    for op, kind in OPERATIONS.items():
        for name, field in _list_all(kind.Reply):
            if field.meaning:
                users.setdefault((name, field.meaning), []).append(op)
    rows = []
    for (name, meaning), ops in users.items():
        of = "several" if len(ops) > MAX_LISTED else ", ".join(map(code, ops))
        rows.append([code(name), of, meaning])
    return table(["field", "in the result of", "meaning"], rows)


def _list_all(kind: type[msgspec.Struct]) -> Iterator[tuple[str, FieldFacts]]:
    """Yield the fields of a class and of the maps in it, but those of places, which have a table of their own."""
    for field in list_fields(kind):
        yield field.name, field
        if field.part is not None and field.part is not ObjectPlace:
            yield from ((f"{field.name}.{name}", part) for name, part in _list_all(field.part))


def _field_table(kind: type[msgspec.Struct]) -> str:
    fields = list_fields(kind)
    return table(["field", "meaning"], [[_name(field), field.meaning] for field in fields])


def _list_arguments(kind: type[Operation[Any]]) -> str:
    fields = list_fields(kind)
    own = [field for field in fields if field.name not in PROMPT]
    if not issubclass(kind, PromptOperation):
        return ", ".join(map(_name, sorted(fields, key=lambda field: not field.is_required)))
    required = [_name(field) for field in own if field.is_required]
    return ", ".join([*required, "prompt", *(_name(field) for field in own if not field.is_required)])


def _describe(kind: type[Operation[Any]]) -> str:
    """Return what an operation does, its result, and words about both."""
    does = " ".join((kind.__doc__ or "").split())
    parts = [does, _list_result(kind.Reply), WORDS.get(kind.op, "")]
    return ". ".join(part.rstrip(".") for part in parts if part)


def _list_result(kind: type[OperationReply]) -> str:
    fields = list_fields(kind)
    if not fields:
        return ""
    return "Result: " + ", ".join(_name(field) for field in fields)


def _name(field: FieldFacts) -> str:
    """Return the name of a field, with ? if it may be absent, its limits, and the fields of its parts."""
    text = code(field.name) + ("" if field.is_required else "?")
    if field.limits:
        text += f" ({field.limits})"
    if field.part is not None:
        parts = (part.name + ("" if part.is_required else "?") for part in list_fields(field.part))
        text += f" {{{', '.join(parts)}}}"
    return text
