"""Receive the frames of a node's cameras and the robot's poses and joints, and decide what is in time.

`AgeLimits` keeps policies from acting on what is long past, `CatchUpPace` lets objects that were prompted on a past
frame catch up between live frames, `DecodeAhead` prepares the next frame during a step.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from math import ceil
from typing import Literal, NamedTuple, overload

from ..calibration.poses import JointTracks, PoseTrack
from ..errors import CalibrationError, TransportError
from ..geometry import Array, pose_of
from ..models import TrackerModel
from ..perception.catch_up import CatchUps
from ..perception.joint_encoding import JointEncoding, choose_together
from ..perception.pipeline import Pipeline
from ..perception.preparing import FramePreparer, PreparedFrame, prepares_ahead
from ..perception.step import BASE, GRIPPER
from ..resources import Closeable
from ..schema.replies import MAX_STRIDE
from ..settings import Settings, SpatialSettings
from ..transport import FrameSubscriber, ReceivedFrame, Security
from ..transport.tap import PoseSubscriber
from ..types import Clock, Frame, JointState, MaskFrame, RobotMessage, RobotState, keep_newest
from ..wire import joints_topic, pose_topic
from .frame_taker import FrameTaker

MAX_AHEAD_S = 1.0
"""Seconds by which the clock of a camera or a robot may be ahead of the node's. What is stamped later is refused."""
MEDIAN_STEPS = 3
"""Median step times that are added to tracker.max_age_ms: masks older than the sum are withheld."""
STEPS = 100
"""Number of the newest steps from which that median is computed."""
FRAMES_PER_STEP = 2
"""Frames by which an object that catches up must come closer to the newest frame during each step. One of them makes up
for the frame that the step itself adds."""
USED_SHARE = 0.7
"""Share of the idle time between frames that catch-up may use. 1.0 would leave no margin for jitter."""
WINDOW = 15
"""Number of the newest frame intervals, and of catch-up slices, whose times are averaged."""
SLICE_SHARE_OF_STEP = 0.5
"""Assumed time of a catch-up slice, as a share of a step, until one is measured. A slice takes less than a step,
because it reads no pixels and encodes nothing."""
POLL_MS = 20
"""Milliseconds for which the thread waits for a newer frame to prepare, before it asks whether a step still runs."""
CAPACITY = 4096
"""Poses, and states of each set of joints, that are kept on each clock: 4 s at 1000 Hz."""
MAX_TRACK_VALUES = 1 << 19
"""Numbers of poses, and of joint states, that are kept on each clock: 4 MiB. It is CAPACITY states of 128 joints,
and fewer of more joints."""
LATE_TOLD_S = 2.0
"""Seconds after the last late message for which lateness is told: later, messages that do not come are the matter."""
MAX_LATE_S = 0.2
"""Seconds from a robot's stamp to the arrival of its message above which their clocks may differ."""
MAX_BACK_NS = 200_000_000
"""Nanoseconds by which a pose or joints may be older than the newest before them. If they are older, the robot's clock
has stepped back, and what came before is forgotten, as tf2 does."""

log = logging.getLogger(__name__)

Peek = Callable[[Collection[Frame], int], Frame | None]
Prepare = Callable[[Frame], PreparedFrame]


class Cameras:
    """The cameras of a node: frames, limits on their age, the pace of catching up, and robot poses.

    `connect` opens the sockets. The attributes are for the thread of the main loop, but any thread may read the counts
    of `frames`.
    """

    frames: FrameSubscriber
    taker: FrameTaker
    poses: RobotPoses

    def __init__(self, settings: Settings) -> None:
        live = settings.transport.delivery == "newest"
        self.ages = AgeLimits(settings.tracker.max_age_ms, live)
        self.pace = CatchUpPace(live)
        self.ahead: DecodeAhead | None = None
        self._settings = settings

    def connect(
        self, stack: ExitStack, model: TrackerModel, known_joints: Collection[str] = frozenset()
    ) -> None:
        """Connect to the cameras and to the robot; `stack` closes the sockets. Raises TransportError.

        `known_joints` are those of the robot's URDF.
        """
        settings = self._settings
        transport = settings.transport
        security = Security.from_settings(transport)
        max_cameras = settings.tracker.max_cameras
        self.frames = stack.enter_context(
            FrameSubscriber(transport.frames, transport.delivery, max_cameras=max_cameras, security=security)
        )
        robot = settings.robot.name if settings.robot.urdf else None
        self.poses = RobotPoses(settings.spatial, stack, security, robot, self.ages, known_joints)
        # each camera has an endpoint; frames of lossless delivery are stepped in their order, however many wait
        several = min(max_cameras, len(transport.frames)) > 1 and transport.delivery == "newest"
        most = min(max_cameras, choose_together(model)) if several else 1
        prepare = FramePreparer(model, settings.tracker.max_frame_pixels)
        if prepares_ahead(model):
            peek = partial(self.frames.peek, any_camera=most > 1)
            slots = max_cameras if most > 1 else 1
            self.ahead = stack.enter_context(DecodeAhead(peek, prepare, slots))

        def join(frames: Sequence[Frame]) -> JointEncoding | None:
            found = [one for frame in frames if (one := self._prepare(frame, prepare)) is not None]
            return JointEncoding(model, dict(enumerate(found)), len(found)) if len(found) > 1 else None

        self.taker = FrameTaker(self.frames, most, join)

    def _prepare(self, frame: Frame, prepare: Prepare) -> PreparedFrame | None:
        """Return the prepared form of a frame that is to be encoded with others; None if it cannot be decoded."""
        prepared = self.ahead.take(frame) if self.ahead else None
        if prepared is not None:
            return prepared
        with suppress(Exception):  # its step will fail in the same way, and say why
            return prepare(frame)
        return None

    def silent_s(self, camera: str) -> float | None:
        """Return the seconds since the last frame of a camera arrived; None if none has. Any thread may call it."""
        return self.frames.names.silent_s(camera)


class Refusal(NamedTuple):
    """A reason not to step a frame."""

    kind: Literal["too_old", "clock_ahead"]
    reason: str


class AgeLimits:
    """Decides which frames are too old to step, and which masks too old to publish. 0 for `max_age_ms` is no limit.

    With lossless delivery (`live` is False) frames wait in queues and may be recorded ones, so there is no limit.
    """

    def __init__(self, max_age_ms: float, live: bool) -> None:
        self._max_age_ns = int(max_age_ms * 1e6) if live else 0
        self._live = live
        self._steps_ns: deque[int] = deque(maxlen=STEPS)

    def find_lead_s(self, stamp_ns: int, clock: Clock) -> float | None:
        """Return by how many seconds a stamp is ahead of the node's clock if that is too much to use it; else None."""
        # a time of another clock cannot be compared with this host's
        if not self._live or clock != "system":
            return None
        lead_s = (stamp_ns - time.time_ns()) / 1e9
        return lead_s if lead_s > MAX_AHEAD_S else None

    def find_latest_ns(self) -> int | None:
        """Return the latest stamp of the system's clock that may be used now; None if each may be."""
        return time.time_ns() + int(MAX_AHEAD_S * 1e9) if self._live else None

    def check_frame(self, received: ReceivedFrame) -> Refusal | None:
        """Return the reason to skip a frame; None to step it."""
        frame = received.frame
        lead_s = self.find_lead_s(frame.capture_ns, frame.clock)
        if lead_s is not None:
            return Refusal(
                "clock_ahead",
                f"its clock is {lead_s:.1f} s ahead; synchronise clocks (chrony/PTP) or send clock=monotonic",
            )
        # a time of another clock cannot be compared with this host's, so the age counts from the arrival
        origin_ns = frame.capture_ns if frame.clock == "system" else received.received_ns
        age_ns = time.time_ns() - origin_ns
        if 0 < self._max_age_ns < age_ns:
            return Refusal(
                "too_old",
                f"frame {frame.seq} is {age_ns / 1e9:.1f} s old, expected at most {self._max_age_ns / 1e6:g} ms "
                "(tracker.max_age_ms); if every frame is, synchronise clocks (chrony/PTP) or send clock=monotonic",
            )
        return None

    def check_masks(self, masks: MaskFrame, step_ns: int) -> str | None:
        """Return the reason to withhold the masks of a step of `step_ns`; None to publish them."""
        # before the first step, there is none to compare with
        median_ns = int(statistics.median(self._steps_ns)) if self._steps_ns else 0
        limit_ns = self._max_age_ns + MEDIAN_STEPS * median_ns
        # after the limit is computed: a slow step must not raise its own limit
        self._steps_ns.append(step_ns)
        age_ns = time.time_ns() - masks.age_origin_ns
        if not self._max_age_ns or age_ns <= limit_ns:
            return None
        return f"masks withheld: they were {age_ns / 1e9:.1f} s old, expected at most {limit_ns / 1e9:.1f} s"


class CatchUpPace:
    """Measures steps, slices and the arrival of frames, and says whether a slice may begin. Times are in ns.

    A slice tracks one object that catches up on one kept frame. A slice begins if its usual time fits before the next
    expected frame. Each step adds a frame to track on, and makes slices due that track on two frames. So an object
    reaches the newest frame even if no slice ever fits. A due slice always runs. So does the last slice of an object: a
    click on the frame before the newest takes one slice. With lossless delivery (`live` False), frames wait for the
    node, so slices need not fit.
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
        """Note a frame that was taken, and the number of frames skipped before it."""
        before_ns = self._arrivals_ns.get(camera)
        self._arrivals_ns[camera] = received_ns
        if before_ns is not None:
            intervals = self._intervals_ns.setdefault(camera, deque(maxlen=WINDOW))
            # skipped frames have arrived in between, and the system's clock may have been set back
            intervals.append(max(0, received_ns - before_ns) / (skipped + 1))

    def note_step(self, catch_ups: CatchUps, step_ns: int, now_ns: int) -> None:
        """Note a step of a camera and the usual step time, and choose the stride of the next objects that catch up."""
        self._step_ns = step_ns
        if catch_ups.behind:
            # one slice brings the object closer by a stride of frames
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

    def choose(
        self, pipelines: Iterable[Pipeline], now_ns: int, frame_waits: Callable[[], bool]
    ) -> Pipeline | None:
        """Return the camera whose slice may begin now, if any: cameras take turns.

        `frame_waits` returns True if a frame could be stepped instead.
        """
        waiting = [pipeline for pipeline in pipelines if pipeline.catch_ups.behind]
        if not waiting:
            # what is due belongs to objects that have arrived; the next object begins anew
            self._due = 0.0
            return None
        # cameras take turns, so that no camera's objects wait for all objects of another
        pipeline = waiting[self._slices % len(waiting)]
        arrives = pipeline.catch_ups.behind == 1
        may_begin = arrives or self.is_due or (not frame_waits() and self._fits(now_ns))
        return pipeline if may_begin else None

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
        # number of slices that fit between two steps, which decides how many frames one slice has to pass
        slices = USED_SHARE * (1 / rate - self._step_ns) / self._slice_ns
        return min(MAX_STRIDE, ceil(FRAMES_PER_STEP / max(slices, FRAMES_PER_STEP / MAX_STRIDE)))

    @property
    def _slice_ns(self) -> float:
        return statistics.median(self._slices_ns) if self._slices_ns else SLICE_SHARE_OF_STEP * self._step_ns

    def _find_intervals(self, now_ns: int) -> list[tuple[str, float]]:
        """Return the cameras that send, whose next frame is not overdue by a whole interval, with their intervals."""
        medians = {camera: statistics.median(times) for camera, times in self._intervals_ns.items()}
        # a camera that has stopped would have its next frame in the past, before which no slice fits
        return [
            (camera, interval_ns)
            for camera, interval_ns in medians.items()
            if now_ns - self._arrivals_ns[camera] < 2 * interval_ns + self._step_ns
        ]


class DecodeAhead(Closeable):
    """Prepares the frame that waits to be taken next, in a thread, while a step runs; of up to `slots` cameras.

    Frames are not taken early. If a newer frame replaces a prepared one, the thread prepares the newer one and forgets
    the other. So the newest frame wins, and ages do not change.
    """

    def __init__(self, peek: Peek, prepare: Prepare, slots: int = 1) -> None:
        self._peek = peek
        self._prepare = prepare
        self._slots = slots
        self._changed = threading.Condition()
        self._stepping = False
        self._closed = False
        self._busy_with: Frame | None = None
        self._prepared: dict[str, PreparedFrame] = {}  # by camera
        self._thread = threading.Thread(target=self._work, name="decode-ahead", daemon=True)
        self._thread.start()

    @contextmanager
    def during_step(self) -> Iterator[None]:
        """Prepare frames within the block."""
        self._set_stepping(True)
        try:
            yield
        finally:
            self._set_stepping(False)

    def take(self, frame: Frame) -> PreparedFrame | None:
        """Return the prepared form of a frame that was taken, after waiting for work on it; None if there is none."""
        with self._changed:
            # to decode the frame a second time would take longer than the rest of the first
            self._changed.wait_for(lambda: self._busy_with is not frame)
            prepared = self._prepared.pop(frame.camera, None)
        return prepared if prepared is not None and prepared.frame is frame else None

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _set_stepping(self, stepping: bool) -> None:
        with self._changed:
            self._stepping = stepping
            self._changed.notify_all()

    def _work(self) -> None:
        seen: dict[str, Frame] = {}
        while self._wait_for_step():
            # with the last ones named, the same frame is not prepared twice
            frame = self._peek(seen.values(), POLL_MS)
            if frame is not None:
                keep_newest(seen, frame.camera, frame, self._slots)
                self._prepare_frame(frame)

    def _wait_for_step(self) -> bool:
        """Wait until a step runs. Return False if this was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._stepping or self._closed)
            return not self._closed

    def _prepare_frame(self, frame: Frame) -> None:
        with self._changed:
            self._busy_with = frame
        prepared = None
        # without the lock, so that the main loop can begin and end steps meanwhile
        with suppress(Exception):  # its step will fail in the same way, and say why
            prepared = self._prepare(frame)
        with self._changed:
            self._busy_with = None
            self._prepared.pop(frame.camera, None)
            if prepared is not None:
                keep_newest(self._prepared, frame.camera, prepared, self._slots)
            self._changed.notify_all()


class RobotTracks:
    """The gripper's poses in the base, and the joints of `robot` if it is given, over time on each clock.

    At most `capacity` poses are kept, and as many states of each set of joints. Each kind has at most `max_values`
    numbers together. `known_joints` are those of the robot's URDF: a set with none of them may end.
    """

    def __init__(
        self,
        settings: SpatialSettings,
        robot: str | None,
        capacity: int,
        max_values: int = MAX_TRACK_VALUES,
        known_joints: Collection[str] = frozenset(),
    ) -> None:
        self.problem: str | None = None
        """Why the last call of `find` gave no pose or no joints of `robot`; None if it gave them."""
        self.poses: dict[Clock, PoseTrack] = {}
        self.joints: dict[Clock, JointTracks] = {}
        self.max_back_ns: int | None = MAX_BACK_NS
        """Nanoseconds by which new tracks let a message be older than the newest. None: messages come in any order."""
        self._robot = robot
        self._known_joints = known_joints
        self._limits = (capacity, max_values)
        self._max_gap_ns = round(settings.max_pose_gap_ms * 1e6)
        self._max_ahead_ns = round(settings.max_pose_ahead_ms * 1e6)

    def add(self, message: RobotMessage) -> None:
        """Take a pose or joints, in any order; other frames and robots are ignored."""
        if isinstance(message, JointState):
            # times of different clocks cannot be compared, so each clock has a track of its own
            if message.robot == self._robot:
                if message.clock not in self.joints:
                    self.joints[message.clock] = JointTracks(
                        *self._limits, self.max_back_ns, self._known_joints
                    )
                self.joints[message.clock].add_joints(message)
        elif (message.frame, message.parent) == (GRIPPER, BASE):
            if message.clock not in self.poses:
                self.poses[message.clock] = PoseTrack(*self._limits, self.max_back_ns)
            self.poses[message.clock].add(message)

    def find(self, frame: Frame) -> RobotState:
        """Return the robot at the frame's capture."""
        self.problem = None
        stamp_ns = frame.capture_ns
        clock = frame.clock
        pose = None
        matrix = self._find(self.poses, "poses", frame)
        if matrix is not None:
            pose = pose_of(matrix, GRIPPER, BASE, stamp_ns, clock)
        # without the robot's model, its joints say nothing
        joints = None
        if self._robot is not None:
            positions = self._find(self.joints, "joints", frame)
            if positions is not None:
                joints = JointState(self._robot, stamp_ns, positions, clock)
        return RobotState(pose, joints)

    @property
    def restarts(self) -> int:
        """Number of times that the robot's clock stepped back, at each of which a track began anew."""
        poses = sum(track.restarts for track in self.poses.values())
        return poses + sum(track.restarts for track in self.joints.values())

    @overload
    def _find(self, tracks: Mapping[Clock, PoseTrack], what: str, frame: Frame) -> Array | None: ...

    @overload
    def _find(
        self, tracks: Mapping[Clock, JointTracks], what: str, frame: Frame
    ) -> dict[str, float] | None: ...

    def _find(
        self, tracks: Mapping[Clock, PoseTrack] | Mapping[Clock, JointTracks], what: str, frame: Frame
    ) -> Array | dict[str, float] | None:
        try:
            if frame.clock not in tracks:
                raise CalibrationError(
                    f"expected {what} with the clock of the images, {frame.clock}, found none"
                )
            return tracks[frame.clock].at(frame.capture_ns, self._max_gap_ns, self._max_ahead_ns)
        except CalibrationError as error:
            self.problem = (
                f"{error}{self._advise(tracks[frame.clock], frame) if frame.clock in tracks else ''}"
            )
            return None

    def _advise(self, track: PoseTrack | JointTracks, frame: Frame) -> str:
        """Return what to do about a time without a pose or joints, by the time from one message to the next."""
        period_ns = track.measure_period_ns()
        if period_ns is None or period_ns <= self._max_gap_ns:
            return ""
        return (
            f"; they come every {period_ns / 1e6:.0f} ms: send them more often, 50 Hz or more is usual, or raise "
            "spatial.max_pose_gap_ms"
        )


class RobotPoses(RobotTracks):
    """Receives the poses of `settings.poses`, if it is set, and the joints of `robot`. `stack` closes the socket.

    Messages that are too far ahead of the node's clock by `ages` are refused, as frames are. Without an endpoint there
    is no state and no `problem`. Raises TransportError for a malformed endpoint.
    """

    def __init__(
        self,
        settings: SpatialSettings,
        stack: ExitStack,
        security: Security | None = None,
        robot: str | None = None,
        ages: AgeLimits | None = None,
        known_joints: Collection[str] = frozenset(),
    ) -> None:
        super().__init__(settings, robot, CAPACITY, MAX_TRACK_VALUES, known_joints)
        self.ahead = 0
        """Number of messages that were refused because their clock was ahead of the node's."""
        self._lead_s = 0.0  # of the last of them
        self._late_s = 0.0  # from the stamps of the last messages to their arrival
        self._late_until_s = 0.0  # when that is told no more, of the monotonic clock
        self._ages = ages or AgeLimits(0.0, live=True)
        self._subscriber: PoseSubscriber | None = None
        if settings.poses:
            topics = [pose_topic(GRIPPER), *([] if robot is None else [joints_topic(robot)])]
            self._subscriber = stack.enter_context(PoseSubscriber(settings.poses, topics, security))

    def add(self, message: RobotMessage) -> None:
        """Take a pose or joints, in any order, unless their clock is ahead; other frames and robots are ignored."""
        lead_s = self._ages.find_lead_s(message.stamp_ns, message.clock)
        if lead_s is None:
            super().add(message)
            return
        self.ahead += 1
        self._lead_s = lead_s
        # once: each message of such a clock would log a line
        if self.ahead == 1:
            log.warning("robot: %s", self._describe_ahead())

    def find(self, frame: Frame) -> RobotState:
        """Return the robot at the frame's capture."""
        source = self._subscriber
        if source is None:
            return RobotState()
        try:
            messages = source.take(timeout_ms=0)
            for message in messages:
                self.add(message)
        except TransportError as error:
            # without the robot's messages, the frame still has masks
            self.problem = str(error)
            return RobotState()
        # of those that came together, the newest has waited least
        now_ns = time.time_ns()
        lates_s = [(now_ns - one.stamp_ns) / 1e9 for one in messages if one.clock == "system"]
        if lates_s:
            self._late_s = min(lates_s)
            self._late_until_s = time.monotonic() + LATE_TOLD_S
        self._forget_ahead()
        state = super().find(frame)
        if self.problem is not None:
            self.problem += self._describe_losses(source)
        return state

    def _forget_ahead(self) -> None:
        """Forget what was taken in time, and is ahead now because the node's own clock was set back."""
        latest_ns = self._ages.find_latest_ns()
        if latest_ns is None:
            return
        tracks: tuple[Mapping[Clock, PoseTrack | JointTracks], ...] = (self.poses, self.joints)
        for by_clock in tracks:
            if "system" in by_clock:
                by_clock["system"].forget_after(latest_ns)

    def _describe_losses(self, source: PoseSubscriber) -> str:
        """Return the messages that were not used: what is missing may be among them."""
        losses = ""
        if self._late_s > MAX_LATE_S and time.monotonic() < self._late_until_s:
            losses += (
                f"; they come {self._late_s:.1f} s after their stamps: synchronise the clocks of robot and node "
                "(chrony/PTP), or send them at once"
            )
        if self.ahead:
            losses += f"; {self.ahead} were refused: {self._describe_ahead()}"
        if source.rejected:
            losses += f"; {source.rejected} were malformed, the last: {source.last_error}"
        if source.skipped:
            losses += f"; {source.skipped} were skipped because they came too fast"
        return losses

    def _describe_ahead(self) -> str:
        return (
            f"expected stamps at most {MAX_AHEAD_S:g} s ahead of the node's clock, found {self._lead_s:.1f} s; "
            "synchronise clocks (chrony/PTP)"
        )
