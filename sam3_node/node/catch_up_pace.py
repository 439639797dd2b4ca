"""The pace at which objects that were prompted on a past frame catch up, so that live frames wait little for it.

A slice is one frame of one object's way. It is begun if its usual time fits before the next frame is expected. So that
an object arrives although nothing ever fits, each step, which adds a frame to its way, makes slices due that shorten it
by two. A due slice is done in any case, and so is one with which an object arrives: a click on a frame that has just
been succeeded takes one slice.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from math import ceil

from ..perception.catch_up import MAX_STRIDE, CatchUps
from ..perception.pipeline import Pipeline

FRAMES_PER_STEP = 2
"""Frames that the way of an object gets shorter by in each step, while the step adds one."""
USED_SHARE = 0.7
"""Share of the time that steps leave which slices are to take on average: their times vary."""
WINDOW = 15
"""Frames and slices over which times are averaged."""
SLICE_SHARE_OF_STEP = 0.5
"""Time of a slice before one is measured. A slice reads no pixels and encodes nothing."""


class CatchUpPace:
    """Measures steps, slices and the arrival of frames, and says whether a slice may begin. Times are in ns.

    With lossless delivery (`live` False), frames wait for the node, so slices need not fit.
    """

    def __init__(self, live: bool) -> None:
        self._live = live
        self._arrivals_ns: dict[str, int] = {}  # of the newest frame of each camera
        self._intervals_ns: dict[str, deque[float]] = {}
        self._slices_ns: deque[int] = deque(maxlen=WINDOW)
        self._step_ns = 0
        self._due = 0.0
        self._slices = 0

    def note_frame(self, camera: str, received_ns: int, skipped: int) -> None:
        """Note a frame that was taken, and the number of frames between it and the one before."""
        before_ns = self._arrivals_ns.get(camera)
        self._arrivals_ns[camera] = received_ns
        if before_ns is not None:
            intervals = self._intervals_ns.setdefault(camera, deque(maxlen=WINDOW))
            intervals.append(max(0, received_ns - before_ns) / (skipped + 1))

    def note_step(self, catch_ups: CatchUps, step_ns: int, now_ns: int) -> None:
        """Note a step of a camera and the usual time of one, and choose the stride of its objects that begin next."""
        self._step_ns = step_ns
        if catch_ups.behind:
            self._due += FRAMES_PER_STEP / (catch_ups.get_stride() or 1)
        catch_ups.stride = self._choose_stride(now_ns)

    def note_slice(self, took_ns: int) -> None:
        """Note a slice that was done."""
        self._slices_ns.append(took_ns)
        self._due = max(0.0, self._due - 1)
        self._slices += 1

    def forget(self, camera: str) -> None:
        """Forget a camera that is no longer served."""
        self._arrivals_ns.pop(camera, None)
        self._intervals_ns.pop(camera, None)

    @property
    def is_due(self) -> bool:
        """True if a slice is due."""
        return self._due >= 1

    def choose(self, pipelines: Iterable[Pipeline], now_ns: int, frame_waits: bool) -> Pipeline | None:
        """Return the camera whose slice may begin now, if any: cameras take turns.

        `frame_waits` is True if a frame could be stepped instead.
        """
        waiting = [pipeline for pipeline in pipelines if pipeline.catch_ups.behind]
        if not waiting:
            self._due = 0.0
            return None
        pipeline = waiting[self._slices % len(waiting)]
        arrives = pipeline.catch_ups.behind == 1
        if arrives or self.is_due or (not frame_waits and self._fits(now_ns)):
            return pipeline
        return None

    def _fits(self, now_ns: int) -> bool:
        expected_ns = [
            self._arrivals_ns[camera] + interval_ns for camera, interval_ns in self._find_intervals(now_ns)
        ]
        return not self._live or not expected_ns or now_ns + self._slice_ns <= min(expected_ns)

    def _choose_stride(self, now_ns: int) -> int:
        """Return the smallest stride for which the time between two steps suffices, 1 to MAX_STRIDE."""
        rate = sum(1 / max(interval_ns, 1) for _, interval_ns in self._find_intervals(now_ns))
        if not self._live or not rate or not self._slice_ns:
            return 1
        slices = USED_SHARE * (1 / rate - self._step_ns) / self._slice_ns
        return min(MAX_STRIDE, ceil(FRAMES_PER_STEP / max(slices, FRAMES_PER_STEP / MAX_STRIDE)))

    @property
    def _slice_ns(self) -> float:
        return statistics.median(self._slices_ns) if self._slices_ns else SLICE_SHARE_OF_STEP * self._step_ns

    def _find_intervals(self, now_ns: int) -> list[tuple[str, float]]:
        """Return the cameras that send, whose next frame is not overdue by a whole interval, with their intervals."""
        medians = {camera: statistics.median(found) for camera, found in self._intervals_ns.items()}
        return [
            (camera, interval_ns)
            for camera, interval_ns in medians.items()
            if now_ns - self._arrivals_ns[camera] < 2 * interval_ns + self._step_ns
        ]
