"""The saved state of all cameras as one tree, which is checked whole before any part of it is restored.

A digest says that a file is complete, not who has made it. A wrong value would be an error at each step to come, or a
message that no client accepts. So types and bounds are checked by the Structs of the parts, and here the ids that parts
share. Of values that no part declares, only the numbers are checked. Tensors are checked by the parts that take them:
any values in them give masks, if wrong ones.
"""

from collections.abc import Collection

from msgspec import field

from ..detection.detectors import PromptSet
from ..errors import ReplayError
from ..schema.fields import Epoch
from ..schema.state import Label, SavedState, State, check_numbers, from_plain
from ..tracking.tracks import catching_key
from .linking import CameraObject, LinksState
from .prompting import PromptingState
from .stages.detect import DetectionState
from .stages.reidentify import ObjectMemoryState, ReidentifyState
from .stages.table import TableState
from .stages.track import CropState


class StagesState(SavedState):
    """The stages that keep something, by their names. One is absent if the settings did not have it."""

    detect: DetectionState | None = None
    remember: ObjectMemoryState | None = None
    recall: ReidentifyState | None = None
    table: TableState | None = None
    window: CropState | None = None


class Origin(SavedState):
    """What must be equal in the pipeline that continues."""

    model: Label
    detector: Label | None
    bank: Label
    """layout of the tracker's memory"""
    calibration: Label
    """of the confidences"""


class CameraState(SavedState):
    """What `Pipeline` keeps."""

    origin: Origin
    prompt_set: PromptSet | None = field(name="prompts")
    stages: StagesState
    prompting: PromptingState


class PerceptionState(SavedState):
    """What `Perception` keeps."""

    prompts: PromptSet
    paused: bool
    cameras: dict[Label, CameraState]
    epochs: dict[Label, Epoch | None]
    links: LinksState | None
    nameless_owner: Label | None = None
    """the camera of the calibration without a camera's name"""


def check_state(state: State) -> PerceptionState:
    """Return the state. Raises ReplayError for one that `Perception.state` cannot have returned: where and why."""
    check_numbers(state)
    everything = from_plain(PerceptionState, state)
    for name, camera in everything.cameras.items():
        _check_camera(f"camera {name}", camera)
        if name not in everything.epochs:
            raise ReplayError(f"camera {name}: expected its epoch, found none")
    if everything.links is not None:
        _check_links(everything.links)
    return everything


def _check_camera(name: str, camera: CameraState) -> None:
    """Raise ReplayError unless the parts of a camera's state are about the same objects."""
    prompting = camera.prompting
    registry = prompting.registry
    objects = list(registry.objects)
    if objects != [status.id for status in registry.objects.values()]:
        raise ReplayError(f"{name}: expected the status of objects {objects!r:.200} under their ids")
    _require_known(f"{name}: objects", objects, range(1, registry.last_id + 1))
    # a key below 0 is that of an object that catches up
    keys = list(prompting.tracker.rows.rows)
    tracked = {key for key in keys if key >= 0}
    catching = {catching_key(key) for key in keys if key < 0}
    pending = set(registry.values.get("pending", {}))
    progress = list(prompting.catch_ups.progress)
    _require_known(f"{name}: rows", tracked | catching, objects)
    _require_known(f"{name}: catch_ups", progress, catching)
    _require_known(f"{name}: rows of objects that catch up", catching, progress)
    # an object without a row would be asked for at each step
    _require_known(f"{name}: objects", objects, tracked | catching | pending)
    for values, items in registry.values.items():
        _require_known(f"{name}: {values}", list(items), objects)
    if camera.stages.remember is not None:
        lost = camera.stages.remember.memory.lost
        _require_unique(f"{name}: lost objects", [*lost, *objects])
        _require_known(f"{name}: lost objects", list(lost), range(1, registry.last_id + 1))
        _require_known(f"{name}: lost objects", [each.id for each in lost.values()], list(lost))
    if camera.stages.detect is not None:
        _require_known(f"{name}: track states", list(camera.stages.detect.lifecycle.track_states), objects)
    if camera.stages.window is not None:
        followed = camera.stages.window.crops.followed
        _require_known(f"{name}: object crops", list(followed), objects)
        _require_unique(f"{name}: rows of object crops", [each.row for each in followed.values()])
    # prompts find their frame by its step, and the next step comes after all of them
    steps = [frame.frame_number for frame in prompting.frame_cache.frames]
    if [*steps, prompting.tracker.frame_number] != sorted({*steps, prompting.tracker.frame_number}):
        raise ReplayError(f"{name}: expected cached frames in the order of their steps, found {steps!r:.200}")


def _check_links(links: LinksState) -> None:
    """Raise ReplayError unless each thing has its own number, and each object one thing."""
    members = list[CameraObject]()
    for number, thing in links.things.items():
        if number != thing.id or number > links.last_id:
            raise ReplayError(f"links: expected thing {number} of at most {links.last_id}, found {thing.id}")
        members += thing.members
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
