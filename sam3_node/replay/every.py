"""All frames of a recording, with objects and edits at the frames that they are meant for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..bags.recorded import RecordedMasks
from ..operations import CHANGES
from ..types import Frame
from ..wire import Event, encode_mask
from .actions import Action, Edit, Notes, Step
from .job import ObjectOnFrame
from .palette import read_mask

Place = tuple[str, int]
"""Camera and seq of a frame."""


class Edits:
    """Edits by the frame that they take effect on: before its step, or on it once it is stepped."""

    def __init__(self) -> None:
        self.before: defaultdict[Place, list[Edit]] = defaultdict(list)
        self.on: defaultdict[Place, list[Edit]] = defaultdict(list)


def every_frame(frames: Iterable[Frame], edits: Edits) -> Iterator[Action]:
    """A step on each frame, with the edits at theirs."""
    for frame in frames:
        place = frame.camera, frame.seq
        yield from edits.before.pop(place, ())
        received_ns = frame.sent_ns or frame.capture_ns
        yield Step(frame, received_ns, edits=tuple(edits.on.pop(place, ())))


def with_objects(
    actions: Iterable[Action], objects: Sequence[ObjectOnFrame], notes: Notes
) -> Iterator[Action]:
    """The actions, with each object added on its frame. Notes an object whose frame does not come."""
    waiting = list(objects)
    indices: defaultdict[str, int] = defaultdict(int)
    for action in actions:
        if isinstance(action, Step) and waiting:
            shown = [one for one in waiting if _is_on(one, action.frame, indices[action.frame.camera])]
            waiting = [one for one in waiting if one not in shown]
            action = action._replace(edits=(*action.edits, *(_added(one, action.frame) for one in shown)))
            indices[action.frame.camera] += 1
        yield action
    for one in waiting:
        place = f"seq {one.seq}" if one.seq is not None else f"frame {one.index}"
        notes.tell(f"object {one.label}: expected {place} of {one.camera or 'a camera'}, found no such frame")


def edits_of(log: Iterable[RecordedMasks | Event]) -> Edits:
    """What a live node was asked, by the frames that it took effect on; what came after the last frame is left out."""
    edits = Edits()
    waiting: list[Edit] = []
    last: dict[str, int] = {}
    for item in log:
        if isinstance(item, RecordedMasks):
            place = item.masks.camera, item.masks.seq
            last[place[0]] = place[1]
            edits.before[place] += [edit for edit in waiting if _is_for(edit, place[0])]
            waiting = [edit for edit in waiting if not _is_for(edit, place[0])]
        elif item.op in CHANGES:
            edit = Edit(item.op, item.args)
            frame = _prompted_frame(edit, last)
            edits.on[frame].append(edit) if frame else waiting.append(edit)
    return edits


def _prompted_frame(edit: Edit, last: dict[str, int]) -> Place | None:
    """The past frame that an edit is on, None for one that takes effect on the next."""
    camera = edit.args.get("camera") or (next(iter(last)) if len(last) == 1 else None)
    seq = edit.args.get("seq")
    if seq is None and edit.op == "refine_object" and camera in last:
        seq = last[camera]
    return None if seq is None or camera is None else (camera, seq)


def _is_for(edit: Edit, camera: str) -> bool:
    return edit.args.get("camera") in (None, camera)


def _is_on(shown: ObjectOnFrame, frame: Frame, index: int) -> bool:
    at = frame.seq == shown.seq if shown.seq is not None else index == shown.index
    return at and shown.camera in (None, frame.camera)


def _added(shown: ObjectOnFrame, frame: Frame) -> Edit:
    given: dict[str, Any] = {"points": shown.points, "labels": shown.labels, "box": shown.box}
    args = {name: _lists(value) for name, value in given.items() if value is not None}
    if shown.mask is not None:
        args["mask"] = encode_mask(read_mask(Path(shown.mask), shown.value))
    return Edit("add_object", {**args, "camera": frame.camera, "seq": frame.seq, "label": shown.label})


def _lists(value: object) -> object:
    return list(map(_lists, value)) if isinstance(value, tuple) else value
