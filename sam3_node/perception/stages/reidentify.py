"""Remember the appearance of the objects, find those that are out of view by it, and let them go on under their ids.

Each frame, the appearance of one object in view is compared with its stored one; a frame's work does not grow with the
number of objects. Every few frames, some occluded objects are searched for: where the features of the frame are most
similar to the embeddings of one, a click and boxes give masks, and the mask that is most similar to any object out of
view is taken for it.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Annotated

import torch
from msgspec import Meta

from ...geometry import Scaling
from ...models.sam.stages import Decoded
from ...schema.state import Count, Id, SavedState, Time
from ...tracking import Track, Tracker
from ...tracking.appearance import describe_colours, describe_features, make_embeddings
from ...tracking.confidence import ConfidenceEstimator
from ...types import NANOSECONDS
from ...wire import RECALLED
from ..object_memory import (
    Candidate,
    IdentityVerdict,
    LostObjectsState,
    Memory,
    ObjectMemory,
    measure_overlap_of_boxes,
    measure_whole,
)
from ..objects import Objects
from ..reidentification import AppearanceFrame, report
from ..shedding import stretch_detection
from ..stage import Clock, Stage
from ..step import ObjectEvent, StepFrame

EVERY = 3
"""Frames from one search to the next while an object has been searched for on less than RECENT_FRAMES. A search takes
half as long as a detection."""
SLOW_EVERY = 15
"""Frames from one search to the next once all these objects have been searched for longer. At 15 Hz, a return is
noticed up to a second later."""
RECENT_FRAMES = 150
"""Frames out of view, or of doubtful masks after a return, below which searches run every EVERY frames: ten seconds at
15 Hz."""
AT_ONCE = 3
"""Objects that one search looks for. Three take half as long again as one."""
SAME_IOU = 0.3
"""IoU of the boxes found on two searched frames in a row, from which on they confirm each other and the object is
tracked again."""
MAX_OVERLAP = 0.3
"""Largest share of a candidate's mask that tracked objects may cover. Above it, the candidate belongs to one of
them."""


class ChooseDescribed(Stage):
    """Chooses the object whose appearance is compared on this frame: the one whose last comparison is the oldest."""

    name = "choose"
    is_optional = True

    def __init__(self, memory: ObjectMemory) -> None:
        self._memory = memory

    def run(self, step: StepFrame) -> None:
        """Fill `described_id`."""
        step.described_id = self._memory.choose(step.tracks.ids)


class ObjectMemoryState(SavedState):
    """What `UpdateObjectMemory` keeps."""

    memory: LostObjectsState


class UpdateObjectMemory(Stage):
    """Notes where all objects are, and compares the appearance of the chosen one."""

    name = "remember"
    timed = "host"
    is_optional = True
    STATE = ObjectMemoryState

    def __init__(self, memory: ObjectMemory) -> None:
        self._memory = memory

    def run(self, step: StepFrame) -> None:
        """Fill `events` of the objects that are surely back."""
        frame = step.frame
        memory = self._memory
        memory.expire(frame.capture_ns)
        for back in memory.observe(step.instances, frame.seq, frame.capture_ns, step.camera_pose):
            absent_s = round(back.absent_ns / NANOSECONDS, 3)
            step.events.append(ObjectEvent(RECALLED, back.id, {"absent_s": absent_s}))

    def finish(self, step: StepFrame) -> None:
        """Compare the appearance of the chosen object with what is stored of it."""
        chosen = next((seen for seen in step.instances if seen.id == step.described_id), None)
        if chosen is None or not chosen.mask.crop.size:
            return
        row = step.tracks.ids.index(chosen.id)
        features = describe_features(step.features.top, step.tracks.logits[row : row + 1]).cpu()
        embedding = make_embeddings(features, [describe_colours(step.image, chosen.mask)])[0]
        self._memory.compare_appearance(chosen, embedding, step.image, step.frame.seq, step.frame.capture_ns)


class ReidentifyState(SavedState):
    """What `ReidentifyObjects` keeps."""

    since: Count
    last_id: Count
    tentative_id: Count
    tentative_box: Annotated[list[Time], Meta(min_length=4, max_length=4)]
    reported_ids: set[Id]


class ReidentifyObjects(Stage):
    """Looks for objects out of view in turns, and begins to track one again where it is found."""

    name = "recall"
    timed = "device"
    is_optional = True
    STATE = ReidentifyState

    def __init__(
        self, tracker: Tracker, objects: Objects, memory: ObjectMemory, confidence: ConfidenceEstimator
    ) -> None:
        self._tracker = tracker
        self._objects = objects
        self._memory = memory
        self._confidence = confidence
        self._since = 0
        self._last_id = 0
        self._tentative_id = 0
        """the object that was found on the last search, and is to be found again on the next frame; 0: none"""
        self._tentative_box = [0, 0, 0, 0]
        """where it was found"""
        self._reported_ids: set[int] = set()
        """the objects of the last event `ambiguous`, which is not repeated on each search"""

    def clock(self, step: StepFrame) -> Clock | None:
        """Return the clock of frames on which something is searched for."""
        return self.timed if self._is_due(step) else None

    def run(self, step: StepFrame) -> None:
        """Update `tracks` if an object that is out of view is found."""
        if not self._is_due(step):
            self._since += 1
            return
        self._since = 0
        # in turns, and what was found on the last search first
        out_of_view = list(self._list_out_of_view(step))
        sought = self._choose(out_of_view)
        self._last_id = sought[-1]
        tentative_id = self._tentative_id
        self._tentative_id = 0
        # masks of objects out of view must not cover anything: they may lie on the object that is searched for
        scene = AppearanceFrame.from_step(step, out_of_view)
        decoded = self._propose(scene, sought)
        if decoded is None:
            return
        if step.cover is not None:
            decoded = step.cover.cut(decoded)
        candidates = scene.describe(decoded)
        index, verdict = find_best(self._memory, candidates, out_of_view)
        found = candidates[index]
        if verdict.kind == "ambiguous" and self._reported_ids != set(verdict.ids):
            self._reported_ids = set(verdict.ids)
            report(step, verdict, self._memory)
        if verdict.kind != "known" or found is None:
            return
        # a single search may be wrong: the next frame must show the object at the same location
        object_id = verdict.ids[0]
        x0, y0, x1, y1 = self._tentative_box
        near = measure_overlap_of_boxes((x0, y0, x1, y1), found.box) >= SAME_IOU
        if not (near and object_id == tentative_id):
            self._tentative_id = object_id
            self._tentative_box = list(found.box)
            return
        # it is tracked there again, and objects whose masks covered it lose these masks
        self._reported_ids = set()
        report(step, verdict, self._memory)
        changed = self._clear(step, decoded, index, [i for i in out_of_view if i != object_id])
        changed[object_id] = self._tracker.adopt(
            step.features, step.frame_number, object_id, decoded, index, is_back=True
        )
        for each in changed:
            self._confidence.remove(each)
        self._memory.confirm(object_id)
        step.tracks = self._tracker.updated(step.tracks, changed)

    def _choose(self, out_of_view: Sequence[int]) -> list[int]:
        """Return the objects to search for: the one that was found on the last search, else the next ones in turn."""
        if self._tentative_id in out_of_view:
            return [self._tentative_id]
        later = [i for i in out_of_view if i > self._last_id]
        earlier = [i for i in out_of_view if i <= self._last_id]
        return [*sorted(later), *sorted(earlier)][:AT_ONCE]

    def _propose(self, scene: AppearanceFrame, sought: Sequence[int]) -> Decoded | None:
        """Return the masks of the best region for each object that is searched for, in one batch; None without one."""
        regions = []
        sides = []
        for object_id in sought:
            memory = self._memory.require(object_id)
            for region in scene.list_regions(memory.gallery, 1):
                regions.append(region)
                sides.append(measure_sides(memory, scene.scaling))
        if not regions:
            return None
        return scene.propose(self._tracker, regions, sides)

    def _clear(
        self, step: StepFrame, decoded: Decoded, index: int, others: Collection[int]
    ) -> dict[int, Track]:
        """Take a mask from objects out of view whose tracks cover it. Return these tracks, which are hidden."""
        found = decoded.logits[index] > 0
        changed: dict[int, Track] = {}
        for object_id in others:
            track = step.tracks.row(object_id)
            inside = track.logits > 0
            if bool((inside & found).sum() > MAX_OVERLAP * inside.sum().clamp(min=1)):
                # it followed the wrong thing, so what it remembers of the last frames is wrong, too
                self._tracker.forget_recent(object_id)
                changed[object_id] = track._replace(visible=torch.zeros_like(track.visible))
        return changed

    def _is_due(self, step: StepFrame) -> bool:
        """Return True if this frame is to be searched. Under load, fewer are."""
        out_of_view = list(self._list_out_of_view(step))
        # what was found once is looked for on the next frame
        if self._tentative_id in out_of_view:
            return True
        is_new = any(self._memory.require(i).sought_frames < RECENT_FRAMES for i in out_of_view)
        every = EVERY if is_new else SLOW_EVERY
        return bool(out_of_view) and self._since + 1 >= every * stretch_detection(step.decisions.shed_level)

    def _list_out_of_view(self, step: StepFrame) -> Iterator[int]:
        """Yield the tracked objects that are not where they were, and that have embeddings."""
        # the robot is in front of a covered object, so it is not elsewhere
        covered = step.cover.ids if step.cover is not None else ()
        for object_id in step.tracks.ids:
            memory = self._memory.require(object_id)
            if memory.needs_reidentification and len(memory.gallery) and object_id not in covered:
                yield object_id


def find_best(
    memory: ObjectMemory, candidates: Sequence[Candidate | None], out_of_view: Collection[int]
) -> tuple[int, IdentityVerdict]:
    """Return the index of the mask that is most similar to an object that is out of view, and which object it is."""
    best = 0, IdentityVerdict("new")
    for index, candidate in enumerate(candidates):
        if candidate is None or candidate.overlap > MAX_OVERLAP:
            continue
        verdict = memory.judge(candidate, out_of_view)
        if verdict.similarity > best[1].similarity:
            best = index, verdict
    return best


def measure_sides(memory: Memory, scaling: Scaling) -> tuple[float, float] | None:
    """Return an object's width and height in parts of those of the frame; None if they are not known."""
    if memory.sighting is None:
        return None
    whole_px = measure_whole(memory.sighting, None)
    height, width = scaling.frame_size
    return whole_px[0] / width, whole_px[1] / height
