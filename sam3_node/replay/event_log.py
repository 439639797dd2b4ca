"""What a live node did, from its masks and events in the order in which it sent them, and what of it is unknown.

The frames of a plan, found while a recording is read once, with few held at a time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from ..types import Frame, MaskFrame
from ..wire import DROPPED, FAILED, SERVED, Event, Fields
from .actions import RESTARTED, Action, Edit, Notes, Step


class Stepped(NamedTuple):
    """A frame that the live node stepped; of one whose step raised, only camera and seq are known."""

    camera: str
    seq: int
    capture_ns: int | None = None
    received_ns: int = 0
    skipped: int = 0

    @property
    def failed(self) -> bool:
        """Whether its step raised."""
        return self.capture_ns is None


class Gap(NamedTuple):
    """Something that is not in the recording, so that what follows cannot be repeated as it was."""

    text: str


Planned = Stepped | Edit | Gap


def planned(log: Iterable[MaskFrame | Event], description: Mapping[str, Any] | None) -> Iterator[Planned]:
    """Steps and edits in the node's order. `description` is what the node told of itself when recording began.

    A gap is before the first action that follows it: what had happened before the recording began, events and masks
    that are not in it.
    """
    reader = _Reader(description or {})
    for item in log:
        yield from reader.event(item) if isinstance(item, Event) else reader.masks(item)


@dataclass(slots=True)
class _Reader:
    description: Mapping[str, Any]
    begun: bool = False
    next_event: int | None = None
    last_seq: dict[str, int | None] = field(default_factory=dict)
    """By camera served, the last frame taken; None where that is not known."""

    def event(self, event: Event) -> Iterator[Planned]:
        yield from self._in_order(event)
        args = Fields(event.args, f"event {event.op}")
        if event.op == FAILED:
            camera, seq = args.text("camera"), args.integer("seq")
            self.last_seq[camera] = seq
            yield Stepped(camera, seq)
            return
        if event.op == SERVED:
            self.last_seq[args.text("camera")] = None
        elif event.op == DROPPED:
            self.last_seq.pop(args.text("camera"), None)
        yield Edit(event.op, event.args)

    def masks(self, masks: MaskFrame) -> Iterator[Planned]:
        yield from self._begin(self.description.get("events", 1))
        if masks.camera not in self.last_seq:
            yield Edit(SERVED, {"camera": masks.camera})
        elif (last := self.last_seq[masks.camera]) is not None:
            yield from self._check_seq(masks, last)
        self.last_seq[masks.camera] = masks.seq
        yield Stepped(masks.camera, masks.seq, masks.capture_ns, masks.received_ns, masks.skipped)

    def _begin(self, first: int) -> Iterator[Gap]:
        """Of the first thing in the recording; `first` is the number of the event that it begins with."""
        if self.begun or first == 0:
            self.begun = True
            return
        self.begun = True
        cameras: Mapping[str, Any] = self.description.get("cameras", {})
        changes = self.description.get("events", first) - len(cameras)
        if changes or self.description.get("prompts") or not self.description:
            objects = sum(camera.get("objects", 0) for camera in cameras.values())
            yield Gap(
                "expected a recording from the node's start on, found one that begins later, when it had been changed "
                f"{changes} times by requests and had {objects} objects: they are not in the recording"
            )

    def _in_order(self, event: Event) -> Iterator[Planned]:
        expected = self.next_event
        if expected is None:
            # the node was described when its masks were already heard: what it told in between is here and there
            described = self.description.get("events", event.n)
            yield from self._begin(min(event.n, described))
            expected = min(event.n, described)
        elif event.n < expected:  # counts from 0 again
            yield Edit(RESTARTED)
            self.last_seq.clear()
            expected = 0
        if event.n > expected:
            yield Gap(
                f"expected event {expected} of the node, found {event.n} ({event.op}): what happened in between is "
                "not in the recording"
            )
        self.next_event = event.n + 1

    def _check_seq(self, masks: MaskFrame, last: int) -> Iterator[Gap]:
        # a camera that was started again counts from the beginning
        if masks.seq > last and masks.seq != last + masks.skipped + 1:
            yield Gap(
                f"camera {masks.camera}: expected the masks of all frames that were stepped between {last} and "
                f"{masks.seq}, found that {masks.seq - last - 1 - masks.skipped} of them are not in the recording"
            )


WINDOW = 256  # planned steps looked ahead at: by how many the order of steps and that of frames may differ


def with_frames(plan: Iterable[Planned], frames: Iterable[Frame], notes: Notes) -> Iterator[Action]:
    """The plan with the frame of each step; a step whose frame is not among `frames` is left out, and a gap.

    `frames` are those of all cameras, each camera's in its order; of those read ahead only such are held as one of the
    next WINDOW steps needs.
    """
    waiting, source = deque[Planned](), iter(plan)
    finder = _Finder(iter(frames))
    while True:
        for item in islice(source, WINDOW - len(waiting)):
            waiting.append(item)
            finder.want(item)
        if not waiting:
            return
        item = waiting.popleft()
        if isinstance(item, Edit):
            yield item
        elif isinstance(item, Gap):
            notes.gap(item.text)
        elif (frame := finder.find(item)) is not None:
            yield Step(frame, item.received_ns, item.skipped, item.failed)
        else:
            notes.gap(
                f"camera {item.camera}: expected frame {item.seq}, which the node stepped, found that it is not in "
                "the recording"
            )


class _Finder:
    """Takes frames from a source until it finds the one that is asked for; keeps on the way what is wanted later."""

    def __init__(self, frames: Iterator[Frame]) -> None:
        self._frames = frames
        self._wanted: Counter[tuple[str, int]] = Counter()
        self._held: dict[tuple[str, int], deque[Frame]] = {}

    def want(self, item: Planned) -> None:
        if isinstance(item, Stepped):
            self._wanted[item.camera, item.seq] += 1

    def find(self, item: Stepped) -> Frame | None:
        key = item.camera, item.seq
        frame = self._take_held(item) or self._read_until(item)
        self._wanted[key] -= 1
        if not self._wanted[key]:
            del self._wanted[key]
            self._held.pop(key, None)
        return frame

    def _take_held(self, item: Stepped) -> Frame | None:
        held = self._held.get((item.camera, item.seq), deque())
        while held:
            frame = held.popleft()
            if _is_of(item, frame):
                return frame
        return None

    def _read_until(self, item: Stepped) -> Frame | None:
        if self._is_passed(item):
            return None
        for frame in self._frames:
            key = frame.camera, frame.seq
            if _is_of(item, frame):
                return frame
            if key in self._wanted:
                self._held.setdefault(key, deque()).append(frame)
                if frame.camera == item.camera and key != (item.camera, item.seq):
                    return None  # a camera's frames are in order: this one is needed later
        return None

    def _is_passed(self, item: Stepped) -> bool:
        """Whether a frame that is needed later from the same camera has been read already."""
        return any(held and camera == item.camera for (camera, _), held in self._held.items())


def _is_of(item: Stepped, frame: Frame) -> bool:
    """A frame is known by its time of capture too, as seq begins again where a camera was started again."""
    same = (frame.camera, frame.seq) == (item.camera, item.seq)
    return same and item.capture_ns in (None, frame.capture_ns)
