"""Places the rows of LeRobot datasets in time, and their pictures in videos, also where a merge has lost this.

An episode's pictures begin at `from_timestamp` of its video, and a row's timestamp counts from there. Converters and
merges leave offsets of which several are the same, and timestamps that all are 0 or go on over episodes. Such a dataset
gives pictures of other rows without an error. Where a video has exactly the pictures of the rows, their order says
which picture belongs to a row, and a note says so. Elsewhere the rows are refused.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ...errors import BagError
from ...types import NANOSECONDS
from .video import count_frames


class VideoPart(NamedTuple):
    """The part of a video file that an episode is in, from `begin_s` to `end_s`; None: it has the file for itself.

    `fault` says why it is not known where the part begins.
    """

    path: Path
    begin_s: float
    end_s: float | None = None
    fault: str | None = None


class PlacedParts(NamedTuple):
    """The parts of one video, and what was put right."""

    parts: list[VideoPart]
    note: str | None = None


def place_parts(parts: Sequence[VideoPart], lengths: Sequence[int], fps: float) -> PlacedParts:
    """Return the parts of one video, each of so many rows, with right beginnings, or with the fault of an overlap."""
    order = sorted(range(len(parts)), key=lambda at: parts[at].begin_s)
    overlapping = set()
    for before, after in pairwise(order):
        if parts[after].begin_s < parts[before].begin_s + (lengths[before] - 0.5) / fps:
            overlapping |= {before, after}
    if not overlapping:
        return PlacedParts(list(parts))

    # a video of exactly these rows has them in their order
    path = parts[0].path
    found = f"expected parts of {path} that follow one another, found from_timestamp of episodes that overlap"
    frames = count_frames(path)
    if frames == sum(lengths):
        placed = []
        done = 0
        for part, length in zip(parts, lengths, strict=True):
            placed.append(part._replace(begin_s=done / fps, end_s=(done + length) / fps))
            done += length
        return PlacedParts(placed, f"{found}; its {frames} pictures are taken in the order of the rows")
    fault = (
        f"{found}, and {frames} pictures for {sum(lengths)} rows, so that it is not known which belong to a row; "
        "correct from_timestamp in meta/episodes"
    )
    return PlacedParts(
        [part._replace(fault=fault) if at in overlapping else part for at, part in enumerate(parts)]
    )


class RowTime(NamedTuple):
    """When a row is: from the beginning of its episode, and from the beginning of the episode's videos, in ns."""

    time_ns: int
    video_ns: int


class RowTimes:
    """The times of an episode's rows, which are asked for in their order.

    `note` says what was wrong with the timestamps, if the order of the rows gave the times.
    """

    def __init__(self, length: int, fps: float, parts: Sequence[VideoPart]) -> None:
        self.note: str | None = None
        self._length = length
        self._fps = fps
        self._parts = parts
        self._half_ns = round(NANOSECONDS / fps / 2)
        self._is_ordered = False
        self._first_ns = 0
        """Timestamp of the first row, where the pictures are those at the timestamps"""
        self._last_ns = -1

    def find(self, index: int, stamp_ns: int) -> RowTime | None:
        """Return the time of the row `index` with this timestamp; None if it would not be after the row before.

        Raises BagError for an episode whose timestamps do not tell which pictures are its own.
        """
        if index == 0 and stamp_ns > self._half_ns:
            self._begin_late(stamp_ns)
        elif stamp_ns - self._first_ns <= self._last_ns and not self._is_ordered and self._has_its_pictures():
            self._follow_order(index, stamp_ns, "a later one than of the row before")
        time_ns = stamp_ns - self._first_ns
        if self._is_ordered:
            time_ns = stamp_ns = round(index / self._fps * NANOSECONDS)
        if time_ns <= self._last_ns:
            return None
        self._last_ns = time_ns
        return RowTime(time_ns, stamp_ns)

    def _begin_late(self, stamp_ns: int) -> None:
        """Choose what the timestamp of the first row means, which is not 0."""
        if self._has_its_pictures():
            self._follow_order(0, stamp_ns, "0")
        elif self._covers(stamp_ns):
            # rows that were cut off at the beginning leave a longer video
            self._first_ns = stamp_ns
            self.note = (
                f"expected 0 for the timestamp of its first row, found {stamp_ns / NANOSECONDS:g} s; pictures are "
                "those at the timestamps"
            )
        else:
            raise BagError(
                f"expected 0 for the timestamp of its first row, found {stamp_ns / NANOSECONDS:g} s, and videos with "
                f"other pictures than its {self._length} rows, so that it is not known which belong to a row; correct "
                "the timestamps in data"
            )

    def _follow_order(self, index: int, stamp_ns: int, expected: str) -> None:
        self._is_ordered = True
        self.note = (
            f"expected {expected} for the timestamp of row {index}, found {stamp_ns / NANOSECONDS:g} s; rows are taken "
            f"to be {1 / self._fps:g} s apart, in their order"
        )

    def _has_its_pictures(self) -> bool:
        """Return True if each video has one picture for each row."""
        return all(abs(self._measure(part) - self._length) < 0.5 for part in self._parts)

    def _covers(self, first_ns: int) -> bool:
        """Return True if each video has pictures up to about the last row, if the first is at this time."""
        rows = first_ns / NANOSECONDS * self._fps + self._length
        return all(rows < self._measure(part) + 2 for part in self._parts)

    def _measure(self, part: VideoPart) -> float:
        """Return the length of a part in pictures."""
        if part.end_s is None:
            return count_frames(part.path)
        return (part.end_s - part.begin_s) * self._fps
