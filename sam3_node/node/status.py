"""Keep what the node says about itself: counts and times of each camera, and its status.

The thread of the main loop writes, any thread reads.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from ..perception.pipeline import Pipeline
from ..perception.shedding import LoadShedder
from ..perception.step import StepFrame
from ..perception.window_budget import StepCost, WindowBudget, estimate_window_ms
from ..schema.fields import MAX_INT, Plain, to_plain
from ..schema.replies import CameraFigures
from ..types import Frame, MaskFrame, Shed, StepDecisions, TrackState
from .health import Histogram

WINDOW_FRAMES = 1000
"""Frames of a camera whose ages and latencies the percentiles count."""
RATE_FRAMES = 100
"""Frames of a camera over which its rate is averaged."""
STEP_FRAMES = 15
"""Frames of a camera whose median step sets how long requests may take between two steps."""
SILENT_S = 2.0
"""Seconds without a frame from which on a camera counts as silent: it takes no time of the others."""
MAX_ERROR_CHARACTERS = 200
"""Characters of an error that a message carries. The rest is cut off."""
LOG_EVERY_S = 10.0
"""Seconds between two log lines about refused frames of one camera. Their counts go on."""
COUNTS = ("stepped", "failed", "skipped", "too_old", "clock_ahead", "withheld")
"""Attributes of CameraStats that a snapshot keeps."""
DESCRIBED = (
    "received",
    "stepped",
    "skipped",
    "failed",
    "too_old",
    "clock_ahead",
    "withheld",
    "over_budget",
    "shed_level",
    "last_seq",
    "last_error",
    "spatial_problem",
)
"""Attributes of CameraStats that the status has."""

log = logging.getLogger(__name__)


class CameraStats:
    """Counts of one camera's frames (received = stepped + failed + skipped), and times of the last 1000 frames.

    Frames that were `too_old`, or whose clock was ahead of the node's, are among the skipped ones. Frames whose masks
    were `withheld`, and frames that took longer than `budget_ms` from their arrival, `over_budget`, are among the
    stepped ones. `silent_s` returns the seconds since the camera's last frame arrived.
    `age` is the time from capture to the start of the frame's step. `latency` is the time from capture to the
    publication of the masks. If the camera's clock is not Unix time, both count from the frame's arrival. `arrival` is
    the time from capture to arrival, which contains the difference of the two clocks; Unix time only.
    One thread counts; any thread may read. Counts stop at the largest integer of a message.
    """

    def __init__(
        self, camera: str = "", silent_s: Callable[[], float | None] = lambda: None, budget_ms: float = 0.0
    ) -> None:
        self.stepped = 0
        self.failed = 0
        self.skipped = 0
        self.too_old = 0
        self.clock_ahead = 0
        self.withheld = 0
        self._skipped_by_time = 0  # since the last step
        self._next_log_s = 0.0
        self._camera = camera
        self._silent_s = silent_s
        self._shedder = LoadShedder(budget_ms)
        self._budget_ms = budget_ms
        self.decisions = StepDecisions()
        """For the step that runs, or ran last"""
        self._window_budget = WindowBudget()
        self._periods_ns: deque[int] = deque(maxlen=STEP_FRAMES)
        """Times between the captures of two frames"""
        self._last_capture_ns: int | None = None
        self.last_seq: int | None = None
        self.last_error: str | None = None
        self._last_error_s: float | None = None
        self.spatial_problem: str | None = None
        """Why the last frame with depth has no 3-D fields, or none in the base; None if nothing is missing."""
        self._spatial_kinds: set[str] = set()
        self._ages_ns: deque[int] = deque(maxlen=WINDOW_FRAMES)
        self._latencies_ns: deque[int] = deque(maxlen=WINDOW_FRAMES)
        self._arrivals_ns: deque[int] = deque(maxlen=WINDOW_FRAMES)
        self.origin_ns: int | None = None
        """Unix time from which the age of the newest published masks is measured; None before the first."""
        self.age = Histogram()
        """All ages since the start"""
        self.latency = Histogram()
        """All latencies since the start"""
        self._ends_s: deque[float] = deque(maxlen=RATE_FRAMES)
        self._begin_s = 0.0
        self._steps_s: deque[float] = deque(maxlen=STEP_FRAMES)

    @property
    def received(self) -> int:
        """Number of frames that were stepped, failed or skipped."""
        return min(self.stepped + self.failed + self.skipped, MAX_INT)

    @property
    def silent_s(self) -> float | None:
        """Seconds since the last frame arrived; None before the first."""
        return self._silent_s()

    @property
    def shed_level(self) -> int:
        """Level of shedding of the step that runs, or ran last."""
        return self.decisions.shed_level

    @property
    def over_budget(self) -> int:
        """Number of stepped frames that took longer than the budget."""
        return self._shedder.over_budget

    @property
    def median_step_s(self) -> float:
        """Median duration in seconds of the last steps, publication included; 0 before the first."""
        return statistics.median(self._steps_s) if self._steps_s else 0.0

    @property
    def period_s(self) -> float:
        """Median time in seconds between the captures of two frames; 0 if it is not known."""
        return statistics.median(self._periods_ns) / 1e9 if self._periods_ns else 0.0

    @property
    def load(self) -> float:
        """Share of the time that the steps of this camera take; 0 if it is not known, or the camera is silent."""
        silent_s = self._silent_s()
        if not self.period_s or silent_s is None or silent_s > SILENT_S:
            return 0.0
        return self.median_step_s / self.period_s

    def begin(self, frame: Frame, received_ns: int, skipped: int, limits_windows: bool = False) -> None:
        """Record that a frame's step starts, and that `skipped` frames before it were skipped.

        limits_windows: the number of windows follows the time that they take.
        """
        self._begin_s = time.monotonic()
        passed_ns = 0 if self._last_capture_ns is None else frame.capture_ns - self._last_capture_ns
        self._last_capture_ns = frame.capture_ns
        # a camera may begin again with earlier times
        if passed_ns > 0:
            self._periods_ns.append(passed_ns // (max(0, skipped) + 1))
        # kept for the whole step: the shedder decides on the next level when this step ends
        self.decisions = StepDecisions(
            shed=Shed(self._shedder.level) if self._shedder.level else None,
            windows=self._window_budget.count if limits_windows else None,
        )
        # `skipped` contains the frames that `skip` has counted already
        self.skipped = min(self.skipped + max(0, skipped - self._skipped_by_time), MAX_INT)
        self._skipped_by_time = 0
        age_ns = time.time_ns() - _find_origin(frame, received_ns)
        self._ages_ns.append(age_ns)
        self.age.observe(age_ns / 1e9)
        if frame.clock == "system":
            self._arrivals_ns.append(received_ns - frame.capture_ns)

    def end(self, frame: Frame, received_ns: int) -> None:
        """Record that the frame's masks were published."""
        self.origin_ns = _find_origin(frame, received_ns)
        latency_ns = time.time_ns() - self.origin_ns
        self._latencies_ns.append(latency_ns)
        self.latency.observe(latency_ns / 1e9)
        self._end_step(frame, received_ns)

    def note_cost(self, masks: MaskFrame, windows: int, step_s: float, load_of_others: float) -> None:
        """Decide on the windows of the next step, by what one with so many windows has cost.

        load_of_others: the share of the time that the steps of other cameras take.
        """
        period_ms = 1e3 * self.period_s * max(0.0, 1 - load_of_others)
        if self._budget_ms:
            period_ms = min(period_ms, self._budget_ms)
        window_ms = estimate_window_ms(masks.stages_us, windows, len(masks.instances))
        self._window_budget.observe(
            StepCost(1e3 * step_s, period_ms, window_ms, windows, len(masks.instances))
        )

    def skip(self, kind: Literal["too_old", "clock_ahead"], reason: str) -> None:
        """Record that a frame is not stepped because of its time."""
        self.skipped = min(self.skipped + 1, MAX_INT)
        self._skipped_by_time += 1
        setattr(self, kind, getattr(self, kind) + 1)
        self._note(reason)

    def withhold(self, frame: Frame, received_ns: int, reason: str) -> None:
        """Record that a frame was stepped, but its masks were too old."""
        self.withheld += 1
        self._end_step(frame, received_ns)
        self._note(reason)

    def _end_step(self, frame: Frame, received_ns: int) -> None:
        # from the arrival on, because a frame that waits is also late
        self._shedder.observe((time.time_ns() - received_ns) / 1e6)
        self.stepped += 1
        self.last_seq = frame.seq
        self._ends_s.append(time.monotonic())
        self._steps_s.append(self._ends_s[-1] - self._begin_s)

    def note_failures(self, failures: Sequence[str]) -> None:
        """Keep why a frame has masks without what optional stages add."""
        for failure in failures:
            self._note(describe_error(failure))

    def note_spatial_problem(self, step: StepFrame, poses_problem: str | None) -> None:
        """Keep why 3-D fields are missing, and log it once for each kind of problem."""
        problem = step.problem
        if problem and step.lacks_robot and poses_problem:
            problem += f": {poses_problem}"
        self.spatial_problem = problem
        # what follows the colon may differ from frame to frame, and each would be logged
        kind = (problem or "").split(":")[0]
        if problem is not None and kind not in self._spatial_kinds:
            self._spatial_kinds.add(kind)
            log.warning("camera %s: 3-D: %s", self._camera, problem)

    def _note(self, reason: str) -> None:
        """Keep a reason. Log the first one, and then one every LOG_EVERY_S."""
        self.last_error = reason
        now_s = time.monotonic()
        self._last_error_s = now_s
        if now_s >= self._next_log_s:
            self._next_log_s = now_s + LOG_EVERY_S
            log.warning("camera %s: %s", self._camera, reason)

    def counts(self) -> dict[str, int]:
        """Return the counts, as `restore` takes them."""
        return {name: getattr(self, name) for name in COUNTS}

    def restore(self, counts: Mapping[str, int]) -> None:
        """Go on from the counts of an earlier run."""
        for name in COUNTS:
            # a file may say anything, but a message has no larger integers
            setattr(self, name, min(max(int(counts.get(name, 0)), 0), MAX_INT))

    def fail(self, error: Exception) -> None:
        """Record that the frame's step failed."""
        self.failed += 1
        self.last_error = f"{type(error).__name__}: {describe_error(error)}"
        self._last_error_s = time.monotonic()

    def describe_failure(self, frame: Frame, error: str) -> Plain:
        """Return the fields of the event FAILED: the newest frame, and what its step shed and left out."""
        return {"camera": frame.camera, "seq": frame.seq, "error": error, **to_plain(self.decisions)}

    def describe(self, offset_ns: int | None = None) -> Plain:
        """Return the counts, frames per second, and times in milliseconds (None before the first frame).

        `offset_ns` is the time from the newest masks of all cameras to the newest of this camera, by their captures: 0
        or negative. `masks_age_ms` is the age of this camera's newest masks.
        """
        silent_s = self._silent_s()
        masks_age_ns = time.time_ns() - self.origin_ns if self.origin_ns is not None else None
        error_age_s = None
        if self._last_error_s is not None:
            error_age_s = round(time.monotonic() - self._last_error_s, 3)
        return {
            "last_error_age_s": error_age_s,
            "silent_s": None if silent_s is None else round(silent_s, 3),
            **{name: getattr(self, name) for name in DESCRIBED},
            "fps": self._rate(),
            "masks_age_ms": _to_ms(masks_age_ns),
            "offset_ms": _to_ms(offset_ns),
            "arrival_p50_ms": _percentile_ms(self._arrivals_ns, 0.50),
            "age_p50_ms": _percentile_ms(self._ages_ns, 0.50),
            "age_p99_ms": _percentile_ms(self._ages_ns, 0.99),
            "latency_p50_ms": _percentile_ms(self._latencies_ns, 0.50),
            "latency_p99_ms": _percentile_ms(self._latencies_ns, 0.99),
        }

    def _rate(self) -> float:
        ends_s = list(self._ends_s)
        if len(ends_s) < 2:
            return 0.0
        # measured up to now, so the rate of a stopped camera falls
        return round(len(ends_s) / max(time.monotonic() - ends_s[0], 1e-9), 2)


def _percentile_ms(values_ns: deque[int], fraction: float) -> float | None:
    ordered = sorted(values_ns)  # copies at once: another thread may append
    if not ordered:
        return None
    return _to_ms(ordered[int(fraction * (len(ordered) - 1))])


def _to_ms(duration_ns: int | None) -> float | None:
    return None if duration_ns is None else round(duration_ns / 1e6, 3)


def _find_origin(frame: Frame, received_ns: int) -> int:
    """Return the Unix time from which ages are measured: of the capture if the camera has that clock."""
    return frame.capture_ns if frame.clock == "system" else received_ns


def describe_counts(counts: Mapping[str, object]) -> str:
    """Return the counts of a camera as the text of a log line. What is not known yet is left out."""
    return ", ".join(f"{name} {value}" for name, value in counts.items() if value is not None)


def describe_error(error: Exception | str) -> str:
    """Return the text of an error as a message can carry it: short, and without lone surrogates."""
    return str(error)[:MAX_ERROR_CHARACTERS].encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True, slots=True)
class CameraStatus:
    """A camera between two frames: its counts, which go on, and its objects at that moment."""

    stats: CameraStats
    epoch: int | None
    """the epoch of its ids"""
    turned_away: int
    recalled: int
    """objects that came back by their looks"""
    stage_failures: int
    """see `Pipeline.stage_failures`"""
    cache: Mapping[str, int]
    """`Prompting.cache_usage`"""
    tracks: Mapping[TrackState, int]
    """number of objects by state"""

    @classmethod
    def take(cls, stats: CameraStats, pipeline: Pipeline) -> Self:
        """Return the status of a pipeline between two frames."""
        tracks = Counter(status.state for status in pipeline.objects)
        return cls(
            stats,
            pipeline.epoch,
            pipeline.turned_away,
            pipeline.memory.reidentifications,
            pipeline.stage_failures.total(),
            pipeline.prompting.cache_usage,
            tracks,
        )

    @property
    def bank_bytes(self) -> int:
        """Memory of the bank, allocated once."""
        return self.cache["bank_bytes"]

    @property
    def cached_bytes(self) -> int:
        """Memory of the features kept for prompts on past frames."""
        return self.cache["cached_bytes"]

    def describe(self, offset_ns: int | None = None) -> CameraFigures:
        """Return the counts, those of objects, of detections without a slot and of recalls, and the cache's usage."""
        figures: dict[str, Any] = {**self.stats.describe(offset_ns), **self.cache}
        return CameraFigures(
            epoch=self.epoch,
            objects=sum(self.tracks.values()),
            turned_away=self.turned_away,
            recalled=self.recalled,
            **figures,
        )


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """The node between two actions. `status` and `describe` are answered from it, also while a step runs."""

    perception: Mapping[str, Any]
    """`Perception.status()`"""
    cameras: Mapping[str, CameraStatus]
    events: int
    """number of events that were published before this moment; the rest of the status is their outcome"""

    def describe_cameras(self) -> dict[str, CameraFigures]:
        """Return what each camera's statistics say now, with the offset of its masks from the newest of all."""
        origins_ns = {
            camera: status.stats.origin_ns
            for camera, status in self.cameras.items()
            if status.stats.origin_ns is not None
        }
        newest_ns = max(origins_ns.values(), default=0)
        return {
            camera: status.describe(origins_ns[camera] - newest_ns if camera in origins_ns else None)
            for camera, status in self.cameras.items()
        }
