"""What a live node did, from its masks and events in the order in which it sent them, and what of it is unknown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..types import MaskFrame
from ..wire import DROPPED, FAILED, SERVED, Event, Fields
from .actions import RESTARTED, Edit


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
