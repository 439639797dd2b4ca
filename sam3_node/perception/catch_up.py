"""Cache one camera's newest frames, and let objects that were prompted on a past frame catch up with the latest.

The cache keeps features, so that users can prompt on a frame that they have seen. The object then catches up between
the steps of live frames, one frame at a time. The tracker follows it alone, on every frame that was cached after its
prompt. With a stride of 2 to 6, it follows it on every second to sixth frame and on the latest. The cache drops no such
frame before the object was tracked on it. So the object's memory depends on the prompts, the frames, the stride, and
the step after which it joins. It does not depend on how the work was divided. A replay that knows stride and step
repeats it bit for bit.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engines.oom import find_device_error
from ..errors import UnknownFrameError, current_request_id, request_id
from ..geometry import Scaling
from ..models import Features
from ..schema.replies import Stride
from ..schema.state import Count, Id, Label, Pixels, SavedPart, SavedState, Time
from ..settings import TrackerSettings
from ..tracking import Track, Tracker, Tracks
from ..tracking.confidence import ConfidenceEstimator
from ..tracking.host_copy import copy_pinned
from ..tracking.tracks import PromptTensors, catching_key
from ..types import Image
from .objects import Objects
from .output_masks import copy_masks, copy_to_host
from .step import StepFrame

log = logging.getLogger(__name__)

MAX_DEVICE_SHARE = 1 / 16
"""Share of a GPU's memory that the features of one camera may take. Above it, older features go to the host."""
MAX_WAY = 32
"""Frames that are kept between a pinned frame and the newest seconds, evenly spread. With fewer, an object that catches
up from the pinned frame would move far between two of them."""
MAX_CORRECTIONS = 4
"""Corrected objects that can catch up at a time. Each takes a row of memory; new objects have rows of their own."""
MAX_DROPS = 2
"""Frames older than the kept span that a step drops at most. It is one more than a step adds, so the cache shrinks.
Objects that catch up are tracked on a frame before it is dropped, which takes time."""


class CachedFrame(SavedState, eq=False):
    """A tracked frame."""

    seq: Time
    frame_number: Count
    """the tracker's step"""
    features: Features
    """without the trunk; in memory of the device or of the host"""
    logits: dict[Id, Tensor]
    """[h, w] of each object on the frame, as tracked or as prompted later"""
    scaling: Scaling
    capture_ns: Time = 0
    age_origin_ns: Time = 0
    """Unix time from which its age is measured"""
    image: Tensor | None = None
    """BGR uint8 [h, w, 3], if the detector takes exemplars"""
    lease_ns: Time = 0
    """camera's time for which it stays pinned; 0: not pinned"""
    pinned_ns: Time = 0
    """capture of the newest frame when its lease began"""
    nbytes: int = 0
    """memory of features, logits and image; computed"""

    def __post_init__(self) -> None:
        tensors = (*self.features, *self.logits.values(), self.image)
        self.nbytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @classmethod
    def from_step(cls, step: StepFrame, with_image: bool) -> CachedFrame:
        """Build it from a step whose objects are tracked, without the trunk, which no prompt needs."""
        frame = step.frame
        return cls(
            seq=frame.seq,
            frame_number=step.frame_number,
            features=step.features._replace(trunk=None),
            logits=dict(zip(step.tracks.ids, step.tracks.logits, strict=True)),
            scaling=step.scaling,
            capture_ns=frame.capture_ns,
            age_origin_ns=frame.capture_ns if frame.clock == "system" else step.received_ns,
            image=torch.tensor(step.image) if with_image else None,
        )

    def set_logits(self, object_id: int, logits: Tensor) -> None:
        """Keep the mask that a prompt gave an object on this frame."""
        if object_id not in self.logits:
            self.nbytes += logits.nbytes
        self.logits[object_id] = logits

    def drop_logits(self, object_id: int) -> None:
        """Forget the mask of an object on this frame, if it has one."""
        logits = self.logits.pop(object_id, None)
        if logits is not None:
            self.nbytes -= logits.nbytes

    def features_on(self, device: torch.device) -> Features:
        """Return the features on the device, ready for the current stream."""
        return _map(self.features, lambda part: part.to(device, non_blocking=True))

    def move(self, device: torch.device) -> None:
        """Move features and masks to a device. The image stays on the host."""
        self.features = _map(self.features, lambda part: part.to(device))
        self.logits = {object_id: logits.to(device) for object_id, logits in self.logits.items()}


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """The frames to keep: the newest `frames` in any case, others while they are within `span_ns` and `nbytes`."""

    frames: int
    span_ns: int
    """between the captures of the oldest and the newest"""
    nbytes: int
    """of all frames"""
    on_host: bool = False
    """True: all but the newest `frames` lie in memory of the host."""

    @classmethod
    def from_settings(cls, settings: TrackerSettings, device: torch.device) -> CacheLimits:
        """Return the limits for a model on this device."""
        nbytes = int(settings.feature_cache_mb * 1e6)
        small = device.type == "cuda" and nbytes > MAX_DEVICE_SHARE * torch.cuda.mem_get_info(device)[1]
        return cls(settings.feature_cache, int(settings.feature_cache_s * 1e9), nbytes, small)


class FramesState(SavedState):
    """What `FrameCache` keeps, in the order of the frames' steps."""

    frames: list[CachedFrame]
    latest_image: Pixels | None


class FrameCache(SavedPart[FramesState]):
    """The newest frames of a camera, within limits, and pinned ones.

    A pinned frame stays until its lease ends, by the captures of frames. Of the frames since, up to MAX_WAY stay beyond
    the span, spread evenly: those whose neighbours are nearest go first. All count in the limit of memory.
    """

    STATE = FramesState

    def __init__(self, camera: str, limits: CacheLimits, device: torch.device) -> None:
        self._camera = camera
        self._device = device
        self._limits = limits
        self._frames: list[CachedFrame] = []
        self.latest_image: Image | None = None
        """BGR image of the newest frame, for what is found by its appearance; None: there is no frame"""

    def __len__(self) -> int:
        return len(self._frames)

    def __iter__(self) -> Iterator[CachedFrame]:
        """Yield the frames, the oldest first."""
        return iter(self._frames)

    @property
    def nbytes(self) -> int:
        """Memory of all frames in bytes."""
        return sum(frame.nbytes for frame in self._frames)

    def pin(self, seq: int, lease_ns: int) -> None:
        """Keep the frame `seq` for `lease_ns` from now on, 0 to let it go; UnknownFrameError if it is not cached."""
        frame = self.get(seq)
        frame.lease_ns = lease_ns
        # the lease counts from the newest frame, whose time a replay knows, too
        frame.pinned_ns = self._frames[-1].capture_ns

    def add(self, frame: CachedFrame, held: Iterable[int] = ()) -> list[CachedFrame]:
        """Add the newest frame. Drop frames beyond the limits, and return them, the oldest first.

        Objects that were `held` have no mask on it: points on them correct their masks on the frame before.
        """
        for object_id in held:
            if self._frames and object_id in self._frames[-1].logits:
                frame.set_logits(object_id, self._frames[-1].logits[object_id])
        # leases end by the times of frames, so a replay ends them on the same frames
        pinned = [kept for kept in self._frames if kept.lease_ns]
        for kept in pinned:
            # after a restart of the camera, a seq would name two frames
            if frame.seq <= self._frames[-1].seq or abs(frame.capture_ns - kept.pinned_ns) > kept.lease_ns:
                kept.lease_ns = 0
        self._frames.append(frame)
        self._move_to_host()
        dropped: list[CachedFrame] = []
        while (index := self._find_surplus(len(dropped), bool(pinned))) is not None:
            dropped.append(self._frames.pop(index))
        return sorted(dropped, key=lambda frame: frame.frame_number)

    def _find_surplus(self, dropped: int, pinned: bool) -> int | None:
        """Return the index of the frame to drop after `dropped` others; None if the frames are within the limits.

        pinned: False if no frame was pinned when this step began, as on nearly all steps: the oldest is dropped then.
        """
        frames = self._frames
        newest = self._frames[-1]
        is_large = self.nbytes > self._limits.nbytes
        if not pinned:
            is_past = abs(newest.capture_ns - frames[0].capture_ns) > self._limits.span_ns
            is_due = is_large or (is_past and dropped < MAX_DROPS)
            return 0 if is_due and len(frames) > self._limits.frames else None
        # neither pinned frames nor the newest `frames` ever go
        free = [at for at in range(len(frames) - self._limits.frames) if not frames[at].lease_ns]
        past = [at for at in free if abs(newest.capture_ns - frames[at].capture_ns) > self._limits.span_ns]
        first = next((at for at, frame in enumerate(frames) if frame.lease_ns), len(frames))
        # before the first pinned frame, the oldest goes, as without pins
        if past and past[0] < first:
            return past[0] if is_large or dropped < MAX_DROPS else None
        # on the way from a pinned frame, the one between the nearest neighbours is missed least
        if past and (is_large or len(past) > MAX_WAY):
            return min(past, key=lambda at: frames[at + 1].frame_number - frames[at - 1].frame_number)
        # memory is the hard limit: for it, frames within the span go, too
        return free[0] if free and is_large else None

    def _move_to_host(self) -> None:
        """Move the features of the frame that is no longer among the newest `frames`."""
        index = len(self._frames) - 1 - self._limits.frames
        if self._limits.on_host and index >= 0:
            self._frames[index].features = _map(self._frames[index].features, copy_pinned)

    def get(self, seq: int | None) -> CachedFrame:
        """Return the frame `seq`, or the latest for None; UnknownFrameError if it is not in the cache.

        After a restart of the camera, several frames may have this number: the newest of them is returned.
        """
        if not self._frames:
            raise UnknownFrameError(f"camera {self._camera}: expected a frame to prompt on, found none yet")
        for frame in reversed(self._frames):
            if seq in (None, frame.seq):
                return frame
        raise UnknownFrameError(
            f"camera {self._camera}: expected one of the {len(self)} cached seq from {self._frames[0].seq} to "
            f"{self._frames[-1].seq}, found {seq}; prompt on a later frame, or raise tracker.feature_cache_s"
        )

    def count_after(self, frame_number: int) -> int:
        """Return the number of frames after step `frame_number`."""
        return len(self) - bisect_right(self._frames, frame_number, key=lambda frame: frame.frame_number)

    def next_after(self, frame_number: int) -> CachedFrame | None:
        """Return the oldest frame after step `frame_number`, None if there is none."""
        count = self.count_after(frame_number)
        return self._frames[-count] if count else None

    def remove_object(self, object_id: int) -> None:
        """Drop the masks of an object."""
        for frame in self:
            frame.drop_logits(object_id)

    def after_restore(self, state: FramesState) -> None:
        """Move the frames to the device."""
        for frame in self:
            frame.move(self._device)


def _map(features: Features, change: Callable[[Tensor], Tensor]) -> Features:
    parts: Iterator[Any] = (None if part is None else change(part) for part in features)
    return Features(*parts)


class CaughtUp(NamedTuple):
    """An object that has caught up, or has failed to."""

    id: Id
    error: Label | None = None
    """The reason why it gave up: a new object is removed then, a corrected one is tracked as before."""
    request_id: Label | None = None
    """of its prompt"""


class CatchUpProgress(SavedState):
    """How far an object has caught up."""

    frame_number: Time
    """the last step on which it was tracked or prompted"""
    frames: Count = 0
    """steps since its prompt"""
    hidden: Count = 0
    """number of the last of these steps, in a row, on which it was out of view"""
    stride: Stride = 1
    """steps from one frame that it is tracked on to the next"""
    request_id: Label | None = None
    """of its prompt"""


class CatchUpsState(SavedState):
    """What `CatchUps` keeps."""

    progress: dict[Id, CatchUpProgress]
    failed: list[CaughtUp]


class CatchUps(SavedPart[CatchUpsState]):
    """The objects of one camera that catch up, first come, first served."""

    STATE = CatchUpsState

    def __init__(
        self,
        tracker: Tracker,
        frames: FrameCache,
        objects: Objects,
        confidence: ConfidenceEstimator,
        on_join: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`on_join` is called with the id of each object that joins the tracked ones."""
        self._on_join = on_join
        self._tracker = tracker
        self._frames = frames
        self._objects = objects
        self._confidence = confidence
        self._progress: dict[int, CatchUpProgress] = {}
        self._failed: list[CaughtUp] = []
        self.stride = 1
        """Stride of objects whose prompt does not say one, 1 to MAX_STRIDE. With 1 an object becomes what a prompt in
        time would have made of it."""
        objects.on_remove(self.forget)

    def __contains__(self, object_id: int) -> bool:
        return object_id in self._progress

    def __len__(self) -> int:
        return len(self._progress)

    @property
    def behind(self) -> int:
        """Number of calls of `advance` until all objects have caught up, and all failures are returned."""
        waiting = sum(
            ceil(self._frames.count_after(progress.frame_number) / progress.stride)
            for progress in self._progress.values()
        )
        return waiting + len(self._failed)

    def get_stride(self, object_id: int | None = None) -> int | None:
        """Return the stride of an object, by default of the next to be tracked; None if it does not catch up."""
        progress = self._progress.get(next(iter(self._progress), -1) if object_id is None else object_id)
        return None if progress is None else progress.stride

    def begin(
        self, cached: CachedFrame, prompt: PromptTensors, stride: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Prompt on a cached frame, and catch up from there; return logits [h, w] and score [].

        An object that catches up already begins again from this frame. Where frames since are gone, the chosen stride
        leaves out none of those that have stayed.
        """
        object_id = prompt.object_id
        features = cached.features_on(self._tracker.model.device)
        logits, score = self._tracker.begin_catch_up(features, cached.frame_number, prompt)
        # pinned frames keep a way to them with gaps: the stride must not step over frames that have stayed
        following = self._frames.next_after(cached.frame_number) or cached
        gap = following.frame_number - cached.frame_number
        chosen = self.stride if gap < 2 else min(self.stride, gap // 2)  # gaps differ by a factor of two
        self._progress[object_id] = CatchUpProgress(
            cached.frame_number, stride=stride or chosen, request_id=current_request_id()
        )
        # a key of its own: a corrected object keeps its old history until it joins
        self._confidence.remove(catching_key(object_id))
        self._confidence.start(catching_key(object_id), copy_masks(logits[None])[0].levels)
        self._join_if_done(object_id)
        return logits, score

    def advance(self) -> CaughtUp | None:
        """Track the first object on its next frame. Return it if it has caught up, or failed to."""
        # failures are returned first, also those of `use_dropped`
        if not self._failed and self._progress:
            object_id, progress = next(iter(self._progress.items()))
            self._go_on(object_id)
            if self._join_if_done(object_id):
                return CaughtUp(object_id, request_id=progress.request_id)
        return self._failed.pop(0) if self._failed else None

    def use_dropped(self, frame: CachedFrame) -> None:
        """Track objects up to this frame and on it, if it is on their way, before its features are gone."""
        # a list, because an object that fails is removed in between
        for object_id, progress in list(self._progress.items()):
            while (
                object_id in self._progress and progress.frame_number + progress.stride <= frame.frame_number
            ):
                step = self._frames.next_after(progress.frame_number + progress.stride - 1) or frame
                self._track(object_id, min(step, frame, key=lambda either: either.frame_number))

    def end(self, object_id: int, failed: bool) -> None:
        """Catch up at once, or give up if it has `failed` to. Does nothing for an object that does not catch up."""
        # a replay gives up where the recorded node did, even if it could go on
        if failed and object_id in self._progress:
            self._give_up(object_id)
        while object_id in self._progress:
            self._go_on(object_id)
            self._join_if_done(object_id)

    def end_all(self) -> None:
        """Let all objects catch up at once."""
        # a list, because each object is removed when it joins
        for object_id in list(self._progress):
            self.end(object_id, failed=False)

    def forget(self, object_id: int) -> None:
        """Let an object no longer catch up, if it does."""
        if self._progress.pop(object_id, None) is not None:
            self._confidence.remove(catching_key(object_id))
            self._tracker.give_up(object_id)

    def _go_on(self, object_id: int) -> None:
        """Track an object on the next frame of its way: its stride after the last, or the latest if that is nearer."""
        progress = self._progress[object_id]
        latest = self._frames.get(None)
        frame = self._frames.next_after(progress.frame_number + progress.stride - 1) or latest
        if frame.frame_number > progress.frame_number:
            self._track(object_id, frame)

    @torch.inference_mode()
    def _track(self, object_id: int, frame: CachedFrame) -> None:
        """Track an object on one frame. If that fails, the object gives up."""
        progress = self._progress[object_id]
        try:
            features = frame.features_on(self._tracker.model.device)
            track = self._tracker.catch_up(object_id, features, frame.frame_number)
            if track is not None:
                self._observe(object_id, track, frame.frame_number - progress.frame_number)
        except Exception as error:  # one object that fails must not stop the others
            if lost := find_device_error(error):
                raise lost from error
            with request_id(progress.request_id):
                log.exception("object %d cannot catch up from its prompt", object_id)
            self._give_up(object_id)
            self._failed.append(CaughtUp(object_id, f"{type(error).__name__}: {error}", progress.request_id))
        else:
            progress.frame_number = frame.frame_number

    def _observe(self, object_id: int, track: Track, steps: int) -> None:
        """Count the steps up to a frame and learn from its mask, as a step does."""
        on_host = copy_to_host(Tracks([catching_key(object_id)], *(column[None] for column in track)))
        self._confidence.observe(on_host.evidence)
        progress = self._progress[object_id]
        progress.frames += steps
        in_view = on_host.evidence.visible[0] and not on_host.masks.levels.is_empty[0]
        progress.hidden = 0 if in_view else progress.hidden + steps

    def _join_if_done(self, object_id: int) -> bool:
        """Let the object join the tracked ones if it was tracked on the latest frame. Return True if it has joined."""
        progress = self._progress.get(object_id)
        if progress is None or self._frames.next_after(progress.frame_number) is not None:
            return False
        del self._progress[object_id]
        # the age of a new object counts from its prompt; a corrected one has counted meanwhile
        is_new = object_id not in self._tracker.ids
        self._tracker.join(object_id)
        self._confidence.rename(catching_key(object_id), object_id)
        self._objects.catch_up(object_id, progress.frames if is_new else 0, progress.hidden)
        self._on_join(object_id)
        return True

    def _give_up(self, object_id: int) -> None:
        """Remove a new object. A corrected one is tracked as before."""
        if object_id in self._tracker.ids:
            self.forget(object_id)
        else:
            self._objects.remove(object_id)
