"""Publisher and subscriber of poses, such as the gripper's in the robot's base: one stream for each frame."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from ..errors import WireError
from ..types import FramePose
from ..wire import pack_pose, pose_topic, unpack_pose
from .channels import Publisher
from .connection import Listener, ReconnectingSocket, connect_all, open_subscriber
from .sockets import MAX_MESSAGE_BYTES

POSES_QUEUE = 256
MAX_POSES = 4096
"""Maximum number of received poses that wait to be taken; the oldest are dropped beyond it."""


class PosePublisher(Publisher):
    """A publisher of poses on `endpoint`. `.endpoint` is the bound endpoint, with port 0 and * resolved.

    It is a context manager. Raises TransportError when the endpoint is malformed or in use.
    """

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint, "newest", POSES_QUEUE, MAX_MESSAGE_BYTES)

    def send(self, pose: FramePose) -> bool:
        """Publish a pose without waiting. Return True when it is queued. Raises WireError for an invalid pose."""
        return self._send(lambda: pack_pose(pose), 0)


class PoseSubscriber(Listener):
    """A subscriber of poses: a thread collects all of them in the order of arrival, for `take`.

    Poses are needed from before and after each image, so none is skipped: the newest MAX_POSES wait, of all frames or
    of those in `frames`. It is a context manager. Raises TransportError for a malformed endpoint; the publisher may
    start later.
    """

    def __init__(self, endpoint: str, frames: Sequence[str] = ()) -> None:
        self._topics = frozenset(map(pose_topic, frames))
        self._changed = threading.Condition()
        self._poses: deque[FramePose] = deque(maxlen=MAX_POSES)
        self._ended = False
        self._rejected = 0
        self._last_error: str | None = None
        socket = open_subscriber(self._topics or (b"pose/",), MAX_MESSAGE_BYTES)
        super().__init__(connect_all([(socket, endpoint)]), POSES_QUEUE)
        self._listen()

    @property
    def rejected(self) -> int:
        """Number of messages dropped because they were malformed."""
        return self._rejected

    @property
    def last_error(self) -> str | None:
        """Reason for which the last message was dropped."""
        return self._last_error

    def take(self, timeout_ms: int | None = None) -> list[FramePose]:
        """Return all poses that wait, oldest first; [] when none arrives in time (None: no limit) or after `close`.

        Raises TransportError when the receiving thread has failed.
        """
        with self._changed:
            timeout_s = None if timeout_ms is None else timeout_ms / 1000
            self._changed.wait_for(lambda: self._ended or bool(self._poses), timeout_s)
            taken = list(self._poses)
            self._poses.clear()
        if not taken:
            self._raise_failure()
        return taken

    def _accept(self, parts: list[memoryview], received_ns: int, source: ReconnectingSocket) -> None:
        if self._topics and parts[0] not in self._topics:
            return  # a subscription also matches longer topics
        try:
            pose = unpack_pose(parts)
        except WireError as error:
            self._last_error, self._rejected = str(error), self._rejected + 1
            return
        with self._changed:
            self._poses.append(pose)
            self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
