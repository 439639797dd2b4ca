"""The newest frames of one camera with their features, kept so that users can prompt on a frame that they have seen."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import UnknownFrameError
from ..geometry import Scaling
from ..models import Features
from ..settings import TrackerSettings
from ..tracking import Tracks
from ..tracking.host_copy import copy_pinned
from ..types import Frame, State
from .track_manager import FrameContext

MAX_DEVICE_SHARE = 1 / 16
"""Largest share of a GPU's memory that the features of one camera may take."""


@dataclass(slots=True, eq=False)
class CachedFrame:
    """A tracked frame."""

    seq: int
    frame_number: int
    """the tracker's step"""
    features: Features
    """without the trunk; in memory of the device or of the host"""
    logits: dict[int, Tensor]
    """[h, w] of each object on the frame, as tracked or as prompted later"""
    scaling: Scaling
    capture_ns: int = 0
    age_origin_ns: int = 0
    """Unix time from which its age is measured"""
    nbytes: int = field(init=False)
    """memory of features and logits"""

    def __post_init__(self) -> None:
        tensors = (*self.features, *self.logits.values())
        self.nbytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @classmethod
    def from_step(cls, frame: Frame, received_ns: int, context: FrameContext, tracks: Tracks) -> CachedFrame:
        """Build it from a step and its result. Of the features, the trunk is left out: no prompt needs it."""
        logits = dict(zip(tracks.ids, tracks.logits, strict=True))
        origin_ns = frame.capture_ns if frame.clock == "system" else received_ns
        kept = context.features._replace(trunk=None)
        return cls(
            frame.seq,
            context.frame_number,
            kept,
            logits,
            context.scaling,
            frame.capture_ns,
            origin_ns,
        )

    def set_logits(self, object_id: int, logits: Tensor) -> None:
        """Keep the mask that a prompt gave an object on this frame."""
        if object_id not in self.logits:
            self.nbytes += logits.nbytes
        self.logits[object_id] = logits

    def features_on(self, device: torch.device) -> Features:
        """Return the features on the device, ready for the current stream."""
        return _map(self.features, lambda part: part.to(device, non_blocking=True))

    def state(self) -> State:
        """Return the state that `from_state` takes."""
        return {
            "seq": self.seq,
            "frame_number": self.frame_number,
            "features": [part.cpu() for part in self.features if part is not None],
            "logits": [[object_id, logits.cpu()] for object_id, logits in self.logits.items()],
            "frame_size": list(self.scaling.frame_size),
            "model_size": self.scaling.model_size,
            "capture_ns": self.capture_ns,
            "age_origin_ns": self.age_origin_ns,
        }

    @classmethod
    def from_state(cls, state: State, device: torch.device) -> CachedFrame:
        """Build a frame from what `state` returned, with its tensors on `device`."""
        height, width = state["frame_size"]
        return cls(
            state["seq"],
            state["frame_number"],
            Features(*(part.to(device) for part in state["features"])),
            {object_id: logits.to(device) for object_id, logits in state["logits"]},
            Scaling((height, width), state["model_size"]),
            state["capture_ns"],
            state["age_origin_ns"],
        )


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


class FrameCache:
    """The newest frames of a camera, within limits."""

    def __init__(self, camera: str, limits: CacheLimits) -> None:
        self._camera, self._limits = camera, limits
        self._frames: deque[CachedFrame] = deque()

    def __len__(self) -> int:
        return len(self._frames)

    def __iter__(self) -> Iterator[CachedFrame]:
        """Yield the frames, the oldest first."""
        return iter(self._frames)

    @property
    def nbytes(self) -> int:
        """Memory of all frames in bytes."""
        return sum(frame.nbytes for frame in self._frames)

    def add(self, frame: CachedFrame, held: Iterable[int] = ()) -> list[CachedFrame]:
        """Add the newest frame. Drop the oldest ones beyond the limits, and return them.

        Objects that were `held` have no mask on it: points on them correct those of the frame before.
        """
        for object_id in held:
            if self._frames and object_id in self._frames[-1].logits:
                frame.set_logits(object_id, self._frames[-1].logits[object_id])
        self._frames.append(frame)
        self._move_to_host()
        dropped = []
        nbytes = self.nbytes
        while len(self._frames) > self._limits.frames and (
            nbytes > self._limits.nbytes
            or abs(frame.capture_ns - self._frames[0].capture_ns) > self._limits.span_ns
        ):
            dropped.append(self._frames.popleft())
            nbytes -= dropped[-1].nbytes
        return dropped

    def _move_to_host(self) -> None:
        """Move the features of the frame that is no longer among the newest `frames`."""
        place = len(self._frames) - 1 - self._limits.frames
        if self._limits.on_host and place >= 0:
            self._frames[place].features = _map(self._frames[place].features, copy_pinned)

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
            frame.logits.pop(object_id, None)

    def state(self, after: int = -1) -> State:
        """Return the state that `restore` takes: the frames after step `after`, and the newest in any case."""
        count = max(self.count_after(after), 1)
        return {"frames": [frame.state() for frame in list(self)[-count:]]}

    def restore(self, state: State, device: torch.device) -> None:
        """Replace the frames by those that `state` returned, on `device`."""
        self._frames = deque(CachedFrame.from_state(frame, device) for frame in state["frames"])


def _map(features: Features, change: Callable[[Tensor], Tensor]) -> Features:
    return Features(change(features.fine), change(features.middle), change(features.top))
