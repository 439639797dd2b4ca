"""Frames on their way through a node, and what became of them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ...types import Frame, MaskFrame

log = logging.getLogger(__name__)


class Settled(NamedTuple):
    """A frame that the node is done with, and its masks; None where its step failed."""

    frame: Frame
    masks: MaskFrame | None


class Counts(NamedTuple):
    """What a node has done with frames: `failed` raised in their step, `rejected` were not taken."""

    stepped: int = 0
    failed: int = 0
    rejected: int = 0

    @classmethod
    def of(cls, status: Mapping[str, Any], cameras: Collection[str]) -> Counts:
        """From what the node answers to `status`; those rejected are of any camera."""
        known = [status["cameras"][name] for name in cameras if name in status["cameras"]]
        stepped, failed = (sum(camera[name] for camera in known) for name in ("stepped", "failed"))
        return cls(stepped, failed, status["frames_rejected"])

    @property
    def lost(self) -> int:
        """Frames that have no masks."""
        return self.failed + self.rejected

    def since(self, before: Counts) -> Counts:
        """The difference."""
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


class InFlightFrames:
    """Frames that were sent and are not settled, those that are and were not taken from `settled`, and the counts.

    A node of lossless delivery publishes masks in the order in which the frames were sent, none for one that fails.
    """

    def __init__(self) -> None:
        self.in_flight: deque[Frame] = deque()
        self.settled: deque[Settled] = deque()
        self.sent = self.received = self.lost = 0

    def send(self, frame: Frame) -> None:
        """A frame is on its way."""
        self.in_flight.append(frame)
        self.sent += 1

    def receive(self, masks: MaskFrame) -> int:
        """Masks have come -> how many frames before theirs are thereby known to have none."""
        places = [_place(frame) for frame in self.in_flight]
        if _place(masks) not in places:
            log.warning(
                "camera %s: masks of frame %d, which was not sent, are ignored", masks.camera, masks.seq
            )
            return 0
        failed = places.index(_place(masks))
        self._lose(failed)
        self.received += 1
        self.settled.append(Settled(self.in_flight.popleft(), masks))
        return failed

    def hear(self, done: Counts) -> None:
        """The node has told what it did with these frames: where it is done with all, those without masks failed."""
        if done.stepped == self.received and done.lost >= self.lost + len(self.in_flight):
            self._lose(len(self.in_flight))

    def contradicts(self, done: Counts) -> bool:
        """Whether the node has done less than what came of it tells: it is not the one that got the frames."""
        return done.stepped < self.received or done.lost < self.lost

    def _lose(self, count: int) -> None:
        self.lost += count
        for _ in range(count):
            frame = self.in_flight.popleft()
            log.error("camera %s: frame %d failed in the node; its log says why", frame.camera, frame.seq)
            self.settled.append(Settled(frame, None))


def _place(one: Frame | MaskFrame) -> tuple[str, int, int]:
    return one.camera, one.seq, one.capture_ns
