"""ZeroMQ lives here and nowhere else: frames, masks and control, live or lossless."""

from .channels import FramePublisher, FrameSubscriber, MaskPublisher, MaskSubscriber, Received
from .control import ControlClient, ControlServer, Peer, poll
from .tap import Arrived, StreamTap

__all__ = [
    "Arrived",
    "ControlClient",
    "ControlServer",
    "FramePublisher",
    "FrameSubscriber",
    "MaskPublisher",
    "MaskSubscriber",
    "Peer",
    "Received",
    "StreamTap",
    "poll",
]
