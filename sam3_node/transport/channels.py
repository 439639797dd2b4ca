"""Publish and receive frames and masks, publish poses, and keep the newest masks of each camera.

Delivery is live (`newest`: PUB/SUB, stale messages are skipped) or lossless (`every`: PUSH/PULL).
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, TypeVar

import zmq

from .. import wire
from ..errors import TransportError, WireError
from ..types import (
    Buffer,
    Delivery,
    Frame,
    MaskEncoding,
    MaskFrame,
    RobotAction,
    RobotMessage,
    count_missing_frames,
    keep_newest,
)
from ..wire.video import VIDEO, VideoDecoders
from . import sockets
from .primitives import RateBudget
from .receiver import EVERY_QUEUE, MAX_TOPIC_BYTES, CameraReceiver, StoredMessage
from .security import Security
from .shared_frames import SharedFrameReader, SharedFrames, find_shared_topics

FRAMES_QUEUE = 2
"""Frames that a live publisher queues for each peer. More would only grow old there."""
POSES_QUEUE = 256
"""Poses that a publisher queues for each peer. Each image needs those around it, so a burst must not lose any."""
KEY_REQUEST_S = 0.5
"""Least time between two requests of a reader for a key frame, in seconds."""
MAX_VIDEO_FPS = 120.0
"""Packets of a camera's video that are decoded in a second. Those beyond it are rejected."""
MAX_VIDEO_PIXELS_PER_S = 250e6
"""Pixels of a camera's video that are decoded in a second: 3840 x 2160 at 30 Hz. Packets beyond it are rejected."""
MAX_FRAMES_CAMERAS = 16
"""Default for the number of cameras whose frames a subscriber receives."""
MASKS_QUEUE = 8
"""Masks that a live publisher queues for each peer. A peer that is slower misses those beyond it."""
MAX_MASKS_CAMERAS = 64
"""Cameras whose newest masks are kept."""
SAMPLE_SIZE = 5
"""Messages that `count_arrivals` looks at. A few tell what kind of endpoint this is."""
LIVE_LINGER_MS = 100
"""Longest time that closing waits for the queue of a live publisher: old messages are worth little."""
EVERY_LINGER_MS = 5000
"""The same for a lossless publisher, whose queue must not be lost."""


T = TypeVar("T")


class Publisher(sockets.BoundOwner):
    """Base of publishers: it binds a PUB socket (`newest`) or a PUSH socket (`every`).

    `newest` never waits. A peer that is too slow misses the messages beyond a short queue. A thread publishes a beat
    every BEAT_S seconds, by which subscribers tell an idle publisher from one that hangs. `every` waits for a peer and
    for space in its queue. With several peers, each message goes to one of them. Only one thread at a time may use a
    publisher. `security` has the key of `role`; it defaults to the environment.
    """

    role = ""
    live_kind = zmq.PUB
    queue = MASKS_QUEUE
    max_bytes = sockets.MAX_MESSAGE_BYTES

    def __init__(
        self, endpoint: str, delivery: Delivery = "newest", security: Security | None = None
    ) -> None:
        self._newest = delivery == "newest"
        self._lock = threading.Lock()  # of the socket, which the beats share
        self._closing = threading.Event()
        if self._newest:
            kind = self.live_kind
            queue = self.queue
        else:
            kind = zmq.PUSH
            queue = EVERY_QUEUE
        self._bound = sockets.BoundSocket(
            kind, endpoint, queue, sockets.MAX_SUBSCRIPTION_BYTES, self.role, security
        )
        self.endpoint = self._bound.endpoint
        self._beats = threading.Thread(target=self._beat, name=f"beat {self.endpoint}", daemon=True)
        if self._newest:
            # the first beat of each connection
            self._bound.socket.setsockopt(zmq.XPUB_WELCOME_MSG, wire.BEAT_TOPIC)
            self._beats.start()

    def wait_for_space(self, timeout_ms: int) -> bool:
        """Wait until `every` can queue a message. Return False when it cannot in time. `newest` never waits."""
        self._require_open()
        return self._newest or bool(self._bound.socket.poll(timeout_ms, zmq.POLLOUT))

    def wait_for_peer(self, timeout_ms: int) -> bool:
        """Wait at most `timeout_ms`. Return True if a peer is connected."""
        self._require_open()
        return self._bound.guard.wait_for_peer(timeout_ms)

    def close(self, linger_ms: int | None = None) -> None:
        """Close, and wait at most `linger_ms` until the queue is sent. Idempotent.

        The default is LIVE_LINGER_MS for `newest` and EVERY_LINGER_MS for `every`.
        """
        # a fork shares the pipes and sockets with the process that owns them, and must not touch them
        if self._is_forked:
            return
        # the beats use the socket, so their thread ends before it is closed
        self._closing.set()
        if self._newest:
            self._beats.join()
        if linger_ms is None:
            linger_ms = LIVE_LINGER_MS if self._newest else EVERY_LINGER_MS
        self._bound.close(linger_ms)

    def _send(self, pack: Callable[[], Sequence[Buffer]], timeout_ms: int | None) -> bool:
        self._require_open()
        wait_ms = 0 if self._newest else timeout_ms
        # polling makes libzmq notice what peers have read. A send within 3 ms of the last one would not check that: it
        # would consider the short queue full and drop the message
        with self._lock:
            writable = self._bound.socket.poll(wait_ms, zmq.POLLOUT)
            # a live publisher sends all the same: libzmq drops the message for those peers alone whose queue is full
            if not writable and not self._newest:
                return False
            # packed only now, so that the stamp of sending is that of the moment at which there is space
            return self._hand_over(pack())

    def _hand_over(self, parts: Sequence[Buffer]) -> bool:
        """Give a message to the socket. Return False when the queue is full."""
        return sockets.send_parts(self._bound.socket, parts, self.max_bytes)

    def _require_open(self) -> None:
        self._require_process()
        if self._closing.is_set():
            raise TransportError(f"cannot publish on {self.endpoint}: this {type(self).__name__} is closed")

    def _beat(self) -> None:
        """Publish beats until `close`. Sending also makes libzmq process subscriptions to an idle publisher."""
        while not self._closing.wait(sockets.BEAT_S):
            with suppress(TransportError):  # closed meanwhile
                self._send(lambda: [wire.BEAT_TOPIC], 0)


class PosePublisher(Publisher):
    """A publisher of a robot's poses, joints and actions on `endpoint`.

    `.endpoint` is the bound endpoint, with port 0 and * resolved. It is a context manager. Raises TransportError when
    the endpoint is malformed or in use. `security` defaults to the environment.
    """

    role = "robot"
    queue = POSES_QUEUE

    def __init__(self, endpoint: str, security: Security | None = None) -> None:
        super().__init__(endpoint, "newest", security)

    def send(self, pose: RobotMessage | RobotAction) -> bool:
        """Publish a pose, joints or an action without waiting. Return True when they are queued.

        Raises WireError for an invalid pose.
        """
        if isinstance(pose, RobotAction):
            return self._send(lambda: wire.pack_action(pose), 0)
        return self._send(lambda: wire.pack_pose(pose), 0)


class ReceivedFrame(NamedTuple):
    """A frame, its arrival (`time.time_ns`), the number of frames of its camera skipped before it, and its endpoint."""

    frame: Frame
    received_ns: int
    skipped: int
    endpoint: str = ""


class FramePublisher(Publisher):
    """A publisher of frames on `endpoint`. `.endpoint` is the bound endpoint, with port 0 and * resolved.

    With `newest`, readers on the same machine get the pixels in shared memory. It is a context manager.
    Raises TransportError when the endpoint is malformed or in use.
    """

    role = "camera"
    live_kind = zmq.XPUB  # it sees who subscribes
    queue = FRAMES_QUEUE
    max_bytes = sockets.MAX_FRAME_BYTES

    def __init__(
        self, endpoint: str, delivery: Delivery = "newest", security: Security | None = None
    ) -> None:
        self._shared = SharedFrames()
        super().__init__(endpoint, delivery, security)
        if self._newest:
            # also who subscribes to what others have already: each needs a key frame of a video
            self._bound.socket.setsockopt(zmq.XPUB_VERBOSE, 1)

    @property
    def subscriptions(self) -> int:
        """Number of subscriptions to frames so far. After each, a video needs a key frame."""
        return self._shared.subscriptions

    def send(self, frame: Frame, timeout_ms: int | None = None) -> bool:
        """Publish a frame. Set `sent_ns` if it is 0. Return True when the frame is queued for sending.

        `every` waits up to `timeout_ms` (None: no limit) for a subscriber with space in its queue, and returns False
        when there is none. Large pixel buffers are not copied, so do not modify them after the call.
        Raises WireError when the fields of the frame contradict each other.
        """

        def pack() -> Sequence[Buffer]:
            stamped = frame if frame.sent_ns else replace(frame, sent_ns=time.time_ns())
            return wire.pack_frame(stamped)

        return self._send(pack, timeout_ms)

    def close(self, linger_ms: int | None = None) -> None:
        """Close, and wait at most `linger_ms` until the queue is sent. Readers keep the memory that they opened."""
        super().close(linger_ms)
        if not self._is_forked:
            self._shared.close()

    def _hand_over(self, parts: Sequence[Buffer]) -> bool:
        if self._newest:
            self._shared.read_subscriptions(self._bound.socket)
            is_frame = len(parts) > 1  # and not a beat
            message = self._shared.share(parts) if is_frame else None
            # the place first: who reads it needs no pixels from the socket
            if message is not None:
                sockets.send_parts(self._bound.socket, message, self.max_bytes)
                if not self._shared.is_wanted(bytes(parts[0])):
                    return True
        return super()._hand_over(parts)


class FrameSubscriber(CameraReceiver[Frame]):
    """A subscriber that connects to the endpoint of each camera. It is a context manager.

    `newest`: one slot per camera holds its newest frame. The camera that was taken longest ago is next. Frames of
    this machine come in shared memory, see `shared_frames`.
    `every`: a short queue in the order of arrival; publishers wait while it is full.
    With `cameras`, frames of other cameras are ignored. Up to `max_cameras` are received, by default
    MAX_FRAMES_CAMERAS and at least one for each endpoint; CameraNames chooses them.
    Raises TransportError for a malformed endpoint; the peers may start later.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        delivery: Delivery = "newest",
        cameras: Sequence[str] = (),
        max_cameras: int | None = None,
        security: Security | None = None,
    ) -> None:
        topics = [wire.frame_topic(camera) for camera in cameras]
        self._max_cameras = max_cameras or max(MAX_FRAMES_CAMERAS, len(endpoints))
        self._last_seq: dict[str, int] = {}
        self._seq_before: dict[str, int | None] = {}  # of each camera's frame that was taken last
        keys = (security or Security.from_environment()).frame_keys(endpoints)
        peers = list(zip(endpoints, keys, strict=True))
        self._memory: dict[sockets.ReconnectingSocket, SharedFrameReader] = {}
        self._subscribed = topics or [b""]
        self._videos = VideoDecoders()
        self._budgets: dict[str, RateBudget] = {}
        self._asked_s = -math.inf  # when a key frame was asked for last
        shared = find_shared_topics(self._subscribed) if delivery == "newest" else []
        super().__init__(peers, delivery, self._max_cameras, sockets.MAX_FRAME_BYTES, topics, b"", shared)

    def take(self, timeout_ms: int | None = None) -> ReceivedFrame | None:
        """Return the next frame, or None when none arrives within `timeout_ms` (None: no limit) or after `close`.

        Raises TransportError when the receiving thread has failed.
        """
        self._require_process()
        taken = self._take(timeout_ms)
        if taken is None:
            return None
        frame, received_ns, endpoint = taken
        # remembered for `skip`, which takes this frame back
        before = self._last_seq.get(frame.camera)
        keep_newest(self._seq_before, frame.camera, before, self._max_cameras)
        skipped = 0
        if before is not None:
            skipped = count_missing_frames(before, frame.seq)
        keep_newest(self._last_seq, frame.camera, frame.seq, self._max_cameras)
        return ReceivedFrame(frame, received_ns, skipped, endpoint)

    def peek(self, seen: Collection[Frame], timeout_ms: int, any_camera: bool = False) -> Frame | None:
        """Return the frame that `take` would return, and leave it. None if no frame but those `seen` arrives in time.

        any_camera: return also a frame that waits for its turn.
        """
        self._require_process()

        def is_new(item: StoredMessage[Frame]) -> bool:
            return not any(item.message is one for one in seen)

        waiting = self._queue.peek(is_new, timeout_ms, not any_camera)
        return None if waiting is None else waiting.message

    @property
    def waits(self) -> bool:
        """True if `take` would return a frame now."""
        return not self._queue.is_empty

    def skip(self, received: ReceivedFrame) -> None:
        """Count the frame of a camera that was taken last as skipped, before its next one."""
        # as if the frame had never been taken: the next one counts it among the missing
        camera = received.frame.camera
        before = self._seq_before.get(camera)
        if before is None:
            self._last_seq.pop(camera, None)
        else:
            self._last_seq[camera] = before

    @property
    def shared(self) -> tuple[str, ...]:
        """Endpoints whose pixels come in shared memory. Any thread may ask."""
        readers = list(self._memory.items())
        return tuple(source.endpoint for source, reader in readers if reader.reads_memory)

    def _accept(self, parts: list[memoryview], received_ns: int, source: sockets.ReconnectingSocket) -> None:
        if self._is_live:
            reader = self._memory.get(source)
            if reader is None:
                reader = SharedFrameReader(source, self._subscribed)
                self._memory[source] = reader
            resolved = reader.resolve(parts)
            if resolved is None:
                return
            parts = resolved
        super()._accept(parts, received_ns, source)

    def _update_sockets(self) -> None:
        super()._update_sockets()
        for reader in self._memory.values():
            reader.follow_connection()

    def _unpack(self, parts: list[memoryview]) -> Frame:
        return wire.unpack_frame(parts)

    def _admit(self, frame: Frame, source: sockets.ReconnectingSocket) -> Frame | None:
        """Decode a frame of a video. Return None if it needs a frame that did not come."""
        super()._admit(frame, source)
        topic = wire.frame_topic(frame.camera)
        if frame.encoding != VIDEO:
            self._whole.pop(topic, None)
            return frame
        # each packet is needed, and costs its decoding
        keep_newest(self._whole, topic, None, self._max_cameras)
        budget = self._budgets.get(frame.camera) or RateBudget(MAX_VIDEO_FPS, MAX_VIDEO_PIXELS_PER_S, 1.0)
        keep_newest(self._budgets, frame.camera, budget, self._max_cameras)
        if not budget.spend(frame.width * frame.height):
            raise WireError(
                f"h264 image: expected at most {MAX_VIDEO_FPS:.0f} packets and {MAX_VIDEO_PIXELS_PER_S / 1e6:.0f} "
                "million pixels of video a second, found more"
            )
        picture = self._videos.decode(frame)
        if picture is None:
            self._ask_for_key_frame(source)
        return picture

    def _ask_for_key_frame(self, source: sockets.ReconnectingSocket) -> None:
        """Subscribe again: the camera answers each subscription with a key frame."""
        now_s = time.monotonic()
        if not self._is_live or now_s - self._asked_s < KEY_REQUEST_S:
            return
        self._asked_s = now_s
        for topic in self._subscribed:
            source.socket.setsockopt(zmq.SUBSCRIBE, topic)
            source.socket.setsockopt(zmq.UNSUBSCRIBE, topic)  # of two

    def _release(self) -> None:
        super()._release()
        for reader in self._memory.values():
            reader.close()


class MaskPublisher(Publisher):
    """A publisher of masks on `endpoint`. `.endpoint` is the bound endpoint, with port 0 and * resolved.

    It is a context manager. Raises TransportError when the endpoint is malformed or in use.
    """

    role = "node"

    def __init__(
        self,
        endpoint: str,
        delivery: Delivery = "newest",
        encoding: MaskEncoding = "bits+zstd",
        security: Security | None = None,
    ) -> None:
        self._encoding = encoding
        super().__init__(endpoint, delivery, security)

    def send(self, masks: MaskFrame, timeout_ms: int | None = None) -> bool:
        """Publish the masks of a frame. Set `published_ns` if it is 0. Return True when they are queued for sending.

        `every` waits up to `timeout_ms` (None: no limit) for a subscriber with space in its queue, and returns False
        when there is none.
        """

        def pack() -> Sequence[Buffer]:
            stamped = masks if masks.published_ns else replace(masks, published_ns=time.time_ns())
            return wire.pack_masks(stamped, self._encoding)

        return self._send(pack, timeout_ms)

    def send_event(self, event: wire.Event) -> None:
        """Publish an event in sequence with the masks. With `every` nothing is sent: its only reader expects masks."""
        # a PUSH socket would give the event to one policy, which waits for masks
        if self._newest:
            self._send(lambda: wire.pack_event(event), 0)


class NewestMasks:
    """The newest masks of each of MAX_MASKS_CAMERAS cameras. The camera that is silent for longest is forgotten first.

    One thread puts masks in; any thread may read them, and wait for more.
    """

    def __init__(self) -> None:
        self._masks: dict[str, MaskFrame] = {}  # the camera whose masks came last is the last
        self._arrived = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._closed = False

    def put(self, masks: MaskFrame) -> None:
        """Replace the masks of a camera. Call `notify` to wake the threads that wait."""
        with self._arrived:
            keep_newest(self._masks, masks.camera, masks, MAX_MASKS_CAMERAS)

    def notify(self) -> None:
        """Wake all waiting threads, and call the listeners."""
        with self._arrived:
            self._arrived.notify_all()
            # a copy: a listener may add another one, and must not be called under the lock
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener()

    def get(self, camera: str | None = None) -> MaskFrame | None:
        """Return the newest masks of a camera; without a name, the masks that arrived last. None before the first."""
        with self._arrived:
            if camera is None:
                return next(reversed(self._masks.values()), None)
            return self._masks.get(camera)

    def get_all(self) -> tuple[MaskFrame, ...]:
        """Return the newest masks of every camera, in the order of their arrival."""
        with self._arrived:
            return tuple(self._masks.values())

    def wait(self, find: Callable[[], T | None], timeout_s: float | None) -> T | None:
        """Return the first result of `find` that is not None. It is called now, and after each arrival.

        Returns None when the time is over (None: no limit), and after `close`. `find` may raise, and must be quick.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._arrived:
            while (result := find()) is None and not self._closed:
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    break
                self._arrived.wait(left_s)
        return result

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each arrival and at the end, in the thread that receives. It must not raise."""
        with self._arrived:
            self._listeners.append(listener)

    def close(self) -> None:
        """Wake all that wait; nothing more will arrive. The newest masks stay readable. Idempotent."""
        with self._arrived:
            self._closed = True
        self.notify()


class Arrivals(NamedTuple):
    """Numbers of messages that came to a subscriber of masks, and why the last one could not be read."""

    masks: int
    rejected: int
    last_error: str | None
    sample: Mapping[str, int] = {}
    """messages of any kind that its endpoint sends, by topic"""


class MaskSubscriber(CameraReceiver[MaskFrame]):
    """A subscriber of the node's masks: `newest` keeps the newest of each camera, `every` keeps all in order.

    It is a context manager. With `cameras`, masks of other cameras are ignored. With `lazy`, masks are decoded when
    their pixels are first used. Raises TransportError for a malformed endpoint; the node may start later.
    """

    def __init__(
        self,
        endpoint: str,
        delivery: Delivery = "newest",
        cameras: Sequence[str] = (),
        security: Security | None = None,
        lazy: bool = False,
    ) -> None:
        topics = [wire.masks_topic(camera) for camera in cameras]
        keys = (security or Security.from_environment()).client_keys("node")
        self.newest = NewestMasks()
        self._arrived = 0
        self._is_lazy = lazy
        peers = [(endpoint, keys)]
        super().__init__(
            peers, delivery, MAX_MASKS_CAMERAS, sockets.MAX_MESSAGE_BYTES, topics, wire.MASKS_ROOT
        )

    def take(self, timeout_ms: int | None = None) -> MaskFrame | None:
        """Return the next masks, or None when none arrive within `timeout_ms` (None: no limit) or after `close`.

        Raises TransportError when the receiving thread has failed.
        """
        self._require_process()
        taken = self._take(timeout_ms)
        return None if taken is None else taken.message

    def silent_s(self, camera: str) -> float | None:
        """Return the seconds since the last masks of a camera arrived; None if none have."""
        return self.names.silent_s(camera)

    def count_arrivals(self, timeout_ms: int) -> Arrivals:
        """Count the messages so far. Without masks, listen for at most `timeout_ms` to what else the peer publishes."""
        # what was ignored or rejected tells most: it came to this very socket
        sample = self._unwanted.copy()
        # else listen to all topics for a moment, which shows the topics that this socket has not asked for
        if self._is_live and self.connected and not self._arrived and not sample:
            sample = self._sample(time.monotonic() + timeout_ms / 1000)
        topics = {topic.decode("ascii", "backslashreplace"): count for topic, count in sample.items()}
        return Arrivals(self._arrived, self.rejected, self.last_error, topics)

    def _sample(self, deadline_s: float) -> Counter[bytes]:
        """Listen to all topics of the endpoint, and count the messages of each."""
        source = self._sockets[0]
        sample: Counter[bytes] = Counter()
        with sockets.open_subscriber([b""], sockets.MAX_FRAME_BYTES) as socket:
            if source.keys is not None:
                source.keys.apply(socket)
            sockets.connect(socket, source.endpoint)
            while sample.total() < SAMPLE_SIZE and (left_s := deadline_s - time.monotonic()) > 0:
                socket.poll(math.ceil(left_s * 1000))
                parts = sockets.receive_parts(socket)
                if parts and parts[0] != wire.BEAT_TOPIC:
                    sample[bytes(parts[0][:MAX_TOPIC_BYTES])] += 1
            socket.close(0)
        return sample

    def _unpack(self, parts: list[memoryview]) -> MaskFrame:
        masks = wire.unpack_masks(parts, self._is_lazy)
        # masks carry the ones before them, from which motion is estimated; a chain of them would grow for ever
        before = self.newest.get(masks.camera)
        if before is None:
            return masks
        return replace(masks, before=replace(before, before=None))

    def _store(self, masks: MaskFrame, received_ns: int, source: sockets.ReconnectingSocket) -> bool:
        # the newest first: who waits for an arrival then finds it
        self.newest.put(masks)
        if not super()._store(masks, received_ns, source):
            return False
        self._arrived += 1
        self.newest.notify()
        return True

    def _end(self) -> None:
        super()._end()
        self.newest.close()
