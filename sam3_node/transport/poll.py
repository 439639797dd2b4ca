"""Waiting for frames and requests at once."""

from __future__ import annotations

import zmq

from .control import ControlServer
from .frames import FrameSubscriber


def poll(frames: FrameSubscriber, control: ControlServer, timeout_ms: int | None = None) -> bool:
    """Wait for a frame or a request; False when neither came within `timeout_ms` (None: no limit)."""
    poller = zmq.Poller()
    poller.register(frames.wakeup, zmq.POLLIN)
    poller.register(control.wakeup, zmq.POLLIN)
    return bool(poller.poll(timeout_ms))
