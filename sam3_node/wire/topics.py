"""Topics: `<kind>/<camera>`, the first part of every published message."""

from __future__ import annotations

import re

from ..errors import WireError
from ..types import Buffer
from .codec import Fields, describe

_CAMERA = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def frame_topic(camera: str) -> bytes:
    """The topic of a camera's frames."""
    return _topic("frame", camera)


def masks_topic(camera: str) -> bytes:
    """The topic of the masks made from a camera's frames."""
    return _topic("masks", camera)


def _topic(kind: str, camera: str) -> bytes:
    if not _CAMERA.fullmatch(camera):
        raise WireError(
            f"expected a camera name of 1 to 64 letters, digits, '_', '.' or '-', found {describe(camera)}"
        )
    return f"{kind}/{camera}".encode()


def take_camera(fields: Fields, topic: Buffer) -> str:
    """The map's camera, whose topic (the map's kind, a slash and its name) must be `topic`."""
    camera = fields.text("camera")
    expected = _topic(fields.text("kind"), camera)
    if topic != expected:
        raise WireError(
            f"{fields.what}: expected the topic {expected.decode()}, found {describe(bytes(topic[:80]))}"
        )
    return camera
