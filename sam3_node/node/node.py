"""Counts and times of each camera, and the memory of this process.

The process: receive the newest frame, step, publish; answer requests in between."""

from __future__ import annotations

import gc
import logging
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from ..errors import Sam3NodeError
from ..perception.perception import Perception
from ..settings import Settings
from ..transport import ControlServer, FrameSubscriber, MaskPublisher, Received, poll
from ..types import MaskFrame
from ..wire import DROPPED, FAILED, SERVED, Event, Reply, Request
from .operations import answer, changed
from .stats import CameraStats, rss_bytes

log = logging.getLogger(__name__)

POLL_MS = 100
REQUESTS_PER_TURN = 32
HEALTH_EVERY_S = 60.0
FAILURE_LOG_EVERY_S = 1.0
CAMERA_IDLE_S = 10.0
MAX_CAMERA_NAMES = 256
LINGER_MS = 300  # at the end, a reader that hangs is not waited for


class Node:
    """One model serving the frames of up to `tracker.max_cameras` cameras. A context manager.

    Raises TransportError, ModelError or EngineError when it cannot start; afterwards no frame and no request ends it.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._events = 0
        self._health: dict[str, CameraStats] = {}
        self._refused = 0
        self._pack_us = 0
        self._start_s = self._next_health_s = self._next_failure_log_s = time.monotonic()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        try:
            self.startup()
        except BaseException:
            self._open.close()
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
        self._open.callback(self._masks.close, LINGER_MS)
        self._control = self._open.enter_context(ControlServer(transport.control))
        self.perception = Perception.load(self._settings)
        self.perception.describe()  # reads the weights once more, for their digests: better now than while it serves
        self._frames = self._open.enter_context(
            FrameSubscriber(transport.frames, transport.delivery, max_cameras=MAX_CAMERA_NAMES)
        )
        # what is here now stays: collections that skip it neither delay a frame nor, at exit, the end
        gc.collect()
        gc.freeze()
        self._next_health_s = time.monotonic() + HEALTH_EVERY_S

    def main_loop(self, stop: threading.Event) -> None:
        """Serve until `stop` is set; the frame in hand is finished and published first."""
        self._say_ready()
        while not stop.is_set():
            self._wait()
            self._answer_requests()
            if not self.perception.paused and not stop.is_set():
                self._step_next(stop)
            self._tell_health()

    def shutdown(self) -> None:
        """Close the sockets; what was published is flushed to whoever still reads."""
        for camera, health in self._health.items():
            log.info("camera %s: %s", camera, health.describe())
        self._open.close()
        log.info("node stopped after %.1f s", time.monotonic() - self._start_s)

    def status(self) -> dict[str, Any]:
        """The state of the node and of each camera, as `status` answers it."""
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
        """All that a recorder must know of the node, as `describe` answers it; `events` counts those so far."""
        return {**self.perception.describe(), "events": self._events, "cameras": self.status()["cameras"]}

    def _camera_status(self, camera: str) -> dict[str, Any]:
        pipeline = self.perception.pipelines[camera]
        return {
            **self._health[camera].describe(),
            "objects": len(pipeline.objects),
            "turned_away": pipeline.turned_away,
        }

    def _say_ready(self) -> None:
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
            found = self._control.receive(timeout_ms)
            if found is None:
                return
            peer, request = found
            try:
                self._control.reply(peer, self._answer(request))
            except Sam3NodeError as error:
                log.warning("control: %s could not be answered: %s", request.op, error)
            timeout_ms = 0

    def _answer(self, request: Request) -> Reply:
        """Carry a request out, and tell whoever records of one that has changed anything."""
        reply = answer(self, request)
        if changed(request, reply):
            self._tell(request.op, request.args)
        return reply

    def _tell(self, op: str, args: dict[str, Any]) -> None:
        self._masks.tell(Event(self._events, op, args))
        self._events += 1

    def _step_next(self, stop: threading.Event) -> None:
        received = self._frames.take(timeout_ms=0)
        if received is None or not self._admit(received.frame.camera):
            return
        health = self._health[received.frame.camera]
        health.begin(received.frame, received.received_ns, received.skipped)
        try:
            self._publish(self._step(received), stop)
        except Exception as error:  # one bad frame must not end the node
            health.fail(error)
            self._log_failure(received, error)
            self._tell(
                FAILED,
                {"camera": received.frame.camera, "seq": received.frame.seq, "error": str(error)[:200]},
            )
        else:
            health.end(received.frame, received.received_ns)

    def _step(self, received: Received) -> MaskFrame:
        pipeline = self.perception.pipelines[received.frame.camera]
        masks = pipeline.step(received.frame, received.received_ns, received.skipped)
        # a message cannot hold the time of its own packing: `pack` is that of the message before
        return replace(masks, stages_us={**masks.stages_us, "pack": self._pack_us})

    def _publish(self, masks: MaskFrame, stop: threading.Event) -> None:
        """Lossless delivery waits for a subscriber with room; requests are answered meanwhile."""
        begin_ns = time.perf_counter_ns()
        while not self._masks.send(masks, timeout_ms=POLL_MS):
            if stop.is_set():
                log.warning(
                    "camera %s: masks of frame %d dropped: nobody takes them", masks.camera, masks.seq
                )
                return
            self._answer_requests()
            begin_ns = time.perf_counter_ns()
        self._pack_us = (time.perf_counter_ns() - begin_ns) // 1000

    def _admit(self, camera: str) -> bool:
        """Whether the camera is served; a new one takes the place of one that has been silent."""
        served = self.perception.pipelines
        if camera in served:
            return True
        if len(served) >= self._settings.tracker.max_cameras and not self._drop_idle_camera():
            self._refused += 1
            if self._refused == 1:
                log.warning("camera %s is not served: tracker.max_cameras are already", camera)
            return False
        log.info("camera %s is served from now on", camera)
        self.perception.serve(camera)
        self._tell(SERVED, {"camera": camera})
        self._health[camera] = CameraStats()
        return True

    def _drop_idle_camera(self) -> bool:
        camera, health = max(self._health.items(), key=lambda item: item[1].idle_s)
        if health.idle_s < CAMERA_IDLE_S:
            return False
        log.warning("camera %s has been silent: another takes its place", camera)
        self.perception.drop(camera)
        del self._health[camera]
        self._tell(DROPPED, {"camera": camera})
        return True

    def _log_failure(self, received: Received, error: Exception) -> None:
        """Log at most one failure a second, with a traceback where it was not foreseen; all are counted."""
        now_s = time.monotonic()
        if now_s < self._next_failure_log_s:
            return
        self._next_failure_log_s = now_s + FAILURE_LOG_EVERY_S
        frame, foreseen = received.frame, isinstance(error, Sam3NodeError)
        log.error("camera %s: frame %d failed: %s", frame.camera, frame.seq, error, exc_info=not foreseen)

    def _tell_health(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_health_s:
            return
        self._next_health_s = now_s + HEALTH_EVERY_S
        for camera in self.perception.pipelines:
            log.info("camera %s: %s", camera, self._camera_status(camera))
        log.info("rss %.0f MB, %d frames rejected", rss_bytes() / 1e6, self._frames.rejected + self._refused)
