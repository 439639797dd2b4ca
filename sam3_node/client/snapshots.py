"""Requests for snapshots of a node: to make one with a name there, or to fetch one over the control socket."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import BusyError, SnapshotError
from ..transport import ControlClient
from ..wire import Fields

MAX_BYTES = 4 << 30
"""Size of the largest snapshot that is fetched."""
WAIT_S = 60.0
"""Longest time for which a node may pack and write."""
POLL_S = 0.02


class SnapshotInfo(NamedTuple):
    """A snapshot that a node has made."""

    size: int
    """in bytes"""
    sha256: str
    """of the file, as 64 hex digits"""


def make_snapshot(control: ControlClient, name: str) -> SnapshotInfo:
    """Let the node write a snapshot with a name, and wait until it is on disk.

    Raises RequestError for a name that cannot be used, and SnapshotError if it cannot be written.
    """
    number = Fields(control.call("snapshot", name=name), "snapshot").integer("snapshot")
    reply = _read(control, number, 0)
    return SnapshotInfo(reply.integer("size"), reply.text("sha256"))


def fetch_snapshot(control: ControlClient, op: str = "snapshot", **args: str) -> bytes:
    """Return the bytes of a new snapshot; with op `hand_over` and its arguments, the node pauses in the same moment.

    Raises SnapshotError if it is too large, or does not arrive as it was sent.
    """
    number = Fields(_call_patiently(control, op, args), op).integer("snapshot")
    data = bytearray()
    while True:
        reply = _read(control, number, len(data))
        size, part = reply.integer("size"), reply.blob("data")
        if size > MAX_BYTES or len(data) + len(part) > size:
            raise SnapshotError(f"expected a snapshot of at most {MAX_BYTES} bytes, found one of {size}")
        data += part
        if not part or len(data) == size:
            break
    import hashlib  # here, because it slows the start of a client

    found = hashlib.sha256(data).hexdigest()
    if found != reply.text("sha256"):
        raise SnapshotError(
            f"expected a snapshot with SHA-256 {reply.text('sha256')}, found {len(data)} bytes with {found}; try again"
        )
    return bytes(data)


def _call_patiently(control: ControlClient, op: str, args: Mapping[str, str]) -> object:
    """Send a request; again while the node makes another snapshot."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            return control.call(op, **args)
        except BusyError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(POLL_S)


def _read(control: ControlClient, number: int, offset: int) -> Fields:
    """Return a part of a snapshot, once it is packed."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        reply = Fields(control.call("read_snapshot", snapshot=number, offset=offset), "read_snapshot")
        if reply.flag("ready"):
            return reply
        if time.monotonic() > deadline_s:
            raise SnapshotError(
                f"expected the node to pack its snapshot within {WAIT_S:g} s; look at its log"
            )
        time.sleep(POLL_S)
