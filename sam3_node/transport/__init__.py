"""ZeroMQ transport of frames, masks and control messages. No other package imports zmq.

What a client needs is imported here. Servers, taps and pairing are imported from their modules: a client, which needs
none, starts sooner.
"""

from .channels import (
    FramePublisher,
    FrameSubscriber,
    MaskPublisher,
    MaskSubscriber,
    PosePublisher,
    ReceivedFrame,
)
from .control_client import ControlClient, ask_server
from .receiver import choose_replaced
from .security import Security
