"""The sockets of the node, with the keys of its settings."""

from __future__ import annotations

from typing import Any

from ..settings import Settings
from ..transport import ControlServer, FrameSubscriber, MaskPublisher, Security
from ..transport.control import AnswerNow
from .operations import NODE_QUERIES, find_topic

MAX_CAMERA_NAMES = 256


def bind_masks(settings: Settings) -> MaskPublisher:
    """Bind the endpoint of masks. Raises TransportError."""
    transport, encoding = settings.transport, settings.tracker.mask_encoding
    return MaskPublisher(transport.masks, transport.delivery, encoding, Security.from_settings(transport))


def bind_control(settings: Settings, answer_now: AnswerNow, node: str) -> ControlServer:
    """Bind the endpoint of requests. Readers may request status and description. Raises TransportError."""
    security = Security.from_settings(settings.transport)
    return ControlServer(settings.transport.control, answer_now, node, find_topic, security, NODE_QUERIES)


def connect_frames(settings: Settings) -> FrameSubscriber:
    """Connect to the endpoints of cameras. Raises TransportError."""
    transport = settings.transport
    return FrameSubscriber(
        transport.frames,
        transport.delivery,
        max_cameras=MAX_CAMERA_NAMES,
        security=Security.from_settings(transport),
    )


def describe_refusals(
    masks: MaskPublisher, control: ControlServer, frames: FrameSubscriber
) -> dict[str, Any]:
    """Return the fields of the status that say who was refused, and which cameras' endpoints are."""
    return {
        "requests_last_error": control.last_error,
        "peers_refused": masks.peers_refused + control.peers_refused,
        "peers_last_refusal": control.last_refusal or masks.last_refusal,
        "endpoints_refused": list(frames.refusals),
    }
