"""A newer request supersedes an older one of its connection, over real sockets."""

from __future__ import annotations

import zmq

from sam3_node.transport import ControlServer
from sam3_node.transport.request_queue import MAX_REQUESTS_PER_PEER
from sam3_node.wire import Request, pack_request, unpack_reply
from tests.support.transport_peer import wait_until, waiting_bodies

TCP = "tcp://127.0.0.1:*"


def test_of_the_requests_of_a_moving_mouse_only_the_newest_is_carried_out() -> None:
    with (
        ControlServer(
            TCP, find_topic=lambda request: request.op if request.op == "segment" else None
        ) as server,
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
