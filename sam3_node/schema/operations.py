"""The operations of the control socket: a Struct each, whose fields are the arguments of its request, and its reply.

What a node reads, what a handler takes and returns, what a client sends and gets, what a replay repeats and what the
generated page lists follow from these fields. A new operation needs a class here, its reply in `schema.replies`, a case
in `node.operations` and a test. Operations of wire version 1 are frozen: add, never change. An argument that is nil
counts as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, Generic, cast, get_args

import msgspec
from msgspec import Meta

from ..errors import RequestError
from .fields import (
    MAX_ITEMS,
    Finite,
    FromOne,
    Natural,
    Positive,
    Text,
    convert,
    describe,
    to_plain,
)
from .replies import (
    DescriptionReply,
    EndedEpisode,
    EpisodeReply,
    EverythingReply,
    ExemplarReply,
    HandOverReply,
    Lease,
    NamesReply,
    NothingReply,
    ObjectReply,
    ObjectsReply,
    OperationReply,
    PausedReply,
    PhotoReply,
    PicksReply,
    PictureReply,
    PinnedFrame,
    PlacesReply,
    PointsReply,
    PromptedObject,
    PromptsReply,
    RenamedObject,
    ReplyT,
    RestoredReply,
    SceneReply,
    SegmentReply,
    SnapshotPart,
    SnapshotReply,
    StatusReply,
    Stride,
)
from .values import MaskMap, Priority

MAX_POINTS = 64
"""Points of a prompt."""
MIN_SCORE = 0.01
"""Lowest threshold of a detection's score. With a lower one, nearly every box would be a detection."""
MAX_SURFACE_POINTS = 10_000
"""Points of a surface in one reply, 12 bytes each."""
MAX_LINE_CHARACTERS = 200
"""Characters of a text that goes to logs and probes."""
MAX_OBJECTS = 64
"""Objects of one picture that is sent. The node decodes a mask for each."""
MIN_SIZE_M = 0.001
"""Least radius of a suction cup and opening of a gripper, in metres."""
MAX_CUP_M = 0.05
"""Largest radius of a suction cup, in metres."""
MAX_OPENING_M = 1.0
"""Largest opening of a gripper, in metres."""

Corners = tuple[Finite, Finite, Finite, Finite]
"""(x0, y0, x1, y1), in pixels, also parts of them and beyond the frame."""
Points = Annotated[tuple[tuple[Finite, Finite], ...], Meta(min_length=1, max_length=MAX_POINTS)]
Mark = Annotated[int, Meta(ge=0, le=1)] | Annotated[float, Meta(ge=0.0, le=1.0)]
"""1 inside, 0 outside. Clients of other languages may send it as a float."""
Marks = Annotated[tuple[Mark, ...], Meta(max_length=MAX_POINTS)]
Texts = Annotated[tuple[Text, ...], Meta(max_length=MAX_ITEMS)]
Line = Annotated[str, Meta(min_length=1, max_length=MAX_LINE_CHARACTERS)]
Scores = Annotated[Mapping[Text, Annotated[float, Meta(ge=MIN_SCORE, le=1.0)]], Meta(max_length=MAX_ITEMS)]
Counts = Annotated[Mapping[Text, FromOne], Meta(max_length=MAX_ITEMS)]
Priorities = Annotated[Mapping[Text, Priority], Meta(max_length=MAX_ITEMS)]


SHARED_MEANINGS = {
    "id": "the object's id",
    "label": "name of the object",
    "camera": "name of the camera; needed only if the node serves several",
    "epoch": "epoch of the camera's ids; the node refuses another one than its own, whose ids name other objects",
    "seq": "number of a recent frame; without it, the latest",
    "priority": "low: the object is the first that is not tracked on every frame under load",
}
"""What arguments of these names mean, where a field says nothing else"""


class Prompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What marks an object: points, a box or both. In pixels of a frame, or of a picture that is sent."""

    points: Points | None = None
    """(x, y) of each"""
    labels: Marks | None = None
    """for each point 1 if it is inside the object, 0 if outside; all 1 if absent"""
    box: Corners | None = None
    """around the object"""


class Operation(
    msgspec.Struct,
    Generic[ReplyT],
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """Base of the operations. An optional argument that is None was not given: the node decides then."""

    op: ClassVar[str]
    """Its name in requests and events"""
    Reply: ClassVar[type[OperationReply]] = OperationReply
    """The class of its reply: the one that its base is parametrized with"""
    is_repeatable: ClassVar[bool] = False
    """True: to run it twice has the result of once, so that a client may send it again."""
    is_for_readers: ClassVar[bool] = False
    """True: a key of the role reader may request it."""
    is_in_console: ClassVar[bool] = False
    """True: the console's page may request it."""
    is_for_agents: ClassVar[bool] = False
    """True: agents may request it, by a tool of its name. Other tools of agents are written in `mcp.tools`."""
    is_superseded: ClassVar[bool] = False
    """True: a newer request of the same client for the same camera makes an older one useless."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Note the class of the reply. A class that is derived from an operation has the same."""
        super().__init_subclass__(**options)
        for base in cls.__dict__.get("__orig_bases__", ()):
            for reply in get_args(base):
                if isinstance(reply, type):
                    cls.Reply = reply

    def to_args(self) -> dict[str, object]:
        """Return the arguments of the request as it has them. Those that have their default are left out."""
        return {name: _with_lists(value) for name, value in to_plain(self).items()}

    def read_reply(self, result: object) -> ReplyT:
        """Return the result of a reply message as the reply. Raises WireError for any other value."""
        return cast(ReplyT, convert(result, self.Reply, self.op))

    def check(self) -> None:
        """Raise RequestError for what the types of the fields do not say."""

    def list_prompts(self) -> tuple[Prompt, ...]:
        """Return the prompts in the request, without a mask."""
        return ()


def _with_lists(value: object) -> object:
    """Return a plain value with lists in the place of tuples, as a message that is read has them."""
    if isinstance(value, tuple | list):
        return [_with_lists(inner) for inner in value]
    if isinstance(value, dict):
        return {key: _with_lists(inner) for key, inner in value.items()}
    return value


class PromptOperation(Operation[ReplyT], frozen=True, kw_only=True):
    """Base of the operations with one prompt: points and box, or both, or a mask."""

    points: Points | None = None
    """(x, y) of each, in pixels of the frame"""
    labels: Marks | None = None
    """for each point 1 if it is inside the object, 0 if outside; all 1 if absent"""
    box: Corners | None = None
    """around the object, in pixels of the frame"""
    mask: MaskMap | None = None
    """of the frame's size, alone"""

    def list_prompts(self) -> tuple[Prompt, ...]:
        """Return the prompt; none if it is a mask alone."""
        if self.mask is not None and (self.points, self.labels, self.box) == (None, None, None):
            return ()
        return (Prompt(points=self.points, labels=self.labels, box=self.box),)


PROMPT = PromptOperation.__struct_fields__
"""Arguments of a prompt"""


@cache
def list_required(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Return the fields of a class that have no default."""
    return frozenset(part.name for part in msgspec.structs.fields(kind) if part.required)


def check_line(op: str, name: str, text: str | None) -> None:
    """Raise RequestError for a text for logs and probes that is not one printable line."""
    if text is not None and not text.isprintable():
        raise RequestError(
            f"{op}: {name}: expected 1 to {MAX_LINE_CHARACTERS} printable characters, found {text!r:.80}"
        )


# changes of perception: each is published as an event


class AddObject(PromptOperation[PromptedObject], frozen=True, kw_only=True):
    """Track a new object."""

    op = "add_object"
    is_in_console = True

    label: Text | None = None
    seq: Natural | None = None
    """number of the recent frame that the prompt applies to; without it, the next frame that arrives"""
    priority: Priority | None = None
    choice: Natural | None = None
    """which mask of `segment` with `multimask` for this prompt the object begins with, from 0"""
    camera: Text | None = None
    stride: Stride | None = None
    """Frames from one to the next on which an object from a past frame catches up. Events have it for replays."""
    epoch: Natural | None = None


class AddLike(Operation[PromptedObject], frozen=True, kw_only=True):
    """Track what looks like an object of a camera, also like one that was lost, on another camera's latest frame."""

    op = "add_like"
    is_in_console = True

    like: Natural
    """id of the object that the new one looks like, in place of a prompt"""
    like_camera: Text
    """the camera of that object"""
    like_epoch: Natural | None = None
    """of that camera's ids"""
    label: Text | None = None
    """without it, the object's own"""
    camera: Text | None = None
    epoch: Natural | None = None


class RefineObject(PromptOperation[PromptedObject], frozen=True, kw_only=True):
    """Correct the mask of an object on a recent frame."""

    op = "refine_object"
    is_in_console = True

    id: Natural
    seq: Natural | None = None
    camera: Text | None = None
    stride: Stride | None = None
    epoch: Natural | None = None


class PinFrame(Operation[PinnedFrame], frozen=True, kw_only=True):
    """Keep a recent frame for prompts for a time; 0 lets it go."""

    op = "pin_frame"
    is_repeatable = True
    is_in_console = True

    seq: Natural
    lease_s: Lease | None = None
    """seconds for which the node keeps the frame, at most four at once"""
    camera: Text | None = None
    epoch: Natural | None = None


class RemoveObject(Operation[ObjectReply], frozen=True, kw_only=True):
    """Stop tracking an object, and forget it."""

    op = "remove_object"
    is_in_console = True

    id: Natural
    camera: Text | None = None
    epoch: Natural | None = None


class RenameObject(Operation[RenamedObject], frozen=True, kw_only=True):
    """Change the label of an object."""

    op = "rename_object"
    is_in_console = True

    id: Natural
    label: Text
    """the new name"""
    camera: Text | None = None
    epoch: Natural | None = None


class SetPrompts(Operation[PromptsReply], frozen=True, kw_only=True):
    """Replace the names of the objects to look for, on all cameras."""

    op = "set_prompts"
    is_repeatable = True
    is_in_console = True

    prompts: Texts
    """all names; those that were looked for before and are not among them are dropped"""
    scores: Scores | None = None
    """for a name the minimum score of a detection to start an object"""
    most: Counts | None = None
    """for a name the largest number of objects"""
    priorities: Priorities | None = None
    """for a name the priority of its objects"""


class AddExemplar(Operation[ExemplarReply], frozen=True, kw_only=True):
    """Look for all that is like boxes on a frame or a photo."""

    op = "add_exemplar"
    is_in_console = True

    name: Text
    """of what is found"""
    boxes: Annotated[tuple[Corners, ...], Meta(max_length=MAX_ITEMS)]
    """around things, in pixels"""
    labels: Annotated[tuple[Annotated[int, Meta(ge=0, le=1)], ...], Meta(max_length=MAX_ITEMS)] | None = None
    """for each box 1 if it shows what is meant, 0 if it shows what is not; all 1 if absent"""
    text: Text | None = None
    """what is meant, in words, beside the boxes"""
    photo: bytes | None = None
    """a JPEG or PNG that the boxes are on, in place of a frame"""
    seq: Natural | None = None
    camera: Text | None = None
    epoch: Natural | None = None

    def check(self) -> None:
        """Raise RequestError unless there is a label for each box."""
        if self.labels is not None and len(self.labels) != len(self.boxes):
            raise RequestError(
                f"{self.op}: expected 'labels' to be {len(self.boxes)} integers in 0..1, one for each box, found "
                f"{describe(self.labels)}"
            )

    def list_prompts(self) -> tuple[Prompt, ...]:
        """Return the boxes."""
        return tuple(Prompt(box=box) for box in self.boxes)


class Reset(Operation[NothingReply], frozen=True, kw_only=True):
    """Remove all objects, of one camera or of all."""

    op = "reset"
    is_in_console = True

    camera: Text | None = None
    """whose objects are removed; without it, those of all"""


class Pause(Operation[PausedReply], frozen=True, kw_only=True):
    """Stop processing frames."""

    op = "pause"
    is_repeatable = True
    is_in_console = True


class Resume(Operation[PausedReply], frozen=True, kw_only=True):
    """Process frames again."""

    op = "resume"
    is_repeatable = True
    is_in_console = True


# queries of perception: they change nothing


class ListObjects(Operation[ObjectsReply], frozen=True, kw_only=True):
    """List the objects that are tracked now."""

    op = "list_objects"
    is_repeatable = True
    is_for_readers = True

    camera: Text | None = None
    """whose objects are listed; without it, those of all"""


class SegmentFrame(PromptOperation[SegmentReply], frozen=True, kw_only=True):
    """Segment a recent frame once, without tracking."""

    op = "segment"
    is_repeatable = True
    is_in_console = True
    is_superseded = True

    seq: Natural | None = None
    camera: Text | None = None
    multimask: bool = False
    """also all masks that the prompt may mean: a part, a larger one, the whole"""


class SegmentEverything(Operation[EverythingReply], frozen=True, kw_only=True):
    """Segment everything on a recent frame, without prompts."""

    op = "segment_everything"
    is_repeatable = True
    is_superseded = True

    grid: Natural | None = None
    """points along each side, 1 to 32 [16]"""
    min_iou: Finite | None = None
    """lowest IoU predicted for a mask, 0 to 1 [the model's own]"""
    min_stability: Finite | None = None
    """lowest stability of a mask, 0 to 1 [the model's own]"""
    max_overlap: Finite | None = None
    """highest IoU of the boxes of two masks that are both kept, 0 to 1 [0.7]"""
    most: Natural | None = None
    """largest number of masks, 1 to 256 [100]"""
    seq: Natural | None = None
    camera: Text | None = None


class SegmentPhoto(Operation[PhotoReply], frozen=True, kw_only=True):
    """Segment a picture that is sent once, by prompts or by names, without tracking."""

    op = "segment_photo"
    is_repeatable = True

    photo: bytes
    """a JPEG or PNG"""
    objects: Annotated[tuple[Prompt, ...], Meta(min_length=1, max_length=MAX_OBJECTS)] | None = None
    """a prompt for each; without names"""
    names: Texts | None = None
    """what is looked for"""
    scores: Scores | None = None
    """of names, as of `set_prompts`"""
    multimask: bool = False
    """all masks that the one prompt may mean"""

    def list_prompts(self) -> tuple[Prompt, ...]:
        """Return the prompts of the objects."""
        return self.objects or ()


class ReadPoints(Operation[PointsReply], frozen=True, kw_only=True):
    """Return points of an object's visible surface on the latest frame."""

    op = "points"
    is_repeatable = True

    id: Natural
    count: Annotated[int, Meta(ge=1, le=MAX_SURFACE_POINTS)] | None = None
    """largest number of points [1000]"""
    camera: Text | None = None
    epoch: Natural | None = None


class FindObjects(Operation[PlacesReply], frozen=True, kw_only=True):
    """Say where objects are, or where they were seen last: all, or those of an id or a label, also lost ones."""

    op = "where"
    is_repeatable = True
    is_for_readers = True
    is_in_console = True

    id: Natural | None = None
    """of one object, in place of a label"""
    label: Text | None = None
    """of the objects; without it, all that the node knows, also lost ones"""
    camera: Text | None = None
    epoch: Natural | None = None


class NextPick(Operation[PicksReply], frozen=True, kw_only=True):
    """Rank the objects that a robot can pick next, each with the reason, and say why it must not pick the others."""

    op = "next_pick"
    is_repeatable = True
    is_for_agents = True

    id: Natural | None = None
    """of one object, in place of a label"""
    label: Text | None = None
    """of the objects; without it, all"""
    cup_radius_m: Annotated[float, Meta(ge=MIN_SIZE_M, le=MAX_CUP_M)] | None = None
    """radius of the suction cup, in metres [0.01]"""
    opening_m: Annotated[float, Meta(ge=MIN_SIZE_M, le=MAX_OPENING_M)] | None = None
    """widest object that the gripper takes between its fingers, in metres [0.085]"""
    reach_m: Positive | None = None
    """largest distance from the base's origin, in metres; without it, any"""
    max_age_ms: Positive | None = None
    """oldest frame that is picked from, in milliseconds [500]"""
    covered: bool = False
    """true: also objects on which others may lie, after all that are free"""
    most: FromOne | None = None
    """largest number of picks; without it, all"""
    camera: Text | None = None
    epoch: Natural | None = None


class ReadScene(Operation[SceneReply], frozen=True, kw_only=True):
    """Return what a motion planner must not run into: the table, a container, and the objects as upright boxes."""

    op = "planning_scene"
    is_repeatable = True

    container: bool = False
    """true: also the container, as the setting spatial.container gives it, else as the frame shows its rim"""
    camera: Text | None = None


class ListNames(Operation[NamesReply], frozen=True, kw_only=True):
    """List the names that the detector knows: all, or those with a text in them. Others it may not find."""

    op = "list_names"
    is_repeatable = True
    is_for_readers = True
    is_for_agents = True

    containing: Text | None = None
    """part of the names, in any case; without it, all"""
    most: Annotated[int, Meta(ge=1, le=MAX_ITEMS)] | None = None
    """largest number of names [4096]"""


class ReadPicture(Operation[PictureReply], frozen=True, kw_only=True):
    """Return the last picture of an object, a small JPEG."""

    op = "picture"
    is_repeatable = True
    is_in_console = True

    id: Natural
    camera: Text | None = None
    epoch: Natural | None = None


# about the node itself


class ReadStatus(Operation[StatusReply], frozen=True, kw_only=True):
    """Return the state of the node and of each camera."""

    op = "status"
    is_repeatable = True
    is_for_readers = True


class DescribeNode(Operation[DescriptionReply], frozen=True, kw_only=True):
    """Return what a recording needs for making the masks again."""

    op = "describe"
    is_repeatable = True
    is_for_readers = True


# about its snapshots


class MakeSnapshot(Operation[SnapshotReply], frozen=True, kw_only=True):
    """Begin a snapshot of what the node tracks. With a name it becomes a file."""

    op = "snapshot"

    name: Text | None = None
    """of the file: 1 to 64 letters, digits, _ and -"""


class ReadSnapshot(Operation[SnapshotPart], frozen=True, kw_only=True):
    """Return a part of a snapshot, once it is made."""

    op = "read_snapshot"
    is_repeatable = True

    snapshot: Natural
    """its number"""
    offset: Natural
    """of the part, in bytes"""


class RestoreSnapshot(Operation[RestoredReply], frozen=True, kw_only=True):
    """Track again what a snapshot with a name holds."""

    op = "restore"

    name: Text
    """of the snapshot"""


class HandOver(Operation[SnapshotReply], frozen=True, kw_only=True):
    """Pause, and give the work to another node."""

    op = "hand_over"

    taker: Line | None = None
    """which node continues, by a name of its own"""
    token: Line | None = None
    """that the other node chooses"""

    def check(self) -> None:
        """Raise RequestError unless both are printable."""
        check_line(self.op, "taker", self.taker)
        check_line(self.op, "token", self.token)


class ConfirmHandOver(Operation[HandOverReply], frozen=True, kw_only=True):
    """Say whether the other node continues the work."""

    op = "confirm_hand_over"

    token: Line
    """of the hand-over"""
    accepted: bool = True
    """false: the node works on"""

    def check(self) -> None:
        """Raise RequestError unless the token is printable."""
        check_line(self.op, "token", self.token)


# about episodes of a recording: the node marks them for recorders, and tracks on as before


class BeginEpisode(Operation[EpisodeReply], frozen=True, kw_only=True):
    """Begin an episode of a dataset, for recorders."""

    op = "begin_episode"
    is_in_console = True

    task: Line | None = None
    """what is done in it, in words [the names that are looked for]"""

    def check(self) -> None:
        """Raise RequestError unless the task is printable."""
        check_line(self.op, "task", self.task)


class EndEpisode(Operation[EndedEpisode], frozen=True, kw_only=True):
    """End the episode, and keep or discard it."""

    op = "end_episode"
    is_in_console = True

    keep: bool = True
    """false: recorders discard it"""


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
Query = (
    ListObjects
    | SegmentFrame
    | SegmentEverything
    | SegmentPhoto
    | ReadPoints
    | FindObjects
    | NextPick
    | ListNames
    | ReadScene
    | ReadPicture
)
NodeQuery = ReadStatus | DescribeNode
SnapshotRequest = MakeSnapshot | ReadSnapshot | RestoreSnapshot | HandOver | ConfirmHandOver
EpisodeRequest = BeginEpisode | EndEpisode
"""A mark in the recording, which the node publishes as an event. It changes nothing that a replay repeats."""
AnyOperation = Change | Query | NodeQuery | SnapshotRequest | EpisodeRequest


def _names(kinds: UnionType) -> tuple[str, ...]:
    return tuple(kind.op for kind in get_args(kinds))


OPERATIONS: dict[str, type[AnyOperation]] = {kind.op: kind for kind in get_args(AnyOperation)}
"""The class of each operation, by its name"""
CHANGES = _names(Change)
"""Operations that change perception, whose requests the node publishes as events"""
EPISODE_MARKS = _names(EpisodeRequest)
"""Operations that mark episodes, whose requests the node also publishes as events"""
QUERIES = _names(Query | NodeQuery)
"""Operations that change nothing"""
NODE_QUERIES = _names(NodeQuery)
"""Operations that are answered also while a step runs"""
FOR_READERS = tuple(op for op, kind in OPERATIONS.items() if kind.is_for_readers)
"""Operations that keys of the role reader may request"""
REPEATABLE = tuple(op for op, kind in OPERATIONS.items() if kind.is_repeatable)
"""Operations that a client sends again if the connection ends before the reply"""
FOR_AGENTS = tuple(kind for kind in OPERATIONS.values() if kind.is_for_agents)
"""Operations that agents may request by tools of their names"""
IN_CONSOLE = tuple(op for op, kind in OPERATIONS.items() if kind.is_in_console)
"""Operations that the console's page may request"""
