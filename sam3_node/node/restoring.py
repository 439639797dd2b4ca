"""The start of a node from a snapshot: its own after a crash, a file, or one that another node hands over."""

from __future__ import annotations

import logging
from pathlib import Path

from ..client.snapshots import fetch_snapshot
from ..errors import RequestError, TransportError
from ..transport import ControlClient, Security
from .snapshots import Snapshots, read_file

log = logging.getLogger(__name__)

ANSWER_MS = 10_000
HAND_OVER = "hand_over"


def restore_at_start(snapshots: Snapshots, source: str | None, security: Security | None = None) -> None:
    """Continue from `source`, a file or the control endpoint of another node; without it, from the node's own snapshot.

    When another node does not hand over, but this node's own snapshot is recent, this node has been started again after
    it took over, and continues from that. `security` has the key for another node. Raises SnapshotError, or
    TransportError or RequestError of the other node; it works on then.
    """
    if source is None:
        snapshots.restore_saved()
    elif "://" not in source:
        snapshots.restore(read_file(Path(source)), source)
    else:
        try:
            _take_over(snapshots, source, security)
        except (TransportError, RequestError) as error:
            if snapshots.restore_saved() is None:
                raise
            log.warning("%s was not handed over (%s): continued from this node's own snapshot", source, error)


def _take_over(snapshots: Snapshots, endpoint: str, security: Security | None) -> None:
    """Let another node stop, and continue its work. It stops only after a copy of its state was restored here."""
    control = ControlClient(endpoint, ANSWER_MS, security)
    try:
        snapshots.check(fetch_snapshot(control), endpoint)
        snapshots.restore(fetch_snapshot(control, HAND_OVER), endpoint)
    finally:
        control.close()
