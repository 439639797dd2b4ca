"""What is remembered of the objects of one camera: their appearance, their last sighting, and those that were lost.

An object that was lost, because it was out of view for too long, is remembered with its id. What comes into view is
compared with all objects that are out of view: occluded ones, and lost ones. It is one of them only if it is similar in
appearance, and clearly less similar to any other one. Where depth and pose are known, its size and its distance from
the last position must fit as well.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from typing import Annotated, Literal, NamedTuple

import cv2
from msgspec import Meta, field
from msgspec.structs import replace
from torch import Tensor

from ..geometry import shrink
from ..schema.fields import Natural, NotNegative, PixelBox, Share, Text, Vector3, Vector6
from ..schema.replies import ObjectPlace
from ..schema.state import Count, Id, Label, SavedPart, SavedState, Time
from ..settings import TrackerSettings
from ..tracking.appearance import Gallery
from ..types import NANOSECONDS, Box, FramePose, Image, Instance, Priority
from ..wire.images import read_jpeg_header
from .objects import Objects
from .stage import PerObject
from .step import BASE

PICTURE_PX = 128
"""Longer side of a picture of an object, in pixels."""
PICTURE_MARGIN = 0.2
"""Border that a picture shows around its object, as a share of the object's longer side."""
PICTURE_QUALITY = 80
"""JPEG quality of pictures; a picture has 2 to 6 kB."""
MAX_PICTURE_BYTES = 32 << 10
"""Bytes of a picture in a state at most. Noise of PICTURE_PX a side has less than half of it."""
MARGIN = 0.12
"""Lead in similarity (0 to 2, the sum of two cosines) that the best match must have over every other object. With a
smaller lead, the match is ambiguous."""
SAME_PLACE = 0.15
"""Similarity that is added for a candidate in the box where the object was seen last, times the IoU of the two
boxes."""
SIZE_RATIO = 1.3
"""Largest ratio between the measured sizes in metres of a candidate and of an object that it may be."""
MAX_SIDE_RATIO = 1.8
"""Largest ratio of a candidate's longer side in pixels to the object's known one. It is used where no size in metres is
known. It is well above 1 because the camera may have come nearer."""
MIN_SIDE_RATIO = 0.7
"""Smallest such ratio. A smaller candidate is more often a part of the object than the whole of it."""
REACH_M = 0.3
"""Distance in metres by which two positions of an object at rest may differ: a position is that of the visible part of
the surface."""
REACH_MPS = 2.0
"""Largest speed in m/s at which an object is expected to be moved while it is out of view."""


MAX_LOST = 1024
"""The largest tracker.remember, the lost objects in a state at most."""
MAX_WAIT = 2
"""Number of detection rounds for which a detection that is similar to an object out of view, but not surely that
object, waits. Then it begins a new object."""
HIDDEN_FRAMES = 3
"""Frames in a row without a mask after which an object counts as out of view, and is searched for."""
SHRINKING = 0.98
"""Factor a frame by which the known width and height of an object in pixels shrink while only a smaller part is
seen."""
WHOLE_S = 1.0
"""Seconds for which the last box of the whole object is kept as its last sighting, when the frame's edge cuts the
object off."""
MIN_MISMATCHES = 2
"""Embeddings in a row that match none of the object's stored ones, from which on its mask is taken for that of another
object."""

TURNED_MISMATCHES = 10
"""Such embeddings in a row after which an object that was never out of view counts as turned, so that its new ones are
stored."""


class SimilarityLimits(NamedTuple):
    """Similarities of two embeddings, 0 to 2, for the features of one model."""

    sure: float
    """from which on they show the same object"""
    maybe: float
    """below which they show different ones"""


LIMITS = {"nano": SimilarityLimits(1.75, 1.55)}
"""Thresholds by the name of a model. For nano, 3 % of the pairs of different objects in one real clip are above
`sure`."""
OTHER_LIMITS = SimilarityLimits(1.65, 1.4)
"""Thresholds for all other models. They were chosen with SAM 2 tiny, whose features separate objects better than
nano's."""


class LastSighting(NamedTuple):
    """Where an object was seen last, by a mask that was not doubtful."""

    seq: Natural
    capture_ns: Natural
    box: PixelBox
    """in pixels of the frame"""
    confidence: Share | None
    """of the mask"""
    frame: Text | None = None
    """of the position: "camera" or "base"; None: there is no position"""
    position_m: Vector3 | None = None
    camera_position_m: Vector3 | None = None
    """in the camera's frame at that time"""
    covariance_m2: Vector6 | None = None
    size_m: NotNegative | None = None
    """longest side"""
    camera_pose: FramePose | None = None
    """the camera in the base at that time"""
    whole_px: tuple[float, float] = (0.0, 0.0)
    """width and height of the object in the picture, also if a part of it was hidden then"""


class ObjectPicture(NamedTuple):
    """A crop of a frame around an object."""

    seq: Natural
    capture_ns: Natural
    box: PixelBox
    """that it shows, in pixels of the frame"""
    jpeg: Annotated[bytes, Meta(max_length=MAX_PICTURE_BYTES)]


class Memory(SavedState):
    """What is remembered of one object."""

    gallery: Gallery = field(default_factory=Gallery)
    sighting: LastSighting | None = None
    picture: ObjectPicture | None = None
    held: bool = False
    """True if the gripper held it when it was seen last, or holds it hidden"""
    hidden_by: Label | None = None
    """what covered it when it went out of view, as far as it is known"""
    seen_ns: Time = 0
    """capture time of the last frame with a mask that was not doubtful"""
    compared_ns: Time = 0
    """capture time of the last comparison of its appearance"""
    hidden_frames: Count = 0
    """frames in a row without a mask"""
    was_out_of_view: bool = False
    """True if it has been out of view since its appearance last matched"""
    unsure_frames: Count = 0
    """frames since its return, until a mask of it is not doubtful; then 0"""
    found_ns: Time | None = None
    """capture time of the frame on which it was found again, until a later mask of it is not doubtful; then None"""
    absent_ns: Time = 0
    """how long it had been out of view then"""
    waited: Count = 0
    """rounds for which a detection that may be this object has started no new one"""
    mismatches: Count = 0
    """comparisons in a row in which its mask showed something else"""

    def __post_init__(self) -> None:
        # a saved state may come from a file, and its picture is shown to agents
        if self.picture is not None:
            header = read_jpeg_header(self.picture.jpeg, "picture")
            if max(header.width, header.height) > PICTURE_PX:
                raise ValueError(
                    f"expected a picture of at most {PICTURE_PX} pixels a side, found {header.width}x{header.height}"
                )

    @property
    def is_unverified(self) -> bool:
        """True if it has been out of view, and nothing since then has shown that its mask is that of the same thing."""
        return self.was_out_of_view and len(self.gallery) > 0

    @property
    def needs_reidentification(self) -> bool:
        """True if it is not where its mask is, or has none: it is to be searched for."""
        is_hidden = self.hidden_frames >= HIDDEN_FRAMES
        return is_hidden or self.mismatches >= MIN_MISMATCHES or self.unsure_frames > 0

    @property
    def sought_frames(self) -> int:
        """For about how many frames it has been searched for."""
        return max(self.hidden_frames, self.unsure_frames, self.mismatches)


class LostObject(SavedState):
    """An object that is tracked no longer."""

    id: Id
    label: Label
    priority: Priority
    memory: Memory
    lost_ns: Time
    """capture time of the frame on which it was given up"""


class IdentityVerdict(NamedTuple):
    """Which object a candidate is.

    known: `ids` has the one object. unsure: it may be this one, or a new one. ambiguous: it may be any of these. new:
    it is none of them.
    """

    kind: Literal["known", "unsure", "ambiguous", "new"]
    ids: tuple[int, ...] = ()
    similarity: float = 0.0


NEW = IdentityVerdict("new")


class Candidate(NamedTuple):
    """A region or detection that may be one of the objects that are out of view."""

    embedding: Tensor
    """[C + COLOURS], on the host"""
    capture_ns: int
    box: Box
    """in pixels of the frame"""
    overlap: float = 0.0
    """share of it that objects in view cover"""
    sighting: LastSighting | None = None
    """where it is, if that is measured"""


class Return(NamedTuple):
    """An object that came back by its appearance, with a mask that is not doubtful."""

    id: int
    absent_ns: int
    """how long it was out of view"""


class LostObjectsState(SavedState):
    """What `ObjectMemory` keeps of lost objects. What it remembers of present ones is saved with these."""

    lost: Annotated[dict[Id, LostObject], Meta(max_length=MAX_LOST)]


class ObjectMemory(SavedPart[LostObjectsState]):
    """What is remembered of the objects of one camera."""

    STATE = LostObjectsState

    def __init__(self, objects: Objects, model: str, settings: TrackerSettings) -> None:
        self.limits = LIMITS.get(model, OTHER_LIMITS)
        self.lost: dict[int, LostObject] = {}
        """The objects that were lost, by id, those first that were lost first"""
        self.reidentifications = 0
        """Number of times that an object came back by its appearance, since the start"""
        self._objects = objects
        self._memories = objects.register(PerObject("memories", Memory))
        self._most = settings.remember
        self._lost_ns = round(settings.remember_s * NANOSECONDS)
        self._pictures = settings.pictures
        objects.on_leave(self._keep)

    def get(self, object_id: int) -> Memory | None:
        """Return what is remembered of an object; None if nothing is."""
        if object_id in self.lost:
            return self.lost[object_id].memory
        return self._memories.get(object_id)

    def label(self, object_id: int) -> str:
        """Return the label of an object; UnknownObjectError if there is none with this id."""
        if object_id in self.lost:
            return self.lost[object_id].label
        return self._objects.get(object_id).label

    def require(self, object_id: int) -> Memory:
        """Return what is remembered of an object; UnknownObjectError if there is none with this id."""
        memory = self.get(object_id)
        if memory is not None:
            return memory
        self._objects.require(object_id)
        # it is too new to be remembered
        return Memory()

    def begin(self, object_id: int, gallery: Gallery) -> None:
        """Give a new object the embeddings of another camera."""
        self._memories[object_id] = Memory(Gallery(gallery.embeddings))

    def observe(
        self, instances: Iterable[Instance], seq: int, capture_ns: int, pose: FramePose | None
    ) -> list[Return]:
        """Note where the objects are on a frame. Doubtful masks say nothing.

        Return the objects that were found again and have the first mask since then that is not doubtful. The mask by
        which they were found does not count: the tracker has not followed it yet.
        """
        returns = []
        for instance in instances:
            memory = self._memories.setdefault(instance.id, Memory())
            in_view = bool(instance.mask.crop.size)
            has_returned = in_view and memory.hidden_frames >= HIDDEN_FRAMES
            is_unsure = instance.doubtful and (has_returned or memory.unsure_frames > 0)
            memory.unsure_frames = memory.unsure_frames + 1 if is_unsure else 0
            memory.hidden_frames = 0 if in_view else memory.hidden_frames + 1
            memory.was_out_of_view = memory.was_out_of_view or memory.hidden_frames >= HIDDEN_FRAMES
            if not in_view:
                memory.held = instance.held
                memory.hidden_by = instance.hidden_by or memory.hidden_by
            # a mask of another identity does not show where the object is, and what is back may be another thing
            elif not instance.doubtful and not memory.mismatches and not memory.is_unverified:
                if memory.found_ns not in (None, capture_ns):
                    returns.append(Return(instance.id, memory.absent_ns))
                    memory.found_ns = None
                memory.held = instance.held
                memory.hidden_by = None
                memory.seen_ns = capture_ns
                sighting = make_sighting(instance, seq, capture_ns, pose)
                if not is_worse(sighting, memory.sighting, instance.mask.size):
                    memory.sighting = sighting._replace(whole_px=measure_whole(sighting, memory.sighting))
        self.reidentifications += len(returns)
        return returns

    def choose(self, tracked: Iterable[int]) -> int | None:
        """Return the object whose appearance is to be compared, of those in view.

        One that has come back goes first, else the one whose last comparison is the oldest.
        """
        known = {i: self._memories[i] for i in tracked if i in self._memories}
        seen = [i for i, memory in known.items() if not memory.hidden_frames]
        return min(seen, key=lambda i: (not known[i].was_out_of_view, known[i].compared_ns), default=None)

    def compare_appearance(
        self, instance: Instance, embedding: Tensor, image: Image, seq: int, capture_ns: int
    ) -> None:
        """Compare an embedding [C + COLOURS] of an object in view with its gallery.

        Keep it, and a picture, if the object is sure.
        """
        memory = self._memories[instance.id]
        memory.compared_ns = capture_ns
        # a mask that has drifted to another thing must not add that thing's appearance
        is_known = (
            not len(memory.gallery) or float(memory.gallery.compare(embedding[None])[0]) >= self.limits.maybe
        )
        if is_known:
            memory.was_out_of_view = False
        # an object that was in view all the time may have been turned
        elif not memory.was_out_of_view and memory.mismatches >= TURNED_MISMATCHES and not instance.doubtful:
            is_known = True
        memory.mismatches = 0 if is_known else memory.mismatches + 1
        if instance.doubtful or not is_known:
            return
        memory.gallery.add(embedding)
        if self._pictures:
            memory.picture = take_picture(image, instance.box, seq, capture_ns)

    def has_identity_mismatch(self, object_id: int) -> bool:
        """Return True if an object was out of view, and what has its mask since then looks like something else."""
        memory = self._memories.get(object_id)
        return memory is not None and memory.was_out_of_view and memory.mismatches >= MIN_MISMATCHES

    def confirm(self, object_id: int) -> None:
        """Take the mask of an object for right, because a user has given it or its appearance was found there."""
        memory = self._memories.get(object_id)
        if memory is not None:
            memory.hidden_frames = 0
            memory.waited = 0
            memory.mismatches = 0
            memory.was_out_of_view = False
            memory.unsure_frames = 0

    def may_wait(self, object_id: int) -> bool:
        """Count a round in which something may be an object; return False once it is to be decided."""
        memory = self.require(object_id)
        memory.waited += 1
        return memory.waited <= MAX_WAIT

    def expire(self, now_ns: int) -> None:
        """Forget the objects that were lost too long ago."""
        for object_id in [i for i, lost in self.lost.items() if now_ns - lost.lost_ns > self._lost_ns]:
            del self.lost[object_id]

    def describe(
        self, object_id: int | None, label: str | None, now_ns: int, camera: str
    ) -> list[ObjectPlace]:
        """Return where the objects of `camera` with an id or a label are, or were seen last; all for None.

        `age_s` is the time from then to the latest frame, at capture time `now_ns`.
        """
        found = []
        for status in self._objects:
            if object_id in (None, status.id) and _is_called(status.label, label):
                memory = self._memories.get(status.id) or Memory()
                # an object that is in view by a doubtful mask only may be elsewhere
                in_view = status.frames_since_seen == 0 and memory.seen_ns == now_ns
                place = ObjectPlace(camera, status.id, status.label, status.state, in_view)
                found.append(describe_memory(place, memory, now_ns))
        for lost in self.lost.values():
            if object_id in (None, lost.id) and _is_called(lost.label, label):
                place = ObjectPlace(camera, lost.id, lost.label, "lost", in_view=False)
                found.append(describe_memory(place, lost.memory, now_ns))
        return found

    def forget(self, object_id: int) -> bool:
        """Forget a lost object; return False if there is none with this id."""
        return self.lost.pop(object_id, None) is not None

    def clear(self) -> None:
        """Forget all lost objects."""
        self.lost.clear()

    def reactivate(self, object_id: int) -> LostObject:
        """Return a lost object, which is one of the objects again from now on."""
        lost = self.lost.pop(object_id)
        self._objects.add(object_id, lost.label, lost.priority)
        self._memories[object_id] = lost.memory
        return lost

    def list_out_of_view(
        self, label: str | None, hidden: Collection[int], named: Collection[int]
    ) -> list[int]:
        """Return the ids of objects that something of this label may be: the hidden ones, and the lost ones.

        The label must agree unless there is none. `named`: the hidden ones whose label the detector gave.
        """
        lost = [i for i, each in self.lost.items() if label is None or each.label == label]
        here = [i for i in hidden if label is None or i not in named or self._objects.label(i) == label]
        return [*here, *lost]

    def judge(self, candidate: Candidate, out_of_view: Collection[int]) -> IdentityVerdict:
        """Say which of the objects that are out of view a candidate is.

        What looks as much like any other object, also like one in view, is ambiguous: one of them may be the other.
        """
        scores = self._compare(candidate, out_of_view)
        if not scores:
            return NEW
        best = max(scores, key=lambda each: scores[each])
        similarity = scores[best]
        if similarity < self.limits.maybe:
            return NEW
        if similarity < self.limits.sure:
            return IdentityVerdict("unsure", (best,), similarity)
        # its position tells it from other things, but not from a look-alike, which may have taken the position
        similarities = {
            i: self._measure_similarity(candidate, memory) for i, memory in self._list_all(out_of_view)
        }
        rivals = [i for i in similarities if i != best and similarities[i] > similarities[best] - MARGIN]
        if rivals:
            return IdentityVerdict("ambiguous", (best, *rivals), similarity)
        return IdentityVerdict("known", (best,), similarity)

    def _compare(self, candidate: Candidate, out_of_view: Iterable[int]) -> dict[int, float]:
        """Return how similar a candidate is to each of the objects that it may be."""
        scores: dict[int, float] = {}
        for object_id in out_of_view:
            memory = self.get(object_id)
            if memory is not None and len(memory.gallery) and may_be(memory.sighting, candidate):
                overlap = 0.0
                if memory.sighting is not None:
                    overlap = measure_overlap_of_boxes(memory.sighting.box, candidate.box)
                scores[object_id] = self._measure_similarity(candidate, memory) + SAME_PLACE * overlap
        return scores

    def _list_all(self, out_of_view: Iterable[int]) -> Iterator[tuple[int, Memory]]:
        """Yield the objects that are tracked, and the lost ones of these ids, with what is remembered of them."""
        yield from self._memories.items()
        for object_id in out_of_view:
            if object_id in self.lost:
                yield object_id, self.lost[object_id].memory

    def _measure_similarity(self, candidate: Candidate, memory: Memory) -> float:
        return float(memory.gallery.compare(candidate.embedding[None])[0])

    def _keep(self, object_id: int, now_ns: int) -> None:
        """Remember an object that is given up, if there is anything to know it by."""
        memory = self._memories.get(object_id)
        if not self._most or memory is None or memory.sighting is None:
            return
        status = self._objects.get(object_id)
        self.lost[object_id] = LostObject(object_id, status.label, status.priority, memory, now_ns)
        if len(self.lost) > self._most:
            del self.lost[next(iter(self.lost))]


def make_sighting(instance: Instance, seq: int, capture_ns: int, pose: FramePose | None) -> LastSighting:
    """Return where an instance with a mask is."""
    if instance.position_m is None:
        return LastSighting(seq, capture_ns, instance.box, instance.confidence)
    return LastSighting(
        seq,
        capture_ns,
        instance.box,
        instance.confidence,
        instance.frame,
        instance.position_m,
        instance.camera_position_m or instance.position_m,
        instance.covariance_m2,
        None if instance.extent_m is None else max(instance.extent_m),
        pose,
    )


def _is_called(label: str, wanted: str | None) -> bool:
    """Return True if a label is the wanted one, whatever its capitals; None is any."""
    return wanted is None or label.casefold() == wanted.casefold()


def is_worse(sighting: LastSighting, before: LastSighting | None, size: tuple[int, int]) -> bool:
    """Return True if a sighting shows a part of an object that was whole just before, in a frame of `size`.

    The middle of a part that the frame's edge cuts off is not where the object is.
    """
    if before is None or not _is_cut(sighting.box, size) or _is_cut(before.box, size):
        return False
    return 0 <= sighting.capture_ns - before.capture_ns <= WHOLE_S * NANOSECONDS


def measure_whole(sighting: LastSighting, before: LastSighting | None) -> tuple[float, float]:
    """Return width and height of an object in the picture, in pixels.

    They are the largest of late, because what hides an object has hidden a part of it just before.
    """
    x0, y0, x1, y1 = sighting.box
    width = max(float(x1 - x0), sighting.whole_px[0])
    height = max(float(y1 - y0), sighting.whole_px[1])
    if before is not None:
        width = max(width, SHRINKING * before.whole_px[0])
        height = max(height, SHRINKING * before.whole_px[1])
    return width, height


def _is_cut(box: Box, size: tuple[int, int]) -> bool:
    """Return True if a box reaches to an edge of the frame (height, width)."""
    return box[0] <= 0 or box[1] <= 0 or box[2] >= size[1] or box[3] >= size[0]


def describe_memory(place: ObjectPlace, memory: Memory, now_ns: int) -> ObjectPlace:
    """Return the place of an object with what is remembered of it."""
    place = replace(
        place, held=memory.held, hidden_by=memory.hidden_by, has_picture=memory.picture is not None
    )
    sighting = memory.sighting
    if sighting is None:
        return place
    return replace(
        place,
        # a camera's clock may begin again
        age_s=round(max(0, now_ns - sighting.capture_ns) / NANOSECONDS, 3),
        seq=sighting.seq,
        capture_ns=sighting.capture_ns,
        box=sighting.box,
        confidence=sighting.confidence,
        frame=sighting.frame,
        position_m=sighting.position_m,
        camera_position_m=sighting.camera_position_m,
        covariance_m2=sighting.covariance_m2,
        size_m=sighting.size_m,
        camera_pose=sighting.camera_pose,
    )


def may_be(sighting: LastSighting | None, candidate: Candidate) -> bool:
    """Return False if a candidate is too large or too small for an object, or too far from where that was."""
    found = candidate.sighting
    if sighting is None:
        return True
    if found is None or sighting.size_m is None or found.size_m is None:
        x0, y0, x1, y1 = candidate.box
        ratio = max(x1 - x0, y1 - y0) / max(1.0, *measure_whole(sighting, None))
        return MIN_SIDE_RATIO <= ratio <= MAX_SIDE_RATIO
    if not 1 / SIZE_RATIO <= found.size_m / max(1e-6, sighting.size_m) <= SIZE_RATIO:
        return False
    # places of a camera that moves cannot be compared
    if found.frame != BASE or sighting.frame != BASE or not found.position_m or not sighting.position_m:
        return True
    apart_s = max(0, candidate.capture_ns - sighting.capture_ns) / NANOSECONDS
    return math.dist(found.position_m, sighting.position_m) <= REACH_M + REACH_MPS * apart_s


def measure_overlap_of_boxes(first: Box, second: Box) -> float:
    """Return the IoU of two boxes."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    shared = max(0, width) * max(0, height)
    return shared / max(1, _measure_area(first) + _measure_area(second) - shared)


def take_picture(image: Image, box: Box, seq: int, capture_ns: int) -> ObjectPicture:
    """Return a picture of the object in a box that is not empty."""
    height, width = image.shape[:2]
    x0, y0, x1, y1 = box
    margin = round(PICTURE_MARGIN * max(x1 - x0, y1 - y0))
    left = max(0, x0 - margin)
    top = max(0, y0 - margin)
    right = min(width, x1 + margin)
    bottom = min(height, y1 + margin)
    crop = shrink(image[top:bottom, left:right], PICTURE_PX)
    _, jpeg = cv2.imencode(".jpg", crop, [cv2.IMWRITE_JPEG_QUALITY, PICTURE_QUALITY])
    return ObjectPicture(seq, capture_ns, (left, top, right, bottom), jpeg.tobytes())


def _measure_area(box: Box) -> int:
    return (box[2] - box[0]) * (box[3] - box[1])
