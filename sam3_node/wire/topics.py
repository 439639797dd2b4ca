"""Topics of messages: `<kind>/<name>` is the first part of each frame, masks and pose message."""

from __future__ import annotations

import re

from ..errors import WireError
from ..types import Buffer
from .codec import Fields, describe

# not of dots alone: outputs name files and folders by cameras
_NAME = re.compile(r"(?!\.+\Z)[A-Za-z0-9_.-]{1,64}")

FRAMES_ROOT, MASKS_ROOT = b"frame/", b"masks/"
"""Beginnings of the topics of frames and masks."""
BEAT_TOPIC = b"beat"
"""Topic, and only part, of the message by which a live publisher says that it runs."""


def frame_topic(camera: str) -> bytes:
    """Return the topic of the frames of a camera."""
    return _make_topic("frame", camera)


def masks_topic(camera: str) -> bytes:
    """Return the topic of the masks of a camera."""
    return _make_topic("masks", camera)


def _make_topic(kind: str, camera: str) -> bytes:
    return f"{kind}/{check_name(camera, 'camera')}".encode()


def check_name(name: str, what: str) -> str:
    """Return the name of a camera or a frame. Raises WireError unless it may be part of a topic."""
    if not _NAME.fullmatch(name):
        raise WireError(
            f"expected a {what} name of 1 to 64 letters, digits, '_', '.' or '-', and not of dots alone, found "
            f"{describe(name)}"
        )
    return name


def read_camera(fields: Fields, topic: Buffer) -> str:
    """Return the camera of a map. Raises WireError unless `topic` is the topic of its kind and camera."""
    camera = fields.text("camera")
    expected = _make_topic(fields.text("kind"), camera)
    if topic != expected:
        raise WireError(
            f"{fields.what}: expected the topic {expected.decode()}, found {describe(bytes(topic[:80]))}"
        )
    return camera
