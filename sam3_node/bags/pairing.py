"""Pairs samples to Frames: each colour image with the depth image of the same moment.

`TimeSpan` is a part of a recording, given in seconds from its first frame or in Unix time.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from statistics import median, median_low
from typing import Any, NamedTuple

import numpy as np

from ..errors import BagError
from ..types import NANOSECONDS, Depth, Frame, Intrinsics
from .discovery import Camera
from .samples import UNIX_SINCE_NS, CameraInfo, Colour, MillimetreDepth, ReadReport, Sample, find_clock

TOLERANCE_NS = 20_000_000
"""Lower limit of the tolerance between the stamps of a colour image and its depth: 0.6 of a period at 30 Hz."""

MAX_TOLERANCE_NS = 150_000_000
"""Upper limit of this tolerance: 0.6 of a period at 4 Hz. With more, a moving object has left its place in depth."""

PATIENCE_NS = 2_000_000_000
"""Time that a colour image waits for its depth, by the log times of the recording."""

INFO_PATIENCE_NS = 500_000_000
"""Time that a colour image with its depth waits for intrinsics. A camera that was never calibrated has none."""

MAX_WAITING = 64
"""Number of colour images that wait per camera, and of depth images that are kept."""

MAX_BYTES = 256 << 20
"""Size of all colour images that wait, and of the depth images that are kept per camera."""

LATE_NS = 250_000_000
"""Difference between the recording delays of colour and depth above which a note reports it."""

SILENCE_NS = 1_000_000_000
"""Distance from a colour image to the nearest depth above which depth has a gap."""

DISORDER_NS = 10 * NANOSECONDS
"""Time by which samples may be out of order. Reading ends when all cameras are this far past the end of the span."""

# a gap of depth lasts at least so many of its periods
_GAP_PERIODS = 3
# gaps are reported as a loss if one of so many frames lies in one
_GAP_SHARE = 20
# number of the last samples that show a topic's period and clock
_RECENT = 16
# share of a period that depth may be away from its colour image, as numerator and denominator
_TOLERANCE_SHARE = (3, 5)


class _Times:
    """The stamps of a topic's last samples, and their distances from the times of recording."""

    def __init__(self) -> None:
        self.count = 0
        self.stamps_ns: deque[int] = deque(maxlen=_RECENT)
        self._offsets_ns: deque[int] = deque(maxlen=_RECENT)

    def add(self, sample: Sample) -> None:
        self.count += 1
        self.stamps_ns.append(sample.stamp_ns)
        self._offsets_ns.append(sample.stamp_ns - sample.logged_ns)

    @property
    def period_ns(self) -> int | None:
        """Median distance of two stamps; None before the second one."""
        steps = [after - before for before, after in pairwise(sorted(self.stamps_ns)) if after > before]
        if not steps:
            return None
        return median_low(steps)

    @property
    def offset_ns(self) -> float:
        """Median distance from the times of recording."""
        return median(self._offsets_ns)


@dataclass(slots=True)
class _CameraState:
    """The state of one camera so far. `settled` counts its frames, `paired` those with depth."""

    camera: Camera
    seq: int = 0
    info: CameraInfo | None = None
    depths: deque[Sample] = field(default_factory=lambda: deque(maxlen=MAX_WAITING))
    colour_times: _Times = field(default_factory=_Times)
    depth_times: _Times = field(default_factory=_Times)
    settled: int = 0
    paired: int = 0
    nearest_ns: int | None = None
    first_depth_ns: int | None = None
    in_gaps: int = 0
    """Number of frames without depth because depth had stopped."""
    before_depth: int = 0
    """Number of frames without depth because it had not begun."""
    is_metric: bool | None = None
    """True if the first depth with values was in its format's unit, None before it."""

    @property
    def lateness_ns(self) -> float:
        """Time by which depth is recorded later than colour of the same stamp, or by which its clock is behind."""
        return self.colour_times.offset_ns - self.depth_times.offset_ns

    @property
    def gap_ns(self) -> int:
        """Least distance from a colour image to the next depth that counts as a gap."""
        return max(SILENCE_NS, _GAP_PERIODS * (self.depth_times.period_ns or 0))

    @property
    def tolerance_ns(self) -> int:
        """Maximum distance of depth: 0.6 of the shorter period, so that no depth serves many images."""
        colour_ns = self.colour_times.period_ns
        depth_ns = self.depth_times.period_ns
        if colour_ns is None or depth_ns is None:
            return TOLERANCE_NS
        numerator, denominator = _TOLERANCE_SHARE
        share = min(colour_ns, depth_ns) * numerator // denominator
        return min(max(TOLERANCE_NS, share), MAX_TOLERANCE_NS)


@dataclass(slots=True)
class _WaitingImage:
    """A colour image that waits for its own depth, or for an earlier image that waits."""

    state: _CameraState
    seq: int
    stamp_ns: int
    logged_ns: int
    colour: Colour
    depth: Depth | None = None
    has_paired: bool = False
    settled: bool = False


class Pairing:
    """Makes Frames from the samples of cameras.

    A frame's `seq` is the sample's number, or counts from 0 for each camera. A colour image takes the depth image with
    the nearest stamp, recorded before or after it, and the latest intrinsics. The stamps may differ by 0.6 of the
    shorter period of both topics, within TOLERANCE_NS and MAX_TOLERANCE_NS. The image waits for them in bounded memory,
    and goes without them if they come later than `patience_ns`. Frames come in the order in which their colour images
    were recorded.
    """

    def __init__(self, cameras: Sequence[Camera], patience_ns: int = PATIENCE_NS) -> None:
        self._patience_ns = patience_ns
        self._states = [_CameraState(camera) for camera in cameras]
        self._queue: deque[_WaitingImage] = deque()
        self._report = ReadReport()

    def add(self, sample: Sample) -> list[Frame]:
        """Take one sample. Return the frames that are complete now."""
        for state in self._states:
            self._take(state, sample)

        # an image whose depth is certain still waits for intrinsics, if its camera has a topic of them
        for waiting in self._queue:
            if not waiting.settled and _is_ready(waiting):
                _pair(waiting)
                waiting.settled = waiting.state.camera.intrinsics is None or waiting.state.info is not None

        # the overdue ones take what has come
        for waiting in list(self._overdue(sample.logged_ns)):
            _settle(waiting)
        return self._settled()

    def flush(self) -> list[Frame]:
        """Return the frames that still wait, with the depth and intrinsics that have come."""
        for waiting in self._queue:
            _settle(waiting)
        return self._settled()

    def describe_losses(self, minimum: int = 1) -> str | None:
        """Describe what was skipped so far: intrinsics and depth that fit no frame. None if nothing was.

        Depth that reaches few frames, or stops, counts as soon as there are `minimum` frames and depth images.
        """
        depths = (_describe_depth(state, minimum, self._patience_ns) for state in self._states)
        return ReadReport(self._report.text(), *depths).text()

    def forget_losses(self) -> None:
        """Count losses anew. What has been seen of topics is kept, so that frames go on as before."""
        self._report = ReadReport()
        for state in self._states:
            state.settled = 0
            state.paired = 0
            state.in_gaps = 0
            state.before_depth = 0
            state.depth_times.count = 0

    def notes(self) -> list[str]:
        """Return what a reader of the frames should know, though nothing is missing."""
        notes = []
        for state in self._states:
            if not state.paired:
                continue
            if state.before_depth:
                notes.append(
                    f"{state.camera.name}: {state.before_depth} of {state.settled} frames have no depth, because it "
                    "began later"
                )
            # stamps pair as usual then, but a reader may doubt them
            late_ns = state.lateness_ns
            if abs(late_ns) > LATE_NS:
                first = "colour"
                last = "depth"
                if late_ns < 0:
                    first, last = last, first
                notes.append(
                    f"{state.camera.name}: {last} was recorded {_ms(round(abs(late_ns)))} later than {first} of its "
                    "stamp: its writer was slow, or it has another clock, and then depth is of another moment"
                )
        return notes

    def _overdue(self, now_ns: int) -> Iterator[_WaitingImage]:
        """Yield the images that have waited too long, and the oldest ones while too many wait."""
        # what is missing below 0 must go, the oldest first
        spare = MAX_WAITING * len(self._states) - len(self._queue)
        spare_bytes = MAX_BYTES - sum(_size(waiting.colour) for waiting in self._queue)
        for index, waiting in enumerate(self._queue):
            patience_ns = self._patience_ns
            if waiting.has_paired:
                patience_ns = min(patience_ns, INFO_PATIENCE_NS)
            if now_ns - waiting.logged_ns > patience_ns or index + spare < 0 or spare_bytes < 0:
                yield waiting
            spare_bytes += _size(waiting.colour)

    def _take(self, state: _CameraState, sample: Sample) -> None:
        # a depth topic may turn out to hold colour: reported, and not paired
        topic, stamp_ns, logged_ns, payload, number = sample
        camera = state.camera
        if isinstance(payload, Colour) and topic == camera.colour:
            seq = number if number is not None else state.seq
            self._queue.append(_WaitingImage(state, seq, stamp_ns, logged_ns, payload))
            state.seq = seq + 1
            state.colour_times.add(sample)
            self._note_distance(state, stamp_ns, (depth.stamp_ns for depth in state.depths))
        elif isinstance(payload, Depth) and topic == camera.depth:
            self._take_depth(state, sample, payload)
        elif isinstance(payload, Colour) and topic == camera.depth:
            self._report.skip(topic, f"expected depth, found a colour image in {payload.encoding}")
        elif isinstance(payload, CameraInfo) and topic == camera.intrinsics:
            state.info = payload

    def _take_depth(self, state: _CameraState, sample: Sample, depth: Depth) -> None:
        # values above 100 m are millimetres if all are so; after values in metres they are noise
        is_guess = isinstance(depth, MillimetreDepth)
        if state.is_metric is None and _has_values(depth):
            state.is_metric = not is_guess
        if is_guess and state.is_metric:
            self._report.skip(sample.topic, "values above 100 m after others in metres")
            return
        if is_guess:
            self._report.add(
                f"{sample.topic}: expected metres, as 32FC1 has in ROS (REP 118), found values above 100 alone: they "
                "are read as millimetres"
            )

        if state.first_depth_ns is None:
            state.first_depth_ns = sample.stamp_ns
        state.depths.append(sample)
        state.depth_times.add(sample)
        # the oldest depth goes where images are large
        while len(state.depths) > 1 and sum(_size(depth.payload) for depth in state.depths) > MAX_BYTES:
            state.depths.popleft()
        self._note_distance(state, sample.stamp_ns, state.colour_times.stamps_ns)

    def _note_distance(self, state: _CameraState, stamp_ns: int, others_ns: Iterable[int]) -> None:
        """Keep the smallest distance between colour and depth, which tells why none was paired."""
        if state.paired:
            return
        for other_ns in others_ns:
            distance_ns = abs(stamp_ns - other_ns)
            if state.nearest_ns is None or distance_ns < state.nearest_ns:
                state.nearest_ns = distance_ns

    def _settled(self) -> list[Frame]:
        """Take the settled images from the queue, as frames. One that still waits holds those behind it."""
        frames = []
        while self._queue and self._queue[0].settled:
            waiting = self._queue.popleft()
            waiting.state.settled += 1
            waiting.state.paired += waiting.depth is not None
            _count_gap(waiting)
            frames.append(_frame(waiting, self._find_intrinsics(waiting.state, waiting.colour)))
        return frames

    def _find_intrinsics(self, state: _CameraState, colour: Colour) -> Intrinsics | None:
        """Return the latest intrinsics for an image; None, with a note, if they are of another size."""
        # intrinsics that do not fit cost the frame nothing else
        if state.info is None:
            return None
        try:
            return state.info.fit((colour.width, colour.height), state.camera.rectified)
        except BagError as error:
            self._report.skip(f"the intrinsics of {state.camera.name}", error)
            return None


def _is_ready(waiting: _WaitingImage) -> bool:
    """Return True if no later sample can fit better."""
    state = waiting.state
    if waiting.has_paired or state.camera.depth is None:
        return True
    # depth is taken to come in the order of its stamps: what follows a later one is farther away
    if not state.depths or state.depths[-1].stamp_ns < waiting.stamp_ns:
        return False
    # the first images wait until the periods are known, if that matters
    has_periods = state.colour_times.period_ns is not None and state.depth_times.period_ns is not None
    return has_periods or _distance(_nearest(waiting), waiting) <= TOLERANCE_NS


def _settle(waiting: _WaitingImage) -> None:
    """End the waiting."""
    _pair(waiting)
    waiting.settled = True


def _pair(waiting: _WaitingImage) -> None:
    """Assign the nearest depth within the tolerance, once."""
    if waiting.has_paired:
        return
    waiting.has_paired = True
    nearest = _nearest(waiting)
    if nearest is not None and _distance(nearest, waiting) <= waiting.state.tolerance_ns:
        assert isinstance(nearest.payload, Depth)
        waiting.depth = nearest.payload


def _nearest(waiting: _WaitingImage) -> Sample | None:
    return min(waiting.state.depths, key=lambda depth: _distance(depth, waiting), default=None)


def _count_gap(waiting: _WaitingImage) -> None:
    """Count an image without depth that is far from any depth."""
    # depth that was near but did not pair is a matter of tolerance, not of a gap
    state = waiting.state
    nearest = _nearest(waiting)
    if state.camera.depth is None or waiting.depth is not None:
        return
    if state.first_depth_ns is None or waiting.stamp_ns < state.first_depth_ns - state.gap_ns:
        state.before_depth += 1
    elif nearest is None or abs(nearest.stamp_ns - waiting.stamp_ns) > state.gap_ns:
        state.in_gaps += 1


def _distance(depth: Sample | None, waiting: _WaitingImage) -> int:
    if depth is None:
        return MAX_TOLERANCE_NS + 1
    return abs(depth.stamp_ns - waiting.stamp_ns)


def _size(image: Any) -> int:
    return memoryview(image.data).nbytes


def _has_values(depth: Depth) -> bool:
    """Return True if any value is known. Compressed depth is taken to have some, without decoding it."""
    return depth.encoding != "z16" or bool(np.frombuffer(depth.data, np.uint8).any())


def _describe_depth(state: _CameraState, minimum: int, patience_ns: int) -> str | None:
    """Say that depth reached no frame, or less than half of the frames that it could reach, and why."""
    arrived = state.depth_times.count
    possible = min(state.settled, arrived)
    if possible < minimum:
        return None

    # most frames have depth: the rest matters where depth has stopped
    if 2 * state.paired >= possible:
        if state.in_gaps < max(minimum, state.settled / _GAP_SHARE):
            return None
        return (
            f"{state.camera.depth}: {state.in_gaps} of {state.settled} frames have no depth, because it stopped: none "
            f"came within {_ms(SILENCE_NS)} of them"
        )

    # few or none have it: the nearest distance tells whether depth is late or has another clock
    tolerance_ns = state.tolerance_ns
    text = f"{state.camera.depth}: {arrived} depth images came, {state.paired} of {state.settled} frames have one"
    if state.nearest_ns is None or state.paired:
        return f"{text}: the others were more than {_ms(tolerance_ns)} away, or came more than {_ms(patience_ns)} later"
    if state.nearest_ns <= tolerance_ns:
        return f"{text}: expected depth at most {_ms(patience_ns)} after its colour image, found it recorded later"
    text += f": expected one within {_ms(tolerance_ns)} of a colour image, the nearest is {_ms(state.nearest_ns)} away"
    late_ns = state.lateness_ns
    if abs(late_ns) <= tolerance_ns:
        return text
    side = "behind" if late_ns > 0 else "ahead of"
    return (
        f"{text}; by the times of recording its clock is about {abs(late_ns) / NANOSECONDS:.3f} s {side} "
        "the clock of colour: images of two clocks are not paired, give both the same clock"
    )


def _ms(time_ns: int) -> str:
    if time_ns < NANOSECONDS:
        return f"{time_ns / 1e6:g} ms"
    return f"{time_ns / NANOSECONDS:.3f} s"


def _frame(waiting: _WaitingImage, intrinsics: Intrinsics | None) -> Frame:
    camera = waiting.state.camera
    colour = waiting.colour
    depth = waiting.depth
    # depth of another size cannot be registered to colour, whatever the topic's name says
    if depth is not None:
        same_size = (depth.width, depth.height) == (colour.width, colour.height)
        aligned = same_size and (camera.aligned or depth.aligned)
        depth = Depth(depth.width, depth.height, depth.encoding, depth.scale_m, aligned, depth.data)
    return Frame(
        camera=camera.name,
        seq=waiting.seq,
        capture_ns=waiting.stamp_ns,
        width=colour.width,
        height=colour.height,
        encoding=colour.encoding,
        colour=colour.data,
        clock=find_clock(waiting.stamp_ns),
        depth=depth,
        intrinsics=intrinsics,
    )


class TimeSpan(NamedTuple):
    """A span of recording times in ns, from `begin_ns` to before `end_ns`. None leaves an end open.

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
        return self.overlaps(time_ns - margin_ns, time_ns + margin_ns)

    def overlaps(self, first_ns: int, last_ns: int) -> bool:
        """Return True if a time from `first_ns` to `last_ns`, both included, may be in the resolved span."""
        begins = self.begin_ns is None or last_ns >= self.begin_ns
        return begins and (self.end_ns is None or first_ns < self.end_ns)


def _resolve(limit_ns: int, first_ns: int) -> int:
    # seconds from the start count in any clock, Unix time only in its own
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
    # as a number of seconds, Unix time in ns would lose digits
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
    # a float has no digits for microseconds since 1970
    return round(date.replace(microsecond=0).timestamp()) * NANOSECONDS + date.microsecond * 1000


def cut_samples(
    samples: Iterable[Sample], span: TimeSpan, colour_topics: Collection[str]
) -> Iterator[Sample]:
    """Yield the samples in a resolved span, colour images with their number in the whole recording.

    Depth that may belong to a frame of the span is also kept, and so are all intrinsics.
    """
    numbers: Counter[str] = Counter()
    running = set(colour_topics)
    for sample in samples:
        # number images before the cut, so that a frame has the same number in any span
        if isinstance(sample.payload, Colour):
            if sample.number is None:
                sample = sample._replace(number=numbers[sample.topic])
            numbers[sample.topic] += 1

        # stop when no colour topic can have a frame in the span any more
        if span.end_ns is not None and sample.logged_ns >= span.end_ns + DISORDER_NS:
            running.discard(sample.topic)
            if not running:
                return

        margin_ns = PATIENCE_NS if isinstance(sample.payload, Depth) else 0
        if not isinstance(sample.payload, Colour | Depth) or span.contains(sample.logged_ns, margin_ns):
            yield sample
