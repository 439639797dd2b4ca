"""The newest frames of one camera, kept for prompts on what the user has just seen."""

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
    """A frame as it was tracked: `frame_number` is the tracker's step."""

    seq: int
    frame_number: int
    features: Features
    logits: dict[int, Tensor]
    """[h, w] of each object on it, as tracked or, later, as prompted."""
    scaling: Scaling

    def state(self) -> State:
        """What `of` takes."""
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
    def of(cls, state: State, device: torch.device) -> CachedFrame:
        """The frame that `state` was asked of, its tensors on `device`."""
        height, width = state["frame_size"]
        return cls(
            state["seq"],
            state["frame_number"],
            Features(**{name: part.to(device) for name, part in state["features"].items()}),
            {object_id: logits.to(device) for object_id, logits in state["logits"]},
            Scaling((height, width), state["model_size"]),
        )


class FrameCache:
    """The last `most` frames of a camera."""

    def __init__(self, camera: str, most: int) -> None:
        self._camera, self._most = camera, most
        self._frames: OrderedDict[int, CachedFrame] = OrderedDict()

    def __iter__(self) -> Iterator[CachedFrame]:
        return iter(self._frames.values())

    def keep(self, frame: CachedFrame) -> None:
        """Hold the newest frame, and let go of the oldest."""
        self._frames.pop(frame.seq, None)  # a camera that started again counts from the beginning
        self._frames[frame.seq] = frame
        while len(self._frames) > self._most:
            self._frames.popitem(last=False)

    def recall(self, seq: int | None) -> CachedFrame:
        """The frame `seq`, None for the latest; UnknownFrameError where it is not held."""
        if not self._frames:
            raise UnknownFrameError(
                f"camera {self._camera}: expected a frame to prompt on, found that none has come yet"
            )
        if seq is None:
            return next(reversed(self._frames.values()))
        if seq not in self._frames:
            raise UnknownFrameError(
                f"camera {self._camera}: expected seq among those held, {list(self._frames)}, found {seq}; "
                "prompt on a later frame, or raise tracker.feature_cache"
            )
        return self._frames[seq]

    def forget(self, object_id: int) -> None:
        """Let go of an object's masks."""
        for frame in self:
            frame.logits.pop(object_id, None)

    def state(self) -> State:
        """What `restore` takes."""
        return {"frames": [frame.state() for frame in self]}

    def restore(self, state: State, device: torch.device) -> None:
        """Hold the frames that were held when `state` was asked for, on `device`."""
        frames = (CachedFrame.of(frame, device) for frame in state["frames"])
        self._frames = OrderedDict((frame.seq, frame) for frame in frames)
