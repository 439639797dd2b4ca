"""Decode the photos of requests in another thread, while the main loop steps frames."""

import hashlib
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

from ..perception.perception import Perception
from ..resumable import Resumable
from ..types import Image
from ..wire.images import MAX_PHOTO_MEMORY, decode_photo

TURN_S = 0.002
"""Seconds for which a turn of the main loop waits for the thread. With less, the loop would take the cores from it."""


class Photo(NamedTuple):
    """A decoded photo."""

    image: Image
    """BGR uint8 [h, w, 3]"""
    digest: str
    """SHA-256 of its file, which names it"""


def read_photo(data: bytes, max_pixels: int, max_memory: int | None = None) -> Photo:
    """Decode a JPEG or PNG within the limits of `decode_photo`. Raises WireError for any other bytes."""
    return Photo(decode_photo(data, max_pixels, max_memory), hashlib.sha256(data).hexdigest())


def read_photo_in_turns(perception: Perception, data: bytes) -> Resumable[Photo]:
    """Read a photo of at most MAX_PHOTO_MEMORY in another thread. One is read at a time, because each takes memory."""
    # an earlier photo goes on first
    while perception.reading_photo:
        yield
    perception.reading_photo = True
    try:
        # the block waits for the thread, also if the work is cancelled, so that none is left
        with ThreadPoolExecutor(1, "photo") as thread:
            limits = perception.settings.tracker.max_frame_pixels, MAX_PHOTO_MEMORY
            reading = thread.submit(read_photo, data, *limits)
            while not wait([reading], TURN_S).done:
                yield
        return reading.result()
    finally:
        perception.reading_photo = False
