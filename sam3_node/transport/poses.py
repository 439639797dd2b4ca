"""Publisher and subscriber of poses, such as the gripper's in the robot's base: one stream for each frame."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from ..types import FramePose
from ..wire import POSES_ROOT, pack_pose, pose_topic, unpack_pose
from .channels import Publisher
from .connection import ReconnectingSocket, connect_all, open_subscriber
from .receiver import UnpackingListener
from .security import Security
from .sockets import MAX_MESSAGE_BYTES

POSES_QUEUE = 256
MAX_POSES = 4096
"""Maximum number of received poses that wait to be taken; the oldest are dropped beyond it."""


class PosePublisher(Publisher):
    """A publisher of poses on `endpoint`. `.endpoint` is the bound endpoint, with port 0 and * resolved.

    It is a context manager. Raises TransportError when the endpoint is malformed or in use. The default of `security`
    is that of the environment.
    """

    role = "robot"

    def __init__(self, endpoint: str, security: Security | None = None) -> None:
        super().__init__(endpoint, "newest", POSES_QUEUE, MAX_MESSAGE_BYTES, security)

    def send(self, pose: FramePose) -> bool:
        """Publish a pose without waiting. Return True when it is queued. Raises WireError for an invalid pose."""
        return self._send(lambda: pack_pose(pose), 0)


class PoseSubscriber(UnpackingListener[FramePose]):
    """A subscriber of poses: a thread collects all of them in the order of arrival, for `take`.

    Poses are needed from before and after each image, so none is skipped: the newest MAX_POSES wait, of all frames or
    of those in `frames`. It is a context manager. Raises TransportError for a malformed endpoint; the publisher may
    start later.
    """

    def __init__(self, endpoint: str, frames: Sequence[str] = (), security: Security | None = None) -> None:
        keys = (security or Security.from_environment()).client_keys("robot")
        topics = [pose_topic(frame) for frame in frames]
        self._changed = threading.Condition()
        self._poses: deque[FramePose] = deque(maxlen=MAX_POSES)
        self._ended = False
        socket = open_subscriber(topics or (POSES_ROOT,), MAX_MESSAGE_BYTES)
        super().__init__(connect_all([(socket, endpoint, keys)]), POSES_QUEUE, topics, unpack_pose)
        self._listen()

    def take(self, timeout_ms: int | None = None) -> list[FramePose]:
        """Return all poses that wait, oldest first; [] when none arrives in time (None: no limit) or after `close`.

        Raises TransportError when the receiving thread has failed.
        """
        self._require_process()
        with self._changed:
            timeout_s = None if timeout_ms is None else timeout_ms / 1000
            self._changed.wait_for(lambda: self._ended or bool(self._poses), timeout_s)
            taken = list(self._poses)
            self._poses.clear()
        if not taken:
            self._raise_failure()
        return taken

    def _store(self, message: FramePose, received_ns: int, source: ReconnectingSocket) -> None:
        with self._changed:
            self._poses.append(message)
            self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
