"""Frames over ZeroMQ: live (`newest`: PUB/SUB, stale frames passed over) or lossless (`every`: PUSH/PULL)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..types import Delivery, Frame
from ..wire import frame_topic, pack_frame, unpack_frame
from .publisher import Publisher
from .receiver import Receiver
from .sockets import MAX_FRAME_BYTES

NEWEST_QUEUE = 2


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
        super().__init__(endpoint, delivery, NEWEST_QUEUE, MAX_FRAME_BYTES)

    def send(self, frame: Frame, timeout_ms: int | None = None) -> bool:
        """Publish a frame; `sent_ns` is filled in where it is 0. True when it is on its way.

        `every` waits up to `timeout_ms` (None: no limit) for a subscriber with room, and returns False when
        there was none. Large pixel buffers are not copied: leave them unchanged after the call.
        Raises WireError for a frame that contradicts itself.
        """
        return self._send(lambda: pack_frame(_stamped(frame)), timeout_ms)


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


def _stamped(frame: Frame) -> Frame:
    return frame if frame.sent_ns else replace(frame, sent_ns=time.time_ns())
