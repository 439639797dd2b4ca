"""Chooses the rows of an episode: one time of each, the frame of each camera, and the robot's state at that time.

A dataset has one rate, and row k has the timestamp k / fps. The rows follow the frames of the slowest camera, so that
each of its frames is in one row. A row is at most one period off its timestamp: where the camera's rate is another, a
frame is repeated or left out now and then. Other cameras give the frame that is nearest in time. Joints are
interpolated between the messages around a row. No value is farther away in time than the caller allows.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import BagError
from ...geometry import interpolate_joints
from ...settings import MAX_DATASET_FPS
from ...types import NANOSECONDS
from .forms import CameraGaps

FOLLOW = 0.1
"""Share of the difference between a row and its frame by which the next row moves. A clock that runs a little faster
or slower than the rate is followed without a repeated frame, and jitter is smoothed. 1 would follow each jitter."""
FPS_MARGIN = 0.02
"""Share by which a measured rate may be above the highest one, for cameras whose clock is a little off."""
LEAST_FPS = 1
"""Lowest rate of a dataset, in rows per second. lerobot stores whole numbers."""
UNEVEN = 2.0
"""Ratio of the mean to the usual time between two frames from which on a camera has no rate: frames come in bursts."""

Times = npt.NDArray[np.int64]
"""Times in ns, ascending."""


class CameraFrames(NamedTuple):
    """The frames of one camera in an episode, by ascending times. `has_masks` tells which of them have masks."""

    times_ns: Times
    has_masks: npt.NDArray[np.bool_]

    def measure_period_ns(self) -> float:
        """Return the usual time between two frames; 0 for fewer than two."""
        # of all frames, not of those with masks: the node steps fewer on a busy machine
        if len(self.times_ns) < 2:
            return 0.0
        return float(statistics.median(np.diff(self.times_ns).tolist()))

    def measure_rate(self) -> float:
        """Return the usual rate in frames per second; 0 for fewer than two frames, and for frames of one time."""
        period_ns = self.measure_period_ns()
        return NANOSECONDS / period_ns if period_ns else 0.0


@dataclass(slots=True)
class CameraRows:
    """The frame of each row, by its index, and what was done about frames that are absent or too many."""

    frames: list[int] = field(default_factory=list)
    repeated: int = 0
    """Rows that have the frame of the row before."""
    left_out: int = 0
    """Frames between the first and the last row that are in no row."""
    max_gap_ms: float = 0.0
    """Longest time between a row and its frame."""
    off: set[int] = field(default_factory=set)
    """Rows whose frame is more than half a period away."""

    def describe(self, fps: float) -> CameraGaps:
        """Return the counts as the dataset stores them, with the rate of the camera in frames per second."""
        return {
            "repeated": self.repeated,
            "left_out": self.left_out,
            "max_gap_ms": round(self.max_gap_ms, 3),
            "fps": round(fps, 3),
        }


class EpisodeRows(NamedTuple):
    """The rows of an episode: their times, the frames of each camera, and how far timestamps are off at most."""

    times_ns: Times
    cameras: dict[str, CameraRows]
    max_stamp_ms: float


def measure_fps(cameras: Mapping[str, CameraFrames]) -> int:
    """Return the rate of the slowest camera, in whole frames per second.

    Raises BagError if no camera has two frames, or if the slowest has no even rate within the bounds of the settings.
    """
    name, slowest = max(cameras.items(), key=lambda item: item[1].measure_period_ns())
    times_ns = slowest.times_ns
    if len(times_ns) < 2:
        raise BagError("expected at least two frames of a camera, found fewer")
    period_ns = slowest.measure_period_ns()
    mean_ns = int(times_ns[-1] - times_ns[0]) / (len(times_ns) - 1)
    is_even = mean_ns <= UNEVEN * period_ns
    if not is_even or period_ns * MAX_DATASET_FPS < NANOSECONDS * (1 - FPS_MARGIN):
        span = f"from {format_time(int(times_ns[0]))} to {format_time(int(times_ns[-1]))}"
        raise BagError(
            f"camera {name}: expected a capture time of each frame, at an even rate of at most {MAX_DATASET_FPS} "
            f"frames per second, found {len(times_ns)} frames of which most are {period_ns / 1e6:g} ms apart, and "
            f"{mean_ns / 1e6:g} ms on average, {span}; correct stamps or clock where the frames are sent, or choose "
            "lerobot.fps"
        )
    return min(max(LEAST_FPS, round(NANOSECONDS / period_ns)), MAX_DATASET_FPS)


def format_time(time_ns: int) -> str:
    """Return a Unix time as ISO 8601 in UTC, to milliseconds."""
    seconds, rest_ns = divmod(time_ns, NANOSECONDS)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest_ns // 10**6:03d}Z"


def choose_rows(cameras: Mapping[str, CameraFrames], fps: int, max_gap_ns: int) -> EpisodeRows:
    """Choose the rows of an episode. Raises BagError where a camera has no frame for longer than `max_gap_ns`."""
    for camera, frames in cameras.items():
        if not len(frames.times_ns):
            raise BagError(f"camera {camera}: expected frames, found none")
    period_ns = NANOSECONDS // fps

    # all cameras have frames from the latest first one to the earliest last one
    half_ns = period_ns // 2
    begin_ns = max(int(frames.times_ns[0]) for frames in cameras.values()) - half_ns
    end_ns = min(int(frames.times_ns[-1]) for frames in cameras.values()) + half_ns
    slowest = max(cameras, key=lambda camera: cameras[camera].measure_period_ns())
    follower = _Follower(slowest, cameras[slowest], fps, max_gap_ns)
    times_ns = follower.follow(begin_ns, end_ns)
    if not len(times_ns):
        raise BagError("expected a time at which all cameras have frames, found none")

    rows = {}
    for camera, frames in cameras.items():
        rows[camera] = _choose_frames(camera, frames, times_ns, period_ns, max_gap_ns)
    stamps_ns = times_ns[0] + np.rint(np.arange(len(times_ns)) * (NANOSECONDS / fps)).astype(np.int64)
    return EpisodeRows(times_ns, rows, float(np.abs(times_ns - stamps_ns).max()) / 1e6)


class _Follower:
    """Chooses the times of rows: those of a camera's frames, and the times between where frames are absent."""

    def __init__(self, camera: str, frames: CameraFrames, fps: int, max_gap_ns: int) -> None:
        self._camera = camera
        self._frames = frames
        self._period_ns = NANOSECONDS / fps
        self._max_gap_ns = max_gap_ns

    def follow(self, begin_ns: int, end_ns: int) -> Times:
        """Return the times from a beginning to an end. Raises BagError for a gap that is not filled."""
        times = self._frames.times_ns
        first = int(np.searchsorted(times, begin_ns))
        if first == len(times):
            return np.zeros(0, np.int64)
        chosen: list[int] = []
        first_ns = float(times[first])
        wanted_ns = first_ns
        last = first - 1
        while wanted_ns <= end_ns:
            found = _find_near(self._frames, wanted_ns, self._period_ns / 2, last + 1)
            time_ns = wanted_ns
            if found is None:
                # a lost frame keeps its row, so that the time of later rows is right
                self._check_gap(wanted_ns)
            else:
                last = found
                time_ns = float(times[found])
            chosen.append(round(time_ns))
            # the clock of a camera is followed up to half a period, so that timestamps are true
            stamp_ns = first_ns + len(chosen) * self._period_ns
            wanted_ns += self._period_ns + FOLLOW * (time_ns - wanted_ns)
            half_ns = self._period_ns / 2
            wanted_ns = min(max(wanted_ns, stamp_ns - half_ns), stamp_ns + half_ns)
        return np.array(chosen, np.int64)

    def _check_gap(self, time_ns: float) -> None:
        """Raise BagError if the frames around a time are farther apart than rows may be from their frames."""
        times = self._frames.times_ns
        after = min(int(np.searchsorted(times, time_ns)), len(times) - 1)
        before_ns = int(times[max(after - 1, 0)])
        after_ns = int(times[after])
        if after_ns - before_ns > 2 * self._max_gap_ns + self._period_ns:
            raise BagError(
                f"camera {self._camera}: expected a frame within {self._max_gap_ns / NANOSECONDS:g} s of each row, "
                f"found none from {format_time(before_ns)} to {format_time(after_ns)}, "
                f"{(after_ns - before_ns) / NANOSECONDS:.2f} s; correct the camera's clock if it has jumped, or raise "
                "lerobot.max_gap_s to repeat a frame for longer"
            )


def _choose_frames(
    camera: str, frames: CameraFrames, times_ns: Times, period_ns: int, max_gap_ns: int
) -> CameraRows:
    """Choose the frame of each row: one with masks within half a period if there is one, else the nearest."""
    rows = CameraRows()
    earliest = 0
    for row, time_ns in enumerate(times_ns.tolist()):
        found = _find_near(frames, time_ns, period_ns / 2, earliest)
        if found is None:
            found = _find_nearest(frames.times_ns, time_ns)
        gap_ns = abs(int(frames.times_ns[found]) - time_ns)
        if gap_ns > max_gap_ns:
            raise BagError(
                f"camera {camera}: expected a frame within {max_gap_ns / NANOSECONDS:g} s of row {row}, found the "
                f"nearest {gap_ns / NANOSECONDS:.2f} s away; raise lerobot.max_gap_s to repeat a frame for longer"
            )
        if gap_ns > period_ns / 2:
            rows.off.add(row)
        if rows.frames and found == rows.frames[-1]:
            rows.repeated += 1
        rows.frames.append(found)
        rows.max_gap_ms = max(rows.max_gap_ms, gap_ns / 1e6)
        earliest = max(earliest, found + 1)
    rows.left_out = rows.frames[-1] - rows.frames[0] + 1 - len(set(rows.frames))
    return rows


def _find_near(frames: CameraFrames, time_ns: float, within_ns: float, earliest: int) -> int | None:
    """Return the nearest frame within a distance, one with masks before all others; None if there is none.

    Frames before `earliest` are in other rows.
    """
    first = max(int(np.searchsorted(frames.times_ns, time_ns - within_ns)), earliest)
    end = int(np.searchsorted(frames.times_ns, time_ns + within_ns, side="right"))
    if first >= end:
        return None
    candidates = range(first, end)
    return min(
        candidates,
        key=lambda index: (not frames.has_masks[index], abs(float(frames.times_ns[index]) - time_ns)),
    )


def _find_nearest(times_ns: Times, time_ns: int) -> int:
    after = int(np.searchsorted(times_ns, time_ns))
    candidates = [index for index in (after - 1, after) if 0 <= index < len(times_ns)]
    return min(candidates, key=lambda index: abs(int(times_ns[index]) - time_ns))


class SampledValues(NamedTuple):
    """Values at the times of rows, [rows, names], and the longest time between a row and a message."""

    values: npt.NDArray[np.float32]
    max_gap_ms: float


class NamedSeries:
    """Numbers by their names over time: joints, or what moves them. Messages may give a part of the names in turn."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._times: dict[str, list[int]] = {}
        self._values: dict[str, list[float]] = {}

    @property
    def names(self) -> list[str]:
        """All names, in the order in which they first came."""
        return list(self._times)

    def add(self, time_ns: int, values: Iterable[tuple[str, float]]) -> None:
        """Add the values of one message."""
        for name, value in values:
            self._times.setdefault(name, []).append(time_ns)
            self._values.setdefault(name, []).append(value)

    def interpolate(self, times_ns: Times, names: Sequence[str], max_gap_ns: int) -> SampledValues:
        """Return the values at these times, between the messages around each.

        Raises BagError where the nearest message is farther away than `max_gap_ns`.
        """
        columns = []
        gaps = [0.0]
        for name in names:
            stamps, values = self._sort(name)
            after = np.clip(np.searchsorted(stamps, times_ns), 1, max(len(stamps) - 1, 1))
            before = after - 1
            after = np.minimum(after, len(stamps) - 1)
            distances = np.minimum(np.abs(stamps[before] - times_ns), np.abs(stamps[after] - times_ns))
            gaps.append(self._check_gaps(name, stamps, times_ns, distances, max_gap_ns))
            passed_ns = np.clip(times_ns, stamps[before], stamps[after]) - stamps[before]
            share = passed_ns / np.maximum(stamps[after] - stamps[before], 1)
            columns.append(interpolate_joints(values[before], values[after], share))
        return SampledValues(np.stack(columns, axis=1).astype(np.float32), max(gaps))

    def hold(self, times_ns: Times, names: Sequence[str], max_gap_ns: int) -> SampledValues:
        """Return the last values before these times.

        Raises BagError where the last message is older than `max_gap_ns`.
        """
        columns = []
        gaps = [0.0]
        for name in names:
            stamps, values = self._sort(name)
            last = np.searchsorted(stamps, times_ns) - 1
            distances = np.where(last < 0, max_gap_ns + 1, times_ns - stamps[np.maximum(last, 0)])
            gaps.append(self._check_gaps(name, stamps, times_ns, distances, max_gap_ns))
            columns.append(values[last])
        return SampledValues(np.stack(columns, axis=1).astype(np.float32), max(gaps))

    def _sort(self, name: str) -> tuple[Times, npt.NDArray[np.float64]]:
        """Return times and values of a name, by ascending times."""
        stamps = np.array(self._times[name], np.int64)
        order = np.argsort(stamps, kind="stable")
        return stamps[order], np.array(self._values[name], np.float64)[order]

    def _check_gaps(
        self, name: str, stamps: Times, times_ns: Times, distances_ns: Times, max_gap_ns: int
    ) -> float:
        row = int(distances_ns.argmax())
        if distances_ns[row] <= max_gap_ns:
            return float(distances_ns[row]) / 1e6
        # values that come often enough, but begin or end at another time than the rows, are of another clock
        often = len(stamps) > 1 and float(np.median(np.diff(stamps))) <= max_gap_ns
        late_s = (int(stamps[0]) - int(times_ns[0])) / NANOSECONDS
        early_s = (int(times_ns[-1]) - int(stamps[-1])) / NANOSECONDS
        advice = "send it more often, or raise lerobot.max_gap_s"
        if often and max(late_s, early_s) > max_gap_ns / NANOSECONDS:
            advice = (
                f"its values begin {late_s:+.2f} s after the rows and end {early_s:+.2f} s before them: if the robot "
                "was sent all the time, its clock differs from the camera's; synchronise the clocks (chrony, PTP)"
            )
        raise BagError(
            f"{self._what}: expected a value of {name:.80} within {max_gap_ns / NANOSECONDS:g} s of row {row}, "
            f"found none; {advice}"
        )
