"""Continue the work of an earlier run, of a snapshot's file, or of another node, which hands it over.

A node that takes over writes the state to its own snapshot before it confirms. From then on a start finds it there,
whatever happens to either node. `hand_over` describes the two phases.
"""

import logging
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

from ..client.values import fetch_snapshot
from ..errors import (
    BusyError,
    ForbiddenError,
    RequestError,
    Sam3NodeError,
    SnapshotError,
    TransportError,
    WireError,
)
from ..schema.operations import ConfirmHandOver, HandOver
from ..transport import ControlClient, Security
from .hand_over import UNKNOWN
from .saved_state import Saved, Snapshots

log = logging.getLogger(__name__)

ANSWER_MS = 10_000
"""Longest time in milliseconds for one reply of the other node while its state is fetched."""
ASK_MS = 1000
"""Longest time in milliseconds for the reply to one confirmation. Confirmations are repeated."""
PAUSE_S = 0.1
"""Seconds between two confirmations."""
ANOTHER = "another"
"""State of a hand-over in a node that has begun another one since."""


def restore_at_start(snapshots: Snapshots, source: str | None, security: Security | None = None) -> None:
    """Continue from `source`, a file or the control endpoint of another node; without it, from the node's own snapshot.

    A node that has taken over from this `source` before, and is started again, continues from its own snapshot, unless
    the other node works on. `security` has the key for another node. Raises SnapshotError, or TransportError or
    RequestError of the other node; it works on then, if it did before.
    """
    saved = snapshots.read_saved()
    if source is None:
        _restore_own(snapshots, saved)
    elif "://" not in source:
        _restore_file(snapshots, saved, source)
    elif (
        saved is None
        or saved.snapshot.hand_over.get("source") != source
        or not _continue_after_take_over(snapshots, saved, source, security)
    ):
        _take_over(snapshots, source, security)


def _restore_file(snapshots: Snapshots, saved: Saved | None, source: str) -> None:
    """Continue from a file; from the own snapshot if an earlier run has continued the ids of the same file.

    A supervisor repeats its command: to continue from the file again would give the same ids twice. Raises
    SnapshotError if there is neither.
    """
    try:
        file = Saved.read(Path(source), source)
    except SnapshotError as error:
        if saved is None or saved.snapshot.hand_over.get("source") != source:
            raise
        log.warning("%s; it was continued before", error)
        _restore_own(snapshots, saved)
        return
    # the digest tells this file from a newer one at the same path
    origin = {"source": source, "token": file.sha256, "confirmed": True}
    continues_ids = file.snapshot.kind != "named"
    was_continued = continues_ids and saved is not None and saved.snapshot.hand_over == origin
    if was_continued and _restore_own(snapshots, saved):
        return
    snapshots.restore(file)
    # a named snapshot gives new ids each time, so it may be restored again
    snapshots.note_origin(origin if continues_ids else {})


def _restore_own(snapshots: Snapshots, saved: Saved | None, confirmed: bool = False) -> bool:
    """Continue from the node's own snapshot. Return False if it cannot be used.

    Its ids begin again if another node may use them: if they were taken over and not `confirmed`.
    """
    if saved is None:
        return False
    origin = saved.snapshot.hand_over
    confirmed = confirmed or not origin or origin.get("confirmed") is True
    if snapshots.restore_saved(saved, new_epochs=not confirmed) is None:
        return False
    snapshots.note_origin({**origin, "confirmed": True} if origin else {})
    return True


def _continue_after_take_over(
    snapshots: Snapshots, saved: Saved, source: str, security: Security | None
) -> bool:
    """Continue from the own snapshot of an earlier run that took over. Return False to take over again.

    If it is too old, the node begins without objects, as after any long pause, unless the other node works on.
    """
    origin = saved.snapshot.hand_over
    was_confirmed = origin.get("confirmed") is True
    token = str(origin.get("token"))
    node = str(origin.get("node"))
    # a confirmation that was lost is repeated; one that was answered needs no patience
    patience_s = 0.0 if was_confirmed else snapshots.confirm_s
    state = _confirm(source, security, token, node, patience_s)
    # the other node has begun to work again, so these ids may be its own
    works_on = state in ("expired", "cancelled", ANOTHER)
    if state == "taken_back" or (works_on and not was_confirmed):
        log.warning("%s works on since it has handed over: it is taken over again", source)
        return False
    if works_on:
        log.warning("%s may work, too, with other epochs: stop it or this node", source)
    log.info("%s was taken over before: continuing from %s", source, saved.source)
    if _restore_own(snapshots, saved, confirmed=state == "confirmed"):
        return True
    snapshots.note_origin({**origin, "confirmed": True})
    return was_confirmed or state == "confirmed"


def _take_over(snapshots: Snapshots, source: str, security: Security | None) -> None:
    """Let another node pause, continue its work, and confirm. It pauses only after a trial with a copy of its state."""
    token = secrets.token_hex(8)
    with ControlClient(source, ANSWER_MS, security) as control:
        # a trial: a state that does not fit is refused before the other node has paused
        snapshots.check(fetch_snapshot(control), source)
        # from the hand-over on, the other node waits: it must hear of every failure
        try:
            successor = f"{snapshots.node} on {socket.gethostname()}"
            data = fetch_snapshot(control, HandOver(taker=successor, token=token))
            saved = snapshots.restore(Saved.unpack(data, source))
            origin = {**saved.snapshot.hand_over, "source": source}
            snapshots.note_origin({**origin, "confirmed": False})
            # on disk before the confirmation, because the other node deletes its own snapshot then
            snapshots.save()
        except Exception:
            # if this does not arrive, the other node works on when its patience ends
            with suppress(Sam3NodeError):
                control.ask(ConfirmHandOver(token=token, accepted=False))
            raise
    # only a confirmation that was answered makes these ids this node's own
    if not snapshots.keeps:
        log.warning("without snapshot.path this node cannot continue after a restart: set it")
    state = _confirm(source, security, token, str(origin["node"]), snapshots.confirm_s)
    if state is None:
        snapshots.begin_epochs()
        log.warning("%s did not answer the confirmation, and may work on: ids begin again here", source)
    elif state != "confirmed":
        # the other node goes on to give these ids, so no start may restore them here
        snapshots.withdraw()
        raise RequestError(f"{source} works on: expected that it waits for a confirmation, found {state!r}")
    snapshots.note_origin({**origin, "confirmed": True})


def _confirm(source: str, security: Security | None, token: str, node: str, patience_s: float) -> str | None:
    """Confirm a hand-over of `node`, once or for `patience_s`. Return its state there; None without an answer.

    ANOTHER means that the node has begun another hand-over since, UNKNOWN that it is another process.
    """
    deadline_s = time.monotonic() + patience_s
    # a client of its own, because a confirmation waits less than a fetch of the state
    with ControlClient(source, ASK_MS, security) as control:
        while True:
            try:
                reply = control.ask(ConfirmHandOver(token=token))
                # the same process no longer knows the token once it has begun another hand-over
                is_same = reply.state == UNKNOWN and reply.node == node
                return ANOTHER if is_same else reply.state
            except (TransportError, BusyError, ForbiddenError, WireError) as error:
                if time.monotonic() >= deadline_s:
                    log.warning("%s gives no answer: %s", source, error)
                    return None
                time.sleep(PAUSE_S)
