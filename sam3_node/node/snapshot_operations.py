"""The operations of the control socket for snapshots and hand-overs. They publish their own events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import RequestError
from ..wire import Fields
from .snapshots import Snapshots

MAX_LINE_CHARACTERS = 200


def _snapshot(snapshots: Snapshots, args: Fields) -> dict[str, Any]:
    return {"snapshot": snapshots.begin(args.text("name") if args.has("name") else None)}


def _read_snapshot(snapshots: Snapshots, args: Fields) -> dict[str, Any]:
    return snapshots.read(args.integer("snapshot"), args.integer("offset"))


def _restore(snapshots: Snapshots, args: Fields) -> dict[str, Any]:
    return snapshots.restore_named(args.text("name")).describe()


def _hand_over(snapshots: Snapshots, args: Fields) -> dict[str, Any]:
    """Hand over. A taker of before `confirm_hand_over` names neither itself nor a token."""
    taker = _checked_line(args, "taker") if args.has("taker") else None
    token = _checked_line(args, "token") if taker is not None else ""
    return {"snapshot": snapshots.hand_over(taker, token)}


def _confirm_hand_over(snapshots: Snapshots, args: Fields) -> dict[str, Any]:
    accepted = args.flag("accepted") if args.has("accepted") else True
    state = snapshots.confirm_hand_over(_checked_line(args, "token"), accepted)
    return {"state": state, "node": snapshots.node}


def _checked_line(args: Fields, name: str) -> str:
    """Return a text for logs and probes: one line, printable and not too long."""
    text = args.text(name)
    if not 0 < len(text) <= MAX_LINE_CHARACTERS or not text.isprintable():
        raise RequestError(
            f"{args.what}: {name}: expected 1 to {MAX_LINE_CHARACTERS} printable characters, found {text!r:.80}"
        )
    return text


SNAPSHOT_OPERATIONS: dict[str, tuple[Callable[[Snapshots, Fields], Any], tuple[str, ...]]] = {
    "snapshot": (_snapshot, ("name",)),
    "read_snapshot": (_read_snapshot, ("snapshot", "offset")),
    "restore": (_restore, ("name",)),
    "hand_over": (_hand_over, ("taker", "token")),
    "confirm_hand_over": (_confirm_hand_over, ("token", "accepted")),
}
