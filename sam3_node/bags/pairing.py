"""Pairing of samples into Frames: each colour image with the depth image of the same moment."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..types import Depth, Frame, Intrinsics
from .discovery import Camera
from .samples import Colour, Sample

TOLERANCE_NS = 20_000_000
"""Maximum distance between the stamps of a colour image and its depth: a little over half a frame at 30 Hz."""

PATIENCE_NS = 500_000_000
"""Maximum time, by the log times of the recording, that a colour image waits for its depth and intrinsics."""

MAX_WAITING = 16
"""Maximum number of colour images that wait per camera, and of depth images that are kept."""

UNIX_SINCE_NS = 10**17
"""Stamps before this one (in 1973) are not Unix time, but the clock of a video or a simulation."""


@dataclass(slots=True)
class _CameraState:
    camera: Camera
    seq: int = 0
    intrinsics: Intrinsics | None = None
    depths: deque[Sample] = field(default_factory=lambda: deque(maxlen=MAX_WAITING))


@dataclass(slots=True)
class _Waiting:
    """A colour image that waits, because its own depth or that of an earlier image is still to come."""

    state: _CameraState
    seq: int
    stamp_ns: int
    logged_ns: int
    colour: Colour
    depth: Depth | None = None
    settled: bool = False


class Pairing:
    """Makes Frames from the samples of cameras; `seq` is the sample's number, or counts from 0 for each camera.

    A colour image takes the depth image with the nearest stamp within TOLERANCE_NS, recorded before or after it, and
    the latest intrinsics. It waits for them in bounded memory, and goes without them if they come later than
    `patience_ns`. Frames come in the order in which their colour images were recorded.
    """

    def __init__(self, cameras: Sequence[Camera], patience_ns: int = PATIENCE_NS) -> None:
        self._patience_ns = patience_ns
        self._states = [_CameraState(camera) for camera in cameras]
        self._queue: deque[_Waiting] = deque()

    def add(self, sample: Sample) -> list[Frame]:
        """Take one sample; return the frames that are complete now."""
        for state in self._states:
            self._take(state, sample)
        for waiting in self._queue:
            if not waiting.settled and _is_ready(waiting):
                _settle(waiting)
        for waiting in list(self._overdue(sample.logged_ns)):
            _settle(waiting)
        return self._settled()

    def flush(self) -> list[Frame]:
        """Return the frames that still wait, with the depth and intrinsics that have come."""
        for waiting in self._queue:
            _settle(waiting)
        return self._settled()

    def _overdue(self, now_ns: int) -> Iterator[_Waiting]:
        spare = MAX_WAITING * len(self._states) - len(self._queue)
        for index, waiting in enumerate(self._queue):
            if now_ns - waiting.logged_ns > self._patience_ns or index + spare < 0:
                yield waiting

    def _take(self, state: _CameraState, sample: Sample) -> None:
        topic, stamp_ns, logged_ns, payload, number = sample
        if isinstance(payload, Colour) and topic == state.camera.colour:
            seq = state.seq if number is None else number
            self._queue.append(_Waiting(state, seq, stamp_ns, logged_ns, payload))
            state.seq = seq + 1
        elif isinstance(payload, Depth) and topic == state.camera.depth:
            state.depths.append(sample)
        elif isinstance(payload, Intrinsics) and topic == state.camera.intrinsics:
            state.intrinsics = payload

    def _settled(self) -> list[Frame]:
        frames = []
        while self._queue and self._queue[0].settled:
            frames.append(_frame(self._queue.popleft()))
        return frames


def _is_ready(waiting: _Waiting) -> bool:
    """Return True if no later sample can fit better."""
    state = waiting.state
    if state.camera.intrinsics is not None and state.intrinsics is None:
        return False
    newest_ns = state.depths[-1].stamp_ns if state.depths else 0
    return state.camera.depth is None or newest_ns >= waiting.stamp_ns


def _settle(waiting: _Waiting) -> None:
    """Assign the nearest depth within the tolerance, and end the waiting."""
    if waiting.settled:
        return
    waiting.settled = True
    depths = waiting.state.depths
    nearest = min(depths, key=lambda depth: abs(depth.stamp_ns - waiting.stamp_ns), default=None)
    if nearest is not None and abs(nearest.stamp_ns - waiting.stamp_ns) <= TOLERANCE_NS:
        assert isinstance(nearest.payload, Depth)
        waiting.depth = nearest.payload


def _frame(waiting: _Waiting) -> Frame:
    camera, colour, depth = waiting.state.camera, waiting.colour, waiting.depth
    if depth is not None:
        same_size = (depth.width, depth.height) == (colour.width, colour.height)
        depth = replace(depth, aligned=same_size and (camera.aligned or depth.aligned))
    return Frame(
        camera=camera.name,
        seq=waiting.seq,
        capture_ns=waiting.stamp_ns,
        width=colour.width,
        height=colour.height,
        encoding=colour.encoding,
        colour=colour.data,
        clock="system" if waiting.stamp_ns >= UNIX_SINCE_NS else "device",
        depth=depth,
        intrinsics=_undistorted(waiting.state.intrinsics) if camera.rectified else waiting.state.intrinsics,
    )


def _undistorted(intrinsics: Intrinsics | None) -> Intrinsics | None:
    return intrinsics and replace(intrinsics, model="none", coeffs=())
