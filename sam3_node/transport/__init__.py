"""ZeroMQ transport of frames, masks and control messages. No other package imports zmq."""

from .channels import FramePublisher, FrameSubscriber, MaskPublisher, MaskSubscriber, ReceivedFrame
from .control import ControlClient, ControlServer, Peer, poll
from .poses import PosePublisher, PoseSubscriber
from .tap import ReceivedMessage, StreamTap

__all__ = [
    "ControlClient",
    "ControlServer",
    "FramePublisher",
    "FrameSubscriber",
    "MaskPublisher",
    "MaskSubscriber",
    "Peer",
    "PosePublisher",
    "PoseSubscriber",
    "ReceivedFrame",
    "ReceivedMessage",
    "StreamTap",
    "poll",
]
