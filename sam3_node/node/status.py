"""Keep what the node says about itself: verdicts for probes, counts and times of each camera, and its status.

The thread of the main loop writes, any thread reads. `Output` also publishes masks and events, so that the status
contains the effect of each.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from ..errors import Sam3NodeError, current_request_id
from ..perception.perception import Perception
from ..perception.pipeline import Pipeline
from ..perception.shedding import LoadShedder
from ..perception.step import StepFrame
from ..processes.logs import log_subject, warn_if_descriptors_run_out
from ..processes.notify import Watchdog
from ..settings import Settings
from ..transport import MaskPublisher, ReceivedFrame, Security
from ..transport.limits import rss_bytes
from ..types import Frame, MaskFrame, TrackState
from ..wire import FAILED, Event
from ..wire.codec import MAX_INT
from ..wire.messages import joints_fields, pose_fields

if TYPE_CHECKING:
    from .monitoring import FrameSpans

STEPS = 25
HANG_PER_STEP = 10.0
"""A step hangs if it takes this many times longer than the median of the last STEPS, and group.hang_step_s at least."""
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.033, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
WINDOW_FRAMES = 1000
RATE_FRAMES = 100
STEP_FRAMES = 15
MAX_ERROR_CHARACTERS = 200
LOG_EVERY_S = 10.0
COUNTS = ("stepped", "failed", "skipped", "too_old", "clock_ahead", "withheld")
DESCRIBED = (
    *("received", "stepped", "skipped", "failed", "too_old", "clock_ahead", "withheld", "over_budget"),
    *("shed_level", "last_seq", "last_error", "spatial_problem"),
)
"""Attributes of CameraStats that the status has."""

log = logging.getLogger(__name__)


class Histogram:
    """Counts of durations in seconds, by upper bound. One thread counts; any thread may read."""

    def __init__(self) -> None:
        self.sum_s = 0.0
        self._counts = [0] * (len(BOUNDS_S) + 1)

    def observe(self, seconds: float) -> None:
        """Count a duration. One below 0, such as an age by a clock that is ahead, adds nothing to the sum."""
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += max(0.0, seconds)  # a sum that falls looks like a new process

    def cumulative(self) -> list[tuple[str, int]]:
        """Return each bound as text, the last is +Inf, with the number of durations up to it."""
        return list(zip((*map(str, BOUNDS_S), "+Inf"), accumulate(list(self._counts)), strict=True))


class Verdict(NamedTuple):
    """An answer to a probe, and the reason for it."""

    ok: bool
    reason: str


class Health:
    """Reports of a node's loop about itself, and the verdicts for probes."""

    def __init__(self, settings: Settings, watchdog: Watchdog | None = None) -> None:
        self.watchdog = watchdog or Watchdog(settings.group.hang_s)
        self.serving = False
        """True once the model is loaded and the main loop runs."""
        self.paused = False
        self.explain_pause: Callable[[], str | None] = lambda: None
        """Returns why the node is paused, None if somebody has paused it. Any thread may call it."""
        self.step_times = Histogram()
        self.stages: defaultdict[str, Histogram] = defaultdict(Histogram)
        """Durations of the steps, and of the stages of those whose masks were published."""
        self._deadline_s = settings.health.deadline_s
        self._hang_s, self._hang_step_s = settings.group.hang_s, settings.group.hang_step_s
        self._compiles = settings.model.compile is True
        self._began_s: float | None = None
        self._published_s: float | None = None
        self._steps_s: deque[float] = deque(maxlen=STEPS)

    @property
    def stepping(self) -> bool:
        """True while a step runs."""
        return self._began_s is not None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a step within the block, and have the watchdog watch over it."""
        self.watchdog.begin(self._step_limit_s())
        begin_s = self._began_s = time.monotonic()
        try:
            yield
        finally:
            took_s = time.monotonic() - begin_s
            self._began_s = None
            self._steps_s.append(took_s)
            self.step_times.observe(took_s)
            self.watchdog.begin(self._hang_s)

    def published(self, stages_us: Mapping[str, int]) -> None:
        """Note that masks were published, and how long their stages took."""
        self._published_s = time.monotonic()
        for stage, duration_us in stages_us.items():
            self.stages[stage].observe(duration_us / 1e6)

    def check_alive(self) -> Verdict:
        """Return whether the loop turns: exactly while the watchdog is kicked."""
        if self.watchdog.hangs:
            return Verdict(False, "the main loop hangs; its supervisor starts the process again")
        return Verdict(True, "the main loop turns" if self.serving else "the model is being loaded")

    def check_ready(self) -> Verdict:
        """Return whether masks were published lately, and if not, why."""
        published_s, began_s, now_s = self._published_s, self._began_s, time.monotonic()
        if published_s is not None and now_s - published_s <= self._deadline_s and not self.paused:
            return Verdict(True, f"masks were published {max(0.0, now_s - published_s):.3f} s ago")
        if not self.serving:
            return Verdict(False, "the model is being loaded")
        if self.paused:
            return Verdict(False, self.explain_pause() or "the node is paused: sam3-node resume")
        if began_s is not None and now_s - began_s > self._deadline_s:
            return Verdict(False, f"the step of a frame has run for {now_s - began_s:.1f} s")
        if published_s is None:
            return Verdict(
                False, "no frame has been stepped yet: start a camera, or correct transport.frames"
            )
        return Verdict(
            False, f"no masks for {now_s - published_s:.1f} s: frames have stopped, are too old, or fail"
        )

    def _step_limit_s(self) -> float:
        """Return how long a step may take. The first one, and each where the model compiles, may take long."""
        if self._compiles or not self._steps_s:
            return self._hang_s
        return min(self._hang_s, max(self._hang_step_s, HANG_PER_STEP * statistics.median(self._steps_s)))


class CameraStats:
    """Counts of one camera's frames (received = stepped + failed + skipped), and times of the last 1000 frames.

    Frames that were `too_old`, or whose clock was ahead of the node's, are among the skipped ones. Frames whose masks
    were `withheld`, and those that took longer than `budget_ms` from their arrival, `over_budget`, are among the
    stepped ones. `silent_s` returns the seconds since the camera's last frame arrived.
    `age` is the time from capture to the start of the frame's step. `latency` is the time from capture to the
    publication of the masks. If the camera's clock is not Unix time, both count from the frame's arrival. `arrival` is
    the time from capture to arrival, which contains the difference of the two clocks; Unix time only.
    One thread counts; any thread may read. Counts stop at the largest integer of a message.
    """

    def __init__(
        self, camera: str = "", silent_s: Callable[[], float | None] = lambda: None, budget_ms: float = 0.0
    ) -> None:
        self.stepped = self.failed = self.skipped = 0
        self.too_old = self.clock_ahead = self.withheld = 0
        self._skipped_by_time = 0  # since the last step
        self._next_log_s = 0.0
        self._camera, self._silent_s = camera, silent_s
        self.shed_level = 0
        """of the step that runs, or ran last"""
        self._shedder = LoadShedder(budget_ms)
        self.last_seq: int | None = None
        self.last_error: str | None = None
        self.spatial_problem: str | None = None
        """Why the last frame with depth has no 3-D fields, or none in the base; None if nothing is missing."""
        self._spatial_kinds: set[str] = set()
        self._ages_ns: deque[int] = deque(maxlen=WINDOW_FRAMES)
        self._latencies_ns: deque[int] = deque(maxlen=WINDOW_FRAMES)
        self._arrivals_ns: deque[int] = deque(maxlen=WINDOW_FRAMES)
        self.origin_ns: int | None = None
        """Unix time from which the age of the newest published masks is measured; None before the first."""
        self.age, self.latency = Histogram(), Histogram()
        """All ages and latencies since the start."""
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
    def over_budget(self) -> int:
        """Number of stepped frames that took longer than the budget."""
        return self._shedder.over_budget

    @property
    def median_step_s(self) -> float:
        """Median duration in seconds of the last steps, publication included; 0 before the first."""
        return statistics.median(self._steps_s) if self._steps_s else 0.0

    def begin(self, frame: Frame, received_ns: int, skipped: int) -> None:
        """Record that a frame's step starts, and that `skipped` frames before it were skipped."""
        self._begin_s = time.monotonic()
        self.shed_level = self._shedder.level
        self.skipped = min(self.skipped + max(0, skipped - self._skipped_by_time), MAX_INT)
        self._skipped_by_time = 0
        age_ns = time.time_ns() - (frame.capture_ns if frame.clock == "system" else received_ns)
        self._ages_ns.append(age_ns)
        self.age.observe(age_ns / 1e9)
        if frame.clock == "system":
            self._arrivals_ns.append(received_ns - frame.capture_ns)

    def end(self, frame: Frame, received_ns: int) -> None:
        """Record that the frame's masks were published."""
        self.origin_ns = frame.capture_ns if frame.clock == "system" else received_ns
        latency_ns = time.time_ns() - self.origin_ns
        self._latencies_ns.append(latency_ns)
        self.latency.observe(latency_ns / 1e9)
        self._end_step(frame, received_ns)

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
        self._shedder.observe((time.time_ns() - received_ns) / 1e6)
        self.stepped += 1
        self.last_seq = frame.seq
        self._ends_s.append(time.monotonic())
        self._steps_s.append(self._ends_s[-1] - self._begin_s)

    def note_spatial_problem(self, step: StepFrame, poses_problem: str | None) -> None:
        """Keep why 3-D fields are missing, and log it once for each kind of problem."""
        problem = step.problem
        if problem and step.lacks_robot and poses_problem:
            problem += f": {poses_problem}"
        self.spatial_problem = problem
        kind = (problem or "").split(":")[0]
        if problem is not None and kind not in self._spatial_kinds:
            self._spatial_kinds.add(kind)
            log.warning("camera %s: 3-D: %s", self._camera, problem)

    def _note(self, reason: str) -> None:
        """Keep a reason. Log the first one, and then one every LOG_EVERY_S."""
        self.last_error = reason
        now_s = time.monotonic()
        if now_s >= self._next_log_s:
            self._next_log_s = now_s + LOG_EVERY_S
            log.warning("camera %s: %s", self._camera, reason)

    def counts(self) -> dict[str, int]:
        """Return the counts, as `restore` takes them."""
        return {name: getattr(self, name) for name in COUNTS}

    def restore(self, counts: Mapping[str, int]) -> None:
        """Go on from the counts of an earlier run."""
        for name in COUNTS:
            setattr(self, name, min(max(int(counts.get(name, 0)), 0), MAX_INT))

    def fail(self, error: Exception) -> None:
        """Record that the frame's step failed."""
        self.failed += 1
        self.last_error = f"{type(error).__name__}: {describe_error(error)}"

    def describe_failure(self, frame: Frame, error: str) -> dict[str, Any]:
        """Return the fields of the event FAILED: the newest frame, and its step's level of shedding, if any."""
        shed = {"shed": {"level": self.shed_level}} if self.shed_level else {}
        return {"camera": frame.camera, "seq": frame.seq, "error": error, **shed}

    def describe(self, offset_ns: int | None = None) -> dict[str, Any]:
        """Return the counts, frames per second, and times in milliseconds (None before the first frame).

        `offset_ns` is the time from the newest masks of all cameras to the newest of this camera, by their captures: 0
        or negative. `masks_age_ms` is the age of this camera's newest masks.
        """
        silent_s, origin_ns = self._silent_s(), self.origin_ns
        return {
            "silent_s": None if silent_s is None else round(silent_s, 3),
            **{name: getattr(self, name) for name in DESCRIBED},
            "fps": self._rate(),
            "masks_age_ms": None if origin_ns is None else _to_ms(time.time_ns() - origin_ns),
            "offset_ms": None if offset_ns is None else _to_ms(offset_ns),
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
    return _to_ms(ordered[int(fraction * (len(ordered) - 1))]) if ordered else None


def _to_ms(duration_ns: int) -> float:
    return round(duration_ns / 1e6, 3)


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
    cache: Mapping[str, int]
    """`Pipeline.cache_usage`"""
    tracks: Mapping[TrackState, int]
    """number of objects by state"""

    @classmethod
    def take(cls, stats: CameraStats, pipeline: Pipeline) -> Self:
        """Return the status of a pipeline between two frames."""
        tracks = Counter(status.state for status in pipeline.objects)
        return cls(stats, pipeline.epoch, pipeline.turned_away, pipeline.cache_usage, tracks)

    @property
    def bank_bytes(self) -> int:
        """Memory of the bank, allocated once."""
        return self.cache["bank_bytes"]

    @property
    def cached_bytes(self) -> int:
        """Memory of the features kept for prompts on past frames."""
        return self.cache["cached_bytes"]

    def describe(self, offset_ns: int | None = None) -> dict[str, Any]:
        """Return the counts, the number of objects and of detections that found no free slot, and the cache's usage."""
        own = {"objects": sum(self.tracks.values()), "turned_away": self.turned_away}
        return {"epoch": self.epoch, **self.stats.describe(offset_ns), **own, **self.cache}


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """The node between two actions. `status` and `describe` are answered from it, also while a step runs."""

    perception: Mapping[str, Any]
    """`Perception.status()`"""
    cameras: Mapping[str, CameraStatus]
    events: int
    """number of events that were published before this moment; the rest of the status is their outcome"""

    def describe_cameras(self) -> dict[str, dict[str, Any]]:
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


class Output:
    """Publishes masks and events, and keeps the counts and the status that contain the effect of each.

    `bind` it, set `perception`, and then publish. One thread does so; any thread may call `wait_for_status` and read
    `last_status`.
    """

    publisher: MaskPublisher
    perception: Perception
    spans: FrameSpans | None = None
    """Where published frames are traced, if anywhere"""

    def __init__(self, settings: Settings, health: Health) -> None:
        self.stats: Mapping[str, CameraStats] = {}
        self.last_status: NodeStatus | None = None
        """The newest status; None before the model is loaded."""
        self._settings, self._health = settings, health
        self._budget_ms = settings.deadline.budget_ms if settings.transport.delivery == "newest" else 0.0
        self._events = 0
        self._pack_us = 0
        self._publishing = threading.Lock()
        """Held from publishing masks or an event until the status contains their effect."""

    def bind(self) -> MaskPublisher:
        """Bind the endpoint of masks and events. Raises TransportError."""
        transport, encoding = self._settings.transport, self._settings.tracker.mask_encoding
        security = Security.from_settings(transport)
        self.publisher = MaskPublisher(transport.masks, transport.delivery, encoding, security)
        return self.publisher

    def wait_for_status(self) -> NodeStatus:
        """Return the newest status. It contains what has been published, but does not wait for a step."""
        with self._publishing:
            assert self.last_status is not None
            return self.last_status

    def publish(self, masks: MaskFrame, received: ReceivedFrame) -> bool:
        """Send masks, and count them. Return False if a subscriber of lossless delivery has no space."""
        begin_ns = time.perf_counter_ns()
        pipeline, session = self.perception.pipelines[masks.camera], self.perception.session
        # a message cannot contain the time of its own packing: `pack` is the time of the previous message
        stages_us = {**masks.stages_us, "pack": self._pack_us}
        with self._publishing:
            message = replace(
                masks,
                stages_us=stages_us,
                node=session.node if session else "",
                epoch=pipeline.epoch,
                published_ns=time.time_ns(),
            )
            if not self.publisher.send(message, timeout_ms=0):
                return False
            self.stats[masks.camera].end(received.frame, received.received_ns)
            self._health.published(stages_us)
            self.take_status()
        if self.spans is not None:
            self.spans.record(message, received)
        self._pack_us = (time.perf_counter_ns() - begin_ns) // 1000
        return True

    def publish_event(self, op: str, args: dict[str, Any]) -> None:
        """Publish a change of the node's state, for recorders. With a request id, the log names the event."""
        with self._publishing:
            try:
                self.publisher.send_event(Event(self._events, op, args, asked := current_request_id()))
                if asked is not None:
                    log.info("event %d: %s", self._events, op)
            except Sam3NodeError as error:  # recorders count the missing number as lost
                log.error("event %d, %s, could not be published: %s", self._events, op, error)
            self._events += 1
            self._follow_cameras()
            self.take_status()

    def withhold(self, received: ReceivedFrame, masks: MaskFrame, reason: str) -> None:
        """Count a step whose masks are too old to publish, and tell recorders that the frame was stepped."""
        frame, stats = received.frame, self.stats[masks.camera]
        stats.withhold(frame, received.received_ns, reason)
        robot: dict[str, Any] = {}
        if masks.robot_pose is not None:
            robot["robot_pose"] = pose_fields(masks.robot_pose)
        if masks.joints is not None:
            robot["joints"] = joints_fields(masks.joints)
        self.publish_event(FAILED, {**stats.describe_failure(frame, reason), "withheld": True, **robot})

    def fail(self, frame: Frame, error: Exception) -> None:
        """Count a frame whose step failed, and tell recorders."""
        stats, is_unexpected = self.stats[frame.camera], not isinstance(error, Sam3NodeError)
        stats.fail(error)
        log.error("camera %s: frame %d failed: %s", frame.camera, frame.seq, error, exc_info=is_unexpected)
        self.publish_event(FAILED, stats.describe_failure(frame, describe_error(error)))

    def log_counts(self, frames_rejected: int) -> None:
        """Log the counts of all cameras."""
        for camera, counts in self.wait_for_status().describe_cameras().items():
            with log_subject(camera):
                log.info("camera %s: %s", camera, counts)
        warn_if_descriptors_run_out()
        log.info("rss %.0f MB, %d frames rejected", rss_bytes() / 1e6, frames_rejected)

    def take_status(self) -> None:
        """Replace the status with the present one."""
        cameras = {
            camera: CameraStatus.take(self.stats[camera], pipeline)
            for camera, pipeline in self.perception.pipelines.items()
        }
        self._health.paused = self.perception.paused
        self.last_status = NodeStatus(self.perception.status(), cameras, self._events)

    def _follow_cameras(self) -> None:
        """Keep the counts of the cameras that are served, and begin new ones."""
        session = self.perception.session
        silent_s = session.silent_s if session else lambda camera: None
        self.stats = {
            name: self.stats.get(name) or CameraStats(name, partial(silent_s, name), self._budget_ms)
            for name in self.perception.pipelines
        }
