"""Events: `[b"events", body]`, what happened in the node between frames, in the order of the masks beside them.

Together with the masks messages they say what the node did, so that a recording of both can be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import WireError
from ..types import Buffer
from .codec import VERSION, Fields, Limits, describe, pack, unpack

EVENTS_TOPIC = b"events"
FAILED, SERVED, DROPPED = "failed", "served", "dropped"
_LIMITS = Limits(total_bytes=16 << 20)


@dataclass(frozen=True, slots=True)
class Event:
    """The n-th event of a node, from 0 on without gaps.

    `op` is that of a control request which was carried out, with the `args` that it came with; or FAILED (args:
    camera, seq, error): the step of a frame raised; SERVED, DROPPED (args: camera): a camera is served from now on,
    or no longer, and with it all its objects are gone.
    """

    n: int
    op: str
    args: dict[str, Any] = field(default_factory=dict)


def pack_event(event: Event) -> list[bytes]:
    """The parts of one message."""
    body = {"v": VERSION, "kind": "event", "n": event.n, "op": event.op, "args": event.args}
    return [EVENTS_TOPIC, pack(body)]


def unpack_event(parts: Sequence[Buffer]) -> Event:
    """The event of such parts; WireError where anything in it is wrong."""
    if len(parts) != 2 or parts[0] != EVENTS_TOPIC:
        found = describe(bytes(parts[0][:80])) if parts else "none"
        raise WireError(f"event: expected 2 parts, the first {EVENTS_TOPIC!r}; found {len(parts)}, {found}")
    body = Fields(unpack(parts[1], what="event", limits=_LIMITS), "event")
    body.require_kind("event")
    args = body.fields("args")
    return Event(body.integer("n"), body.text("op"), {name: args.any(name) for name in args.names()})
