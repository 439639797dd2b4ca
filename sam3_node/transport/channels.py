"""What the publishers of frames and of masks share: one bound socket, live or lossless.

Frames over ZeroMQ: live (`newest`: PUB/SUB, stale frames passed over) or lossless (`every`: PUSH/PULL).

Masks over ZeroMQ, from the node to whoever reads them; delivery as for frames."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import zmq

from ..types import Buffer, Closeable, Delivery, Frame, MaskEncoding, MaskFrame
from ..wire import (
    Event,
    frame_topic,
    masks_topic,
    pack_event,
    pack_frame,
    pack_masks,
    unpack_frame,
    unpack_masks,
)
from .receiver import Receiver
from .sockets import MAX_FRAME_BYTES, MAX_MESSAGE_BYTES, BoundSocket, send_parts

EVERY_QUEUE = 2


class Publisher(Closeable):
    """Binds a PUB socket (`newest`) or a PUSH socket (`every`).

    `newest` never waits: for a peer that does not keep up, messages beyond a short queue are dropped.
    `every` waits for room, and for a peer; with several peers each message goes to one of them.
    For one thread at a time.
    """

    def __init__(self, endpoint: str, delivery: Delivery, queue: int, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._newest = delivery == "newest"
        if self._newest:
            self._bound = BoundSocket(zmq.PUB, endpoint, queue, max_bytes)
        else:
            self._bound = BoundSocket(zmq.PUSH, endpoint, EVERY_QUEUE, max_bytes, heartbeats=False)
        self.endpoint = self._bound.endpoint

    def close(self, linger_ms: int | None = None) -> None:
        """Close, waiting at most `linger_ms` for what is queued to leave. Idempotent.

        The default is 100 for `newest` and 5000 for `every`.
        """
        default_ms = 100 if self._newest else 5000
        self._bound.close(default_ms if linger_ms is None else linger_ms)

    def _send(self, pack: Callable[[], Sequence[Buffer]], timeout_ms: int | None) -> bool:
        # asking also makes libzmq see what peers have read by now: a send within 3 ms of the last would not
        # look, take the short queue for full and drop the message
        writable = self._bound.socket.poll(0 if self._newest else timeout_ms, zmq.POLLOUT)
        if not writable and not self._newest:
            return False
        return send_parts(self._bound.socket, pack(), self._max_bytes)


FRAMES_QUEUE = 2


@dataclass(frozen=True, slots=True)
class Received:
    """A frame as it arrived: when (`time.time_ns`), and how many of its camera were passed over before it."""

    frame: Frame
    received_ns: int
    skipped: int


class FramePublisher(Publisher):
    """Binds `endpoint` and publishes frames on it; `.endpoint` is the one really bound. A context manager.

    Raises TransportError when the endpoint is malformed or in use.
    """

    def __init__(self, endpoint: str, delivery: Delivery = "newest") -> None:
        super().__init__(endpoint, delivery, FRAMES_QUEUE, MAX_FRAME_BYTES)

    def send(self, frame: Frame, timeout_ms: int | None = None) -> bool:
        """Publish a frame; `sent_ns` is filled in where it is 0. True when it is on its way.

        `every` waits up to `timeout_ms` (None: no limit) for a subscriber with room, and returns False when
        there was none. Large pixel buffers are not copied: leave them unchanged after the call.
        Raises WireError for a frame that contradicts itself.
        """
        return self._send(lambda: pack_frame(_stamp_frame(frame)), timeout_ms)


class FrameSubscriber(Receiver[Frame]):
    """Connects to each camera's endpoint and keeps what `delivery` says until it is taken. A context manager.

    `newest`: one slot per camera, which always holds the newest frame; cameras have their turns.
    `every`: a short queue in order of arrival, behind which publishers wait.
    Only frames of `cameras` are taken (none named: of all, up to `max_cameras`).
    Raises TransportError for a malformed endpoint; nobody has to be there yet.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        delivery: Delivery = "newest",
        cameras: Sequence[str] = (),
        max_cameras: int = 16,
    ) -> None:
        topics = [frame_topic(camera) for camera in cameras]
        self._taken_seq: dict[str, int] = {}
        super().__init__(endpoints, delivery, topics, unpack_frame, MAX_FRAME_BYTES, max_cameras)

    def take(self, timeout_ms: int | None = None) -> Received | None:
        """The next frame, or None when none came within `timeout_ms` (None: no limit) or after `close`.

        Raises TransportError when receiving has failed for good.
        """
        taken = self._take(timeout_ms)
        if taken is None:
            return None
        frame, received_ns = taken
        # a camera that was restarted counts from the start again: nothing was passed over
        skipped = max(0, frame.seq - self._taken_seq.get(frame.camera, frame.seq) - 1)
        self._taken_seq.pop(frame.camera, None)
        self._taken_seq[frame.camera] = frame.seq
        if len(self._taken_seq) > self._max_cameras:  # the one taken from longest ago has given its place up
            del self._taken_seq[next(iter(self._taken_seq))]
        return Received(frame, received_ns, skipped)


def _stamp_frame(frame: Frame) -> Frame:
    return frame if frame.sent_ns else replace(frame, sent_ns=time.time_ns())


MASKS_QUEUE = 8
MAX_CAMERAS = 64


class MaskPublisher(Publisher):
    """Binds `endpoint` and publishes masks on it; `.endpoint` is the one really bound. A context manager.

    Raises TransportError when the endpoint is malformed or in use.
    """

    def __init__(
        self, endpoint: str, delivery: Delivery = "newest", encoding: MaskEncoding = "bits+zstd"
    ) -> None:
        self._encoding = encoding
        super().__init__(endpoint, delivery, MASKS_QUEUE, MAX_MESSAGE_BYTES)

    def send(self, masks: MaskFrame, timeout_ms: int | None = None) -> bool:
        """Publish the masks of a frame; `published_ns` is filled in where it is 0. True when on its way.

        `every` waits up to `timeout_ms` (None: no limit) for a subscriber with room, and returns False when
        there was none.
        """
        return self._send(lambda: pack_masks(_stamp_masks(masks), self._encoding), timeout_ms)

    def tell(self, event: Event) -> None:
        """Publish an event beside the masks, in their order. `every` has one reader, which is not given any."""
        if self._newest:
            self._send(lambda: pack_event(event), 0)


class MaskSubscriber(Receiver[MaskFrame]):
    """Connects to the node's masks endpoint; keeps the newest of each camera, or `every` one in order.

    Only masks of `cameras` are taken (none named: of all). A context manager.
    Raises TransportError for a malformed endpoint; nobody has to be there yet.
    """

    root = b"masks/"

    def __init__(self, endpoint: str, delivery: Delivery = "newest", cameras: Sequence[str] = ()) -> None:
        topics = [masks_topic(camera) for camera in cameras]
        super().__init__([endpoint], delivery, topics, unpack_masks, MAX_MESSAGE_BYTES, MAX_CAMERAS)

    def take(self, timeout_ms: int | None = None) -> MaskFrame | None:
        """The next masks, or None when none came within `timeout_ms` (None: no limit) or after `close`.

        Raises TransportError when receiving has failed for good.
        """
        taken = self._take(timeout_ms)
        return None if taken is None else taken[0]


def _stamp_masks(masks: MaskFrame) -> MaskFrame:
    return masks if masks.published_ns else replace(masks, published_ns=time.time_ns())
