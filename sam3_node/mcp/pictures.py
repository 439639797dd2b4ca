"""The newest picture of a camera with the masks of exactly that frame, as a JPEG of bounded size.

It is connected to the cameras only while it looks: frames are large, and an agent looks once in seconds.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from ..errors import TransportError, WireError
from ..geometry import shrink
from ..settings import TransportSettings
from ..transport import Security
from ..transport.mask_pairing import MaskPair, MaskPairing
from ..transport.tap import StreamTap
from ..types import Image
from ..visualization import overlay
from ..wire import decode_image, encode_image

LOOK_S = 5.0
"""Longest wait for a frame with its masks, in seconds. Then the newest frame is shown without."""
POLL_MS = 100
"""Longest wait for one message, in milliseconds."""
QUEUE_BYTES = 64 << 20
"""Maximum size of the waiting messages, in bytes. Further ones are dropped."""
QUALITIES = (80, 60, 40)
"""Qualities of the JPEG, in the order in which they are tried until it is small enough."""
MAX_PICTURE_BYTES = 512 << 10
"""Largest JPEG in an answer, in bytes. A larger one is made with a lower quality, then with fewer pixels."""


class DrawnPicture(NamedTuple):
    """A JPEG of a frame, with masks drawn on it if there were any."""

    jpeg: bytes
    width: int
    height: int
    scale: float
    """Pixels of the frame for each pixel of the picture, 1 or more."""

    def scale_box(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Return the facts of an object with its `box` in pixels of the picture."""
        box = facts.get("box")
        return facts if box is None else facts | {"box": [round(side / self.scale) for side in box]}


def take_pair(transport: TransportSettings, camera: str) -> MaskPair:
    """Return the next frame of a camera with its masks; without masks if none come in time.

    Raises TransportError if no frame comes. Damaged messages are skipped.
    """
    pairing = MaskPairing()
    alone: MaskPair | None = None
    damaged = ""
    end_s = time.monotonic() + LOOK_S
    security = Security.from_settings(transport)
    with StreamTap(transport.frames, transport.masks, (camera,), QUEUE_BYTES, security=security) as tap:
        while time.monotonic() < end_s:
            arrived = tap.take(POLL_MS)
            if arrived is None:
                continue
            try:
                pair = pairing.accept(arrived.parts)
            except WireError as error:
                damaged = f"; the last message could not be read: {error}"
                continue
            if pair is None or pair.frame is None:
                continue
            if pair.masks is not None:
                return pair
            alone = pair
    if alone is not None:
        return alone
    raise TransportError(
        f"look: expected a frame of camera {camera} within {LOOK_S:g} s, found none at "
        f"{', '.join(transport.frames)}{damaged}; check that the camera runs, and that transport.frames and the key of "
        "this process are those of its endpoint"
    )


def draw(pair: MaskPair, max_side: int, with_masks: bool = True) -> DrawnPicture:
    """Return the picture of a pair that has a frame, at most `max_side` wide and high, in MAX_PICTURE_BYTES.

    Raises WireError for a damaged image.
    """
    assert pair.frame is not None
    image = decode_image(pair.frame)
    # first smaller, then the masks: they are drawn on fewer pixels, and their text stays readable
    image = shrink(image, max_side)
    if with_masks and pair.masks is not None:
        image = overlay(image, pair.masks)
    jpeg = _encode(image)
    # noise may need more bytes at any quality
    while len(jpeg) > MAX_PICTURE_BYTES:
        image = shrink(image, max(image.shape[:2]) // 2)
        jpeg = _encode(image)
    height, width = image.shape[:2]
    return DrawnPicture(jpeg, width, height, pair.frame.width / width)


def _encode(image: Image) -> bytes:
    """Return a JPEG of the best of QUALITIES that is small enough, else of the lowest."""
    jpeg = b""
    for quality in QUALITIES:
        jpeg = bytes(encode_image(image, "jpeg", quality))
        if len(jpeg) <= MAX_PICTURE_BYTES:
            break
    return jpeg
