"""Times of capture from the stamps of a camera server, whose clock may be another than Unix time."""

from __future__ import annotations

import logging

from ...types import NANOSECONDS
from ..clock_fit import ClockFit

MAX_LATE_S = 10.0
"""A stamp this long before the arrival is still taken for a Unix time: of an old image, or of a clock that is off."""
MAX_EARLY_S = 0.05
"""The same for a stamp after the arrival; the arrival is used then."""
OLD_S = 1.0
"""Lateness of a stamp from which a warning names it."""
_MAX_STAMP_S = 2**62 / NANOSECONDS

_log = logging.getLogger(__name__)


class StampReader:
    """Maps the stamps of one camera of a server to the Unix time of the capture.

    A stamp of Unix seconds is kept. Of another clock (a monotonic one, one that is off by more than MAX_LATE_S), the
    arrival is used, less the delay beyond the shortest one, see ClockFit. An image without a usable stamp has the time
    of its arrival. The times always increase, also where the stamps repeat or go back. `name` is for warnings, of which
    each is logged once.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._fit = ClockFit()
        self._last_ns = 0
        self._warned: set[str] = set()

    def read(self, stamp_s: float | None, arrival_ns: int) -> int:
        """Return the time of the capture. `arrival_ns` is a Unix time."""
        capture_ns = arrival_ns if stamp_s is None else self._map(stamp_s, arrival_ns)
        if capture_ns <= self._last_ns:
            capture_ns = max(arrival_ns, self._last_ns + 1)
        self._last_ns = capture_ns
        return capture_ns

    def _map(self, stamp_s: float, arrival_ns: int) -> int:
        if not 0 < stamp_s < _MAX_STAMP_S:
            return arrival_ns
        stamp_ns = round(stamp_s * NANOSECONDS)
        late_s = (arrival_ns - stamp_ns) / NANOSECONDS
        if -MAX_EARLY_S <= late_s <= MAX_LATE_S:
            if late_s > OLD_S:
                self._warn(
                    "old",
                    f"its stamps are {late_s:.1f} s before the arrival: the images are old, or a clock is off; set the "
                    "clocks of both machines, such as with chrony",
                )
            return min(stamp_ns, arrival_ns)
        self._warn(
            "other",
            f"expected stamps in Unix seconds, found {stamp_s:.3f} at {arrival_ns / NANOSECONDS:.3f}; the server's"
            " clock is another, so the capture is taken as the arrival less the delay beyond the shortest one",
        )
        return arrival_ns - self._fit.delay_ns(stamp_ns, arrival_ns)

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("camera %s: %s", self._name, text)
