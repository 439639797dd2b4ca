"""Track all objects on a frame, in object crops too, and start those whose prompts wait for it."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ...models import TrackerModel
from ...schema.state import SavedState
from ...tracking import Tracker
from ...tracking.object_crops import MAX_CROPS, ObjectCrops, ObjectCropsState, suits
from ...tracking.tracks import PromptTensors
from ...wire import REGROUPED
from ..catch_up import CatchUps
from ..objects import Objects
from ..shedding import choose_shed
from ..stage import PerObject, Stage
from ..step import ObjectEvent, StepFrame

log = logging.getLogger(__name__)


class TrackObjects(Stage):
    """Tracks the objects of one camera. `pending` holds the prompts of the objects that enter on the next frame."""

    name = "track"
    timed = "device"

    def __init__(
        self,
        camera: str,
        tracker: Tracker,
        objects: Objects,
        pending: PerObject[PromptTensors],
        catch_ups: CatchUps,
    ) -> None:
        self._camera = camera
        self._tracker = tracker
        self._objects = objects
        self._pending = pending
        self._catch_ups = catch_ups

    def run(self, step: StepFrame) -> None:
        """Fill `frame_number`, `shed` and `tracks`."""
        step.frame_number = self._tracker.frame_number
        # where the detector runs, it would find a held object as a new one
        objects = () if step.detects else self._objects
        level = step.decisions.shed_level
        step.shed = choose_shed(level, objects, self._tracker.ids, step.frame_number)
        held = step.shed.held if step.shed is not None else ()
        with self._pending_prompts() as prompts:
            step.tracks = self._tracker.step_features(step.features, prompts, held, step.cover)
        step.events += [ObjectEvent(REGROUPED, object_id) for object_id in self._tracker.take_moved()]

    @contextmanager
    def _pending_prompts(self) -> Iterator[Sequence[PromptTensors]]:
        """Yield the prompts of the objects that enter on this frame. The objects are removed if the frame fails."""
        # before the tracker runs: prompts of a frame that fails must not enter on the next one
        prompts = list(self._pending.values())
        self._pending.clear()
        try:
            yield prompts
        except Exception:
            self._remove_untracked()
            raise

    def _remove_untracked(self) -> None:
        tracked = set(self._tracker.ids)
        for status in list(self._objects):
            # the prompt of an object that catches up was on another frame, which did not fail
            if status.id not in tracked and status.id not in self._catch_ups:
                log.warning(
                    "%s: object %d was removed: the frame on which it would have entered failed",
                    self._camera,
                    status.id,
                )
                self._objects.remove(status.id)


class CropState(SavedState):
    """What `FollowCrops` keeps."""

    crops: ObjectCropsState


class FollowCrops(Stage):
    """Improves the tracks by object crops, where the model's input is smaller than the frame.

    Crops cost time, so a live node says how many may be followed, and none is while it sheds work; nor where the robot
    covers objects, of which crops know nothing. They begin again after that.
    """

    name = "window"
    timed = "device"
    is_optional = True
    STATE = CropState

    def __init__(self, model: TrackerModel, tracker: Tracker, crops: ObjectCrops) -> None:
        self._model = model
        self._tracker = tracker
        self._crops = crops

    def give_up(self) -> None:
        """Close all crops; new ones begin with the next masks."""
        self._crops.forget_all()

    def run(self, step: StepFrame) -> None:
        """Replace `tracks`, and fill `crop_masks` and `followed_in_windows`."""
        limit = step.decisions.windows
        most = MAX_CROPS if limit is None else min(limit, MAX_CROPS)
        is_closed = not most or step.decisions.shed_level > 0 or step.cover is not None
        if is_closed or not suits(self._model, step.image):
            self._crops.forget_all()
            return

        def was_prompted(object_id: int) -> bool:
            return self._tracker.was_prompted(object_id, step.frame_number)

        step.tracks, step.crop_masks = self._crops.step(
            step.image, step.frame_number, step.tracks, was_prompted, most
        )
        step.followed_in_windows = len(self._crops)
