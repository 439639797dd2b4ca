"""Tracks spans of a recording again, backward in time, and merges the masks of both passes.

The bidirectional strategy tracks each object backward from the frame where it first appears. Most recordings can only
be read forward, so the frames of the spans are first buffered on disk.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgpack

from ..errors import OutputError, ReplayError
from ..files import explain_os_error
from ..resources import Closeable
from ..schema.operations import AddObject, SetPrompts
from ..schema.values import MaskMap
from ..types import Frame, Instance, MaskFrame
from ..wire import pack_frame, unpack_frame
from ..wire.requests import pack_mask
from .edits import RemoveLabelled
from .event_log import Action, Step
from .shards import CameraObject


@dataclass(frozen=True, slots=True)
class Span:
    """An object, and the frames of its camera to track it on again, from `last` back to `first`.

    `first` and `last` are indices of the first pass's results, over all cameras. `mask`, in its wire form, is the
    prompt on `last`.
    """

    camera: str
    id: int
    first: int
    last: int
    mask: MaskMap

    @classmethod
    def from_instance(cls, first: int, last: int, camera: str, instance: Instance) -> Span:
        """Make the span that starts from an instance on the frame `last`."""
        return cls(camera, instance.id, first, last, pack_mask(instance.mask))


def find_bidirectional_spans(
    masks: Iterable[MaskFrame], min_score: float, episode_starts: Sequence[int] = ()
) -> Iterator[Span]:
    """Yield a span for each object, from its prompt frame back to its camera's first frame in the episode.

    `masks` are all of the forward pass. The prompt frame is the one that the object was marked on. For other objects
    (detected by name, or added without a frame) it is the first frame with the object in view and a score of at least
    `min_score`; an object without such a frame has no span. False detections are tracked backward as well.
    """
    first_frames: dict[tuple[str, int], int] = {}
    seen: set[CameraObject] = set()
    for index, frame_masks in enumerate(masks):
        # objects do not live across episodes
        episode = bisect_right(episode_starts, frame_masks.seq)
        first = first_frames.setdefault((frame_masks.camera, episode), index)
        for instance in frame_masks.instances:
            key = frame_masks.camera, instance.id
            if key not in seen and (_is_prompt_frame(instance) or is_confident(instance, min_score)):
                seen.add(key)
                # an object that begins with its episode has nothing before it
                if first < index:
                    yield Span.from_instance(first, index, frame_masks.camera, instance)


def is_confident(instance: Instance, min_score: float) -> bool:
    """Return True if the object is in view with a score of at least `min_score`."""
    return instance.state == "tracked" and instance.score >= min_score and instance.area > 0


def _is_prompt_frame(instance: Instance) -> bool:
    """Return True if the object was marked on this frame, so that it is not tracked yet."""
    return instance.age == 0 and instance.area > 0


class IndexedFrame(NamedTuple):
    """A frame, with the number of its masks in the results of the first pass, from 0 over all cameras."""

    number: int
    frame: Frame


def index_frames(masks: Iterable[MaskFrame], frames: Iterable[Frame]) -> Iterator[IndexedFrame]:
    """Yield the frames that have masks, with their index. Both inputs are in the order of the recording."""
    source = iter(frames)
    for index, frame_masks in enumerate(masks):
        frame = next((frame for frame in source if frame.key == frame_masks.key), None)
        if frame is None:
            return
        yield IndexedFrame(index, frame)


class ReverseFrameBuffer(Closeable):
    """Frames in a file in `folder`, without depth, with colour as encoded. Each frame takes 16 bytes of memory.

    The file has no name, so nothing is left of it after this is closed or the process ends in any way. Raises
    OutputError if the disk is full. A context manager.
    """

    def __init__(self, folder: Path) -> None:
        self._explain = partial(
            explain_os_error,
            OutputError,
            f"cannot buffer frames in {folder} for a second pass",
            "; the buffer takes as much disk space as the frames in the recording",
        )
        with self._explain():
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed in close
        # where each frame begins in the file, and its index in the results
        self._offsets = array("q", [0])
        self._indices = array("q")

    def __len__(self) -> int:
        return len(self._indices)

    def append(self, index: int, frame: Frame) -> None:
        """Write the next frame."""
        # the second pass tracks in colour alone
        data = msgpack.packb(pack_frame(replace(frame, depth=None)))
        with self._explain():
            self._file.write(data)
            self._file.flush()
        self._indices.append(index)
        self._offsets.append(self._offsets[-1] + len(data))

    def read_backward(self) -> Iterator[IndexedFrame]:
        """Yield all frames, the last first, one in memory at a time."""
        for number in reversed(range(len(self))):
            begin, end = self._offsets[number : number + 2]
            parts = msgpack.unpackb(os.pread(self._file.fileno(), end - begin, begin))
            yield IndexedFrame(self._indices[number], unpack_frame(parts))

    def close(self) -> None:
        """Delete all frames. Idempotent."""
        with suppress(OSError):  # data that a full disk did not take is not needed any more
            self._file.close()


def buffer_frames(
    buffer: ReverseFrameBuffer, spans: Sequence[Span], frames: Iterable[IndexedFrame]
) -> Iterator[int]:
    """Append the frames that spans need to the buffer. After each frame, yield the number of frames read so far."""
    # spans by their beginning, the next one last
    remaining = sorted(spans, key=lambda span: span.first, reverse=True)
    end = max((span.last for span in spans), default=-1)
    needed_until: defaultdict[str, int] = defaultdict(lambda: -1)
    for count, (index, frame) in enumerate(frames, start=1):
        # a camera's frames are needed up to the end of its last span that has begun
        while remaining and remaining[-1].first <= index:
            span = remaining.pop()
            needed_until[span.camera] = max(needed_until[span.camera], span.last)
        if index <= needed_until[frame.camera]:
            buffer.append(index, frame)
        yield count
        if index >= end:
            return


def schedule_backward(
    buffer: ReverseFrameBuffer, spans: Iterable[Span], has_prompts: bool
) -> Iterator[Action]:
    """Yield steps on the buffered frames, the last first. Each span's object is added on `last`, removed on `first`.

    The second pass detects nothing by name; `has_prompts` tells that a new player would. Objects have their id of the
    first pass as label, as the second pass assigns its own ids.
    """
    additions = defaultdict[int, list[Span]](list)
    removals = defaultdict[int, list[RemoveLabelled]](list)
    for span in spans:
        additions[span.last].append(span)
        removals[span.first].append(RemoveLabelled(span.camera, str(span.id)))
    if has_prompts:
        yield SetPrompts(prompts=())
    for index, frame in buffer.read_backward():
        added = (
            AddObject(camera=span.camera, label=str(span.id), mask=span.mask, seq=frame.seq)
            for span in additions[index]
        )
        yield Step(frame, 0, edits=(*removals[index], *added))


def restore_ids(masks: MaskFrame, labels: Mapping[str, Mapping[str, str]]) -> MaskFrame:
    """Give the objects of `schedule_backward` the ids and `labels` (by camera and id) of the first pass.

    An object has no mask on its prompt frame: the first pass's is used there.
    """
    instances = tuple(
        replace(instance, id=int(instance.label), label=labels[masks.camera][instance.label], world_id=None)
        for instance in masks.instances
        if instance.age
    )
    return replace(masks, instances=instances)


def merge(forward: Iterable[MaskFrame], backward: Iterable[MaskFrame]) -> Iterator[MaskFrame]:
    """Yield the forward pass's frames. An object in both passes has the mask with the higher score, forward on a tie.

    `backward` has some of these frames in the same order, which is the recording's over all cameras. Ids mean the same
    objects in both.

    A frame keeps the forward pass's times. Its objects are in the forward pass's order, then come the backward pass's
    own. `age` and `frames_since_seen` are counted again in frame order. Two frames are in memory. Raises ReplayError
    at the end if a frame of `backward` is not in `forward`.
    """
    return _count_ages(_select_masks(forward, backward))


def _select_masks(forward: Iterable[MaskFrame], backward: Iterable[MaskFrame]) -> Iterator[MaskFrame]:
    """Yield the forward pass's frames with the masks that `merge` chooses."""
    remaining = iter(backward)
    behind = next(remaining, None)
    for masks in forward:
        # the second pass has only some of the frames
        if behind is not None and behind.key == masks.key:
            masks = _select(masks, behind)
            behind = next(remaining, None)
        yield masks
    if behind is not None:
        raise ReplayError(
            f"camera {behind.camera}: expected the second pass's frame {behind.seq} among the first pass's, found "
            "no such frame; start over with --again"
        )


def _count_ages(frames: Iterator[MaskFrame]) -> Iterator[MaskFrame]:
    """Yield the frames with each object's age and frames since it was seen, counted in their order."""
    counts: dict[tuple[str, int], tuple[int, int]] = {}
    for masks in frames:
        instances = []
        for instance in masks.instances:
            key = masks.camera, instance.id
            # the age is 0 only on a first frame that the object was marked on
            age, since = counts.get(key, (min(instance.age, 1) - 1, 0))
            age += 1
            since += 1
            if not instance.frames_since_seen:
                since = 0
            counts[key] = age, since
            instances.append(replace(instance, age=age, frames_since_seen=since))
        yield replace(masks, instances=tuple(instances))


def _select(forward: MaskFrame, backward: MaskFrame) -> MaskFrame:
    """Return one frame as `merge` describes it."""
    # begin with the forward pass, and replace what the second one has better
    selected: dict[int, Instance] = {instance.id: instance for instance in forward.instances}
    for instance in backward.instances:
        before = selected.get(instance.id)
        # the links between cameras are the forward pass's
        if before is None or instance.score > before.score:
            world_id = None if before is None else before.world_id
            selected[instance.id] = replace(instance, world_id=world_id)
    return replace(forward, instances=tuple(selected.values()))
