"""The gripper's poses that a live node receives, and its pose at the capture of an image."""

from __future__ import annotations

from contextlib import ExitStack

from ..calibration.poses import PoseTrack
from ..errors import CalibrationError, TransportError
from ..geometry import quaternion_from_rotation
from ..perception.spatial import BASE, GRIPPER
from ..settings import SpatialSettings
from ..transport import Security
from ..transport.poses import PoseSubscriber
from ..types import Clock, Frame, FramePose

CAPACITY = 4096
"""Poses that are remembered: 4 s at 1000 Hz."""


class RobotPoses:
    """Receives the poses of `settings.poses`, if it is set. `stack` closes the socket.

    Raises TransportError for a malformed endpoint.
    """

    def __init__(self, settings: SpatialSettings, stack: ExitStack, security: Security | None = None) -> None:
        self.problem: str | None = None
        """Why the last call of `find` gave no pose; None if it gave one, or poses are not configured."""
        self._max_gap_ns = round(settings.max_pose_gap_ms * 1e6)
        self._max_ahead_ns = round(settings.max_pose_ahead_ms * 1e6)
        self._subscriber = (
            stack.enter_context(PoseSubscriber(settings.poses, (GRIPPER,), security))
            if settings.poses
            else None
        )
        self._tracks: dict[Clock, PoseTrack] = {}

    def find(self, frame: Frame) -> FramePose | None:
        """Return the gripper's pose in the base at the frame's capture; None if it is not known."""
        self.problem = None
        if self._subscriber is None:
            return None
        try:
            for pose in self._subscriber.take(timeout_ms=0):
                if pose.parent == BASE:
                    self._tracks.setdefault(pose.clock, PoseTrack(CAPACITY)).add(pose)
            track = self._tracks.get(frame.clock)
            if track is None:
                self.problem = f"expected poses with the clock of the images, {frame.clock}, found none"
                if rejected := self._subscriber.rejected:
                    self.problem += f"; {rejected} were malformed, the last: {self._subscriber.last_error}"
                return None
            return pose_at(track, frame, self._max_gap_ns, self._max_ahead_ns)
        except (CalibrationError, TransportError) as error:
            self.problem = str(error)
            return None


def pose_at(track: PoseTrack, frame: Frame, max_gap_ns: int, max_ahead_ns: int = 0) -> FramePose:
    """Return the pose of the gripper in the base at the frame's capture. Raises CalibrationError as `PoseTrack.at`."""
    matrix = track.at(frame.capture_ns, max_gap_ns, max_ahead_ns)
    x, y, z, w = quaternion_from_rotation(matrix[:3, :3]).tolist()
    px, py, pz = matrix[:3, 3].tolist()
    return FramePose(GRIPPER, BASE, frame.capture_ns, (px, py, pz), (x, y, z, w), frame.clock)
