"""Pairing of the colour and depth images of one camera by their stamps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StampedFrame:
    """A frame of a device, with its stamp in the device's clock `domain`, and when it arrived on the host's clocks."""

    frame: Any
    stamp_ns: int
    domain: str
    arrival_ns: int  # monotonic
    arrival_unix_ns: int


Pair = tuple[StampedFrame, StampedFrame | None]


class FramePairer:
    """Gives every colour image once, in order, with the depth image at most `tolerance_ns` away, else alone.

    Each stream comes in order of time. A colour image waits for depth until depth of a later time comes, or more than
    `patience` colour images wait. Stamps of two domains are not compared; then the times of arrival are.
    """

    def __init__(self, tolerance_ns: int, patience: int = 1) -> None:
        self._tolerance_ns, self._patience = tolerance_ns, patience
        self._colours: deque[StampedFrame] = deque()
        self._depths: deque[StampedFrame] = deque(maxlen=patience + 1)

    def add_colour(self, colour: StampedFrame) -> list[Pair]:
        """Take a colour image; return the pairs that are complete by it."""
        self._colours.append(colour)
        return self._complete(self._patience)

    def add_depth(self, depth: StampedFrame) -> list[Pair]:
        """Take a depth image; return the pairs that are complete by it."""
        self._depths.append(depth)
        return self._complete(self._patience)

    def flush(self) -> list[Pair]:
        """Return what still waits, when nothing more will come."""
        return self._complete(0)

    def _complete(self, patience: int) -> list[Pair]:
        pairs: list[Pair] = []
        while self._colours:
            colour = self._colours[0]
            while self._depths and _gap_ns(colour, self._depths[0]) > self._tolerance_ns:
                self._depths.popleft()
            if self._depths:
                is_pair = -_gap_ns(colour, self._depths[0]) <= self._tolerance_ns
                pairs.append((colour, self._depths.popleft() if is_pair else None))
            elif len(self._colours) > patience:
                pairs.append((colour, None))
            else:
                break
            self._colours.popleft()
        return pairs


def _gap_ns(colour: StampedFrame, depth: StampedFrame) -> int:
    """Return how much later the colour image is."""
    if colour.domain == depth.domain:
        return colour.stamp_ns - depth.stamp_ns
    return colour.arrival_ns - depth.arrival_ns
