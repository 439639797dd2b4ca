"""Run the node: receive the newest frame, step it, publish the masks, and answer requests in between."""

import ctypes
import gc
import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Self

from ..detection.guarded import GuardedDetector
from ..engines.oom import find_device_error
from ..errors import DeviceError, request_id
from ..perception.identity import LiveIdentity
from ..perception.perception import Perception
from ..perception.pipeline import Pipeline
from ..perception.step import StepFrame
from ..perception.thread_choice import ThreadChooser, count_threads, use_threads
from ..processes.helpers import read_helpers
from ..processes.logs import announce, log_subject
from ..processes.notify import Watchdog
from ..resumable import resume
from ..schema.operations import CHANGES, NODE_QUERIES
from ..schema.replies import DescriptionReply, RefusedCamera, SnapshotStatus, StatusReply
from ..settings import Settings, describe_robot_gaps
from ..transport import ReceivedFrame, Security
from ..transport.control_server import ControlServer, poll
from ..transport.limits import rss_bytes
from ..types import MaskFrame
from ..wire import CAUGHT_UP, DROPPED, SERVED, THREADS, Reply, Request
from .cameras import Cameras
from .episodes import Episodes
from .frame_taker import TakenFrame
from .health import Health
from .monitoring import FrameSpans, HealthServer, Readings, Totals, make_pages
from .operations import describe_change, handle_request
from .output import Output
from .saved_state import Snapshots
from .status import describe_counts, describe_error
from .take_over import restore_at_start

log = logging.getLogger(__name__)

POLL_MS = 100
"""Milliseconds for which the loop waits for a frame or a request, before it looks after the rest."""
STEP_SHARE_OF_REQUESTS = 0.5
"""Between two steps, requests take at most this share of a step, or one request."""
FIRST_BUDGET_S = 0.05
"""Seconds for requests between two steps, before a step was measured."""
LINGER_MS = 300
"""Milliseconds that the end of the node waits for a reader that does not read."""
LOG_EVERY_S = 60.0
"""Seconds between two log lines with the counts of all cameras."""
TRIM_EVERY_S = 30.0
"""Seconds between two returns of free memory to the system."""
CHORES_EVERY_S = 1.0
"""Seconds between two looks at what is due less often than each turn of the loop."""


class Node:
    """Serves the frames of up to `tracker.max_cameras` cameras with one model. A context manager.

    Raises TransportError, ModelError or EngineError if it cannot start. Once it runs, no frame and no request stops it.
    Only a failed GPU does, with DeviceError, because no later frame could succeed.
    """

    perception: Perception
    snapshots: Snapshots
    _control: ControlServer

    def __init__(
        self, settings: Settings, restore_from: str | None = None, watchdog: Watchdog | None = None
    ) -> None:
        self._settings = settings
        self._restore_from = restore_from
        self.health = Health(settings, watchdog)
        self.output = Output(settings, self.health)
        self.cameras = Cameras(settings)
        self.episodes = Episodes()
        self._request_budget_s = FIRST_BUDGET_S
        self._slice_waits = False
        """True if an object that catches up may go on at once."""
        self._told_threads: int | None = None
        """Number of CPU threads of the last event about it"""
        self._start_s = time.monotonic()
        self._next_chores_s = self._start_s
        self._next_log_s = self._start_s + LOG_EVERY_S
        self._heap = HeapTrimmer()
        self._open_sockets = ExitStack()

    def __enter__(self) -> Self:
        try:
            self.startup()
        except BaseException:
            self.health.watchdog.begin_close()
            self._open_sockets.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Close the sockets. Published masks are still delivered to connected readers."""
        self.health.watchdog.begin_close()
        for camera, stats in self.output.stats.items():
            log.info("camera %s: %s", camera, describe_counts(stats.describe()))
        self.snapshots.close()
        self._open_sockets.close()
        log.info("node stopped after %.1f s", time.monotonic() - self._start_s)

    def startup(self) -> None:
        """Bind the sockets, the probe socket first; load the model; connect to the cameras; restore the state."""
        settings = self._settings
        stack = self._open_sockets
        security = Security.from_settings(settings.transport)
        live = settings.transport.delivery == "newest"
        # probes come first: loading may take minutes, and they say so meanwhile
        if settings.health.bind:
            pages = make_pages(self.readings, settings)
            self.health_url = stack.enter_context(HealthServer(settings.health.bind, pages)).url
            log.info("health at %s", self.health_url)
        stack.callback(self.output.bind().close, LINGER_MS)
        for gap in describe_robot_gaps(settings.robot, settings.spatial):
            log.warning("%s", gap)
        session = LiveIdentity(self.cameras.silent_s, settings.tracker.max_prompt_age_s, live)
        if endpoint := settings.monitoring.otlp_endpoint:
            self.output.spans = stack.enter_context(FrameSpans(endpoint, session.node))
        self._control = stack.enter_context(
            ControlServer(settings.transport.control, self._answer_now, session.node, security)
        )
        if self.output.spans is not None:
            self._control.on_answer = self.output.spans.record_request
        # from here on requests wait in the queue: loading may take minutes
        self.perception = Perception.load(settings)
        detector = self.perception.detector
        if live and settings.detector.max_ms and isinstance(detector, GuardedDetector):
            detector.limit_s = settings.detector.max_ms / 1000
        self.output.perception = self.perception
        # before any camera is served, because it gives each camera its epoch
        self.perception.session = session
        self.threads = self._make_thread_chooser()
        if not self.threads.has_choice:
            self._told_threads = self.threads.chosen
        self._description = self.perception.describe()  # computes digests; later it would delay frames
        body = self.perception.robot
        known_joints = frozenset[str]() if body is None else body.known_joints
        self.cameras.connect(stack, self.perception.model, known_joints)
        self.perception.find_robot = self.cameras.poses.find
        self.snapshots = Snapshots(settings.snapshot, self.perception, self.output)
        self.health.explain_pause = self.snapshots.hand_over_state.explain
        restore_at_start(self.snapshots, self._restore_from, security)
        # a restored camera that has not sent yet must not lose its objects to a new camera
        self.cameras.frames.names.expect(self.perception.pipelines)
        # from here on the control socket's own thread answers `status` and `describe`
        self.output.take_status()
        # everything allocated so far lives until the end: garbage collections skip it, so they delay neither a frame
        # nor the exit
        gc.collect()
        gc.freeze()

    def main_loop(self, stop: threading.Event) -> None:
        """Serve until `stop` is set. The current frame is finished and published first."""
        self.health.serving = True
        self._announce_ready()
        while not stop.is_set():
            # an object that may go on catching up does not wait for the next frame
            timeout_ms = 0 if self._slice_waits or self.cameras.taker.holds else POLL_MS
            # while the node is paused, nobody takes frames: a frame that waits would end each poll at once
            if self.perception.paused:
                self.cameras.taker.skip_held()  # they would be old when it goes on
                self._answer_requests(timeout_ms)
            else:
                poll(self.cameras.frames, self._control, timeout_ms)
            self._answer_requests()
            if not self.perception.paused and not stop.is_set():
                self._step_next(stop)
            self._catch_up()
            self.snapshots.tick()
            if time.monotonic() >= self._next_chores_s:
                self._do_chores()

    def status(self) -> StatusReply:
        """Return the state of the node and of each camera: the reply to `status`. Any thread may call it."""
        status = self.output.wait_for_status()
        totals = self.totals()
        frames = self.cameras.frames
        control = self._control
        helpers = read_helpers()
        return StatusReply(
            **status.perception,
            uptime_s=round(time.monotonic() - self._start_s, 3),
            stepping=self.health.stepping,
            rss_bytes=rss_bytes(),
            device_bytes=totals.gpu_bytes,
            threads_reason=self.threads.describe(),
            frames_rejected=frames.rejected,
            frames_last_error=frames.last_error,
            frames_refused=self._describe_refused(),
            requests_rejected=control.rejected,
            requests_last_error=control.last_error,
            peers_refused=totals.peers_refused,
            peers_last_refusal=control.last_refusal or self.output.publisher.last_refusal,
            endpoints_refused=tuple(frames.refusals),
            endpoints_shared=frames.shared,
            snapshot=SnapshotStatus(**self.snapshots.describe()),
            episode=self.episodes.open,
            helpers_ended={name: state.reason for name, state in helpers.items() if state.is_over},
            helpers_restarted={name: state.restarts for name, state in helpers.items() if state.restarts},
            cameras=status.describe_cameras(),
        )

    def describe(self) -> DescriptionReply:
        """Return what a recorder stores about the node: the reply to `describe`. Any thread may call it.

        `events` counts the events so far. Prompts and objects are the outcome of exactly these events.
        """
        status = self.output.wait_for_status()
        return DescriptionReply(
            **{**self._description, **status.perception},
            restored=self.snapshots.restored,
            events=status.events,
            frames_refused=self._describe_refused(),
            cameras=status.describe_cameras(),
        )

    def _describe_refused(self) -> dict[str, RefusedCamera]:
        """Return the rejected frames of each camera: a camera that sends, though the node does not have it."""
        return {camera: found.describe() for camera, found in self.cameras.frames.refused.items()}

    def totals(self) -> Totals:
        """Return counts of the node. Any thread may call it once there is a status."""
        frames = self.cameras.frames
        helpers = read_helpers()
        written = [state.written for state in helpers.values() if state.written is not None]
        return Totals(
            # the rejected frames contain those of cameras beyond the limit, which have a count of their own
            frames.rejected - frames.names.crowded_out,
            frames.names.crowded_out,
            self._control.rejected,
            self.output.publisher.peers_refused + self._control.peers_refused,
            self.perception.device_bytes,
            sum(state.is_over for state in helpers.values()),
            sum(state.restarts for state in helpers.values()),
            sum(written) if written else None,
            0 if self.output.spans is None else self.output.spans.lost,
        )

    @property
    def readings(self) -> Readings:
        """Values of this node that probes and metrics read."""
        return Readings(
            self.health,
            # looked up at each call, because probes ask before the model and the snapshots exist
            read_status=lambda: self.output.last_status,
            count_totals=self.totals,
            read_snapshots=lambda: self.snapshots.figures(),
        )

    def _answer_now(self, request: Request) -> Reply | None:
        """Answer `status` and `describe` in the thread of the control socket, once the model is loaded."""
        # other operations use what a step changes, so they wait for the main loop
        if request.op not in NODE_QUERIES or self.output.last_status is None:
            return None
        reply = handle_request(self, request)
        return reply if isinstance(reply, Reply) else None

    def _announce_ready(self) -> None:
        model = self.perception.model
        frames = ", ".join(self._settings.transport.frames)
        announce(
            f"node ready: {model.name} on {model.device}, frames from {frames}, "
            f"masks on {self.output.publisher.endpoint}, control on {self._control.endpoint}"
        )
        log.info("node started: %s on %s, %s", model.name, model.device, model.dtype)

    def _do_chores(self) -> None:
        self._next_chores_s = time.monotonic() + CHORES_EVERY_S
        self._heap.tick()
        if time.monotonic() >= self._next_log_s:
            self._next_log_s = time.monotonic() + LOG_EVERY_S
            self.output.log_counts(self.cameras.frames.rejected)

    def _answer_requests(self, timeout_ms: int = 0) -> None:
        """Answer at least one waiting request, and more while the budget probably suffices."""
        # also while masks wait for their readers: a slow reader must not look like a loop that hangs
        self.health.watchdog.tick()
        left_s = self._request_budget_s
        longest_s = 0.0
        received = self._control.receive(timeout_ms)
        while received is not None:
            begin_s = time.monotonic()
            peer, request = received
            # all log lines of the work carry the id of its request, also those of lower layers
            with request_id(request.request_id):
                answer = self._control.begun or handle_request(self, request)
                reply = answer if isinstance(answer, Reply) else resume(answer)
                if reply is not None:
                    self._answer(peer, request, reply)
                elif not isinstance(answer, Reply):
                    # a later request of the same client may depend on a change, but not on a query
                    self._control.put_back(answer, keeps_place=request.op in CHANGES)
            took_s = time.monotonic() - begin_s
            left_s -= took_s
            longest_s = max(longest_s, took_s)
            # the next request may take as long as the longest so far
            received = self._control.receive() if longest_s <= left_s else None

    def _answer(self, peer: tuple[bytes, ...], request: Request, reply: Reply) -> None:
        """Reply to a request. If it has changed the state, publish it as an event for recorders."""
        change = describe_change(request, reply)
        if change is not None:
            self.output.publish_event(request.op, change)
        self._control.reply(peer, reply)
        if reply.error is not None:
            log.info("control: %s was refused: %s: %s", request.op, *reply.error)
            # the client has its answer; without the GPU no later request could succeed
            if reply.error.code == DeviceError.code:
                raise DeviceError(reply.error.message)

    def _catch_up(self) -> None:
        """Let an object that was prompted on a past frame catch up by a slice; repeat while slices are due."""
        pace = self.cameras.pace
        pipelines = self.perception.pipelines.values()
        pipeline = pace.choose(pipelines, time.time_ns(), self._frame_waits)
        while pipeline is not None:
            begin_ns = time.perf_counter_ns()
            done = pipeline.catch_ups.advance()
            pace.note_slice(time.perf_counter_ns() - begin_ns)
            if done is not None:
                outcome = {"camera": pipeline.camera, "id": done.id}
                if done.error:
                    outcome["error"] = describe_error(done.error)
                with request_id(done.request_id):
                    self.output.publish_event(CAUGHT_UP, outcome)
            if not pace.is_due:
                break
            pipeline = pace.choose(pipelines, time.time_ns(), self._frame_waits)
        self._slice_waits = pipeline is not None

    def _frame_waits(self) -> bool:
        return not self.perception.paused and self.cameras.taker.waits

    def _step_next(self, stop: threading.Event) -> None:
        """Step the next frame, and publish its masks unless they are too old by then. A bad frame stops nothing."""
        taken = self.cameras.taker.take()
        if taken is None:
            return
        received = taken.received
        frame = received.frame
        pace = self.cameras.pace
        with log_subject(frame.camera, frame.seq):
            pipeline = self._admit(received)
            if pipeline is None:
                return
            stats = self.output.stats[frame.camera]
            stats.begin(frame, received.received_ns, received.skipped, self.output.limits_windows(pipeline))
            pace.note_frame(frame.camera, received.received_ns, received.skipped)
            try:
                with self.health.step():
                    self._step(pipeline, taken, stop)
            except Exception as error:
                self.output.fail(frame, error)
                # without its GPU the node cannot step any later frame, either
                lost = find_device_error(error)
                if lost is not None:
                    raise lost from error
            finally:
                step_s = stats.median_step_s
                self._request_budget_s = STEP_SHARE_OF_REQUESTS * step_s
                pace.note_step(pipeline.catch_ups, round(1e9 * step_s), time.time_ns())

    def _make_thread_chooser(self) -> ThreadChooser:
        """Make the chooser of the number of CPU threads; it has no choice on a GPU or with `model.threads`."""
        on_cpu = self.perception.model.device.type == "cpu"
        return ThreadChooser(count_threads(), fixed=not on_cpu or self._settings.model.threads > 0)

    def _set_threads(self) -> int:
        """Set the number of CPU threads of the next step, tell recorders of a change, and return it.

        The first one of a node that chooses is always told: a recording may go on over a restart.
        """
        # all steps of an object that catches up are repeated with the number of its first one
        hold = any(len(pipeline.catch_ups) for pipeline in self.perception.pipelines.values())
        count = self.threads.next(hold)
        use_threads(count)
        if count != self._told_threads:
            self._told_threads = count
            self.output.publish_event(THREADS, {"count": count})
        return count

    def _step(self, pipeline: Pipeline, taken: TakenFrame, stop: threading.Event) -> None:
        """Step a frame, and publish its events and masks."""
        received = taken.received
        frame = received.frame
        cameras = self.cameras
        output = self.output
        stats = output.stats[frame.camera]
        threads = self._set_threads()
        begin_ns = time.perf_counter_ns()
        step = StepFrame(frame, received.received_ns, received.skipped, stats.decisions)
        step.finishes = False
        step.encoding = taken.encoding
        if taken.encoding is not None:
            step.prepared = taken.encoding.find(frame)
        elif cameras.ahead is not None:
            step.prepared = cameras.ahead.take(frame)
        # the next frame is decoded while this one is stepped
        with cameras.ahead.during_step() if cameras.ahead else nullcontext():
            masks = self.perception.link(pipeline.step(step))
        # recorders need the events before the masks that show their effect
        for event in step.events:
            output.publish_event(event.op, {"camera": frame.camera, "id": event.id, **event.details})
        stats.note_failures(step.failures)
        if frame.depth is not None or pipeline.finds_robot:
            stats.note_spatial_problem(step, cameras.poses.problem)
        # a robot must not act on masks that are too old by now
        reason = cameras.ages.check_masks(masks, time.perf_counter_ns() - begin_ns)
        is_done = True
        try:
            if reason is not None:
                output.withhold(received, masks, step.decisions, reason)
            else:
                is_done = output.publish(masks, received)
        finally:
            # what no mask needs comes after them
            pipeline.finish(step)
        step_s = 1e-9 * (time.perf_counter_ns() - begin_ns)
        self.threads.note(threads, step_s)
        if stats.decisions.windows is not None:
            stats.note_cost(masks, step.followed_in_windows, step_s, output.sum_loads(but=frame.camera))
        if not is_done:
            self._wait_for_readers(masks, received, stop)

    def _admit(self, received: ReceivedFrame) -> Pipeline | None:
        """Return the pipeline of the frame's camera; None to skip the frame."""
        camera = received.frame.camera
        pipeline = self.perception.pipelines.get(camera) or self._serve(camera)
        if pipeline is None:
            return None
        refusal = self.cameras.ages.check_frame(received)
        if refusal is not None:
            # the next frame of this camera counts it among the skipped ones before it
            self.cameras.frames.skip(received)
            self.output.stats[camera].skip(*refusal)
            return None
        return pipeline

    def _wait_for_readers(self, masks: MaskFrame, received: ReceivedFrame, stop: threading.Event) -> None:
        """Publish masks when every subscriber of lossless delivery has space, and answer requests meanwhile."""
        while not stop.is_set():
            self.output.publisher.wait_for_space(POLL_MS)
            self._answer_requests()
            if self.output.publish(masks, received):
                return
        log.warning(
            "camera %s: masks of frame %d dropped: no subscriber receives them", masks.camera, masks.seq
        )
        # the frame was stepped all the same, and counts as such
        self.output.stats[masks.camera].end(received.frame, received.received_ns)

    def _serve(self, camera: str) -> Pipeline | None:
        """Serve a new camera instead of one that has lost its slot. Return None if the new one has lost its own."""
        served = self.perception.pipelines
        names = self.cameras.frames.names
        # the transport decides which cameras have a slot; a pipeline is removed only after its camera has lost it
        while len(served) >= self._settings.tracker.max_cameras:
            lost = next((name for name in served if not names.has_place(name)), None)
            if lost is None:
                return None
            log.warning("camera %s is dropped for the new camera %s", lost, camera)
            self.snapshots.withdraw()  # it has the epoch of ids that become void
            self.cameras.pace.forget(lost)
            self.perception.drop(lost)
            self.output.publish_event(DROPPED, {"camera": lost})
        log.info("camera %s: new, served", camera)
        pipeline = self.perception.serve(camera)
        self.output.publish_event(SERVED, {"camera": camera})
        return pipeline


class HeapTrimmer:
    """Gives memory that the C library keeps after a free back to the system, every TRIM_EVERY_S.

    Tensors and messages of many sizes fragment the heap: glibc keeps free pages between those in use, and a node that
    runs for weeks would creep from one highest mark to the next. `malloc_trim` gives free pages back, also in the
    middle. With another C library than glibc this does nothing.
    """

    def __init__(self) -> None:
        self._trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._next_s = time.monotonic() + TRIM_EVERY_S

    def tick(self) -> None:
        """Trim the heap every TRIM_EVERY_S, which takes 2 to 4 ms for a heap of 300 MB."""
        now_s = time.monotonic()
        if self._trim is not None and now_s >= self._next_s:
            self._next_s = now_s + TRIM_EVERY_S
            self._trim(0)
