"""ZeroMQ transport of frames, masks and control messages. No other package imports zmq."""

import importlib
from typing import TYPE_CHECKING, Any

from .channels import FramePublisher, FrameSubscriber, MaskPublisher, MaskSubscriber, ReceivedFrame
from .control_client import ControlClient, ask_server
from .receiver import choose_replaced
from .security import Security

if TYPE_CHECKING:
    from .control_server import ControlServer, Peer, poll
    from .mask_pairing import MaskPair, MaskPairing
    from .tap import JointSubscriber, PosePublisher, PoseSubscriber, ReceivedMessage, StreamTap

__all__ = [
    "ControlClient",
    "ControlServer",
    "FramePublisher",
    "FrameSubscriber",
    "JointSubscriber",
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
    "ask_server",
    "choose_replaced",
    "poll",
]

_LATER = {
    "control_server": ("ControlServer", "Peer", "poll"),
    "mask_pairing": ("MaskPair", "MaskPairing"),
    "tap": ("JointSubscriber", "PosePublisher", "PoseSubscriber", "ReceivedMessage", "StreamTap"),
}
"""Modules that are imported when a name of theirs is used: a client, which needs none, starts sooner."""


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
