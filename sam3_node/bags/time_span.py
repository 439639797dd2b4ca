"""Spans of time in a recording, given in seconds from its first frame or in Unix time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from datetime import datetime
from typing import NamedTuple

from ..errors import BagError
from ..types import NANOSECONDS, Depth
from .pairing import PATIENCE_NS, UNIX_SINCE_NS
from .samples import Colour, Sample

DISORDER_NS = 10 * NANOSECONDS
"""Samples may come this much out of order: reading ends when all cameras are this far behind the end of the span."""


class TimeSpan(NamedTuple):
    """A span of the times at which messages were recorded, in ns: from `begin_ns` to before `end_ns`; None is open.

    Values before UNIX_SINCE_NS count from the first frame of the recording, later ones are Unix time.
    """

    begin_ns: int | None = None
    end_ns: int | None = None

    @property
    def is_whole(self) -> bool:
        """True if the span has no limits."""
        return self == TimeSpan()

    def resolve(self, first_ns: int) -> TimeSpan:
        """Return the span in the recording's own time, in which its first frame has the time `first_ns`.

        Raises BagError for a limit in Unix time if the recording's clock is none.
        """
        limits = [None if limit is None else _resolve(limit, first_ns) for limit in self]
        return TimeSpan(*limits)

    def contains(self, time_ns: int, margin_ns: int = 0) -> bool:
        """Return True for a time in the resolved span, widened by a margin at both ends."""
        begins = self.begin_ns is None or time_ns >= self.begin_ns - margin_ns
        return begins and (self.end_ns is None or time_ns < self.end_ns + margin_ns)

    def overlaps(self, first_ns: int, last_ns: int) -> bool:
        """Return True if a time from `first_ns` to `last_ns`, both included, may be in the resolved span."""
        begins = self.begin_ns is None or last_ns >= self.begin_ns
        return begins and (self.end_ns is None or first_ns < self.end_ns)


def _resolve(limit_ns: int, first_ns: int) -> int:
    if limit_ns < UNIX_SINCE_NS:
        return first_ns + limit_ns
    if first_ns < UNIX_SINCE_NS:
        raise BagError(
            "expected seconds from the start of the recording, found a date: the times in this recording count from "
            "its start"
        )
    return limit_ns


def parse_time(text: str) -> int:
    """Parse seconds from the start ("12.5"), a date of RFC 3339 with its offset, or Unix time in ns, to ns.

    Raises ValueError that says what was expected.
    """
    if text.isdecimal() and int(text) >= UNIX_SINCE_NS:
        return int(text)
    try:
        seconds = float(text)
    except ValueError:
        return _parse_date(text)
    if not 0 <= seconds < UNIX_SINCE_NS / NANOSECONDS or not math.isfinite(seconds):
        raise ValueError(f"expected seconds from the start, 0 or more, found {text!r:.60}")
    return round(seconds * NANOSECONDS)


def _parse_date(text: str) -> int:
    expected = "expected seconds from the start such as 12.5, a date such as 2026-05-01T12:00:00Z, or Unix time in ns"
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{expected}; found {text!r:.60}") from None
    if date.tzinfo is None:
        raise ValueError(f"{expected}; found {text!r:.60}, which has no offset such as Z or +02:00")
    return round(date.replace(microsecond=0).timestamp()) * NANOSECONDS + date.microsecond * 1000


def cut_samples(
    samples: Iterable[Sample], span: TimeSpan, colour_topics: Collection[str]
) -> Iterator[Sample]:
    """Yield the samples in a resolved span, colour images with their number in the whole recording.

    Depth that may belong to a frame of the span, and all intrinsics, are kept, too.
    """
    numbers: Counter[str] = Counter()
    running = set(colour_topics)
    for sample in samples:
        if isinstance(sample.payload, Colour):
            sample = sample._replace(number=numbers[sample.topic] if sample.number is None else sample.number)
            numbers[sample.topic] += 1
        if span.end_ns is not None and sample.logged_ns >= span.end_ns + DISORDER_NS:
            running.discard(sample.topic)
            if not running:
                return
        margin_ns = PATIENCE_NS if isinstance(sample.payload, Depth) else 0
        if not isinstance(sample.payload, Colour | Depth) or span.contains(sample.logged_ns, margin_ns):
            yield sample
