"""Waiting for frames and requests at once."""

from __future__ import annotations

from typing import Any

import zmq

from .control import ControlServer
from .frames import FrameSubscriber


def poll(frames: FrameSubscriber, control: ControlServer, timeout_ms: int | None = None) -> bool:
    """Wait for a frame or a request; False when neither came within `timeout_ms` (None: no limit)."""
    waited_for: list[tuple[Any, int]] = [(frames.wakeup, zmq.POLLIN), (control.wakeup, zmq.POLLIN)]
    return bool(zmq.zmq_poll(waited_for, -1 if timeout_ms is None else timeout_ms))
