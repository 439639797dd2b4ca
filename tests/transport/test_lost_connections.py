"""Requests whose connection ends before their reply, and clients that are idle while their handshakes fail."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from sam3_node.errors import NoAnswerError, TransportError
from sam3_node.transport import ControlClient, ControlServer, MaskPublisher, MaskSubscriber, Peer, sockets
from sam3_node.wire import Reply, Request
from tests.support.key_rig import Keys, revoke
from tests.support.node_rig import until
from tests.support.refuses import refuses
from tests.support.repeats import repetitions
from tests.support.transport_peer import make_masks, wait_until

TCP = "tcp://127.0.0.1:*"
PATIENT_MS = 120_000
"""Longer than a test may take: a call that ends before has not waited for its timeout."""


def next_request(server: ControlServer) -> tuple[Peer, Request]:
    return until(lambda: server.receive(100), "a request", PATIENT_MS / 2000)


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
@pytest.mark.parametrize("op", ["list_objects", "add_object"])
def test_a_request_in_flight_when_another_key_is_revoked(tmp_path: Path, scheme: str, op: str) -> None:
    """All connections are made anew then, and the reply has nowhere to go."""
    keys = Keys(tmp_path)
    node = keys.machine("node", "node")
    endpoint = TCP if scheme == "tcp" else f"ipc://{tmp_path}/control"
    with (
        ControlServer(endpoint, security=node) as server,
        ControlClient(server.endpoint, PATIENT_MS, keys.machine("policy", "policy")) as client,
        ControlClient(server.endpoint, PATIENT_MS, keys.machine("watcher", "watcher")),
        ThreadPoolExecutor(1) as thread,
    ):
        authenticator = server._bound.authenticator
        assert authenticator is not None
        wait_until(lambda: len(authenticator._admitted) == 2, 60)
        call = thread.submit(client.call, op)
        first, request = next_request(server)
        revoke(node, "watcher")
        if op == "list_objects":  # the client asks again
            again, repeated = next_request(server)
            server.reply(first, Reply(request.id, "to nobody"))
            server.reply(again, Reply(repeated.id, "the objects"))
            assert call.result() == "the objects"
        else:
            with refuses(NoAnswerError, field="add_object"):
                call.result()
            server.reply(first, Reply(request.id, "to nobody"))
            call = thread.submit(client.call, "add_object")
            peer, request = next_request(server)
            server.reply(peer, Reply(request.id, "the new one"))
            assert call.result() == "the new one"


def test_a_request_is_repeated_to_the_next_node(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/control"
    with ControlClient(endpoint, PATIENT_MS) as client, ThreadPoolExecutor(1) as thread:
        with ControlServer(endpoint) as server:
            call = thread.submit(client.call, "status")
            next_request(server)
        with ControlServer(endpoint) as server:
            peer, request = next_request(server)
            server.reply(peer, Reply(request.id, "fine"))
            assert call.result() == "fine"


@contextmanager
def closing_listener() -> Iterator[tuple[str, list[int]]]:
    """Yield an endpoint where each connection is closed before its handshake, and a list with an item for each."""
    closed: list[int] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.close()
            closed.append(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", closed
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_an_idle_client_whose_handshakes_fail_stops_no_other_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once 1000 events wait in a monitor that nobody reads, libzmq's thread waits, and all sockets with it."""
    monkeypatch.setitem(sockets._COMMON_OPTIONS, zmq.RECONNECT_IVL, 1)
    monkeypatch.setitem(sockets._COMMON_OPTIONS, zmq.RECONNECT_IVL_MAX, 0)
    with closing_listener() as (endpoint, closed), ControlClient(endpoint, 100) as idle:
        with refuses(TransportError, field=("program", "node")):
            idle.call("status")
        assert idle._watch.monitor.closed
        assert idle._socket._monitor_socket is None
        until(lambda: len(closed) > repetitions(50, 1100), "many failed handshakes")
        monkeypatch.undo()
        with MaskPublisher(TCP) as masks, MaskSubscriber(masks.endpoint) as subscriber:
            wait_until(lambda: masks.send(make_masks(1)) and subscriber.take(20), 60)
