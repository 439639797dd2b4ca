"""ZeroMQ transport of frames, masks and control messages. No other package imports zmq."""

import importlib
from typing import TYPE_CHECKING, Any

from .channels import FramePublisher, FrameSubscriber, MaskPublisher, MaskSubscriber, ReceivedFrame
from .control_client import ControlClient
from .receiver import choose_replaced
from .security import Security

if TYPE_CHECKING:
    from .control_server import ControlServer, Peer, poll
    from .mask_pairing import MaskPair, MaskPairing
    from .tap import PosePublisher, PoseSubscriber, ReceivedMessage, StreamTap

__all__ = [
    "ControlClient",
    "ControlServer",
    "FramePublisher",
    "FrameSubscriber",
    "MaskPair",
    "MaskPairing",
    "MaskPublisher",
    "MaskSubscriber",
    "Peer",
    "PosePublisher",
    "PoseSubscriber",
    "ReceivedFrame",
    "ReceivedMessage",
    "Security",
    "StreamTap",
    "choose_replaced",
    "poll",
]

_LATER = {
    "ControlServer": "control_server",
    "MaskPair": "mask_pairing",
    "MaskPairing": "mask_pairing",
    "Peer": "control_server",
    "PosePublisher": "tap",
    "PoseSubscriber": "tap",
    "ReceivedMessage": "tap",
    "StreamTap": "tap",
    "poll": "control_server",
}
"""Modules that are imported when a name of theirs is used: a client, which needs none, starts sooner."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
