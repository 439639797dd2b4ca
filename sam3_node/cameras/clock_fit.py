"""Maps a device's clock to the host's clock, and estimates the drift between them."""

from collections import deque

import numpy as np

from ..types import NANOSECONDS

WINDOW_S = 60
"""Seconds of history that the estimate uses."""

# seconds of history from which on the drift is estimated
_MIN_BINS = 5
# largest drift: real clocks differ by less than 200 ppm
_MAX_DRIFT = 1e-3
# nanoseconds before the time of the fit: an image that comes earlier follows a jump of a clock
_MAX_EARLY_NS = NANOSECONDS
# nanoseconds after the time of the fit, likewise. It is longer, because images may be delayed
_MAX_LATE_NS = 10 * NANOSECONDS
# images after a jump until the clock is fitted anew
_MAX_JUMPS = 3


class ClockFit:
    """Estimates how long before its arrival an image was stamped, from the stamps of a device's own clock.

    An image arrives after its stamp by a delay. A one-way measurement cannot see the shortest delay, only what is
    beyond it. The fit is a line through the shortest delay of each second by Theil-Sen (P. K. Sen, 1968). Seconds of
    congestion or wrong stamps cannot bend it while they are less than 29 %. A clock that jumps is fitted anew after
    three images.
    """

    def __init__(self) -> None:
        self._jumps = 0
        # the first pair of times, from which x (the device's time) and y (the delay) count, and the last x
        self._stamp_ns = 0
        self._arrival_ns = 0
        self._last_x = 0
        # the line, and the points that it is fitted to: the shortest delay of each second
        self._slope = 0.0
        self._offset = 0.0
        self._minima: deque[tuple[int, int]] = deque(maxlen=WINDOW_S)

    @property
    def drift_ppm(self) -> float:
        """Gain of the host's clock on the device's, in parts per million; 0 before five seconds have passed."""
        return self._slope * 1e6

    def delay_ns(self, stamp_ns: int, arrival_ns: int) -> int:
        """Return the delay of an image, beyond the shortest one. Never negative; 0 at a jump of a clock.

        `stamp_ns` is a time of the device's clock, `arrival_ns` one of the host's monotonic clock.
        """
        if not self._minima:
            self._restart(stamp_ns, arrival_ns)
        x = stamp_ns - self._stamp_ns
        y = (arrival_ns - self._arrival_ns) - (stamp_ns - self._stamp_ns)
        late = y - self._offset - self._slope * x if self._minima else 0.0

        # a stamp that goes back, or is far off: one may be wrong, several are a jump
        if not -_MAX_EARLY_NS <= late <= _MAX_LATE_NS or x < self._last_x:
            self._jumps += 1
            if self._jumps < _MAX_JUMPS:
                return 0
            self._restart(stamp_ns, arrival_ns)
            x = 0
            y = 0
        self._jumps = 0
        self._last_x = x
        self._add(x, y)
        return max(0, round(y - self._offset - self._slope * x))

    def _restart(self, stamp_ns: int, arrival_ns: int) -> None:
        self._stamp_ns = stamp_ns
        self._arrival_ns = arrival_ns
        self._last_x = 0
        self._slope = 0.0
        self._offset = 0.0
        self._minima.clear()

    def _add(self, x: int, y: int) -> None:
        """Take a pair, and fit anew at each new second."""
        second = x // NANOSECONDS
        if self._minima and self._minima[-1][0] // NANOSECONDS == second:
            self._minima[-1] = min(self._minima[-1], (x, y), key=lambda point: point[1])
        else:
            if len(self._minima) >= _MIN_BINS:
                self._fit()
            self._minima.append((x, y))
        if len(self._minima) < _MIN_BINS:
            self._offset = min(y for _, y in self._minima)

    def _fit(self) -> None:
        x, y = np.array(self._minima, np.float64).T
        earlier, later = np.triu_indices(len(x), 1)
        slope = float(np.median((y[later] - y[earlier]) / (x[later] - x[earlier])))
        self._slope = min(max(slope, -_MAX_DRIFT), _MAX_DRIFT)
        self._offset = float(np.median(y - self._slope * x))
