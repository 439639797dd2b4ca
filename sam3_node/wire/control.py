"""Control messages: a request {v, id, op, args} and its reply {v, id, ok, result | error {code, message}, node?}.

Arguments and results hold masks as maps of `masks.encode_mask`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import Sam3NodeError
from ..types import Buffer
from .codec import VERSION, Fields, Limits, pack, unpack

INTERNAL_ERROR = "internal"
"""Code of a failure that is a fault of the node, and of no error class of this package."""
_LIMITS = Limits(total_bytes=16 << 20)


@dataclass(frozen=True, slots=True)
class Request:
    """A request for an operation of the node. The client chooses `id`, and the reply repeats it."""

    id: int
    op: str
    args: dict[str, Any] = field(default_factory=dict)


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
    return pack({"v": VERSION, "id": request.id, "op": request.op, "args": request.args})


def unpack_request(data: Buffer) -> Request:
    """Unpack a request. Raises WireError for any other bytes."""
    fields = Fields(unpack(data, what="request", limits=_LIMITS), "request")
    fields.require_version()
    args = fields.fields("args")
    return Request(fields.integer("id"), fields.text("op"), {name: args.any(name) for name in args.names()})


def pack_reply(reply: Reply) -> bytes:
    """Pack a reply."""
    body: dict[str, Any] = {"v": VERSION, "id": reply.id, "ok": reply.ok}
    if reply.error is None:
        body["result"] = reply.result
    else:
        body["error"] = {"code": reply.error.code, "message": reply.error.message}
    return pack(body if reply.node is None else body | {"node": reply.node})


def unpack_reply(data: Buffer) -> Reply:
    """Unpack a reply. Raises WireError for any other bytes."""
    fields = Fields(unpack(data, what="reply", limits=_LIMITS), "reply")
    fields.require_version()
    node = fields.text("node") if fields.has("node") else None
    if fields.flag("ok"):
        return Reply(fields.integer("id"), fields.any("result"), node=node)
    error = fields.fields("error")
    return Reply(fields.integer("id"), error=Failure(error.text("code"), error.text("message")), node=node)
