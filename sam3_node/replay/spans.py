"""Spans of a recording on which an object is tracked a second time, backward, and what has to be done for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..types import Frame, Instance, MaskFrame
from ..wire import encode_mask
from .actions import FORGOTTEN, Action, Edit, Step
from .player import Outcome, Player, forward
from .spool import Placed, Spool


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


def put_aside(spool: Spool, spans: Sequence[Span], placed: Iterable[Placed]) -> Iterator[int]:
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


def actions(spool: Spool, spans: Iterable[Span], searching: bool) -> Iterator[Action]:
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
