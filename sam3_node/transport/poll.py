"""Waiting for frames and requests at once."""

from __future__ import annotations

import zmq

from .control import ControlServer
from .frames import FrameSubscriber


def poll(frames: FrameSubscriber | None, control: ControlServer, timeout_ms: int | None = None) -> bool:
    """Wait until a frame or a request is there; False when neither came within `timeout_ms` (None: no limit).

    Only requests count where `frames` is None: a paused node leaves frames where they are.
    """
    poller = zmq.Poller()
    if frames is not None:
        poller.register(frames.wakeup, zmq.POLLIN)
    poller.register(control.wakeup, zmq.POLLIN)
    return bool(poller.poll(timeout_ms))
