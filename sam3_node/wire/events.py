"""Event messages: `[b"events", body]`. They report changes of the node between frames, in sequence with the masks.

Events and masks together describe all actions of the node, so that a recording of both can be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import WireError
from ..types import Buffer
from .codec import VERSION, Fields, Limits, describe, pack, unpack

EVENTS_TOPIC = b"events"
FAILED, SERVED, DROPPED, CAUGHT_UP = "failed", "served", "dropped", "caught_up"
RESTORED = "restored"
_LIMITS = Limits(total_bytes=16 << 20)


@dataclass(frozen=True, slots=True)
class Event:
    """The n-th event of a node; `n` counts from 0 without gaps.

    For a control request that changed the node, `op` and `args` are those of the request, with its camera and without
    its epoch. The other events are FAILED (args: camera, seq, error, withheld?, shed?), a frame was processed without
    masks to publish, because of an error or, with `withheld` true, because they were too old; SERVED (args: camera),
    the node starts to serve a camera; DROPPED (args: camera), the node stops serving a camera and removes its objects;
    and CAUGHT_UP (args: camera, id, error?), an object that was prompted on a past frame was tracked up to the latest
    frame, and the next masks contain it as tracked from that prompt. With `error` it gave up: if new, it is removed.
    RESTORED (args: sha256, saved_ns, ids_continue, cameras): the node tracks what a snapshot holds, in the place of
    everything before; sha256 is that of the snapshot's file.
    """

    n: int
    op: str
    args: dict[str, Any] = field(default_factory=dict)


def pack_event(event: Event) -> list[bytes]:
    """Return the parts of the message."""
    body = {"v": VERSION, "kind": "event", "n": event.n, "op": event.op, "args": event.args}
    return [EVENTS_TOPIC, pack(body)]


def unpack_event(parts: Sequence[Buffer]) -> Event:
    """Unpack an event from the parts of a message. Raises WireError for any other input."""
    if len(parts) != 2 or parts[0] != EVENTS_TOPIC:
        first = describe(bytes(parts[0][:80])) if parts else "none"
        raise WireError(f"event: expected 2 parts, the first {EVENTS_TOPIC!r}; found {len(parts)}, {first}")
    body = Fields(unpack(parts[1], what="event", limits=_LIMITS), "event")
    body.require_kind("event")
    args = body.fields("args")
    return Event(body.integer("n"), body.text("op"), {name: args.any(name) for name in args.names()})
