"""Events of a socket's monitor. The reader in pyzmq would import asyncio, which slows the start of a client."""

from __future__ import annotations

import struct
from typing import NamedTuple

import zmq

from .security import Socket

_HEAD = struct.Struct("=Hi")


class MonitorEvent(NamedTuple):
    """One event: its kind (zmq.EVENT_…) and the value that comes with it, such as a descriptor or an error."""

    kind: int
    value: int


def read_event(monitor: Socket) -> MonitorEvent | None:
    """Return the next event of a monitor; None if none waits."""
    try:
        head, _ = monitor.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
    return MonitorEvent(*_HEAD.unpack(head))
