"""Tests of strangers that send without end: each is cut off before it has taken much memory, and service goes on."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import psutil
import pytest
import zmq

from sam3_node.transport import ControlClient, ControlServer, FramePublisher, FrameSubscriber
from sam3_node.transport.sockets import BoundSocket, receive_parts
from tests.support.raw_zmtp import connect, frame, ping, raw_peer
from tests.support.transport_peer import next_line, peer, wait_until
from tests.transport.test_departures import publishes

TCP = "tcp://127.0.0.1:*"
MEBIBYTE = 1 << 20
PATIENCE_S = 60


def subscriptions() -> bytes:
    return b"".join(frame(b"\x01" + os.urandom(60)) for _ in range(500))


def endless_message() -> bytes:
    return frame(bytes(1 << 16), more=True) * 32


def endless_subscription() -> bytes:
    return frame(b"\x01" + bytes(500), more=True) * 100


def large_requests() -> bytes:
    return frame(bytes(1 << 24))


def small_messages() -> bytes:
    return frame(b"junk") * 20_000


def empty_parts() -> bytes:
    return frame(b"", more=True) * 40_000


def send_until_cut_off(stranger: socket.socket, make: Callable[[], bytes], process: psutil.Process) -> None:
    """Send until the process has closed the connection, which the kernel does not always tell the sender."""
    stranger.settimeout(1)
    deadline_s = time.monotonic() + PATIENCE_S
    while any(item.status == psutil.CONN_ESTABLISHED for item in process.net_connections("tcp")):
        assert time.monotonic() < deadline_s
        with contextlib.suppress(OSError):
            stranger.sendall(make())


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("SUB", subscriptions),
        ("SUB", endless_subscription),
        ("DEALER", endless_message),
        ("DEALER", large_requests),
        ("DEALER", small_messages),
        ("DEALER", empty_parts),
    ],
)
def test_a_stranger_that_never_ends_is_cut_off(kind: str, make: Callable[[], bytes]) -> None:
    """The guard is a thread of the process; on a busy machine it may be late, but not each time."""
    assert any(take_memory(kind, make) < 64 * MEBIBYTE for _ in range(3))


def take_memory(kind: str, make: Callable[[], bytes]) -> int:
    """Return the bytes by which a process has grown when it has cut off a stranger and has answered another peer."""
    role = ("camera", TCP, "cam0", "newest", 500, 100_000, 16) if kind == "SUB" else ("server", TCP)
    with peer(*role) as process:
        endpoint = next_line(process)
        inspected = psutil.Process(process.pid)
        before = inspected.memory_info().rss
        with raw_peer(endpoint, kind) as stranger:
            send_until_cut_off(stranger, make, inspected)
        if kind == "SUB":
            assert publishes(endpoint)
        else:
            with ControlClient(endpoint) as client:
                assert client.call("status") == {}
        return int(inspected.memory_info().rss - before)


def test_a_message_that_waits_takes_its_own_size() -> None:
    """By default, libzmq keeps the buffer of 8 KiB with which it has read the message."""
    process, kept = psutil.Process(), []
    bound = BoundSocket(zmq.ROUTER, TCP, 10, MEBIBYTE)
    with raw_peer(bound.endpoint, "DEALER") as stranger:
        before = process.memory_info().rss
        for _ in range(4000):
            stranger.sendall(frame(bytes(40)))
            assert bound.socket.poll(1000 * PATIENCE_S)
            kept.append(receive_parts(bound.socket))
        assert process.memory_info().rss - before < 16 * MEBIBYTE
    bound.close(0)


@pytest.mark.parametrize(("kind", "size"), [("SUB", 513), ("DEALER", (1 << 24) + 1)])
def test_a_part_above_the_limit_of_its_socket_ends_the_connection(kind: str, size: int) -> None:
    role = ("camera", TCP, "cam0", "newest", 500, 100_000, 16) if kind == "SUB" else ("server", TCP)
    with peer(*role) as process, raw_peer(next_line(process), kind) as stranger:
        stranger.settimeout(PATIENCE_S)
        stranger.sendall(frame(bytes(size))[:300])
        with suppress(ConnectionResetError):
            while stranger.recv(100):
                pass
        assert process.poll() is None


def test_readers_of_many_cameras_and_peers_with_heartbeats_are_not_cut_off() -> None:
    topics = b"".join(frame(b"\x01frame/%060d" % number) for number in range(256))
    with peer("camera", TCP, "0" * 60, "newest", 20, 100_000, 16) as process:
        endpoint = next_line(process)
        readers = [raw_peer(endpoint, "SUB") for _ in range(10)]
        connections = [reader.__enter__() for reader in readers]
        for connection in connections:
            connection.sendall(topics + 100 * ping())
        for connection in connections:
            connection.settimeout(PATIENCE_S)
            for _ in range(5):
                assert connection.recv(1)
            connection.close()


def test_connections_beyond_the_limit_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sam3_node.transport.limits.MAX_CONNECTIONS", 5)
    with ExitStack() as stack, ControlServer(TCP) as server:
        for _ in range(5):
            stack.enter_context(raw_peer(server.endpoint, "DEALER"))
        extra = stack.enter_context(connect(server.endpoint))
        with contextlib.suppress(ConnectionResetError):
            while extra.recv(100):
                pass
        wait_until(lambda: server._bound.guard.cut_off == 1)


OLD_GREETINGS = {
    "ZMTP 1": b"\x01\x00",
    "ZMTP 1 by a later peer": b"\xff" + bytes(7) + b"\x01\x7f\x00",
    "ZMTP 2": b"\xff" + bytes(7) + b"\x01\x7f\x01\x01\x00\x00",
}


@pytest.mark.parametrize("greeting", OLD_GREETINGS.values(), ids=OLD_GREETINGS)
def test_strangers_of_old_protocols_do_not_make_a_peer_uncounted(greeting: bytes) -> None:
    """Their connections end without any event of a handshake."""
    with FramePublisher(TCP) as camera, FrameSubscriber([camera.endpoint]) as reader:
        assert camera.wait_for_peer(1000 * PATIENCE_S)
        for _ in range(3):
            with connect(camera.endpoint) as stranger:
                stranger.settimeout(PATIENCE_S)
                stranger.sendall(greeting + b"\xff" * 64)  # a part of 16 EiB
                with contextlib.suppress(ConnectionResetError):
                    while stranger.recv(1000):
                        pass
        guard = camera._bound.guard
        wait_until(lambda: guard.count_connections() == 1)
        assert camera.wait_for_peer(0)
        reader.close()
        wait_until(lambda: not camera.wait_for_peer(0))
