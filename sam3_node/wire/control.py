"""Pack and unpack control messages and events.

A request is {v, id, op, args, request_id?}, its reply {v, id, ok, result | error {code, message}, node?}; both hold
masks as maps of `masks.encode_mask`. An event message is `[b"events", body]`. Events report changes of the node between
frames, in sequence with the masks: both together describe all actions of the node, so that a recording of them can be
replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from ..errors import RequestError, Sam3NodeError, WireError, check_request_id
from ..schema.fields import Natural, Plain, Text, describe
from ..schema.operations import OPERATIONS, AnyOperation
from ..types import Buffer
from .codec import VERSION, Fields, Limits, Read, Schema, count_items, open_message, pack, unpack
from .requests import decode_operation, read_operation

INTERNAL_ERROR = "internal"
"""Code of a failure that is a fault of the node, and of no error class of this package."""
_LIMITS = Limits(total_bytes=16 << 20)
_READ_LIMITS = Limits(total_bytes=16 << 20, text_bytes=16 << 20, total_items=16 << 20)
"""of arguments that their operation has bounded"""
_ARGUMENTS: dict[str, Read] = {"op": Fields.text, "args": Fields.open_map}


def _read_request_id(fields: Fields, name: str) -> str:
    try:
        return check_request_id(fields.text(name))
    except RequestError as error:
        raise WireError(f"{fields.what}: {error}") from error


_ABOUT: dict[str, Read] = {**_ARGUMENTS, "request_id?": _read_request_id}
_REQUEST = Schema({"id": Fields.integer, **_ABOUT})
_EVENT = Schema({"n": Fields.integer, **_ABOUT})


class _RequestMessage(msgspec.Struct):
    """The map of a request, whose arguments are read by its operation."""

    v: Literal[1]
    id: Natural
    op: Text
    args: msgspec.Raw
    request_id: Text | None = None


_REQUEST_DECODER = msgspec.msgpack.Decoder(_RequestMessage)


class Request:
    """A request for an operation of the node. The client chooses `id`, and the reply repeats it."""

    __slots__ = ("_args", "_operation", "_packed", "id", "op", "request_id")

    def __init__(
        self,
        id: int,
        op: str,
        args: Plain | None = None,
        request_id: str | None = None,
    ) -> None:
        self.id = id
        self.op = op
        self.request_id = request_id
        """Text that the node's log and events repeat, so that an operator finds what became of the request."""
        self._args: Plain | None = args or {}
        self._packed: Buffer = b""
        self._operation: AnyOperation | None = None

    @classmethod
    def of(cls, message: _RequestMessage, operation: AnyOperation) -> Request:
        """Return the request of a message whose operation was read."""
        request = cls(message.id, message.op, None, message.request_id)
        request._args = None
        request._packed = message.args
        request._operation = operation
        return request

    @property
    def args(self) -> Plain:
        """The arguments as they came. They are unpacked when they are first used."""
        if self._args is None:
            args: Plain = unpack(self._packed, what="request: args", limits=_READ_LIMITS)
            self._args = args
        return self._args

    @property
    def operation(self) -> AnyOperation:
        """The operation, read once. Raises RequestError for an unknown one, and for wrong arguments."""
        if self._operation is None:
            self._operation = read_operation(self.op, self.args)
        return self._operation

    @property
    def supersede_key(self) -> str | None:
        """A newer request of the same client with the same key makes this one useless. None: none does."""
        # only an operation whose newer request makes an older one useless, such as a preview
        if self.op not in OPERATIONS or not OPERATIONS[self.op].is_superseded:
            return None
        if self._operation is not None:
            camera = getattr(self._operation, "camera", None)
        else:
            camera = self.args.get("camera")
        if not isinstance(camera, str | None):
            return None
        return f"{self.op} {camera!r}"

    def count_items(self) -> int:
        """Return the number of values in the arguments, at all levels."""
        if self._operation is None:
            return count_items(self.args)
        return _count_values(self._operation)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Request):
            return NotImplemented
        return (self.id, self.op, self.args) == (other.id, other.op, other.args)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.op!r}, {dict(self.args)!r:.200})"


def _count_values(value: object) -> int:
    """Return the number of values in a value of the schema, whose depth its type bounds."""
    inner: Iterable[object] = ()
    if isinstance(value, msgspec.Struct):
        inner = (getattr(value, name) for name in value.__struct_fields__)
    elif isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, tuple):
        inner = value
    return sum(1 + _count_values(each) for each in inner)


class Failure(NamedTuple):
    """The failure of a request: the `code` of an error of this package, and its message."""

    code: str
    message: str


class Reply(NamedTuple):
    """The reply to the request of the same `id`: a result, or an error if `ok` is False."""

    id: int
    result: Any = None
    error: Failure | None = None
    node: str | None = None
    """The node's name for its present run, as in its masks."""

    @property
    def ok(self) -> bool:
        """True if the request succeeded."""
        return self.error is None

    @classmethod
    def failed(cls, id: int, error: Sam3NodeError) -> Reply:
        """Create the reply for an error of this package."""
        return cls(id, error=Failure(error.code, str(error)))


def pack_request(request: Request) -> bytes:
    """Pack a request."""
    return pack({"v": VERSION, "id": request.id, "op": request.op, "args": request.args, **_about(request)})


def unpack_request(data: Buffer) -> Request:
    """Unpack a request and read its operation. Raises WireError for any other bytes; `operation` may still raise."""
    # in one pass, if all is right
    if memoryview(data).nbytes <= _LIMITS.total_bytes:
        with suppress(msgspec.MsgspecError, RecursionError, UnicodeDecodeError, RequestError):
            message = _REQUEST_DECODER.decode(data)
            if message.request_id is not None:
                check_request_id(message.request_id)
            operation = decode_operation(message.op, message.args)
            if operation is not None:
                return Request.of(message, operation)
    # slowly, to say what is wrong
    fields = open_message(data, "request", _LIMITS, has_kind=False)
    request = Request(**fields.read(_REQUEST))
    with suppress(Exception):  # it raises again where the request is answered
        request.operation  # noqa: B018
    return request


def pack_reply(reply: Reply) -> bytes:
    """Pack a reply."""
    # either a result or an error, and the name of the node's run with both
    body: dict[str, object] = {"v": VERSION, "id": reply.id, "ok": reply.error is None}
    if reply.error is None:
        body["result"] = reply.result
    else:
        body["error"] = {"code": reply.error.code, "message": reply.error.message}
    if reply.node is not None:
        body["node"] = reply.node
    return pack(body)


def unpack_reply(data: Buffer) -> Reply:
    """Unpack a reply. Raises WireError for any other bytes."""
    # errors also carry the node's run, because it tells a restart
    fields = open_message(data, "reply", _LIMITS, has_kind=False)
    node = fields.text("node") if fields.has("node") else None
    if fields.flag("ok"):
        return Reply(fields.integer("id"), fields.any("result"), node=node)
    error = fields.fields("error")
    return Reply(fields.integer("id"), error=Failure(error.text("code"), error.text("message")), node=node)


EVENTS_TOPIC = b"events"
"""Topic of all events of a node."""
# names of events that are no requests; see Event
FAILED = "failed"
SERVED = "served"
DROPPED = "dropped"
CAUGHT_UP = "caught_up"
RESTORED = "restored"
GRASPED = "grasped"
RELEASED = "released"
REGROUPED = "regrouped"
RECALLED = "recalled"
AMBIGUOUS = "ambiguous"
THREADS = "threads"


@dataclass(frozen=True, slots=True)
class Event:
    """The n-th event of a node; `n` counts from 0 without gaps.

    For a control request that changed the node, `op` and `args` are the request's own, with its camera and without
    its epoch. The other events are FAILED (args: camera, seq, error, withheld?, fields of StepDecisions), a frame was
    processed without masks to publish, because of an error or, with `withheld` true, because they were too old; SERVED
    (args: camera), the node starts to serve a camera; DROPPED (args: camera), the node stops serving a camera and
    removes its objects; and CAUGHT_UP (args: camera, id, error?), an object that was prompted on a past frame was
    tracked up to the latest frame, and the next masks contain it as tracked from that prompt. With `error` it gave up:
    if new, it is removed.
    RESTORED (args: sha256, saved_ns, ids_continue, cameras): the node tracks what a snapshot holds, in the place of
    everything before; sha256 identifies the snapshot's file. GRASPED and RELEASED (args: camera, id): the next masks
    contain the object as held, or as not held any more. REGROUPED (args: camera, id): from the next frame on, the
    object shares its memory with other objects than before. RECALLED (args: camera, id, absent_s): an object that was
    out of view so many seconds is known again by its looks, and by a mask that is not doubtful. AMBIGUOUS (args:
    camera, ids): something came into view that may be any of these objects, so it is taken for none of them. THREADS
    (args: count): from here on, steps use so many CPU threads, which decides how sums are rounded.
    """

    n: int
    op: str
    args: Plain = field(default_factory=dict)
    request_id: str | None = None
    """of the request that changed the node, or by which an object caught up"""


def pack_event(event: Event) -> list[bytes]:
    """Return the parts of the message."""
    body = {"v": VERSION, "kind": "event", "n": event.n, "op": event.op, "args": event.args, **_about(event)}
    return [EVENTS_TOPIC, pack(body)]


def _about(message: Request | Event) -> dict[str, str]:
    if message.request_id is None:
        return {}
    return {"request_id": message.request_id}


def unpack_event(parts: Sequence[Buffer]) -> Event:
    """Unpack an event from the parts of a message. Raises WireError for any other input."""
    if len(parts) != 2 or parts[0] != EVENTS_TOPIC:
        first = describe(bytes(parts[0][:80])) if parts else "none"
        raise WireError(f"event: expected 2 parts, the first {EVENTS_TOPIC!r}; found {len(parts)}, {first}")
    return Event(**open_message(parts[1], "event", _LIMITS).read(_EVENT))
