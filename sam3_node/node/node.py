"""The node process: receive the newest frame, run the frame step, publish the masks, and answer requests in between."""

from __future__ import annotations

import gc
import logging
import threading
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from ..engines.oom import find_device_error
from ..errors import DeviceError, Sam3NodeError
from ..perception.perception import Perception
from ..perception.pipeline import Pipeline
from ..perception.prepared_frame import FramePreparer, prepares_ahead
from ..perception.session import Session
from ..perception.spatial import SpatialStage
from ..processes.descriptors import warn_if_descriptors_run_out
from ..processes.notify import Watchdog
from ..settings import Settings
from ..transport import ControlServer, FrameSubscriber, MaskPublisher, ReceivedFrame, choose_replaced, poll
from ..types import MaskFrame
from ..wire import CAUGHT_UP, DROPPED, FAILED, SERVED, Event, Reply, Request, pose_fields
from .ages import AgeLimits
from .catch_up_pace import CatchUpPace
from .decode_ahead import DecodeAhead
from .operations import NODE_QUERIES, describe_change, find_topic, handle_request, has_changed_state
from .robot_poses import RobotPoses
from .stats import CameraSnapshot, CameraStats, NodeSnapshot, describe_error, rss_bytes

log = logging.getLogger(__name__)

POLL_MS = 100
STEP_SHARE_OF_REQUESTS = 0.5
"""Between two steps, requests take at most this share of a step, or one request."""
FIRST_BUDGET_S = 0.05  # before the first step
STATS_LOG_EVERY_S = 60.0
FAILURE_LOG_EVERY_S = 1.0
CAMERA_IDLE_S = 10.0
MAX_CAMERA_NAMES = 256
LINGER_MS = 300  # at shutdown, the longest wait for a reader that does not read


class Node:
    """Serves the frames of up to `tracker.max_cameras` cameras with one model. A context manager.

    Raises TransportError, ModelError or EngineError if it cannot start. Once it runs, no frame and no request stops it;
    only a GPU that has failed does, with DeviceError, because no later frame could succeed.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._events = 0
        self._stats: dict[str, CameraStats] = {}
        self._endpoints: dict[str, str] = {}  # by served camera
        self._refused = 0
        self._pack_us = 0
        self._request_budget_s = FIRST_BUDGET_S
        self._publishing = threading.Lock()
        """Held from publishing masks or an event until the snapshot contains their effect."""
        self._watchdog = Watchdog()
        self._ahead: DecodeAhead | None = None
        self._snapshot: NodeSnapshot | None = None
        self._stepping = False
        self._depth_warnings: set[tuple[str, str]] = set()
        live = settings.transport.delivery == "newest"
        self._ages = AgeLimits(settings.tracker.max_age_ms, live)
        self._pace = CatchUpPace(live)
        self._session = Session(self._silent_s, settings.tracker.max_prompt_age_s, live)
        self._start_s = self._next_stats_log_s = self._next_failure_log_s = time.monotonic()
        self._open_sockets = ExitStack()

    def __enter__(self) -> Self:
        try:
            self.startup()
        except BaseException:
            self._open_sockets.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def startup(self) -> None:
        """Bind the sockets, then load the model, then connect to the cameras."""
        transport, tracker = self._settings.transport, self._settings.tracker
        self._masks = MaskPublisher(transport.masks, transport.delivery, tracker.mask_encoding)
        self._open_sockets.callback(self._masks.close, LINGER_MS)
        self._control = self._open_sockets.enter_context(
            ControlServer(transport.control, self._answer_now, self._session.node, find_topic)
        )
        self.perception = Perception.load(self._settings)
        self.perception.session = self._session
        self._description = self.perception.describe()  # computes digests; later it would delay frames
        self._frames = self._open_sockets.enter_context(
            FrameSubscriber(transport.frames, transport.delivery, max_cameras=MAX_CAMERA_NAMES)
        )
        self._poses = RobotPoses(self._settings.spatial, self._open_sockets)
        if prepares_ahead(self.perception.model):
            prepare = FramePreparer(self.perception.model, tracker.max_frame_pixels)
            self._ahead = self._open_sockets.enter_context(DecodeAhead(self._frames.peek, prepare))
        self._take_snapshot()
        # everything allocated so far lives until the end: garbage collections skip it, so they delay neither a frame
        # nor the exit
        gc.collect()
        gc.freeze()
        self._next_stats_log_s = time.monotonic() + STATS_LOG_EVERY_S

    def main_loop(self, stop: threading.Event, watchdog: Watchdog | None = None) -> None:
        """Serve until `stop` is set. The current frame is finished and published first."""
        self._watchdog = watchdog or self._watchdog
        self._announce_ready()
        while not stop.is_set():
            self._wait()
            self._answer_requests()
            if not self.perception.paused and not stop.is_set():
                self._step_next(stop)
            self._catch_up()
            self._log_stats()

    def shutdown(self) -> None:
        """Close the sockets. Published masks are still delivered to connected readers."""
        for camera, stats in self._stats.items():
            log.info("camera %s: %s", camera, stats.describe())
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
        return {**self._description, **snapshot.perception, "events": snapshot.events, "cameras": cameras}

    def _format_status(self, snapshot: NodeSnapshot) -> dict[str, Any]:
        return {
            "uptime_s": round(time.monotonic() - self._start_s, 3),
            **snapshot.perception,
            "stepping": self._stepping,
            "rss_bytes": rss_bytes(),
            "device_bytes": self.perception.device_bytes,
            "frames_rejected": self._frames.rejected + self._refused,
            "frames_last_error": self._frames.last_error,
            "requests_rejected": self._control.rejected,
            "cameras": snapshot.describe_cameras(),
        }

    def _current_snapshot(self) -> NodeSnapshot:
        """Return the newest snapshot. It contains what has been published, but does not wait for a step."""
        with self._publishing:
            assert self._snapshot is not None
            return self._snapshot

    def _take_snapshot(self) -> None:
        cameras = {
            camera: CameraSnapshot(
                self._stats[camera], len(pipeline.objects), pipeline.turned_away, pipeline.cache_usage
            )
            for camera, pipeline in self.perception.pipelines.items()
        }
        self._snapshot = NodeSnapshot(self.perception.status(), cameras, self._events)

    def _answer_now(self, request: Request) -> Reply | None:
        """Answer `status` and `describe` in the thread of the control socket, once the model is loaded."""
        ready = self._snapshot is not None and request.op in NODE_QUERIES
        return handle_request(self, request) if ready else None

    def _announce_ready(self) -> None:
        model, frames = self.perception.model, ", ".join(self._settings.transport.frames)
        print(
            f"node ready: {model.name} on {model.device}, frames from {frames}, "
            f"masks on {self._masks.endpoint}, control on {self._control.endpoint}",
            flush=True,
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
        self._watchdog.turn()
        left_s = self._request_budget_s
        received = self._control.receive(timeout_ms)
        while received is not None:
            begin_s = time.monotonic()
            peer, request = received
            reply = self._answer(request)
            self._control.reply(peer, reply)
            if reply.error is not None and reply.error.code == DeviceError.code:
                raise DeviceError(reply.error.message)
            took_s = time.monotonic() - begin_s
            left_s -= took_s
            received = self._control.receive() if took_s <= left_s else None

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

    def _answer(self, request: Request) -> Reply:
        """Carry out a request. If it has changed the state, publish it as an event for recorders."""
        reply = handle_request(self, request)
        if has_changed_state(request, reply):
            self._publish_event(request.op, describe_change(request, reply))
        return reply

    def _publish_event(self, op: str, args: dict[str, Any]) -> None:
        with self._publishing:
            try:
                self._masks.send_event(Event(self._events, op, args))
            except Sam3NodeError as error:  # recorders count the missing number as lost
                log.error("event %d, %s, could not be published: %s", self._events, op, error)
            self._events += 1
            self._take_snapshot()

    def _step_next(self, stop: threading.Event) -> None:
        received = self._frames.take(timeout_ms=0)
        if received is None or not self._admit(received.frame.camera, received.endpoint):
            return
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
            self._stepping = True
            begin_ns = time.perf_counter_ns()
            masks = self._step(received)
            reason = self._ages.check_masks(masks, time.perf_counter_ns() - begin_ns)
            if reason is not None:
                self._withhold(received, masks, reason)
                return
            self._publish(masks, received, stop)
        except Exception as error:  # one bad frame must not stop the node
            stats.fail(error)
            self._log_failure(received, error)
            self._publish_event(
                FAILED,
                {"camera": received.frame.camera, "seq": received.frame.seq, "error": describe_error(error)},
            )
            if lost := find_device_error(error):
                raise lost from error
        else:
            self._request_budget_s = STEP_SHARE_OF_REQUESTS * stats.median_step_s
        finally:
            self._stepping = False
            catch_ups = self.perception.pipelines[received.frame.camera].catch_ups
            self._pace.note_step(catch_ups, round(1e9 * stats.median_step_s), time.time_ns())

    def _step(self, received: ReceivedFrame) -> MaskFrame:
        pipeline = self.perception.pipelines[received.frame.camera]
        frame = received.frame
        prepared = self._ahead.take(frame) if self._ahead else None
        with self._ahead.during_step() if self._ahead else nullcontext():
            masks = self.perception.link(
                pipeline.step(frame, received.received_ns, received.skipped, self._poses.find, prepared)
            )
        if frame.depth is not None:
            self._note_spatial_problem(frame.camera, pipeline.spatial)
        # a message cannot contain the time of its own packing: `pack` is the time of the previous message
        stages_us = {**masks.stages_us, "pack": self._pack_us}
        return replace(masks, stages_us=stages_us, node=self._session.node, epoch=pipeline.epoch)

    def _note_spatial_problem(self, camera: str, spatial: SpatialStage) -> None:
        """Tell in the status why 3-D fields are missing, and log it once for each camera and reason."""
        problem = spatial.problem
        if spatial.lacks_robot and self._poses.problem is not None:
            problem = f"{problem}: {self._poses.problem}"
        self._stats[camera].spatial_problem = problem
        reason = (camera, (problem or "").split(":")[0])
        if problem is not None and reason not in self._depth_warnings:
            self._depth_warnings.add(reason)
            log.warning("camera %s: 3-D: %s", camera, problem)

    def _withhold(self, received: ReceivedFrame, masks: MaskFrame, reason: str) -> None:
        """Count a step whose masks are too old to publish, and tell recorders that the frame was stepped."""
        frame = received.frame
        if self._stats[frame.camera].withhold(frame, reason):
            log.warning("camera %s: %s", frame.camera, reason)
        pose = {"robot_pose": pose_fields(masks.robot_pose)} if masks.robot_pose is not None else {}
        self._publish_event(
            FAILED, {"camera": frame.camera, "seq": frame.seq, "error": reason, "withheld": True, **pose}
        )

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
            self._take_snapshot()
            return True

    def _admit(self, camera: str, endpoint: str) -> bool:
        """Return True if the camera is served. A new camera may replace one that sends no frames."""
        served = self.perception.pipelines
        if camera in served:
            self._endpoints[camera] = endpoint
            return True
        if len(served) >= self._settings.tracker.max_cameras and not self._drop_camera_for(endpoint):
            self._refused += 1
            if self._refused == 1:
                log.warning("camera %s is not served: tracker.max_cameras cameras are served already", camera)
            return False
        log.info("camera %s: new, served", camera)
        pipeline = self.perception.serve(camera)
        self._stats[camera] = CameraStats(pipeline.epoch, partial(self._silent_s, camera))
        self._publish_event(SERVED, {"camera": camera})
        self._endpoints[camera] = endpoint
        return True

    def _drop_camera_for(self, endpoint: str) -> bool:
        """Drop a camera for a new one of `endpoint`, so that an endpoint with many names takes nothing from others."""
        camera = choose_replaced(
            {
                name: (self._endpoints[name], stats.idle_s >= CAMERA_IDLE_S)
                for name, stats in sorted(self._stats.items(), key=lambda item: -item[1].idle_s)
            },
            endpoint,
            max(1, self._settings.tracker.max_cameras // len(self._settings.transport.frames)),
        )
        if camera is None:
            return False
        log.warning("camera %s is dropped for a new camera of %s", camera, endpoint)
        self.perception.drop(camera)
        self._pace.forget(camera)
        del self._stats[camera], self._endpoints[camera]
        self._publish_event(DROPPED, {"camera": camera})
        return True

    def _log_failure(self, received: ReceivedFrame, error: Exception) -> None:
        """Log at most one failure per second, with a traceback for unexpected errors. All failures are counted."""
        now_s = time.monotonic()
        if now_s < self._next_failure_log_s:
            return
        self._next_failure_log_s = now_s + FAILURE_LOG_EVERY_S
        frame, expected = received.frame, isinstance(error, Sam3NodeError)
        log.error("camera %s: frame %d failed: %s", frame.camera, frame.seq, error, exc_info=not expected)

    def _log_stats(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_stats_log_s:
            return
        self._next_stats_log_s = now_s + STATS_LOG_EVERY_S
        for camera, found in self._current_snapshot().describe_cameras().items():
            log.info("camera %s: %s", camera, found)
        warn_if_descriptors_run_out()
        log.info("rss %.0f MB, %d frames rejected", rss_bytes() / 1e6, self._frames.rejected + self._refused)
