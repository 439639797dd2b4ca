"""The node process: receive the newest frame, run the frame step, publish the masks, and answer requests in between."""

from __future__ import annotations

import gc
import logging
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from ..errors import Sam3NodeError
from ..perception.perception import Perception
from ..perception.session import Session
from ..settings import Settings
from ..transport import ControlServer, FrameSubscriber, MaskPublisher, ReceivedFrame, poll
from ..types import MaskFrame
from ..wire import DROPPED, FAILED, SERVED, Event, Reply, Request
from .ages import AgeLimits
from .operations import describe_change, handle_request, has_changed_state
from .stats import CameraStats, rss_bytes

log = logging.getLogger(__name__)

POLL_MS = 100
REQUESTS_PER_TURN = 32
STATS_LOG_EVERY_S = 60.0
FAILURE_LOG_EVERY_S = 1.0
CAMERA_IDLE_S = 10.0
MAX_CAMERA_NAMES = 256
LINGER_MS = 300  # at shutdown, the longest wait for a reader that does not read


class Node:
    """Serves the frames of up to `tracker.max_cameras` cameras with one model. A context manager.

    Raises TransportError, ModelError or EngineError if it cannot start. Once it runs, no frame and no request stops it.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._events = 0
        self._stats: dict[str, CameraStats] = {}
        self._refused = 0
        self._pack_us = 0
        live = settings.transport.delivery == "newest"
        self._ages = AgeLimits(settings.tracker.max_age_ms, live)
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
        self._control = self._open_sockets.enter_context(ControlServer(transport.control))
        self.perception = Perception.load(self._settings)
        self.perception.session = self._session
        self.perception.describe()  # computes the weights' digests now; later it would delay frames
        self._frames = self._open_sockets.enter_context(
            FrameSubscriber(transport.frames, transport.delivery, max_cameras=MAX_CAMERA_NAMES)
        )
        # everything allocated so far lives until the end: garbage collections skip it, so they delay neither a frame
        # nor the exit
        gc.collect()
        gc.freeze()
        self._next_stats_log_s = time.monotonic() + STATS_LOG_EVERY_S

    def main_loop(self, stop: threading.Event) -> None:
        """Serve until `stop` is set. The current frame is finished and published first."""
        self._announce_ready()
        while not stop.is_set():
            self._wait()
            self._answer_requests()
            if not self.perception.paused and not stop.is_set():
                self._step_next(stop)
            self._log_stats()

    def shutdown(self) -> None:
        """Close the sockets. Published masks are still delivered to connected readers."""
        for camera, stats in self._stats.items():
            log.info("camera %s: %s", camera, stats.describe())
        self._open_sockets.close()
        log.info("node stopped after %.1f s", time.monotonic() - self._start_s)

    def status(self) -> dict[str, Any]:
        """Return the state of the node and of each camera: the reply to `status`."""
        return {
            "uptime_s": round(time.monotonic() - self._start_s, 3),
            **self.perception.status(),
            "rss_bytes": rss_bytes(),
            "frames_rejected": self._frames.rejected + self._refused,
            "frames_last_error": self._frames.last_error,
            "requests_rejected": self._control.rejected,
            "cameras": {camera: self._camera_status(camera) for camera in self.perception.pipelines},
        }

    def describe(self) -> dict[str, Any]:
        """Return what a recorder stores about the node: the reply to `describe`. `events` counts the events so far."""
        return {**self.perception.describe(), "events": self._events, "cameras": self.status()["cameras"]}

    def _camera_status(self, camera: str) -> dict[str, Any]:
        pipeline = self.perception.pipelines[camera]
        return {
            **self._stats[camera].describe(),
            "objects": len(pipeline.objects),
            "turned_away": pipeline.turned_away,
        }

    def _announce_ready(self) -> None:
        model, frames = self.perception.model, ", ".join(self._settings.transport.frames)
        print(
            f"node ready: {model.name} on {model.device}, frames from {frames}, "
            f"masks on {self._masks.endpoint}, control on {self._control.endpoint}",
            flush=True,
        )
        log.info("node started: %s on %s, %s", model.name, model.device, model.dtype)

    def _wait(self) -> None:
        if not self.perception.paused:
            poll(self._frames, self._control, POLL_MS)
        else:
            self._answer_requests(POLL_MS)

    def _answer_requests(self, timeout_ms: int = 0) -> None:
        for _ in range(REQUESTS_PER_TURN):
            received = self._control.receive(timeout_ms)
            if received is None:
                return
            peer, request = received
            try:
                self._control.reply(peer, self._answer(request))
            except Sam3NodeError as error:
                log.warning("control: the reply to %s could not be sent: %s", request.op, error)
            timeout_ms = 0

    def _answer(self, request: Request) -> Reply:
        """Carry out a request. If it has changed the state, publish it as an event for recorders."""
        reply = handle_request(self, request)
        if has_changed_state(request, reply):
            self._publish_event(request.op, describe_change(request, reply))
        return reply

    def _publish_event(self, op: str, args: dict[str, Any]) -> None:
        self._masks.send_event(Event(self._events, op, args))
        self._events += 1

    def _step_next(self, stop: threading.Event) -> None:
        received = self._frames.take(timeout_ms=0)
        if received is None or not self._admit(received.frame.camera):
            return
        stats = self._stats[received.frame.camera]
        refusal = self._ages.check_frame(received)
        if refusal is not None:
            self._frames.leave_out(received)
            stats.leave_out(*refusal)
            self._log_failure(received, refusal.reason)
            return
        stats.begin(received.frame, received.received_ns, received.skipped)
        try:
            begin_ns = time.perf_counter_ns()
            masks = self._step(received)
            reason = self._ages.check_masks(masks, time.perf_counter_ns() - begin_ns)
            if reason is not None:
                self._withhold(received, reason)
                return
            self._publish(masks, stop)
        except Exception as error:  # one bad frame must not stop the node
            stats.fail(error)
            self._log_failure(received, error)
            self._publish_event(
                FAILED,
                {"camera": received.frame.camera, "seq": received.frame.seq, "error": str(error)[:200]},
            )
        else:
            stats.end(received.frame, received.received_ns)

    def _step(self, received: ReceivedFrame) -> MaskFrame:
        pipeline = self.perception.pipelines[received.frame.camera]
        masks = pipeline.step(received.frame, received.received_ns, received.skipped)
        # a message cannot contain the time of its own packing: `pack` is the time of the previous message
        stages_us = {**masks.stages_us, "pack": self._pack_us}
        return replace(masks, stages_us=stages_us, node=self._session.node, epoch=pipeline.epoch)

    def _withhold(self, received: ReceivedFrame, reason: str) -> None:
        """Count a step whose masks are too old to publish, and tell recorders that the frame was stepped."""
        frame = received.frame
        self._stats[frame.camera].withhold(reason)
        self._log_failure(received, reason)
        self._publish_event(
            FAILED, {"camera": frame.camera, "seq": frame.seq, "error": reason, "withheld": True}
        )

    def _silent_s(self, camera: str) -> float | None:
        return self._frames.silent_s(camera)

    def _publish(self, masks: MaskFrame, stop: threading.Event) -> None:
        """Send the masks. Lossless delivery waits until every subscriber has space; requests are answered meanwhile."""
        begin_ns = time.perf_counter_ns()
        while not self._masks.send(masks, timeout_ms=POLL_MS):
            if stop.is_set():
                log.warning(
                    "camera %s: masks of frame %d dropped: no subscriber receives them",
                    masks.camera,
                    masks.seq,
                )
                return
            self._answer_requests()
            begin_ns = time.perf_counter_ns()
        self._pack_us = (time.perf_counter_ns() - begin_ns) // 1000

    def _admit(self, camera: str) -> bool:
        """Return True if the camera is served. A new camera may replace one that sends no frames."""
        served = self.perception.pipelines
        if camera in served:
            return True
        if len(served) >= self._settings.tracker.max_cameras and not self._drop_idle_camera():
            self._refused += 1
            if self._refused == 1:
                log.warning("camera %s is not served: tracker.max_cameras cameras are served already", camera)
            return False
        log.info("camera %s: new, served", camera)
        pipeline = self.perception.serve(camera)
        self._publish_event(SERVED, {"camera": camera})
        self._stats[camera] = CameraStats(pipeline.epoch, partial(self._silent_s, camera))
        return True

    def _drop_idle_camera(self) -> bool:
        camera, stats = max(self._stats.items(), key=lambda item: item[1].idle_s)
        if stats.idle_s < CAMERA_IDLE_S:
            return False
        log.warning("camera %s has sent no frames for some time: dropped for a new camera", camera)
        self.perception.drop(camera)
        del self._stats[camera]
        self._publish_event(DROPPED, {"camera": camera})
        return True

    def _log_failure(self, received: ReceivedFrame, error: Exception | str) -> None:
        """Log at most one failure per second, with a traceback for unexpected errors. All failures are counted."""
        now_s = time.monotonic()
        if now_s < self._next_failure_log_s:
            return
        self._next_failure_log_s = now_s + FAILURE_LOG_EVERY_S
        frame = received.frame
        if isinstance(error, str):
            log.warning("camera %s: %s", frame.camera, error)
        else:
            expected = isinstance(error, Sam3NodeError)
            log.error("camera %s: frame %d failed: %s", frame.camera, frame.seq, error, exc_info=not expected)

    def _log_stats(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_stats_log_s:
            return
        self._next_stats_log_s = now_s + STATS_LOG_EVERY_S
        for camera in self.perception.pipelines:
            log.info("camera %s: %s", camera, self._camera_status(camera))
        log.info("rss %.0f MB, %d frames rejected", rss_bytes() / 1e6, self._frames.rejected + self._refused)
