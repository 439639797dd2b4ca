"""Serve control requests over a ROUTER socket. Requests wait in a queue with a limit for each peer, and one for all."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import zmq

from ..errors import BusyError, ForbiddenError, SupersededError, WireError
from ..resumable import Resumable
from ..schema.operations import FOR_READERS, OPERATIONS
from ..types import Buffer
from ..wire import INTERNAL_ERROR, Failure, Reply, Request, pack_reply, unpack_request
from . import sockets
from .channels import FrameSubscriber
from .limits import Rights
from .primitives import WakePipe
from .security import Security

MAX_REQUESTS_PER_PEER = 32
"""Requests of one peer that may wait. A further one gets the error `busy` at once."""
MAX_WAITING_BYTES = 24 << 20
"""Approximate memory of all waiting requests. Beyond it, the peer that takes most loses its newest ones."""
OVERHEAD_BYTES = 1024
"""Approximate memory in bytes of a waiting request, without its content."""
ITEM_BYTES = 160
"""Most memory in bytes that an unpacked value takes in addition to its packed bytes: an entry of a map with its key."""
QUEUE = 64
"""Replies that libzmq queues for each peer. A peer that does not read loses the others."""
LARGE_BYTES = 1 << 20
"""The server's thread does not unpack larger requests: it must stay quick, and unpacking takes as much memory again."""
MAX_REPLY_BYTES = 16 << 20
"""Longest reply that is sent. A longer one becomes an error reply that says so."""
LINGER_MS = 1000
"""Longest time that closing waits until the last replies are sent."""
MAX_WAIT_S = 10.0
"""Seconds after which a waiting request is refused: its client has given up."""
WORK_S = 0.002
"""Longest time for which the server's thread reads requests before it rests."""
REST_PER_WORK = 3.0
"""While requests keep coming, the server's thread rests after WORK_S, and so takes at most a quarter of one core."""
MAX_BYTES_PER_S = 250e6
"""The thread also rests after large requests: libzmq takes processor time for each byte that it reads ahead."""

log = logging.getLogger(__name__)

Peer = tuple[bytes, ...]
"""The envelope of a request, which routes the reply. Its first part is the identity of the connection."""


class AnsweredRequest(NamedTuple):
    """A request that got its reply, also one that was refused. It has nothing of the request's arguments."""

    op: str
    """a known operation"""
    request_id: str | None
    code: str
    """`ok`, or the code of the error"""
    arrived_s: float
    """of the monotonic clock"""


class WaitingRequest(NamedTuple):
    """A request that waits for the node."""

    peer: Peer
    id: int
    """0 for a large one"""
    content: Request | Buffer
    """a large one waits packed, and is unpacked when it is taken"""
    cost: int
    """approximate memory in bytes"""
    arrived_s: float
    """of the monotonic clock"""
    supersede_key: str | None = None
    """A newer request of the same connection with the same key supersedes this one. None: none does."""
    connection: tuple[int, int] | None = None
    """descriptor and inode of the connection that it came over; None if they are unknown"""
    job: Resumable[Any] | None = None
    """the job that was begun on it, None if there is none yet"""

    def supersedes(self, older: WaitingRequest) -> bool:
        """Return True if this request makes an older one useless."""
        same_key = self.supersede_key is not None and self.supersede_key == older.supersede_key
        # another connection may have chosen the same key
        return same_key and self.peer[0] == older.peer[0] and self is not older

    @property
    def has_departed(self) -> bool:
        """True if the connection that it came over has been closed; libzmq does not report it."""
        return self.connection is not None and find_connection(self.connection[0]) != self.connection

    def cancel(self) -> None:
        """Cancel the job that was begun on it."""
        if self.job is not None:
            self.job.close()


def find_connection(descriptor: int) -> tuple[int, int] | None:
    """Return descriptor and inode of an open connection, which no later connection shares. None if it is closed."""
    if descriptor < 0:
        return None
    try:
        # a later connection of the same descriptor has another inode
        return descriptor, os.fstat(descriptor).st_ino
    except OSError:
        return None


class _PeerQueue:
    """The waiting requests of one peer, the oldest first."""

    def __init__(self) -> None:
        self.requests: deque[WaitingRequest] = deque()
        self.cost = 0

    def find_superseded(self, newer: WaitingRequest) -> WaitingRequest | None:
        """Return the waiting request that `newer` supersedes. There is one at most."""
        return next((request for request in self.requests if newer.supersedes(request)), None)


class RequestQueue:
    """A queue of requests with one line for each peer; the peers take turns, whatever the length of their lines.

    When MAX_WAITING_BYTES wait, a request displaces the newest requests of the peer whose requests take most, unless
    that is its own peer. A superseded request leaves the line and the newer one goes to its end; the peer keeps its
    turn. The request that was taken last counts until the next one is taken, because the node executes it. Long work is
    done in turns: its request is put back, and taken again after other requests. A file descriptor is readable exactly
    while a request waits. All methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._peers: OrderedDict[bytes, _PeerQueue] = OrderedDict()
        self._cost = 0  # of the requests that wait
        self._taken_cost = 0  # of the request that was taken last
        self._changed = threading.Condition()
        self._pipe = WakePipe()

    def put(self, request: WaitingRequest) -> list[WaitingRequest]:
        """Add a request. Return what will not be taken: this one, or others that it displaced or superseded."""
        with self._changed:
            own = self._peers.get(request.peer[0])
            superseded = own.find_superseded(request) if own is not None else None
            # a newer request may replace an older one even where the line is full
            if own is not None and superseded is None and len(own.requests) >= MAX_REQUESTS_PER_PEER:
                return [request]
            # make room: the peer whose requests take most loses its newest ones, unless this peer would take more
            displaced: list[WaitingRequest] = []
            freed = superseded.cost if superseded is not None else 0
            own_cost = 0 if own is None else own.cost
            while self._cost + self._taken_cost + request.cost - freed > MAX_WAITING_BYTES:
                if not self._peers:
                    return [request]
                name, largest = max(self._peers.items(), key=lambda item: item[1].cost)
                if largest.cost <= own_cost + request.cost:
                    return [*displaced, request]
                displaced.append(self._remove(name, largest, newest=True))
            self._add(request)
            # added before the older one is removed, so that the peer never leaves the queue and keeps its turn
            if own is not None and superseded is not None:
                own.requests.remove(superseded)
                own.cost -= freed
                self._cost -= freed
                displaced.append(superseded)
            return displaced

    def take(self, timeout_ms: int) -> WaitingRequest | None:
        """Return the oldest request of the peer whose turn it is, or None when none arrives in time."""
        with self._changed:
            self._taken_cost = 0
            if not self._changed.wait_for(lambda: bool(self._peers), timeout_ms / 1000):
                return None
            name, queue = next(iter(self._peers.items()))
            # the peer goes to the end of the turns, with the rest of its line
            taken = self._remove(name, queue)
            self._taken_cost = taken.cost
            if queue.requests:
                self._peers.move_to_end(name)
            return taken

    def put_back(self, request: WaitingRequest, keeps_place: bool = False) -> bool:
        """Add the request that was taken last to the end of its line, or to its head if it `keeps_place`.

        Return False if a newer one supersedes it.
        """
        with self._changed:
            self._taken_cost = 0
            # a newer request of the same kind came while this one had its turn
            own = self._peers.get(request.peer[0])
            if own is not None and any(newer.supersedes(request) for newer in own.requests):
                return False
            self._add(request, at_head=keeps_place)
            return True

    def clear(self) -> list[WaitingRequest]:
        """Remove all requests, and return them."""
        removed: list[WaitingRequest] = []
        with self._changed:
            while self._peers:
                name, queue = next(iter(self._peers.items()))
                removed.append(self._remove(name, queue))
        return removed

    def fileno(self) -> int:
        """Return a descriptor that is readable exactly while a request waits."""
        return self._pipe.fileno()

    def close(self) -> None:
        """Close the descriptor. Call it when no thread uses the queue any more."""
        self._pipe.close()

    def _add(self, request: WaitingRequest, at_head: bool = False) -> None:
        # the pipe is written when the first request comes and read when the last one goes
        if not self._peers:
            self._pipe.wake()
        queue = self._peers.setdefault(request.peer[0], _PeerQueue())
        if at_head:
            queue.requests.appendleft(request)
        else:
            queue.requests.append(request)
        queue.cost += request.cost
        self._cost += request.cost
        self._changed.notify()

    def _remove(self, name: bytes, queue: _PeerQueue, newest: bool = False) -> WaitingRequest:
        removed = queue.requests.pop() if newest else queue.requests.popleft()  # the oldest is the first
        queue.cost -= removed.cost
        self._cost -= removed.cost
        if not queue.requests:
            del self._peers[name]
            if not self._peers:
                self._pipe.clear()
        return removed


AnswerNow = Callable[[Request], Reply | None]


class ControlServer(sockets.BoundOwner, sockets.SocketThread):
    """A server of control requests on `endpoint`. `.endpoint` is the bound endpoint, with port 0 and * resolved.

    A thread owns the socket and unpacks each request once. It answers malformed requests, and those for which
    `answer_now` returns a reply; that runs in the thread, so it must be quick. The other requests wait for `receive`;
    peers take turns. A request whose job has not ended may be `put_back`, and waits for its next turn. A peer with
    MAX_REQUESTS_PER_PEER waiting requests gets the error `busy` at once. A waiting request is answered `superseded`
    when a newer one of the same connection has the same `supersede_key`, also if its job has begun; requests of more
    than LARGE_BYTES are exempt. `node` is the `node` of replies without one. With keys, `security` says who may
    connect. Any request from a reader that the table of operations does not permit is refused with `forbidden`.
    It is a context manager, and serves DEALER and REQ peers. Raises TransportError when the endpoint is malformed or
    in use.
    """

    _problem = "the control socket failed"

    def __init__(
        self,
        endpoint: str,
        answer_now: AnswerNow = lambda request: None,
        node: str | None = None,
        security: Security | None = None,
    ) -> None:
        self.rejected = 0
        """Number of requests that were malformed, not permitted, found no place, or waited too long."""
        self.last_error: str | None = None
        self.on_answer: Callable[[AnsweredRequest], None] = lambda answered: None
        """Called for each reply to a request whose operation is known, in the thread that made it. It must be quick."""
        self._answer_now = answer_now
        self._node = node
        self._bound = sockets.BoundSocket(
            zmq.ROUTER, endpoint, QUEUE, sockets.MAX_REQUEST_BYTES, "node", security
        )
        self._rights = Rights(FOR_READERS)
        self._socket = self._bound.socket
        self.endpoint = self._bound.endpoint
        self._requests = RequestQueue()
        self._taken: WaitingRequest | None = None
        self._replies: deque[tuple[Peer, bytes]] = deque()
        # `rejected` is counted by the server's thread and by the one that calls `receive`
        self._counting = threading.Lock()
        self._start(f"control {endpoint}")

    def receive(self, timeout_ms: int = 0) -> tuple[Peer, Request] | None:
        """Return the next request and the peer to reply to, or None when no request arrives in time.

        A request that has waited for MAX_WAIT_S is answered with the error `busy` instead, unless its job has begun.
        Raises TransportError when the server's thread has failed.
        """
        self.check()
        self._taken = None
        while (waiting := self._requests.take(timeout_ms)) is not None:
            timeout_ms = 0  # it was spent: further requests are taken only if they wait already
            waited_s = time.monotonic() - waiting.arrived_s
            # the client has given up, and has perhaps sent the request again
            if waited_s > MAX_WAIT_S and waiting.job is None:
                self._refuse(
                    waiting, f"the request waited for {waited_s:.0f} s and was not carried out; send it again"
                )
                continue
            self._taken = waiting
            if isinstance(waiting.content, Request):
                return waiting.peer, waiting.content
            # a large request was left packed by the server's thread, and is unpacked in this one
            try:
                request = unpack_request(waiting.content)
            except WireError as error:
                self._count_rejected(str(error))
                self.reply(waiting.peer, Reply.failed(0, error))
                return None
            self._taken = waiting._replace(content=request, id=request.id)
            return waiting.peer, request
        return None

    def reply(self, peer: Peer, reply: Reply) -> None:
        """Answer a request without waiting. A peer that has gone, or does not read, loses its reply.

        A reply that cannot be packed, or that is too large for a message, becomes an error reply.
        """
        if self._taken is not None:
            self._report(self._taken.content, reply, self._taken.arrived_s)
        self._queue_reply(peer, reply)

    def _queue_reply(self, peer: Peer, reply: Reply) -> None:
        self._require_process()
        self._replies.append((peer, _pack_reply(reply, self._node)))
        self._waker.wake()

    def _report(self, request: Request | Buffer | None, reply: Reply, arrived_s: float) -> None:
        # a large request that was never unpacked has no operation that is known, nor has one of another version
        if isinstance(request, Request) and request.op in OPERATIONS:
            code = "ok" if reply.error is None else reply.error.code
            self.on_answer(AnsweredRequest(request.op, request.request_id, code, arrived_s))

    @property
    def begun(self) -> Resumable[Any] | None:
        """The job of the request that was received last, if it had been put back. None for a new request."""
        return None if self._taken is None else self._taken.job

    def put_back(self, job: Resumable[Any], keeps_place: bool = False) -> None:
        """Let the request that was received last wait for another turn, with the job that was begun on it.

        The peer's other requests come first. If a newer one supersedes it, or its connection has been closed, the job
        is cancelled instead. With `keeps_place`, the peer's other requests wait until the job has ended, and a closed
        connection does not cancel it, as it would not stop a request that is carried out in one turn.
        """
        assert self._taken is not None
        waiting = self._taken._replace(job=job)
        self._taken = None
        # nobody would read the result of a connection that was closed
        if waiting.has_departed and not keeps_place:
            waiting.cancel()
        elif not self._requests.put_back(waiting, keeps_place):
            self._supersede(waiting)

    @property
    def wakeup(self) -> int:
        """File descriptor that is readable exactly while a request waits."""
        return self._requests.fileno()

    def close(self) -> None:
        """Stop answering. Queued replies are still sent, and requests that wait are refused. Idempotent."""
        # refused before the thread ends, which sends these replies
        if not (self._closing or self._is_forked):
            for waiting in self._requests.clear():
                self._refuse(waiting, "not carried out: the node stops")
        super().close()

    def _release(self) -> None:
        self._bound.close(LINGER_MS)
        self._requests.close()

    def _serve(self) -> None:
        # two pollers: while the thread rests, requests must not wake it, but replies must still be sent
        awake = zmq.Poller()
        awake.register(self._waker.fileno(), zmq.POLLIN)
        awake.register(self._socket, zmq.POLLIN)
        resting = zmq.Poller()
        resting.register(self._waker.fileno(), zmq.POLLIN)
        rest_until_s = 0.0
        while not self._closing:
            rest_ms = (rest_until_s - time.monotonic()) * 1000
            if rest_ms > 0:
                resting.poll(math.ceil(rest_ms))
            else:
                awake.poll()
                rest_until_s = self._receive_requests()
            self._send_replies()
        # replies that were queued while it was told to stop
        self._send_replies()

    def _receive_requests(self) -> float:
        """Receive for at most WORK_S. Return the monotonic time until which to rest; 0 if no more requests wait."""
        begin_s = time.monotonic()
        received_bytes = 0
        read: Counter[int] = Counter()  # bytes, by descriptor
        while (parts := sockets.receive_parts(self._socket)) is not None:
            descriptor, size = sockets.describe_source(parts, self._bound.authenticator is None)
            read[descriptor] += size
            try:
                self._accept(parts, descriptor)
            except zmq.ZMQError:
                raise
            except Exception as error:  # no request may end this thread
                self._count_rejected(repr(error))
                log.exception("control: a request failed in the server")
            # after its share of work, the thread rests three times as long, so that the node has the rest of the core
            received_bytes += size
            now_s = time.monotonic()
            if now_s - begin_s > WORK_S or received_bytes > LARGE_BYTES:
                self._bound.guard.count_read(read, is_all=False)
                return now_s + max(REST_PER_WORK * (now_s - begin_s), received_bytes / MAX_BYTES_PER_S)
        self._bound.guard.count_read(read, is_all=True)
        return 0.0

    def _accept(self, parts: list[memoryview], descriptor: int) -> None:
        # who sends it, and may it? The budget of the key is spent even for a malformed request
        peer = _envelope(parts)
        arrived_s = time.monotonic()
        request = None
        try:
            key = None
            if self._bound.authenticator is not None:
                key = self._bound.authenticator.find_key(parts)
                self._rights.spend(key, sum(part.nbytes for part in parts))
            # what does it ask for? That of a large one is not known yet: a reader may not send it
            if len(peer) + 1 != len(parts):
                raise WireError(f"request: expected 1 part after the envelope, found {len(parts) - 1}")
            size = parts[-1].nbytes
            op = ""
            if size <= LARGE_BYTES:
                request = unpack_request(parts[-1])
                op = request.op
            if key is not None:
                self._rights.check(key, op)
        except (WireError, ForbiddenError, BusyError) as error:
            self._count_rejected(str(error))
            refusal = Reply.failed(0, error)
            self._report(request, refusal, arrived_s)
            self._send(peer, _pack_reply(refusal, self._node))
            return
        # answered here at once if that is quick, else queued for the node
        if request is not None and (reply := self._answer_now(request)) is not None:
            self._report(request, reply, arrived_s)
            self._send(peer, _pack_reply(reply, self._node))
            return
        connection = find_connection(descriptor)
        if request is None:
            waiting = WaitingRequest(
                peer, 0, parts[-1], size + OVERHEAD_BYTES, arrived_s, connection=connection
            )
        else:
            cost = size + ITEM_BYTES * request.count_items() + OVERHEAD_BYTES
            waiting = WaitingRequest(
                peer, request.id, request, cost, arrived_s, request.supersede_key, connection
            )
        # a full queue refuses this request, or others in its place
        for refused in self._requests.put(waiting):
            if waiting.supersedes(refused):
                self._supersede(refused)
            else:
                self._refuse(
                    refused, "too many requests wait for the node; wait for replies before sending more"
                )

    def _count_rejected(self, reason: str) -> None:
        with self._counting:
            self.rejected += 1
            self.last_error = reason

    def _supersede(self, older: WaitingRequest) -> None:
        older.cancel()
        reason = SupersededError("not carried out: a request of this client is newer")
        self._answer_waiting(older, Reply.failed(older.id, reason))

    def _refuse(self, refused: WaitingRequest, message: str) -> None:
        refused.cancel()
        self._count_rejected(message)
        self._answer_waiting(refused, Reply.failed(refused.id, BusyError(message)))

    def _answer_waiting(self, waiting: WaitingRequest, reply: Reply) -> None:
        self._report(waiting.content, reply, waiting.arrived_s)
        self._queue_reply(waiting.peer, reply)

    def _send_replies(self) -> None:
        self._waker.clear()
        while self._replies:
            self._send(*self._replies.popleft())

    def _send(self, peer: Peer, body: bytes) -> None:
        sockets.send_parts(self._socket, [*peer, body], sockets.MAX_MESSAGE_BYTES)


def poll(frames: FrameSubscriber, control: ControlServer, timeout_ms: int | None = None) -> bool:
    """Wait for a frame or a request. Return False when neither arrives within `timeout_ms` (None: no limit)."""
    sources: list[tuple[Any, int]] = [(frames.wakeup, zmq.POLLIN), (control.wakeup, zmq.POLLIN)]
    return bool(zmq.zmq_poll(sources, -1 if timeout_ms is None else timeout_ms))


def _envelope(parts: list[memoryview]) -> Peer:
    # a REQ peer puts an empty part between its identity and the request
    length = 2 if len(parts) > 2 and not parts[1].nbytes else 1
    return tuple(bytes(part) for part in parts[:length])


def _pack_reply(reply: Reply, node: str | None) -> bytes:
    """Pack a reply; if it cannot be packed or is too large, pack an error reply that says so."""
    # the session of this node, from which a client learns of a restart
    if reply.node is None:
        reply = reply._replace(node=node)
    try:
        body = pack_reply(reply)
        if len(body) <= MAX_REPLY_BYTES:
            return body
        reason = f"expected a reply of at most {MAX_REPLY_BYTES} bytes, found {len(body)}"
    except Exception as error:  # any value may be in a result
        reason = f"{error}".encode("ascii", "backslashreplace").decode()[:200]
    log.error("control: the reply to request %d could not be packed: %s", reply.id, reason)
    failure = Failure(INTERNAL_ERROR, f"the reply cannot be sent: {reason}")
    return pack_reply(Reply(reply.id, error=failure, node=reply.node))
