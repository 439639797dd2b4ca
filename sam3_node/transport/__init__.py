"""ZeroMQ lives here and nowhere else: frames, masks and control, live or lossless."""

from .control import ControlClient, ControlServer, Peer
from .frames import FramePublisher, FrameSubscriber, Received
from .masks import MaskPublisher, MaskSubscriber
from .poll import poll
from .tap import Arrived, Tap

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
    "Tap",
    "poll",
]
