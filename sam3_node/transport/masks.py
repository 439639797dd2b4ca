"""Masks over ZeroMQ, from the node to whoever reads them; delivery as for frames."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from ..types import Delivery, MaskEncoding, MaskFrame
from ..wire import Event, masks_topic, pack_event, pack_masks, unpack_masks
from .publisher import Publisher
from .receiver import Receiver
from .sockets import MAX_MESSAGE_BYTES

NEWEST_QUEUE = 8
MAX_CAMERAS = 64


class MaskPublisher(Publisher):
    """Binds `endpoint` and publishes masks on it; `.endpoint` is the one really bound. A context manager.

    Raises TransportError when the endpoint is malformed or in use.
    """

    def __init__(
        self, endpoint: str, delivery: Delivery = "newest", encoding: MaskEncoding = "bits+zstd"
    ) -> None:
        self._encoding = encoding
        super().__init__(endpoint, delivery, NEWEST_QUEUE, MAX_MESSAGE_BYTES)

    def send(self, masks: MaskFrame, timeout_ms: int | None = None) -> bool:
        """Publish the masks of a frame; `published_ns` is filled in where it is 0. True when on its way.

        `every` waits up to `timeout_ms` (None: no limit) for a subscriber with room, and returns False when
        there was none.
        """
        return self._send(lambda: pack_masks(_stamped(masks), self._encoding), timeout_ms)

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


def _stamped(masks: MaskFrame) -> MaskFrame:
    return masks if masks.published_ns else replace(masks, published_ns=time.time_ns())
