"""Check a saved state whole, before any part of it is restored: its types, its numbers, and the ids that parts share.

A digest says that a file is complete, not who has made it. A wrong value would be an error at each step to come, or a
message that no client accepts. What is declared here is what `Perception.state` returns. Of a part that this module
does not know, such as a stage that a later release adds, only the numbers are checked. Tensors are checked by the parts
that take them: any values in them give masks, if wrong ones.
"""

import math
from collections.abc import Collection
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from ..errors import ReplayError
from ..schema.fields import MAX_EPOCH, MAX_INT
from ..schema.replies import MAX_STRIDE
from ..settings import describe_faults
from ..tracking.tracks import catching_key
from ..tracking.windows import MOST_WINDOWS
from ..types import Priority, State, TrackState

MAX_COUNT = 1 << 62
"""Largest count or id of a state. What steps add to it stays within 64 bits. A larger one is refused."""
MAX_NUMBER = 1e15
"""Largest number of a state. Its square stays finite in float64. A larger one is refused."""
MAX_TEXT = 64 << 10
"""Characters of the longest text of a state, such as a label. A longer one is refused."""
MAX_OBJECTS = 256
"""Objects of a camera, the largest tracker.max_objects. A state with more is refused."""
MAX_LOST = 1024
"""The largest tracker.remember."""
MAX_DEPTH = 32
"""Levels of nesting of a state. A deeper one is refused."""
UNIT_TOLERANCE = 1e-3
"""How far the length of a table's normal may be from 1."""

Whole = Annotated[int, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)]
Positive = Annotated[int, Field(strict=True, ge=1, le=MAX_COUNT)]
Sign = Annotated[int, Field(strict=True, ge=0, le=1)]
Number = Annotated[float, Field(strict=True)]
Size = Annotated[float, Field(strict=True, ge=0)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True, max_length=MAX_TEXT)]
Box = tuple[Number, Number, Number, Number]
Position = tuple[Number, Number, Number]


class StatePart(BaseModel):
    """A part of a state. It may have more fields than the declared ones."""

    model_config = ConfigDict(extra="ignore", arbitrary_types_allowed=True)


class PromptsState(StatePart):
    """State of `PromptSet`."""

    thresholds: dict[Text, Share]
    max_counts: dict[Text, Positive]
    priorities: dict[Text, Priority]
    exemplars: dict[Text, tuple[Text, dict[Text, tuple[list[Box], list[Sign], Tensor]]]]
    """text and views; of each view the boxes, their labels and their tokens"""


class NameState(StatePart):
    """State of `NameEvidence`."""

    means: list[Number]
    count: Count


class LifeState(StatePart):
    """State of a detected object in `Lifecycle`."""

    votes: dict[Text, Number]
    detections: Count
    missed: Count
    score: Number
    evidence_ns: Whole
    hidden: Flag
    rounds: Count
    names: dict[Text, NameState]


class LivesState(StatePart):
    """State of `Lifecycle`."""

    lives: list[tuple[Positive, LifeState]]


class DetectionState(StatePart):
    """State of the stage DetectObjects."""

    frames_since_detection: Whole
    requested: Flag
    uncertain: Flag
    confident_ids: list[Positive]
    turned_away: Count
    best_scores: dict[Text, Share]
    lifecycle: LivesState


def _check_plane(plane: list[float]) -> list[float]:
    if plane and (len(plane) != 5 or abs(math.hypot(*plane[:3]) - 1) > UNIT_TOLERANCE or plane[4] < 0):
        raise ValueError("expected a normal of length 1, an offset and an error of at least 0")
    return plane


def _check_pose(pose: list[float]) -> list[float]:
    if len(pose) not in (0, 7):
        raise ValueError("expected a position and a quaternion")
    return pose


class TableState(StatePart):
    """State of the stage FindTable."""

    plane: Annotated[list[Number], AfterValidator(_check_plane)]
    camera: Annotated[list[Number], AfterValidator(_check_pose)]
    stamp_ns: Whole


class LostState(StatePart):
    """State of `LostObject`. What is remembered of it is declared in `remembering`."""

    id: Positive
    label: Text
    priority: Priority
    lost_ns: Whole


class LostObjectsState(StatePart):
    """State of `ObjectMemory`."""

    lost: Annotated[list[tuple[Positive, LostState]], Field(max_length=MAX_LOST)]


class RememberState(StatePart):
    """State of the stage RememberObjects."""

    memory: LostObjectsState


class RecallState(StatePart):
    """State of the stage RecallObjects."""

    since: Count
    last_id: Count
    tentative_id: Count
    tentative_box: Annotated[list[Whole], Field(min_length=4, max_length=4)]
    told_ids: list[Positive]


class BankState(StatePart):
    """State of `MemoryBank` or `LastMasks`."""

    used: list[Count]


class FollowedState(StatePart):
    """State of an object in `Windows`."""

    id: Positive
    row: Annotated[int, Field(strict=True, ge=0, lt=MOST_WINDOWS)]
    frame: Whole
    mask: Tensor
    centre: tuple[Number, Number]
    size: Size
    widths: tuple[Size, Size]
    overruled: Count


class WindowsState(StatePart):
    """State of `Windows`."""

    frame: Whole
    grey: Tensor | None
    image: Tensor | None
    bank: BankState
    objects: Annotated[list[FollowedState], Field(max_length=MOST_WINDOWS)]


class WindowState(StatePart):
    """State of the stage FollowWindows."""

    windows: WindowsState


class StagesState(StatePart):
    """The stages that save something, by their names. One is absent if the settings did not have it."""

    detect: DetectionState | None = None
    remember: RememberState | None = None
    recall: RecallState | None = None
    table: TableState | None = None
    window: WindowState | None = None


class RowsState(StatePart):
    """State of `ObjectRows`."""

    rows: list[tuple[Whole, Count]]
    free: list[Count]


class TrackerState(StatePart):
    """State of `Tracker`."""

    frame_number: Count
    rows: RowsState
    bank: BankState


class ObjectState(StatePart):
    """State of `ObjectStatus`."""

    id: Positive
    label: Text
    state: TrackState
    score: Number
    age: Count
    frames_since_seen: Count
    priority: Priority


class ObjectsState(StatePart):
    """State of `Objects`. The kinds of its `values` are declared where they are registered."""

    last_id: Count
    objects: Annotated[list[ObjectState], Field(max_length=MAX_OBJECTS)]
    values: dict[Text, list[tuple[Positive, Any]]]


class ConfidenceState(StatePart):
    """State of `ConfidenceEstimator`."""

    ids: list[Whole]
    rows: list[Count]
    free: list[Count]


class ScalingState(StatePart):
    """State of `Scaling`."""

    frame_size: tuple[Positive, Positive]
    model_size: Positive


class CachedFrameState(StatePart):
    """State of `CachedFrame`."""

    seq: Whole
    frame_number: Count
    logits: list[tuple[Positive, Tensor]]
    scaling: ScalingState
    capture_ns: Whole
    age_origin_ns: Whole
    lease_ns: Whole
    pinned_ns: Whole


class FramesState(StatePart):
    """State of `FrameCache`, in the order of their steps."""

    frames: list[CachedFrameState]


class PlaceState(StatePart):
    """State of an object in `CatchUps`."""

    frame_number: Whole
    frames: Count
    hidden: Count
    stride: Annotated[int, Field(strict=True, ge=1, le=MAX_STRIDE)]
    request_id: Text | None


class CatchUpsState(StatePart):
    """State of `CatchUps`."""

    places: list[tuple[Positive, PlaceState]]
    failed: list[tuple[Positive, Text | None, Text | None]]


class CameraState(StatePart):
    """State of `Pipeline`."""

    prompts: PromptsState | None
    stages: StagesState
    tracker: TrackerState
    objects: ObjectsState
    confidence: ConfidenceState
    frame_cache: FramesState
    catch_ups: CatchUpsState


CameraId = tuple[Text, Positive]
"""A camera and the id of an object of it."""


class SightingState(StatePart):
    """State of `linking.Sighting`."""

    label: Text
    position_m: Position
    diagonal_m: Size | None
    time_ns: Whole
    speed_m_s: Size


class ThingState(StatePart):
    """State of an object of several cameras."""

    id: Positive
    members: list[tuple[CameraId, SightingState | None]]
    agreed: list[tuple[Positive, Count]]
    contradicted: list[tuple[CameraId, Count]]


class LinksState(StatePart):
    """State of `WorldLinker`."""

    last_id: Count
    things: list[tuple[Positive, ThingState]]
    gone: list[tuple[CameraId, Positive]] = []
    """States of earlier versions do not tell it."""


class PerceptionState(StatePart):
    """State of `Perception`."""

    prompts: PromptsState
    paused: Flag
    cameras: dict[Text, CameraState]
    epochs: dict[Text, Annotated[int, Field(strict=True, ge=0, le=MAX_EPOCH)] | None]
    links: LinksState | None
    nameless_owner: Text | None = None
    """The camera of the calibration without a camera's name. States of earlier versions do not tell it."""


def check_state(state: State) -> None:
    """Raise ReplayError for a state that `Perception.state` cannot have returned: what was expected, and where."""
    _check_numbers(state, ())
    try:
        everything = PerceptionState.model_validate(state)
    except ValidationError as error:
        raise ReplayError(f"expected a state of this version, found {describe_faults(error):.400}") from error
    for name, camera in everything.cameras.items():
        _check_camera(f"camera {name}", camera)
        if name not in everything.epochs:
            raise ReplayError(f"camera {name}: expected its epoch, found none")
    if everything.links is not None:
        _check_links(everything.links)


def _check_numbers(value: object, place: tuple[object, ...]) -> None:
    """Raise ReplayError for a number that is not finite or too large, and for nesting that is too deep."""
    if isinstance(value, float) and not abs(value) <= MAX_NUMBER:
        raise ReplayError(f"{_join(place)}: expected a finite number up to {MAX_NUMBER:g}, found {value}")
    if isinstance(value, int) and not -MAX_INT <= value <= MAX_INT:
        raise ReplayError(f"{_join(place)}: expected an integer up to {MAX_INT}, found {value}")
    if len(place) > MAX_DEPTH:
        raise ReplayError(f"{_join(place[:4])}: expected at most {MAX_DEPTH} levels, found more")
    if isinstance(value, dict):
        for key, item in value.items():
            _check_numbers(item, (*place, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_numbers(item, (*place, index))


def _join(place: tuple[object, ...]) -> str:
    return ".".join(map(str, place))


def _check_camera(name: str, camera: CameraState) -> None:
    """Raise ReplayError unless the parts of a camera's state are about the same objects."""
    objects = [status.id for status in camera.objects.objects]
    _require_unique(f"{name}: objects", objects)
    _require_known(f"{name}: objects", objects, range(1, camera.objects.last_id + 1))
    # a key below 0 is that of an object that catches up
    keys = [key for key, _ in camera.tracker.rows.rows]
    _require_unique(f"{name}: rows", keys)
    tracked = {key for key in keys if key >= 0}
    catching = {catching_key(key) for key in keys if key < 0}
    pending = {object_id for object_id, _ in camera.objects.values.get("pending", [])}
    places = [object_id for object_id, _ in camera.catch_ups.places]
    _require_known(f"{name}: rows", tracked | catching, objects)
    _require_known(f"{name}: catch_ups", places, catching)
    _require_known(f"{name}: rows of objects that catch up", catching, places)
    # an object without a row would be asked for at each step
    _require_known(f"{name}: objects", objects, tracked | catching | pending)
    for values, items in camera.objects.values.items():
        _require_known(f"{name}: {values}", [object_id for object_id, _ in items], objects)
    if camera.stages.remember is not None:
        lost = [(key, each.id) for key, each in camera.stages.remember.memory.lost]
        lost_ids = [key for key, _ in lost]
        _require_unique(f"{name}: lost objects", lost_ids + objects)
        _require_known(f"{name}: lost objects", lost_ids, range(1, camera.objects.last_id + 1))
        _require_known(f"{name}: lost objects", [each for _, each in lost], lost_ids)
    if camera.stages.detect is not None:
        _require_known(
            f"{name}: lives", [life_id for life_id, _ in camera.stages.detect.lifecycle.lives], objects
        )
    if camera.stages.window is not None:
        followed = camera.stages.window.windows.objects
        _require_known(f"{name}: windows", [each.id for each in followed], objects)
        _require_unique(f"{name}: windows", [each.id for each in followed])
        _require_unique(f"{name}: rows of windows", [each.row for each in followed])

    _require_unique(f"{name}: confidence", camera.confidence.ids)
    # prompts find their frame by its step, and the next step comes after all of them
    steps = [frame.frame_number for frame in camera.frame_cache.frames]
    if [*steps, camera.tracker.frame_number] != sorted({*steps, camera.tracker.frame_number}):
        raise ReplayError(f"{name}: expected cached frames in the order of their steps, found {steps!r:.200}")


def _check_links(links: LinksState) -> None:
    """Raise ReplayError unless each thing has its own number, and each object one thing."""
    members = list[CameraId]()
    for number, thing in links.things:
        if number != thing.id or number > links.last_id:
            raise ReplayError(f"links: expected thing {number} of at most {links.last_id}, found {thing.id}")
        members += [member for member, _ in thing.members]
    _require_unique("links", members)


def _require_unique(what: str, items: Collection[object]) -> None:
    if len(set(items)) != len(items):
        raise ReplayError(f"{what}: expected each once, found {items!r:.200}")


def _require_known(what: str, found: Collection[int], expected: Collection[int]) -> None:
    # a list would be searched once for each item, and a range is too long for a set
    known = set(expected) if isinstance(expected, list) else expected
    unknown = [item for item in found if item not in known]
    if unknown:
        raise ReplayError(f"{what}: expected ids that the rest of the state has, found {unknown!r:.200}")
