"""The operations of the control socket: a frozen dataclass each, whose fields are the arguments of its request.

What a node reads, what a handler takes, what a client sends, what a replay repeats and what the generated page lists
follow from these fields. A new operation needs a class here, a case in `node.operations`, and its results in
`tools/docs/operations.py`. Operations of wire version 1 are frozen: add, never change.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from types import UnionType
from typing import Annotated, Any, ClassVar, NamedTuple, Self, get_args, get_origin

from ..errors import RequestError, WireError, did_you_mean
from ..types import Priority
from .codec import Fields, Read, Schema, choice, integer, number
from .frame_prompt import FramePrompt
from .masks import MAX_PROMPT_BYTES, encode_mask, read_mask

MAX_STRIDE = 6
"""Largest number of frames from one that an object is tracked on to the next: 6 costs 0.02 of IoU on DAVIS, 8 0.07."""
MIN_SCORE = 0.01
"""Lowest threshold of a detection's score. With a lower one, nearly every box would be a detection."""
MAX_SURFACE_POINTS = 10_000
"""Points of a surface in one reply, 12 bytes each."""
MAX_LEASE_S = 120.0
"""Seconds for which a frame may be pinned, by the camera's clock. Its features take memory of the GPU meanwhile."""
MAX_LINE_CHARACTERS = 200
"""Characters of a text that goes to logs and probes."""
MAX_OBJECTS = 64
"""Objects of one picture that is sent. The node decodes a mask for each."""
PLACES = ("points", "labels", "box")
"""Parts of a prompt without a mask"""
PROMPT = (*PLACES, "mask")
"""Arguments of a prompt: one of points and box, or both, or a mask. A request has them in the place of `prompt`."""


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


def _boxes(fields: Fields, name: str) -> tuple[FramePrompt, ...]:
    """Read boxes, each a list of four numbers."""
    return tuple(FramePrompt(box=box) for box in fields.sequence(name))


def _box_labels(fields: Fields, name: str) -> tuple[int, ...]:
    """Read a label 0 or 1 of each of the boxes."""
    return fields.integers(name, len(fields.sequence("boxes")), 0, 1)


def _objects(fields: Fields, name: str) -> tuple[FramePrompt, ...]:
    """Read the prompt of each of some objects, a map of points, labels and box."""
    prompts = []
    for value in fields.sequence(name):
        given = Fields(value, f"{fields.what}: {name}")
        unknown = sorted(set(given.names()) - set(PLACES))
        if unknown:
            raise RequestError(f"{given.what}: expected {', '.join(PLACES)}, found {unknown[0]!r:.60}")
        prompts.append(FramePrompt(*(value.get(part) for part in PLACES)))
    if not 0 < len(prompts) <= MAX_OBJECTS:
        raise RequestError(f"{fields.what}: {name}: expected 1 to {MAX_OBJECTS}, found {len(prompts)}")
    return tuple(prompts)


_READERS: dict[Any, Read] = {
    bool: Fields.flag,
    bytes: Fields.blob,
    float: Fields.number,
    int: Fields.integer,
    str: Fields.text,
    tuple[str, ...]: Fields.texts,
    Priority: choice(get_args(Priority)),
}
"""How a field is read, by its type. A type of its own, Annotated, names another reader."""

# types of fields that have a reader of their own
Stride = Annotated[int, integer(1, MAX_STRIDE)]
Lease = Annotated[float, number(0.0, MAX_LEASE_S)]
Line = Annotated[str, _line]
Boxes = Annotated[tuple[FramePrompt, ...], _boxes]
Objects = Annotated[tuple[FramePrompt, ...], _objects]
Scores = Annotated[Mapping[str, float], _map(number(MIN_SCORE, 1.0))]


class Arguments(NamedTuple):
    """The arguments of an operation, as its fields say."""

    schema: Schema
    """All but those of a prompt"""
    takes_prompt: bool
    """True: PROMPT is read as the one field `prompt`."""
    allowed: tuple[str, ...]
    """Names that a request may have, in their order"""
    names: frozenset[str]
    """The same, to look up"""


@dataclass(frozen=True)
class Operation:
    """Base of the operations. An optional argument that is None was not given: the node decides then."""

    op: ClassVar[str]
    """Its name in requests and events"""
    is_repeatable: ClassVar[bool] = False
    """True: to run it twice has the result of once, so that a client may send it again."""
    is_for_readers: ClassVar[bool] = False
    """True: a key of the role reader may request it."""
    is_in_console: ClassVar[bool] = False
    """True: the console's page may request it."""
    is_superseded: ClassVar[bool] = False
    """True: a newer request of the same client for the same camera makes an older one useless."""

    @classmethod
    def read(cls, args: Mapping[str, Any]) -> Self:
        """Return the operation with the arguments of a request, each checked once.

        Raises RequestError or WireError for others.
        """
        arguments = ARGUMENTS[cls.op]
        if not arguments.names.issuperset(args):
            unknown = sorted(args.keys() - arguments.names)
            expected = ", ".join(arguments.allowed) or "none"
            raise RequestError(f"{cls.op}: unknown argument {unknown[0]!r:.60}; expected {expected}")
        given = Fields(args, cls.op)
        values = given.read(arguments.schema)
        if arguments.takes_prompt:
            values["prompt"] = _read_prompt(given, args)
        return cls(**values)

    def to_args(self) -> dict[str, Any]:
        """Return the arguments of the request. Those that have their default are left out."""
        args: dict[str, Any] = {}
        for part in fields(self):
            value = getattr(self, part.name)
            if isinstance(value, FramePrompt):
                args |= _pack_prompt(value)
            elif part.name == "objects" and value is not None:
                args[part.name] = [_pack_prompt(prompt) for prompt in value]
            elif value is not part.default:
                args[part.name] = _pack(value)
        return args


def _list_arguments(kind: type[Operation]) -> Arguments:
    """Return the arguments that the fields of an operation describe."""
    readers: dict[str, Read] = {}
    takes_prompt = False
    for part in fields(kind):
        if part.type is FramePrompt:
            takes_prompt = True
        elif part.default is MISSING:
            readers[part.name] = _find_reader(part.type)
        else:
            readers[f"{part.name}?"] = _find_reader(part.type)
    schema = Schema(readers)
    allowed = tuple(schema.readers)
    if takes_prompt:
        allowed += PROMPT
    return Arguments(schema, takes_prompt, allowed, frozenset(allowed))


def _find_reader(annotation: Any) -> Read:
    """Return the reader of a field with this annotation, which may be `| None`."""
    if type(None) in get_args(annotation):
        (annotation,) = (option for option in get_args(annotation) if option is not type(None))
    if get_origin(annotation) is Annotated:
        read: Read = annotation.__metadata__[0]
        return read
    return _READERS[annotation]


def _read_prompt(given: Fields, args: Mapping[str, Any]) -> FramePrompt:
    points, labels, box, mask = map(args.get, PROMPT)
    if mask is not None:
        # its pixels are decoded when they are first used, once its size is known to be that of the frame
        mask = read_mask(given.fields("mask"), is_lazy=True, max_bytes=MAX_PROMPT_BYTES)
    return FramePrompt(points, labels, box, mask)


def _pack_prompt(prompt: FramePrompt) -> dict[str, Any]:
    args: dict[str, Any] = {}
    if prompt.points is not None:
        args["points"] = prompt.points.tolist()
    if prompt.labels is not None:
        args["labels"] = [int(label) for label in prompt.labels]
    if prompt.box is not None:
        args["box"] = prompt.box.tolist()
    if prompt.mask is not None:
        args["mask"] = encode_mask(prompt.mask)
    return args


def _pack(value: Any) -> Any:
    """Return the value of a field as a message can carry it."""
    if isinstance(value, tuple):
        return [item.box.tolist() if isinstance(item, FramePrompt) else item for item in value]
    return dict(value) if isinstance(value, Mapping) else value


# changes of perception: each is published as an event


@dataclass(frozen=True, kw_only=True)
class AddObject(Operation):
    """Track a new object."""

    op = "add_object"
    is_in_console = True

    prompt: FramePrompt
    label: str | None = None
    seq: int | None = None
    """of the recent frame that the prompt applies to; None for the next frame that arrives"""
    priority: Priority | None = None
    choice: Annotated[int, integer(0)] | None = None
    """which mask of `segment` for this prompt the object begins with"""
    camera: str | None = None
    stride: Stride | None = None
    """Frames from one to the next on which an object from a past frame catches up. Events have it for replays."""
    epoch: int | None = None


@dataclass(frozen=True, kw_only=True)
class AddLike(Operation):
    """Track what looks like an object of a camera, also like one that was lost, on another camera's latest frame."""

    op = "add_like"
    is_in_console = True

    like: int
    """the object's id"""
    like_camera: str
    """the object's camera"""
    like_epoch: int | None = None
    """of that camera's ids"""
    label: str | None = None
    """None for the object's own"""
    camera: str | None = None
    epoch: int | None = None


@dataclass(frozen=True, kw_only=True)
class RefineObject(Operation):
    """Correct the mask of an object on a recent frame."""

    op = "refine_object"
    is_in_console = True

    prompt: FramePrompt
    id: int
    seq: int | None = None
    camera: str | None = None
    stride: Stride | None = None
    epoch: int | None = None


@dataclass(frozen=True, kw_only=True)
class PinFrame(Operation):
    """Keep a recent frame for prompts for a time; 0 lets it go."""

    op = "pin_frame"
    is_repeatable = True
    is_in_console = True

    seq: int
    lease_s: Lease | None = None
    camera: str | None = None
    epoch: int | None = None


@dataclass(frozen=True, kw_only=True)
class RemoveObject(Operation):
    """Stop tracking an object, and forget it."""

    op = "remove_object"
    is_in_console = True

    id: int
    camera: str | None = None
    epoch: int | None = None


@dataclass(frozen=True, kw_only=True)
class RenameObject(Operation):
    """Change the label of an object."""

    op = "rename_object"
    is_in_console = True

    id: int
    label: str
    camera: str | None = None
    epoch: int | None = None


@dataclass(frozen=True, kw_only=True)
class SetPrompts(Operation):
    """Replace the names of the objects to look for, on all cameras."""

    op = "set_prompts"
    is_repeatable = True
    is_in_console = True

    prompts: tuple[str, ...]
    scores: Scores | None = None
    most: Annotated[Mapping[str, int], _map(integer(1))] | None = None
    priorities: Annotated[Mapping[str, Priority], _map(_READERS[Priority])] | None = None


@dataclass(frozen=True, kw_only=True)
class AddExemplar(Operation):
    """Look for all that is like boxes on a frame or a photo."""

    op = "add_exemplar"
    is_in_console = True

    name: str
    boxes: Boxes
    labels: Annotated[tuple[int, ...], _box_labels] | None = None
    text: str | None = None
    photo: bytes | None = None
    seq: int | None = None
    camera: str | None = None
    epoch: int | None = None


@dataclass(frozen=True, kw_only=True)
class Reset(Operation):
    """Remove all objects, of one camera or of all."""

    op = "reset"
    is_in_console = True

    camera: str | None = None


@dataclass(frozen=True, kw_only=True)
class Pause(Operation):
    """Stop processing frames."""

    op = "pause"
    is_repeatable = True
    is_in_console = True


@dataclass(frozen=True, kw_only=True)
class Resume(Operation):
    """Process frames again."""

    op = "resume"
    is_repeatable = True
    is_in_console = True


# queries of perception: they change nothing


@dataclass(frozen=True, kw_only=True)
class ListObjects(Operation):
    """List the objects that are tracked now."""

    op = "list_objects"
    is_repeatable = True
    is_for_readers = True

    camera: str | None = None


@dataclass(frozen=True, kw_only=True)
class SegmentFrame(Operation):
    """Segment a recent frame once, without tracking."""

    op = "segment"
    is_repeatable = True
    is_in_console = True
    is_superseded = True

    prompt: FramePrompt
    seq: int | None = None
    camera: str | None = None
    multimask: bool = False


@dataclass(frozen=True, kw_only=True)
class SegmentEverything(Operation):
    """Segment everything on a recent frame, without prompts."""

    op = "segment_everything"
    is_repeatable = True
    is_superseded = True

    grid: int | None = None
    min_iou: float | None = None
    min_stability: float | None = None
    max_overlap: float | None = None
    most: int | None = None
    seq: int | None = None
    camera: str | None = None


@dataclass(frozen=True, kw_only=True)
class SegmentPhoto(Operation):
    """Segment a picture that is sent once, by prompts or by names, without tracking."""

    op = "segment_photo"
    is_repeatable = True

    photo: bytes
    objects: Objects | None = None
    """a prompt for each; without names"""
    names: tuple[str, ...] | None = None
    scores: Scores | None = None
    """of names, as of `set_prompts`"""
    multimask: bool = False
    """all masks that the one prompt may mean"""


@dataclass(frozen=True, kw_only=True)
class ReadPoints(Operation):
    """Return points of an object's visible surface on the latest frame."""

    op = "points"
    is_repeatable = True

    id: int
    count: Annotated[int, integer(1, MAX_SURFACE_POINTS)] | None = None
    camera: str | None = None
    epoch: int | None = None


@dataclass(frozen=True, kw_only=True)
class FindObjects(Operation):
    """Say where objects are, or where they were seen last: all, or those of an id or a label, also lost ones."""

    op = "where"
    is_repeatable = True
    is_for_readers = True
    is_in_console = True

    id: int | None = None
    label: str | None = None
    camera: str | None = None
    epoch: int | None = None


@dataclass(frozen=True, kw_only=True)
class ReadPicture(Operation):
    """Return the last picture of an object, a small JPEG."""

    op = "picture"
    is_repeatable = True
    is_in_console = True

    id: int
    camera: str | None = None
    epoch: int | None = None


# about the node itself


@dataclass(frozen=True, kw_only=True)
class ReadStatus(Operation):
    """Return the state of the node and of each camera."""

    op = "status"
    is_repeatable = True
    is_for_readers = True


@dataclass(frozen=True, kw_only=True)
class DescribeNode(Operation):
    """Return what a recording needs for making the masks again."""

    op = "describe"
    is_repeatable = True
    is_for_readers = True


# about its snapshots


@dataclass(frozen=True, kw_only=True)
class MakeSnapshot(Operation):
    """Begin a snapshot of what the node tracks. With a name it becomes a file."""

    op = "snapshot"

    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class ReadSnapshot(Operation):
    """Return a part of a snapshot, once it is made."""

    op = "read_snapshot"
    is_repeatable = True

    snapshot: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class RestoreSnapshot(Operation):
    """Track again what a snapshot with a name holds."""

    op = "restore"

    name: str


@dataclass(frozen=True, kw_only=True)
class HandOver(Operation):
    """Pause, and give the work to another node."""

    op = "hand_over"

    taker: Line | None = None
    token: Line | None = None


@dataclass(frozen=True, kw_only=True)
class ConfirmHandOver(Operation):
    """Say whether the other node continues the work."""

    op = "confirm_hand_over"

    token: Line
    accepted: bool = True


# about episodes of a recording: the node marks them for recorders, and tracks on as before


@dataclass(frozen=True, kw_only=True)
class BeginEpisode(Operation):
    """Begin an episode of a dataset, for recorders."""

    op = "begin_episode"
    is_in_console = True

    task: Line | None = None
    """what is done in it, in words; None for the names that are looked for"""


@dataclass(frozen=True, kw_only=True)
class EndEpisode(Operation):
    """End the episode, and keep or discard it."""

    op = "end_episode"
    is_in_console = True

    keep: bool = True


Change = (
    AddObject
    | AddLike
    | RefineObject
    | PinFrame
    | RemoveObject
    | RenameObject
    | SetPrompts
    | AddExemplar
    | Reset
    | Pause
    | Resume
)
"""A change of perception, which the node publishes as an event"""
Query = ListObjects | SegmentFrame | SegmentEverything | SegmentPhoto | ReadPoints | FindObjects | ReadPicture
NodeQuery = ReadStatus | DescribeNode
SnapshotRequest = MakeSnapshot | ReadSnapshot | RestoreSnapshot | HandOver | ConfirmHandOver
EpisodeRequest = BeginEpisode | EndEpisode
"""A mark in the recording, which the node publishes as an event. It changes nothing that a replay repeats."""
AnyOperation = Change | Query | NodeQuery | SnapshotRequest | EpisodeRequest


def _names(kinds: UnionType) -> tuple[str, ...]:
    return tuple(kind.op for kind in get_args(kinds))


OPERATIONS: dict[str, type[AnyOperation]] = {kind.op: kind for kind in get_args(AnyOperation)}
"""The class of each operation, by its name"""
ARGUMENTS = {op: _list_arguments(kind) for op, kind in OPERATIONS.items()}
"""The arguments of each operation, by its name"""
CHANGES = _names(Change)
"""Operations that change perception, whose requests the node publishes as events"""
EPISODE_MARKS = _names(EpisodeRequest)
"""Operations that mark episodes, whose requests the node publishes as events, too"""
NODE_QUERIES = _names(NodeQuery)
"""Operations that are answered also while a step runs"""
FOR_READERS = tuple(op for op, kind in OPERATIONS.items() if kind.is_for_readers)
"""Operations that keys of the role reader may request"""
REPEATABLE = tuple(op for op, kind in OPERATIONS.items() if kind.is_repeatable)
"""Operations that a client sends again if the connection ends before the reply"""
IN_CONSOLE = tuple(op for op, kind in OPERATIONS.items() if kind.is_in_console)
"""Operations that the console's page may request"""


def read_operation(op: str, args: Mapping[str, Any]) -> AnyOperation:
    """Return the operation that a request names. Raises RequestError for an unknown one, and for wrong arguments."""
    kind = OPERATIONS.get(op)
    if kind is None:
        expected = ", ".join(OPERATIONS)
        hint = did_you_mean(op[:60], OPERATIONS)
        raise RequestError(f"unknown operation {op!r:.60}: expected one of {expected}{hint}")
    try:
        return kind.read(args)
    except WireError as error:
        raise RequestError(str(error)) from error
