"""Publish the node's masks and events, and keep the status that contains the effect of each."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from msgspec.structs import asdict

from ..errors import Sam3NodeError, current_request_id
from ..perception.perception import Perception
from ..perception.pipeline import Pipeline
from ..processes.logs import log_subject, warn_if_descriptors_run_out
from ..schema.fields import Plain, to_plain
from ..settings import Settings
from ..transport import MaskPublisher, ReceivedFrame, Security
from ..transport.limits import rss_bytes
from ..types import Frame, MaskFrame, StepDecisions
from ..wire import FAILED, Event
from ..wire.messages import joints_fields, pose_fields
from .health import Health
from .spans import FrameSpans
from .status import CameraStats, CameraStatus, NodeStatus, describe_counts, describe_error

log = logging.getLogger(__name__)


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
        self._settings = settings
        self._health = health
        self._budget_ms = 0.0
        # with lossless delivery, no frame has to be in time
        if settings.transport.delivery == "newest":
            self._budget_ms = settings.deadline.budget_ms
        self._events = 0
        self._pack_us = 0
        self._publishing = threading.Lock()
        """Held from publishing masks or an event until the status contains their effect."""

    def limits_windows(self, pipeline: Pipeline) -> bool:
        """Return True if the number of a camera's windows follows the time that they take."""
        # with lossless delivery, no frame has to be in time
        return pipeline.prompting.crops is not None and self._settings.transport.delivery == "newest"

    def sum_loads(self, but: str) -> float:
        """Return the share of the time that the steps of all cameras but one take."""
        return sum(stats.load for camera, stats in self.stats.items() if camera != but)

    def bind(self) -> MaskPublisher:
        """Bind the endpoint of masks and events. Raises TransportError."""
        transport = self._settings.transport
        encoding = self._settings.tracker.mask_encoding
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
        # the stages count what the step took, and the run and epoch say whose ids these are
        pipeline = self.perception.pipelines[masks.camera]
        session = self.perception.session
        # a message cannot contain the time of its own packing: `pack` is the time of the previous message
        stages_us = {**masks.stages_us, "pack": self._pack_us}
        # whoever reads masks may ask for the status at once, so that both change together
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

    def publish_event(self, op: str, args: Plain) -> None:
        """Publish a change of the node's state, for recorders. With a request id, the log names the event."""
        asked = current_request_id()
        with self._publishing:
            try:
                self.publisher.send_event(Event(self._events, op, args, asked))
                if asked is not None:
                    log.info("event %d: %s", self._events, op)
            except Sam3NodeError as error:  # recorders count the missing number as lost
                log.error("event %d, %s, could not be published: %s", self._events, op, error)
            self._events += 1
            # the event may begin or end a camera
            self._follow_cameras()
            self.take_status()

    def withhold(
        self, received: ReceivedFrame, masks: MaskFrame, decisions: StepDecisions, reason: str
    ) -> None:
        """Count a step whose masks are too old to publish, and tell recorders that the frame was stepped."""
        frame = received.frame
        stats = self.stats[masks.camera]
        stats.withhold(frame, received.received_ns, reason)
        # a replay takes the robot and the decisions of a frame from its masks, and this frame has none
        known = to_plain(decisions)
        if masks.robot_pose is not None:
            known["robot_pose"] = pose_fields(masks.robot_pose)
        if masks.joints is not None:
            known["joints"] = joints_fields(masks.joints)
        self.publish_event(FAILED, {**stats.describe_failure(frame, reason), "withheld": True, **known})

    def fail(self, frame: Frame, error: Exception) -> None:
        """Count a frame whose step failed, and tell recorders."""
        stats = self.stats[frame.camera]
        # the project's own errors say what to do; any other needs its traceback
        is_unexpected = not isinstance(error, Sam3NodeError)
        stats.fail(error)
        log.error("camera %s: frame %d failed: %s", frame.camera, frame.seq, error, exc_info=is_unexpected)
        self.publish_event(FAILED, stats.describe_failure(frame, describe_error(error)))

    def log_counts(self, frames_rejected: int) -> None:
        """Log the counts of all cameras."""
        for camera, counts in self.wait_for_status().describe_cameras().items():
            with log_subject(camera):
                log.info("camera %s: %s", camera, describe_counts(asdict(counts)))
        warn_if_descriptors_run_out()
        log.info("rss %.0f MB, %d frames rejected", rss_bytes() / 1e6, frames_rejected)

    def take_status(self) -> None:
        """Replace the status with the present one."""
        cameras = {
            camera: CameraStatus.take(self.stats[camera], pipeline)
            for camera, pipeline in self.perception.pipelines.items()
        }
        # a copy for the probes, which run in another thread
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
