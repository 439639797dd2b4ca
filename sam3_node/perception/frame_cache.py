"""The newest frames of one camera, kept so that users can prompt on a frame that they have just seen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UnknownFrameError
from ..geometry import Scaling
from ..models import Features
from ..types import State


class CachedFrame(NamedTuple):
    """A tracked frame."""

    seq: int
    frame_number: int
    """the tracker's step"""
    features: Features
    logits: dict[int, Tensor]
    """[h, w] of each object on the frame, as tracked or as prompted later"""
    scaling: Scaling
    age_origin_ns: int = 0
    """Unix time from which its age is measured; 0 for a frame from a saved state"""

    def state(self) -> State:
        """Return the state that `from_state` takes."""
        return {
            "seq": self.seq,
            "frame_number": self.frame_number,
            "features": {
                name: part.cpu() for name, part in self.features._asdict().items() if part is not None
            },
            "logits": [[object_id, logits.cpu()] for object_id, logits in self.logits.items()],
            "frame_size": list(self.scaling.frame_size),
            "model_size": self.scaling.model_size,
        }

    @classmethod
    def from_state(cls, state: State, device: torch.device) -> CachedFrame:
        """Build a frame from what `state` returned, with its tensors on `device`."""
        height, width = state["frame_size"]
        return cls(
            state["seq"],
            state["frame_number"],
            Features(**{name: part.to(device) for name, part in state["features"].items()}),
            {object_id: logits.to(device) for object_id, logits in state["logits"]},
            Scaling((height, width), state["model_size"]),
        )


class FrameCache:
    """The last `capacity` frames of a camera."""

    def __init__(self, camera: str, capacity: int) -> None:
        self._camera, self._capacity = camera, capacity
        self._frames: OrderedDict[int, CachedFrame] = OrderedDict()

    def __iter__(self) -> Iterator[CachedFrame]:
        return iter(self._frames.values())

    def add(self, frame: CachedFrame) -> None:
        """Add the newest frame and drop the oldest."""
        self._frames.pop(frame.seq, None)  # a restarted camera counts from the beginning
        self._frames[frame.seq] = frame
        while len(self._frames) > self._capacity:
            self._frames.popitem(last=False)

    def get(self, seq: int | None) -> CachedFrame:
        """Return the frame `seq`, or the latest for None; UnknownFrameError if it is not in the cache."""
        if not self._frames:
            raise UnknownFrameError(f"camera {self._camera}: expected a frame to prompt on, found none yet")
        if seq is None:
            return next(reversed(self._frames.values()))
        if seq not in self._frames:
            raise UnknownFrameError(
                f"camera {self._camera}: expected one of the cached seq, {list(self._frames)}, found {seq}; "
                "prompt on a later frame, or raise tracker.feature_cache"
            )
        return self._frames[seq]

    def remove_object(self, object_id: int) -> None:
        """Drop the masks of an object."""
        for frame in self:
            frame.logits.pop(object_id, None)

    def state(self) -> State:
        """Return the state that `restore` takes."""
        return {"frames": [frame.state() for frame in self]}

    def restore(self, state: State, device: torch.device) -> None:
        """Replace the frames by those that `state` returned, on `device`."""
        frames = (CachedFrame.from_state(frame, device) for frame in state["frames"])
        self._frames = OrderedDict((frame.seq, frame) for frame in frames)
