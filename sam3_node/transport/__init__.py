"""ZeroMQ transport of frames, masks and control messages. No other package imports zmq."""

from .camera_names import choose_replaced
from .channels import FramePublisher, FrameSubscriber, MaskPublisher, MaskSubscriber, ReceivedFrame
from .control import ControlServer, poll
from .control_client import ControlClient
from .pairing import Pair, Pairing
from .poses import PosePublisher, PoseSubscriber
from .request_queue import Peer
from .security import Security
from .tap import ReceivedMessage, StreamTap

__all__ = [
    "ControlClient",
    "ControlServer",
    "FramePublisher",
    "FrameSubscriber",
    "MaskPublisher",
    "MaskSubscriber",
    "Pair",
    "Pairing",
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
