"""Frames put aside on disk, to be read from the last to the first: most recordings can only be read forward.

Spans of a recording on which an object is tracked a second time, backward, and what has to be done for it.

The strategy bidirectional: objects are tracked from where they are known both forward and backward.

The strategy multi-shot: where the forward pass was not sure of an object, it is tracked again, backward from where
it was sure once more."""

from __future__ import annotations

import os
import tempfile
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from ..errors import OutputError
from ..types import Closeable, Frame, Instance, MaskFrame
from ..wire import encode_mask, pack_frame, unpack_frame
from .actions import FORGOTTEN, Action, Edit, Step
from .player import Outcome, Player, forward


class Placed(NamedTuple):
    """A frame, and which of the results of the first pass is its own, counted from 0 over all cameras."""

    place: int
    frame: Frame


class ReverseFrameBuffer(Closeable):
    """Frames in a file in `folder`, colour as it is encoded, without depth; 16 bytes of each are in memory.

    The file has no name: nothing of it is left once this is closed or the process has ended, in whatever way. Raises
    OutputError where the disk is full. A context manager.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed in close
        except OSError as error:
            raise self._cannot(error) from error
        self._offsets = array("q", [0])
        self._places = array("q")

    def __len__(self) -> int:
        return len(self._places)

    def append(self, place: int, frame: Frame) -> None:
        """Put the next frame aside."""
        data = msgpack.packb(pack_frame(replace(frame, depth=None)))
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise self._cannot(error) from error
        self._places.append(place)
        self._offsets.append(self._offsets[-1] + len(data))

    def backward(self) -> Iterator[Placed]:
        """All frames, the last first, one in memory at a time."""
        for number in reversed(range(len(self))):
            begin, end = self._offsets[number : number + 2]
            parts = msgpack.unpackb(os.pread(self._file.fileno(), end - begin, begin))
            yield Placed(self._places[number], unpack_frame(parts))

    def close(self) -> None:
        """Forget all frames. Idempotent."""
        with suppress(OSError):  # what a full disk did not take is not wanted any more
            self._file.close()

    def _cannot(self, error: OSError) -> OutputError:
        return OutputError(
            f"cannot put frames aside in {self._folder} for a second pass: {error.strerror or error}; it takes as much "
            "room as the frames take in the recording"
        )


class ObjectKey(NamedTuple):
    """An object among those of all cameras."""

    camera: str
    id: int


@dataclass(frozen=True, slots=True)
class Span:
    """An object, and the frames of its camera that it is tracked on once more: from `last`, where `mask` (as the wire
    has it) is its prompt, back to `first`. Both are places in the results of the first pass."""

    camera: str
    id: int
    first: int
    last: int
    mask: Mapping[str, Any]

    @classmethod
    def back_to(cls, first: int, last: int, key: ObjectKey, known: Instance) -> Span:
        """From a frame on which the object is known."""
        return cls(key.camera, key.id, first, last, encode_mask(known.mask))


def is_sure(instance: Instance, doubt: float) -> bool:
    """Whether an object is in view on a frame with a score of at least `doubt`."""
    return instance.state == "tracked" and instance.score >= doubt and instance.area > 0


def put_aside(spool: ReverseFrameBuffer, spans: Sequence[Span], placed: Iterable[Placed]) -> Iterator[int]:
    """Put the frames that spans need into the spool -> how many have been looked at, after each of `placed`."""
    waiting = sorted(spans, key=lambda span: span.first, reverse=True)
    end = max((span.last for span in spans), default=-1)
    reach: defaultdict[str, int] = defaultdict(lambda: -1)
    for count, (place, frame) in enumerate(placed, start=1):
        while waiting and waiting[-1].first <= place:
            span = waiting.pop()
            reach[span.camera] = max(reach[span.camera], span.last)
        if place <= reach[frame.camera]:
            spool.append(place, frame)
        yield count
        if place >= end:
            return


def placed_frames(masks: Iterable[MaskFrame], frames: Iterable[Frame]) -> Iterator[Placed]:
    """Those of the recording's frames that masks were found on; both in the order of the recording."""
    source = iter(frames)
    for place, found in enumerate(masks):
        frame = next((frame for frame in source if _is_of(found, frame)), None)
        if frame is None:
            return
        yield Placed(place, frame)


def actions(spool: ReverseFrameBuffer, spans: Iterable[Span], searching: bool) -> Iterator[Action]:
    """Steps on the frames of the spool, the last first; each span's object is added at its end, forgotten at its
    beginning. Nothing is looked for by name, though a fresh player may be `searching`.

    An object's label is its id in the first pass: this pass counts its own.
    """
    begin, end = defaultdict[int, list[Edit]](list), defaultdict[int, list[Edit]](list)
    for span in spans:
        about = {"camera": span.camera, "label": str(span.id)}
        begin[span.last].append(Edit("add_object", {**about, "mask": span.mask}))
        end[span.first].append(Edit(FORGOTTEN, about))
    if searching:
        yield Edit("set_prompts", {"prompts": []})
    for place, frame in spool.backward():
        shown = (Edit(op, {**args, "seq": frame.seq}) for op, args in begin[place])
        yield Step(frame, 0, edits=(*end[place], *shown))


def backward(
    actions: Iterable[Action], player: Player, labels: Mapping[str, Mapping[str, str]]
) -> Iterator[Outcome]:
    """Carry out what `actions` gives; objects have the ids and `labels` (by camera and id) of the first pass.

    On the frame that an object is shown on, it has no mask: that is the first pass's.
    """
    for action, masks in forward(actions, player):
        yield Outcome(action, masks and _as_before(masks, labels))


def _as_before(masks: MaskFrame, labels: Mapping[str, Mapping[str, str]]) -> MaskFrame:
    tracked = (one for one in masks.instances if one.age)
    instances = (replace(one, id=int(one.label), label=labels[masks.camera][one.label]) for one in tracked)
    return replace(masks, instances=tuple(instances))


def _is_of(found: MaskFrame, frame: Frame) -> bool:
    return (frame.camera, frame.seq, frame.capture_ns) == (found.camera, found.seq, found.capture_ns)


def bidirectional_spans(masks: Iterable[MaskFrame], doubt: float) -> Iterator[Span]:
    """From all masks of the forward pass, what is tracked again: each object, from where it is known to its camera's
    first frame.

    It is known on the frame that it was shown on; otherwise (found by name, or entered without a frame) on the first
    where it is in view with a score of at least `doubt`, and where there is none it is not tracked backward. Its mask
    there is the prompt. What was found by mistake is tracked backward as well.
    """
    begun: dict[str, int] = {}
    known: set[ObjectKey] = set()
    for place, found in enumerate(masks):
        first = begun.setdefault(found.camera, place)
        for one in found.instances:
            key = ObjectKey(found.camera, one.id)
            if key not in known and (_is_shown(one) or is_sure(one, doubt)):
                known.add(key)
                if first < place:
                    yield Span.back_to(first, place, key, one)


def _is_shown(instance: Instance) -> bool:
    """Whether this frame is the one that the object was shown on: it was not tracked yet."""
    return instance.age == 0 and instance.area > 0


MIN_FRAMES = 3
"""Frames without a sure mask, from which on a span is worth a second pass."""


@dataclass(slots=True)
class _Sure:
    """The place at which an object was last sure, and on how many frames it has not been since."""

    place: int
    doubts: int = 0


def multi_shot_spans(masks: Iterable[MaskFrame], doubt: float) -> Iterator[Span]:
    """From all masks of the forward pass, what is tracked again: MIN_FRAMES or more successive frames of a camera on
    which an object was out of view or scored below `doubt`, between frames on which it was sure. The frame after them
    is the second shot: its mask there is the prompt. The frame before them is tracked on as well: where both passes
    disagree there, `merge` leaves the second one out (forward-backward error: Kalal et al. 2010).

    It mends what is lost while an object comes back into view, and drift of a low score. It does not find what the
    forward pass never found again, nor doubts what scored high on another thing; an object that was given up and found
    by name anew is another one.
    """
    known: dict[ObjectKey, _Sure] = {}
    for place, found in enumerate(masks):
        for one in found.instances:
            key = ObjectKey(found.camera, one.id)
            if is_sure(one, doubt):
                before = known.get(key)
                if before is not None and before.doubts >= MIN_FRAMES:
                    yield Span.back_to(before.place, place, key, one)
                known[key] = _Sure(place)
            elif key in known:
                known[key].doubts += 1
