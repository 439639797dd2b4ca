"""A newer request supersedes an older one of its connection, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import zmq

from sam3_node.transport import ControlServer, control_server
from sam3_node.transport.control_server import MAX_REQUESTS_PER_PEER
from sam3_node.types import Job, resume
from sam3_node.wire import Reply, Request, pack_request, unpack_reply
from tests.support.transport_peer import wait_until, waiting_bodies

TCP = "tcp://127.0.0.1:*"


def test_of_the_requests_of_a_moving_mouse_only_the_newest_is_carried_out() -> None:
    with (
        ControlServer(TCP) as server,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as mouse,
        context.socket(zmq.DEALER) as other,
    ):
        for socket in (mouse, other):
            socket.linger = 0
            socket.connect(server.endpoint)
        other.send(pack_request(Request(1, "segment")))
        wait_until(lambda: b"segment" in waiting_bodies(server))
        count = MAX_REQUESTS_PER_PEER + 20
        for number in range(1, count + 1):
            mouse.send(pack_request(Request(number, "segment", {"points": [[number, 0]]})))
        for number in range(1, count):
            assert mouse.poll(5000)
            reply = unpack_reply(mouse.recv())
            assert reply.id == number
            assert reply.error is not None
            assert reply.error.code == "superseded"
        taken = [server.receive(5000) for _ in range(2)]
        assert [found and found[1].id for found in taken] == [1, count]
        assert server.receive(0) is None
        assert server.rejected == 0


class Work:
    """Work on a request that never ends by itself; it counts its turns."""

    def __init__(self) -> None:
        self.turns, self.is_closed = 0, False

    def do(self) -> Job[None]:
        try:
            while True:
                self.turns += 1
                yield
        finally:
            self.is_closed = True


@contextmanager
def long_work(peer: str) -> Iterator[tuple[ControlServer, zmq.Socket, Work]]:
    """Yield a server, a peer on `peer`, tcp or ipc, and the work on its request 1, which was put back once."""
    with (
        ControlServer(peer) as server,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as mouse,
    ):
        mouse.linger = 0
        mouse.connect(server.endpoint)
        mouse.send(pack_request(Request(1, "segment_everything")))
        assert server.receive(5000)
        assert server.begun is None
        work = Work()
        with closing(job := work.do()):
            resume(job)
            server.put_back(job)
            yield server, mouse, work


def receive_error(socket: zmq.Socket) -> tuple[int, str]:
    """Return request and code of the next reply, an error."""
    assert socket.poll(60_000)
    reply = unpack_reply(socket.recv())
    assert reply.error is not None
    return reply.id, reply.error.code


def test_long_work_goes_on_when_its_request_is_received_again() -> None:
    with long_work(TCP) as (server, mouse, work):
        received = server.receive(5000)
        assert received
        assert received[1].id == 1
        assert server.begun is not None
        resume(server.begun)
        assert work.turns == 2
        server.reply(received[0], Reply(1, "done"))
        assert mouse.poll(5000)
        assert unpack_reply(mouse.recv()).result == "done"
        assert server.receive(0) is None
        assert server.begun is None


def test_long_work_is_not_refused_for_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    with long_work(TCP) as (server, _, _):
        monkeypatch.setattr(control_server, "MAX_WAIT_S", 0.0)
        assert server.receive(5000)


def test_a_newer_request_ends_the_work_on_the_older_one() -> None:
    with long_work(TCP) as (server, mouse, work):
        mouse.send(pack_request(Request(2, "segment_everything")))
        assert receive_error(mouse) == (1, "superseded")
        assert work.is_closed
        received = server.receive(5000)
        assert received
        assert received[1].id == 2
        assert server.begun is None


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_the_work_for_a_peer_that_has_gone_ends(scheme: str, tmp_path: Path) -> None:
    with long_work(TCP if scheme == "tcp" else f"ipc://{tmp_path}/control") as (server, mouse, work):
        mouse.close()

        def goes_on() -> bool:
            if server.receive(20) and server.begun is not None:
                server.put_back(server.begun)
            return work.is_closed

        wait_until(goes_on)
        assert server.receive(0) is None


def test_a_server_that_closes_refuses_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "LINGER_MS", 60_000)  # a busy machine sends the reply late
    with long_work(TCP) as (server, mouse, work):
        server.close()
        assert receive_error(mouse) == (1, "busy")
        assert work.is_closed
