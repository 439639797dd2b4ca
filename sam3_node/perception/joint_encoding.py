"""Encode the frames of several cameras by one call of the encoder, where that is faster than one by one.

A batch changes how features are rounded, and nothing else: they depend on the frame, on the number of frames and on the
frame's index among them, but not on the other frames. So masks say size and index, and a replay needs no more to repeat
them: another frame may stand where one is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ..engines.oom import STAGE_ERRORS, find_device_error
from ..engines.validation import read_clock
from ..errors import summarize_error
from ..models import Features, TrackerModel
from ..types import Frame, FrameBatch
from .preparing import PreparedFrame

log = logging.getLogger(__name__)

MAX_TOGETHER = 4
"""Frames that a live node encodes together, at most. More would make the first camera's masks too late."""
GAIN = 0.9
"""A batch is used if it takes less than this share of the time of its frames one by one."""
MIN_FREE = 0.25
"""Share of a GPU's memory that is left for what cameras and objects take later; no larger batch is tried below it."""
CALLS = 5
"""Timed calls of each size. The fastest counts: what disturbs a call makes it slower."""


class EncodedFrame(NamedTuple):
    """The features of a frame."""

    features: Features
    batch: FrameBatch | None
    """None: the frame was encoded alone"""


class JointEncoding:
    """The frames that one call of the encoder encodes: when the first of them is taken, unless `run` has been called.

    If the memory of a GPU does not suffice for all, each frame is encoded alone. Not for several threads at a time.
    """

    def __init__(self, model: TrackerModel, frames: Mapping[int, PreparedFrame], size: int) -> None:
        """`frames` by their index in the batch of `size`; at least one. Where one is missing, another is repeated."""
        self._model = model
        self._frames = dict(frames)
        self._size = size
        self._features: dict[int, Features] = {}
        self._ready: torch.cuda.Event | None = None
        self.is_split = False
        """True if memory ran out, so that the frames are encoded one by one."""

    def find(self, frame: Frame) -> PreparedFrame | None:
        """Return the prepared form of a frame; None if it is not among these, or was taken."""
        return next((one for one in self._frames.values() if one.frame is frame), None)

    @torch.inference_mode()
    def run(self) -> None:
        """Encode the frames, on a GPU in the current stream, without waiting for it."""
        if self._size > 1:
            try:
                self._features = self._encode_all()
            except torch.OutOfMemoryError:
                log.warning("memory ran out for %d frames at once: they are encoded one by one", self._size)
                self.is_split = True
        else:
            self._features = {
                index: self._model.encode(one.take_pixels()) for index, one in self._frames.items()
            }
        if self._model.device.type == "cuda":
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(self._model.device))

    def take(self, frame: Frame) -> EncodedFrame | None:
        """Return the features of a frame, once; None if it is not among these. A GPU's current stream waits for them.

        Raises what `run` does.
        """
        index = next((index for index, one in self._frames.items() if one.frame is frame), None)
        if index is None:
            return None
        if not self._features and not self.is_split:
            self.run()
        prepared = self._frames.pop(index)
        if self.is_split:
            return EncodedFrame(self._model.encode(prepared.take_pixels()), None)
        features = self._features.pop(index)
        if self._ready is not None:
            stream = torch.cuda.current_stream(self._model.device)
            stream.wait_event(self._ready)
            for part in features:
                # else the stream that has made it could get this memory while the current one still reads it
                if part is not None:
                    part.record_stream(stream)
        return EncodedFrame(features, FrameBatch(self._size, index) if self._size > 1 else None)

    def _encode_all(self) -> dict[int, Features]:
        spare = next(iter(self._frames.values()))
        frames = [self._frames.get(index, spare) for index in range(self._size)]
        found = self._model.encode_together(torch.cat([one.take_pixels() for one in frames]))
        return {index: found[index] for index in self._frames}


@torch.inference_mode()
def choose_together(model: TrackerModel) -> int:
    """Return the number of frames to encode together: every one from 2 up to it is faster than one by one.

    1 if none is. Batches are timed on random pixels, which captures their graphs. On a CPU nothing is timed: it has no
    idle processors that a batch would fill.
    """
    if model.device.type == "cpu" or not model.encode_limits.many_images:
        return 1
    alone_s = time_encoder(model, 1)
    told = [f"{1e3 * alone_s:.1f}"]
    chosen = 1
    for count in range(2, MAX_TOGETHER + 1):
        try:
            took_s = time_encoder(model, count)
        except STAGE_ERRORS as error:  # memory that runs out, or a kernel that takes one image
            if lost := find_device_error(error):
                raise lost from error
            told.append(summarize_error(error))
            break
        told.append(f"{1e3 * took_s:.1f}")
        if took_s > GAIN * count * alone_s:
            break
        chosen = count
        if measure_free(model.device) < MIN_FREE:
            break
    log.info(
        "frames of up to %d cameras are encoded together: ms for 1 and more: %s", chosen, ", ".join(told)
    )
    return chosen


def measure_free(device: torch.device) -> float:
    """Return the share of a GPU's memory that is free."""
    free, total = torch.cuda.mem_get_info(device)
    return free / total


@torch.inference_mode()
def time_encoder(model: TrackerModel, count: int) -> float:
    """Return the seconds in which the encoder encodes `count` frames together, of the fastest call."""
    generator = torch.Generator(model.device).manual_seed(count)
    shape = (count, 3, model.image_size, model.image_size)
    pixels = torch.randn(shape, generator=generator, device=model.device).to(model.dtype)
    times_s = []
    for _ in range(1 + CALLS):
        begin_s = read_clock(model.device)
        model.encode_together(pixels)
        times_s.append(read_clock(model.device) - begin_s)
    return min(times_s[1:])
