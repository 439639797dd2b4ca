"""Encode the next frames of a replay in a thread, and on a GPU in a stream, while this frame's objects are tracked."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import NamedTuple

import torch

from ..errors import summarize_error
from ..models import TrackerModel
from ..resources import Closeable
from ..types import Frame, FrameBatch
from .joint_encoding import MAX_TOGETHER, JointEncoding
from .preparing import FramePreparer, PreparedFrame

log = logging.getLogger(__name__)


class WantedFrame(NamedTuple):
    """A frame to encode."""

    frame: Frame
    batch: FrameBatch | None = None
    """where a node has encoded it with others"""


class _Begun(NamedTuple):
    """Frames whose encoding has begun."""

    frames: tuple[Frame, ...]
    encoding: Future[JointEncoding | None]


def encodes_beside(model: TrackerModel) -> bool:
    """Return True where encoding a frame beside the tracking of another saves time.

    On a CPU the two take the cores from each other.
    """
    return model.device.type == "cuda" and model.encode_limits.runs_beside


class EncodeAhead(Closeable):
    """Encodes frames in the order in which a replay steps them, one batch ahead. A context manager.

    The features are those that a step computes itself, bit for bit: the same operations run on the same values. A batch
    that a recording names is encoded by one call. Where that saves no time (`encodes_beside`) there is no thread, and a
    frame without a batch is left to its step.
    """

    def __init__(self, model: TrackerModel, max_frame_pixels: int) -> None:
        self._model = model
        self._is_beside = beside = encodes_beside(model)
        is_cuda = beside and model.device.type == "cuda"
        self._stream = torch.cuda.Stream(model.device) if is_cuda else None
        # in the stream of the encoder, so that both are in order
        self._prepare = FramePreparer(model, max_frame_pixels, self._stream)
        self._thread = ThreadPoolExecutor(1, "encode-ahead") if beside else None
        self._begun: list[_Begun] = []
        self._has_failed = False

    def count_needed(self, has_batches: bool) -> int:
        """Return how many frames after the present one `take` should know: those of this batch and of the next."""
        batches = 2 if self._is_beside else 1
        return batches * MAX_TOGETHER - 1 if has_batches else batches - 1

    def take(self, wanted: Sequence[WantedFrame]) -> JointEncoding | None:
        """Return the encoding of the first of some frames, and begin that of those after it.

        None: its step encodes the frame, or fails to.
        """
        first = wanted[0]
        if not self._is_beside and first.batch is None:
            return None
        current = self._find(first.frame) or self._begin(wanted)
        later = [one for one in wanted if not any(one.frame is frame for frame in current.frames)]
        # the frames are taken in their order, so what began before this is over
        self._begun = self._begun[self._begun.index(current) :]
        if self._is_beside and later and self._find(later[0].frame) is None:
            self._begin(later)
        if current.frames[-1] is first.frame:
            self._begun.remove(current)
        try:
            return current.encoding.result()
        except Exception as error:
            # a frame that cannot be encoded fails in its step, too; one that can is slower
            if not self._has_failed:
                log.warning("frames are not encoded ahead: %s", summarize_error(error), exc_info=error)
            self._has_failed = True
            return None

    def close(self) -> None:
        """Stop the thread, and forget what was encoded. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._begun.clear()

    def _find(self, frame: Frame) -> _Begun | None:
        return next((one for one in self._begun if any(frame is other for other in one.frames)), None)

    def _begin(self, wanted: Sequence[WantedFrame]) -> _Begun:
        """Begin to encode the first frame, with those after it that are of its batch."""
        batch = wanted[0].batch
        group = {0 if batch is None else batch.index: wanted[0].frame}
        for one in wanted[1:]:
            if batch is None or one.batch is None or one.batch.size != batch.size:
                break
            if one.batch.index <= max(group):
                break
            group[one.batch.index] = one.frame
        size = 1 if batch is None else batch.size
        begun = _Begun(tuple(group.values()), self._submit(group, size))
        self._begun.append(begun)
        return begun

    def _submit(self, group: dict[int, Frame], size: int) -> Future[JointEncoding | None]:
        ready: torch.cuda.Event | None = None
        if self._stream is not None:
            # what the encoder may still be doing for a request, and nothing of the step that comes now
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self._model.device))
        if self._thread is not None:
            return self._thread.submit(self._encode, group, size, ready)
        done = Future[JointEncoding | None]()
        done.set_result(self._encode(group, size, ready))
        return done

    def _encode(
        self, group: dict[int, Frame], size: int, ready: torch.cuda.Event | None
    ) -> JointEncoding | None:
        prepared: dict[int, PreparedFrame] = {}
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            if self._stream is not None and ready is not None:
                self._stream.wait_event(ready)
            for index, frame in group.items():
                # one that cannot be decoded fails in its step
                with suppress(Exception):
                    prepared[index] = self._prepare(frame)
            if not prepared:
                return None
            encoding = JointEncoding(self._model, prepared, size)
            encoding.run()
        return encoding
