"""The node process: receive the newest frame, run the frame step, publish the masks, and answer requests in between.

The sockets of the node, with the keys of its settings.

Memory that the C library keeps after a free, given back to the system.

Tensors and messages of many sizes fragment the heap: glibc keeps free pages between those in use, and a node that runs
for weeks would creep from one highest mark to the next. `malloc_trim` gives free pages back, also in the middle.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from ..engines.oom import find_device_error
from ..errors import DeviceError, Sam3NodeError
from ..perception.perception import Perception, Session
from ..perception.pipeline import FramePreparer, Pipeline, prepares_ahead
from ..perception.spatial import SpatialStage
from ..processes.logs import announce, log_subject
from ..processes.notify import Watchdog
from ..settings import Settings
from ..transport import ControlServer, FrameSubscriber, MaskPublisher, ReceivedFrame, Security, poll
from ..transport.control_server import AnswerNow
from ..types import MaskFrame, resume
from ..wire import CAUGHT_UP, FAILED, Event, Reply, Request, pose_fields
from ..wire.operations import OPERATIONS
from .cameras import AgeLimits, CatchUpPace, DecodeAhead, RobotPoses, ServedCameras
from .monitoring import HealthServer, Totals, make_pages
from .operations import describe_change, handle_request
from .restoring import restore_at_start
from .saved_state import Snapshots
from .status import CameraSnapshot, CameraStats, Health, NodeSnapshot, StatsLog, describe_error, rss_bytes

log = logging.getLogger(__name__)

POLL_MS = 100
STEP_SHARE_OF_REQUESTS = 0.5
"""Between two steps, requests take at most this share of a step, or one request."""
FIRST_BUDGET_S = 0.05  # before the first step
LINGER_MS = 300  # at shutdown, the longest wait for a reader that does not read


class Node:
    """Serves the frames of up to `tracker.max_cameras` cameras with one model. A context manager.

    Raises TransportError, ModelError or EngineError if it cannot start. Once it runs, no frame and no request stops it;
    only a GPU that has failed does, with DeviceError, because no later frame could succeed.
    """

    def __init__(
        self, settings: Settings, restore_from: str | None = None, watchdog: Watchdog | None = None
    ) -> None:
        self._settings, self._restore_from = settings, restore_from
        self.health = Health(settings, watchdog)
        self._events = 0
        self._stats: dict[str, CameraStats] = {}
        self._pack_us = 0
        self._request_budget_s = FIRST_BUDGET_S
        self._publishing = threading.Lock()
        """Held from publishing masks or an event until the snapshot contains their effect."""
        self._ahead: DecodeAhead | None = None
        self._snapshot: NodeSnapshot | None = None
        live = settings.transport.delivery == "newest"
        self._ages = AgeLimits(settings.tracker.max_age_ms, live)
        self._pace = CatchUpPace(live)
        self._budget_ms = settings.deadline.budget_ms if live else 0.0
        self._session = Session(self._silent_s, settings.tracker.max_prompt_age_s, live)
        self._start_s = time.monotonic()
        self._stats_log = StatsLog()
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def startup(self) -> None:
        """Bind the sockets, that of probes first; load the model; connect to the cameras."""
        settings = self._settings
        if settings.health.bind:
            server = HealthServer(settings.health.bind, make_pages(self, settings))
            self.health_url = self._open_sockets.enter_context(server).url
            log.info("health at %s", self.health_url)
        self._masks = bind_masks(settings)
        self._open_sockets.callback(self._masks.close, LINGER_MS)
        self._control = self._open_sockets.enter_context(
            bind_control(settings, self._answer_now, self._session.node)
        )
        self.perception = Perception.load(self._settings)
        self.perception.session = self._session
        self._cameras = ServedCameras(
            settings, self.perception, lambda: self._stats, self._publish_event, self._forget_camera
        )
        self._description = self.perception.describe()  # computes digests; later it would delay frames
        self._frames = self._open_sockets.enter_context(connect_frames(settings))
        self._poses = RobotPoses(
            settings.spatial, self._open_sockets, Security.from_settings(settings.transport)
        )
        if prepares_ahead(self.perception.model):
            prepare = FramePreparer(self.perception.model, settings.tracker.max_frame_pixels)
            self._ahead = self._open_sockets.enter_context(DecodeAhead(self._frames.peek, prepare))
        keep = self._settings.snapshot
        self.snapshots = Snapshots(keep, self.perception, self._publish_event, lambda: self._stats)
        self.health.explain_pause = self.snapshots.hand_over_state.explain
        restore_at_start(self.snapshots, self._restore_from, Security.from_settings(settings.transport))
        self._take_snapshot()
        # everything allocated so far lives until the end: garbage collections skip it, so they delay neither a frame
        # nor the exit
        gc.collect()
        gc.freeze()

    def main_loop(self, stop: threading.Event) -> None:
        """Serve until `stop` is set. The current frame is finished and published first."""
        self.health.serving = True
        self._announce_ready()
        while not stop.is_set():
            self._wait()
            self._answer_requests()
            if not self.perception.paused and not stop.is_set():
                self._step_next(stop)
            self._catch_up()
            self.snapshots.tick()
            self._heap.tick()
            self._stats_log.write_if_due(
                self._current_snapshot(), self._frames.rejected + self._cameras.refused
            )

    def shutdown(self) -> None:
        """Close the sockets. Published masks are still delivered to connected readers."""
        self.health.watchdog.begin_close()
        for camera, stats in self._stats.items():
            log.info("camera %s: %s", camera, stats.describe())
        self.snapshots.close()
        self._open_sockets.close()
        log.info("node stopped after %.1f s", time.monotonic() - self._start_s)

    def status(self) -> dict[str, Any]:
        """Return the state of the node and of each camera: the reply to `status`. Any thread may call it."""
        return self._format_status(self._current_snapshot())

    def describe(self) -> dict[str, Any]:
        """Return what a recorder stores about the node: the reply to `describe`. Any thread may call it.

        `events` counts the events so far. Prompts and objects are the outcome of exactly these events.
        """
        snapshot = self._current_snapshot()
        cameras = self._format_status(snapshot)["cameras"]
        own = {**self._description, **snapshot.perception, "restored": self.snapshots.restored}
        return {**own, "events": snapshot.events, "cameras": cameras}

    def _format_status(self, snapshot: NodeSnapshot) -> dict[str, Any]:
        totals = self.totals()
        return {
            "uptime_s": round(time.monotonic() - self._start_s, 3),
            **snapshot.perception,
            "stepping": self.health.stepping,
            "rss_bytes": rss_bytes(),
            "device_bytes": totals.gpu_bytes,
            "frames_rejected": totals.malformed + totals.not_served,
            "frames_last_error": self._frames.last_error,
            "requests_rejected": totals.requests_rejected,
            **describe_refusals(self._masks, self._control, self._frames),
            "snapshot": self.snapshots.describe(),
            "cameras": snapshot.describe_cameras(),
        }

    def snapshot(self) -> NodeSnapshot | None:
        """Return the newest snapshot without waiting, None before the model is loaded."""
        return self._snapshot

    def totals(self) -> Totals:
        """Return counts of the node. Any thread may call it once there is a snapshot."""
        return Totals(
            self._frames.rejected,
            self._cameras.refused,
            self._control.rejected,
            self._masks.peers_refused + self._control.peers_refused,
            self.perception.device_bytes,
            self.snapshots.counts(),
        )

    def _current_snapshot(self) -> NodeSnapshot:
        """Return the newest snapshot. It contains what has been published, but does not wait for a step."""
        with self._publishing:
            assert self._snapshot is not None
            return self._snapshot

    def _take_snapshot(self) -> None:
        cameras = {
            camera: CameraSnapshot.take(self._stats[camera], pipeline)
            for camera, pipeline in self.perception.pipelines.items()
        }
        self.health.paused = self.perception.paused
        self._snapshot = NodeSnapshot(self.perception.status(), cameras, self._events)

    def _answer_now(self, request: Request) -> Reply | None:
        """Answer `status` and `describe` in the thread of the control socket, once the model is loaded."""
        is_node = request.op in OPERATIONS and OPERATIONS[request.op].kind == "node"
        reply = handle_request(self, request) if is_node and self._snapshot is not None else None
        return reply if isinstance(reply, Reply) else None

    def _announce_ready(self) -> None:
        model, frames = self.perception.model, ", ".join(self._settings.transport.frames)
        announce(
            f"node ready: {model.name} on {model.device}, frames from {frames}, "
            f"masks on {self._masks.endpoint}, control on {self._control.endpoint}"
        )
        log.info("node started: %s on %s, %s", model.name, model.device, model.dtype)

    def _wait(self) -> None:
        timeout_ms = POLL_MS if self._next_to_catch_up() is None else 0
        if not self.perception.paused:
            poll(self._frames, self._control, timeout_ms)
        else:
            self._answer_requests(timeout_ms)

    def _answer_requests(self, timeout_ms: int = 0) -> None:
        """Answer waiting requests while the budget lasts: at least one, and none that would probably exceed it."""
        self.health.watchdog.tick()
        left_s, longest_s = self._request_budget_s, 0.0
        received = self._control.receive(timeout_ms)
        while received is not None:
            begin_s = time.monotonic()
            self._answer(*received)
            took_s = time.monotonic() - begin_s
            left_s, longest_s = left_s - took_s, max(longest_s, took_s)
            received = self._control.receive() if longest_s <= left_s else None

    def _catch_up(self) -> None:
        """Track an object that was prompted on a past frame on a frame after it; go on while that is due."""
        while (pipeline := self._next_to_catch_up()) is not None:
            begin_ns = time.perf_counter_ns()
            done = pipeline.catch_ups.advance()
            self._pace.note_slice(time.perf_counter_ns() - begin_ns)
            if done is not None:
                error = {"error": describe_error(done.error)} if done.error else {}
                self._publish_event(CAUGHT_UP, {"camera": pipeline.camera, "id": done.id, **error})
            if not self._pace.is_due:
                return

    def _next_to_catch_up(self) -> Pipeline | None:
        frame_waits = not self.perception.paused and self._frames.peek(None, timeout_ms=0) is not None
        return self._pace.choose(self.perception.pipelines.values(), time.time_ns(), frame_waits)

    def _answer(self, peer: tuple[bytes, ...], request: Request) -> None:
        """Carry out a request, or a turn of it. If it has changed the state, publish it as an event for recorders."""
        answer = self._control.begun or handle_request(self, request)
        reply = answer if isinstance(answer, Reply) else resume(answer)
        if reply is None:
            return self._control.put_back(answer)
        if (change := describe_change(request, reply)) is not None:
            self._publish_event(request.op, change)
        self._control.reply(peer, reply)
        if reply.error is not None and reply.error.code == DeviceError.code:
            raise DeviceError(reply.error.message)

    def _publish_event(self, op: str, args: dict[str, Any]) -> None:
        with self._publishing:
            try:
                self._masks.send_event(Event(self._events, op, args))
            except Sam3NodeError as error:  # recorders count the missing number as lost
                log.error("event %d, %s, could not be published: %s", self._events, op, error)
            self._events += 1
            self._stats = CameraStats.follow(
                self._stats, self.perception.pipelines, self._silent_s, self._budget_ms
            )
            self._take_snapshot()

    def _step_next(self, stop: threading.Event) -> None:
        received = self._frames.take(timeout_ms=0)
        if received is None:
            return
        with log_subject(received.frame.camera, received.frame.seq):
            if self._cameras.admit(received.frame.camera, received.endpoint):
                self._step_admitted(received, stop)

    def _step_admitted(self, received: ReceivedFrame, stop: threading.Event) -> None:
        stats = self._stats[received.frame.camera]
        refusal = self._ages.check_frame(received)
        if refusal is not None:
            self._frames.leave_out(received)
            if stats.leave_out(*refusal):
                log.warning("camera %s: %s", received.frame.camera, refusal.reason)
            return
        stats.begin(received.frame, received.received_ns, received.skipped)
        self._pace.note_frame(received.frame.camera, received.received_ns, received.skipped)
        try:
            with self.health.step():
                begin_ns = time.perf_counter_ns()
                masks = self._step(received)
                reason = self._ages.check_masks(masks, time.perf_counter_ns() - begin_ns)
                if reason is not None:
                    self._withhold(received, masks, reason)
                    return
                self._publish(masks, received, stop)
        except Exception as error:  # one bad frame must not stop the node
            stats.fail(error)
            unexpected = not isinstance(error, Sam3NodeError)
            frame = received.frame
            log.error("camera %s: frame %d failed: %s", frame.camera, frame.seq, error, exc_info=unexpected)
            self._publish_event(FAILED, stats.describe_failure(frame, describe_error(error)))
            if lost := find_device_error(error):
                raise lost from error
        else:
            self._request_budget_s = STEP_SHARE_OF_REQUESTS * stats.median_step_s
        finally:
            catch_ups = self.perception.pipelines[received.frame.camera].catch_ups
            self._pace.note_step(catch_ups, round(1e9 * stats.median_step_s), time.time_ns())

    def _step(self, received: ReceivedFrame) -> MaskFrame:
        pipeline = self.perception.pipelines[received.frame.camera]
        frame = received.frame
        prepared = self._ahead.take(frame) if self._ahead else None
        level = self._stats[frame.camera].shed_level
        with self._ahead.during_step() if self._ahead else nullcontext():
            masks = self.perception.link(
                pipeline.step(
                    frame, received.received_ns, received.skipped, self._poses.find, prepared, level
                )
            )
        if frame.depth is not None:
            self._note_spatial_problem(frame.camera, pipeline.spatial)
        # a message cannot contain the time of its own packing: `pack` is the time of the previous message
        stages_us = {**masks.stages_us, "pack": self._pack_us}
        return replace(masks, stages_us=stages_us, node=self._session.node, epoch=pipeline.epoch)

    def _note_spatial_problem(self, camera: str, spatial: SpatialStage) -> None:
        """Tell in the status why 3-D fields are missing, and log it once for each camera and reason."""
        poses_problem = f": {self._poses.problem}" if spatial.lacks_robot and self._poses.problem else ""
        if self._stats[camera].note_spatial_problem(spatial.problem and spatial.problem + poses_problem):
            log.warning("camera %s: 3-D: %s", camera, self._stats[camera].spatial_problem)

    def _withhold(self, received: ReceivedFrame, masks: MaskFrame, reason: str) -> None:
        """Count a step whose masks are too old to publish, and tell recorders that the frame was stepped."""
        frame, stats = received.frame, self._stats[masks.camera]
        if stats.withhold(frame, received.received_ns, reason):
            log.warning("camera %s: %s", frame.camera, reason)
        pose = {"robot_pose": pose_fields(masks.robot_pose)} if masks.robot_pose is not None else {}
        self._publish_event(FAILED, {**stats.describe_failure(frame, reason), "withheld": True, **pose})

    def _silent_s(self, camera: str) -> float | None:
        return self._frames.silent_s(camera)

    def _publish(self, masks: MaskFrame, received: ReceivedFrame, stop: threading.Event) -> None:
        """Send the masks. Lossless delivery waits until every subscriber has space; requests are answered meanwhile."""
        begin_ns = time.perf_counter_ns()
        while not self._send(masks, received):
            if stop.is_set():
                log.warning(
                    "camera %s: masks of frame %d dropped: no subscriber receives them",
                    masks.camera,
                    masks.seq,
                )
                self._stats[masks.camera].end(received.frame, received.received_ns)
                return
            self._masks.wait_for_space(POLL_MS)
            self._answer_requests()
            begin_ns = time.perf_counter_ns()
        self._pack_us = (time.perf_counter_ns() - begin_ns) // 1000

    def _send(self, masks: MaskFrame, received: ReceivedFrame) -> bool:
        """Send the masks and count them. A status after their arrival contains them."""
        with self._publishing:
            if not self._masks.send(masks, timeout_ms=0):
                return False
            self._stats[masks.camera].end(received.frame, received.received_ns)
            self.health.published(masks.stages_us)
            self._take_snapshot()
            return True

    def _forget_camera(self, camera: str) -> None:
        self.snapshots.withdraw()  # it has the epoch of ids that become void
        self._pace.forget(camera)


MAX_CAMERA_NAMES = 256


def bind_masks(settings: Settings) -> MaskPublisher:
    """Bind the endpoint of masks. Raises TransportError."""
    transport, encoding = settings.transport, settings.tracker.mask_encoding
    return MaskPublisher(transport.masks, transport.delivery, encoding, Security.from_settings(transport))


def bind_control(settings: Settings, answer_now: AnswerNow, node: str) -> ControlServer:
    """Bind the endpoint of requests. Raises TransportError."""
    security = Security.from_settings(settings.transport)
    return ControlServer(settings.transport.control, answer_now, node, security)


def connect_frames(settings: Settings) -> FrameSubscriber:
    """Connect to the endpoints of cameras. Raises TransportError."""
    transport = settings.transport
    return FrameSubscriber(
        transport.frames,
        transport.delivery,
        max_cameras=MAX_CAMERA_NAMES,
        security=Security.from_settings(transport),
    )


def describe_refusals(
    masks: MaskPublisher, control: ControlServer, frames: FrameSubscriber
) -> dict[str, Any]:
    """Return the fields of the status that say who was refused, and which cameras' endpoints are."""
    return {
        "requests_last_error": control.last_error,
        "peers_refused": masks.peers_refused + control.peers_refused,
        "peers_last_refusal": control.last_refusal or masks.last_refusal,
        "endpoints_refused": list(frames.refusals),
    }


EVERY_S = 30.0


class HeapTrimmer:
    """Trims the heap every EVERY_S. With another C library than glibc it does nothing."""

    def __init__(self) -> None:
        self._trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._next_s = time.monotonic() + EVERY_S

    def tick(self) -> None:
        """Trim the heap if it is time to. It takes 2 to 4 ms for a heap of 300 MB."""
        now_s = time.monotonic()
        if self._trim is not None and now_s >= self._next_s:
            self._next_s = now_s + EVERY_S
            self._trim(0)
