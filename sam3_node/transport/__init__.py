"""ZeroMQ lives here and nowhere else: frames, masks and control, live or lossless."""

from .control import ControlClient, ControlServer, Peer
from .frames import FramePublisher, FrameSubscriber, Received
from .masks import MaskPublisher, MaskSubscriber
from .poll import poll

__all__ = [
    "ControlClient",
    "ControlServer",
    "FramePublisher",
    "FrameSubscriber",
    "MaskPublisher",
    "MaskSubscriber",
    "Peer",
    "Received",
    "poll",
]
