"""Tap all messages in the order of arrival, for recorders; receive poses and joints.

There is one stream of poses for each frame, such as the gripper's in the robot's base, and one of joints for each
robot; a publisher sends all of its own in order.
"""

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .. import wire
from ..errors import TransportError, WireError
from ..types import JointState, RobotMessage
from . import sockets
from .channels import POSES_QUEUE
from .primitives import RateBudget
from .receiver import MAX_TOPIC_BYTES, Message, Receiver
from .security import ClientKeys, Security, Socket

MAX_POSES = 4096
"""Maximum number of received poses and joints that wait to be taken; the oldest are dropped beyond it."""
MAX_WAITING_BYTES = 16 << 20
"""Maximum memory of received poses and joints that wait to be taken; the oldest are dropped beyond it."""
MAX_JOINTS = 1024
"""Maximum number of joints in a received joint state. One with more is rejected."""
MAX_POSE_BYTES = 1 << 20
"""Maximum size of a part of a received pose or joint state. ZeroMQ closes a connection that sends more."""
MAX_POSES_PER_S = 2500.0
"""Messages of each topic that are unpacked in a second. Those beyond it are skipped: 1000 Hz with a wide margin."""
MAX_POSES_BYTES_PER_S = 2e6
"""Bytes of each topic that are unpacked in a second. Those beyond it are skipped: 50 joints at 1000 Hz take 1.5 MB."""
MAX_TURN_BYTES = 4 << 20
"""Bytes that are read in one turn, beyond which a robot that sends too fast is disconnected: so much has waited."""
FLOOD_REST_S = 0.5
"""Seconds for which such a robot is disconnected. What it has sent is discarded, so that it cannot fill the memory."""
POSES_BURST_S = 1.0
"""Seconds of both rates that may come at once, after a pause of the sender or of this process."""

OVERHEAD_BYTES = 1024
"""Approximate memory in bytes of a waiting message, without its parts or joints."""
JOINT_BYTES = 192
"""Approximate memory in bytes of a joint of a waiting joint state, without the characters of its name."""

ROBOT_TOPICS = (*wire.ROBOT_ROOTS, wire.ACTIONS_ROOT)
"""Beginnings of the topics of the robot's endpoint that a recorder takes."""

log = logging.getLogger(__name__)


class PoseSubscriber(Receiver[RobotMessage]):
    """A subscriber of poses and joints: a thread collects all messages in the order of arrival, for `take`.

    Each image needs those before and after it, so the subscriber keeps all that a robot may send: the newest MAX_POSES
    wait, in at most MAX_WAITING_BYTES, of all topics or of `topics` only. Of a topic that sends more than a robot may,
    it skips those beyond the rate before it unpacks them, evenly in time. With `topics`, each has a rate of its own. It
    is a context manager. Raises TransportError for a malformed endpoint; the publisher may start later.
    """

    def __init__(self, endpoint: str, topics: Sequence[bytes] = (), security: Security | None = None) -> None:
        self.skipped = 0
        """Number of messages skipped because their topic sent more than MAX_POSES_PER_S or MAX_POSES_BYTES_PER_S."""
        keys = (security or Security.from_environment()).client_keys("robot")
        self._poses: deque[RobotMessage] = deque()
        self._bytes = 0
        # without topics, all share one rate: a publisher that invents topics must not get a rate for each
        self._budgets = {topic: _make_budget() for topic in topics}
        self._shared_budget = _make_budget()
        socket = sockets.open_subscriber(topics or wire.ROBOT_ROOTS, MAX_POSE_BYTES)
        super().__init__(sockets.connect_all([(socket, endpoint, keys)]), topics, POSES_QUEUE)

    def take(self, timeout_ms: int | None = None) -> list[RobotMessage]:
        """Return all messages that wait, oldest first; [] when none arrives in time (None: no limit) or after `close`.

        Raises TransportError when the receiving thread has failed.
        """
        self._require_process()
        with self._changed:
            timeout_s = None if timeout_ms is None else timeout_ms / 1000
            self._changed.wait_for(lambda: self.is_over or bool(self._poses), timeout_s)
            taken = list(self._poses)
            self._poses.clear()
            self._bytes = 0
        if not taken:
            self.check()
        return taken

    def _read(self, source: sockets.ReconnectingSocket) -> Iterator[Message]:
        """Yield the waiting messages of one turn. Disconnect a robot that sends faster than they can be read."""
        skipped = self.skipped
        count = 0
        size = 0
        for message in super()._read(source):
            yield message
            count += 1
            size += _count_bytes(message)
            if size > MAX_TURN_BYTES:
                break
        # reading takes less time than a robot needs to send what it may: so much waits only if it sends more
        is_full = count >= self._per_turn or size > MAX_TURN_BYTES
        if is_full and self.skipped > skipped:
            source.rest(FLOOD_REST_S)

    def _select(self, messages: Iterator[Message]) -> Iterable[Message]:
        """Return the messages whose topic has not sent too much. The rest costs no more than its reading."""
        # all are read before one is unpacked, so that a robot that sends too fast is disconnected before that
        return [message for message in messages if self._is_in_time(message)]

    def _is_in_time(self, message: Message) -> bool:
        """Return True if a message may be unpacked. Count it otherwise."""
        topic = bytes(message.parts[0][:MAX_TOPIC_BYTES])
        # what the caller ignores is not charged
        is_ignored = bool(self._topics) and topic not in self._topics
        if is_ignored or self._budgets.get(topic, self._shared_budget).spend(_count_bytes(message)):
            return True
        self.skipped += 1
        if self.skipped == 1:
            log.warning(
                "%s sends %s too fast: expected at most %.0f messages and %.0f kB a second; the rest is skipped",
                self._sockets[0].endpoint,
                topic.decode("ascii", "replace"),
                MAX_POSES_PER_S,
                MAX_POSES_BYTES_PER_S / 1e3,
            )
        return False

    def _unpack(self, parts: list[memoryview]) -> RobotMessage:
        return wire.unpack_pose(parts)

    def _admit(self, message: RobotMessage, source: sockets.ReconnectingSocket) -> RobotMessage:
        """Return the message. Raises WireError for more joints than a robot may have."""
        if isinstance(message, JointState) and len(message.positions) > MAX_JOINTS:
            raise WireError(
                f"joints: expected at most {MAX_JOINTS} joints of a robot, found {len(message.positions)}; publish "
                "those of its URDF alone"
            )
        return message

    def _store(self, pose: RobotMessage, received_ns: int, source: sockets.ReconnectingSocket) -> bool:
        with self._changed:
            self._poses.append(pose)
            self._bytes += _estimate_bytes(pose)
            while len(self._poses) > MAX_POSES or self._bytes > MAX_WAITING_BYTES:
                self._bytes -= _estimate_bytes(self._poses.popleft())
            self._changed.notify_all()
        return True


def _count_bytes(message: Message) -> int:
    return sum(part.nbytes for part in message.parts)


def _make_budget() -> RateBudget:
    return RateBudget(MAX_POSES_PER_S, MAX_POSES_BYTES_PER_S, POSES_BURST_S)


def _estimate_bytes(message: RobotMessage) -> int:
    """Return the approximate memory of a waiting pose or joint state."""
    if not isinstance(message, JointState):
        return OVERHEAD_BYTES
    positions = message.positions
    return OVERHEAD_BYTES + JOINT_BYTES * len(positions) + sum(map(len, positions))


class ReceivedMessage(NamedTuple):
    """The parts of a message, of which the first is the topic, and its arrival (`time.time_ns`)."""

    parts: list[memoryview]
    received_ns: int

    @property
    def nbytes(self) -> int:
        """Approximate memory of the message."""
        return OVERHEAD_BYTES + sum(part.nbytes for part in self.parts)


class StreamTap(Receiver[list[memoryview]]):
    """A receiver of all frames, masks and events of live (`newest`) delivery, in the order of arrival.

    With `poses`, it also receives all poses, joints and actions of that endpoint. It is a context manager. At most
    `max_bytes` wait to be taken; further messages are dropped and counted. Publishers never wait for a tap. With
    `cameras`, frames and masks of other cameras are ignored. Messages are neither unpacked nor checked, but with keys,
    frames of a name that the endpoint's key may not send are rejected. Raises TransportError for a malformed endpoint;
    the peers may start later.
    """

    def __init__(
        self,
        frames: Sequence[str],
        masks: str,
        cameras: Sequence[str],
        max_bytes: int,
        poses: str = "",
        security: Security | None = None,
    ) -> None:
        if not frames:
            raise TransportError("expected at least one frame endpoint to connect to, found none")
        self.dropped = 0
        """Number of messages dropped because `max_bytes` were waiting."""
        self.refused = 0
        """Number of frames rejected because their camera was not one of the key's."""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._waiting: deque[ReceivedMessage] = deque()
        security = security or Security.from_environment()
        frame_topics = [wire.frame_topic(camera) for camera in cameras] or [wire.FRAMES_ROOT]
        mask_topics = [
            *([wire.masks_topic(camera) for camera in cameras] or [wire.MASKS_ROOT]),
            wire.EVENTS_TOPIC,
        ]
        self._wanted: frozenset[bytes] = frozenset()  # empty: all topics
        if cameras:
            self._wanted = frozenset(frame_topics + mask_topics)
        # one connection for each camera, one to the node, and one to the robot if it is also recorded
        keys = security.frame_keys(frames)
        peers: list[tuple[str, Sequence[bytes], ClientKeys | None]]
        peers = [(endpoint, frame_topics, key) for endpoint, key in zip(frames, keys, strict=True)]
        peers.append((masks, mask_topics, security.client_keys("node")))
        if poses:
            peers.append((poses, ROBOT_TOPICS, security.client_keys("robot")))
        super().__init__(
            sockets.connect_all((_open(topics), endpoint, key) for endpoint, topics, key in peers)
        )

    def take(self, timeout_ms: int) -> ReceivedMessage | None:
        """Return the next message, or None when none arrives in time.

        After `close` it returns the waiting messages, then None without waiting.
        Raises TransportError when the receiving thread has failed.
        """
        self._require_process()
        # after `close`, what waits is still handed out: a recording ends with the last message
        with self._changed:
            self._changed.wait_for(lambda: self.is_over or bool(self._waiting), timeout_ms / 1000)
            if self._waiting:
                message = self._waiting.popleft()
                self._bytes -= message.nbytes
                return message
        # nothing waits: because nothing came, or because the thread has failed
        self.check()
        return None

    def _unpack(self, parts: list[memoryview]) -> list[memoryview]:
        return parts

    def _store(self, parts: list[memoryview], received_ns: int, source: sockets.ReconnectingSocket) -> bool:
        is_robots = bytes(parts[0]).startswith(ROBOT_TOPICS)
        if self._wanted and parts[0] not in self._wanted and not is_robots:
            return True  # a subscription also matches longer topics
        if source.keys is not None and not self._is_permitted(parts[0], source, source.keys):
            return True
        message = ReceivedMessage(parts, received_ns)
        with self._changed:
            # a single message larger than the limit is taken all the same: it would else never be recorded
            if self._waiting and self._bytes + message.nbytes > self._max_bytes:
                self.dropped += 1
            else:
                self._waiting.append(message)
                self._bytes += message.nbytes
                self._changed.notify()
        return True

    def _is_permitted(self, topic: memoryview, source: sockets.ReconnectingSocket, keys: ClientKeys) -> bool:
        """Return True if the other end's key may send a message of this topic. Count it otherwise."""
        # a key of a camera may send frames of its own cameras, and nothing else
        camera = bytes(topic[len(wire.FRAMES_ROOT) :]).decode("ascii", "replace")
        is_frame = topic[: len(wire.FRAMES_ROOT)] == wire.FRAMES_ROOT
        if keys.server.role != "camera" or (is_frame and keys.may_send(camera)):
            return True
        self.refused += 1
        if self.refused == 1:
            log.warning(
                "%s sends frames of %r, which its key %s may not", source.endpoint, camera, keys.server
            )
        return False


def _open(topics: Sequence[bytes]) -> Socket:
    # frames need the largest limit; the node's and the robot's messages are small
    is_small = wire.EVENTS_TOPIC in topics or wire.POSES_ROOT in topics
    max_bytes = sockets.MAX_MESSAGE_BYTES if is_small else sockets.MAX_FRAME_BYTES
    return sockets.open_subscriber(topics, max_bytes)
