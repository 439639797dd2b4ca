"""Strangers that send without end, or hostile bytes: each is cut off or answered, and good messages still pass."""

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import psutil
import pytest
import zmq

from sam3_node import transport
from sam3_node.errors import RequestError
from sam3_node.transport.control_server import ControlServer
from sam3_node.transport.sockets import BoundSocket, receive_parts
from sam3_node.types import Delivery
from sam3_node.wire import Reply, Request, pack_frame, pack_masks, pack_request
from tests.support.hostility import mutations
from tests.support.patience import PATIENCE_MS, PATIENCE_S
from tests.support.raw_zmtp import connect, frame, ping, raw_peer
from tests.support.transport_peer import (
    TCP,
    guard_of,
    make_frame,
    make_masks,
    open_peer,
    peer,
    place_of,
    take_error,
    wait_until,
)
from tests.transport.test_restart import publishes

MEBIBYTE = 1 << 20


def read_to_end(stranger: socket.socket) -> None:
    """Read until the other end has closed the connection."""
    with contextlib.suppress(ConnectionResetError):
        while stranger.recv(1000):
            pass


STRANGERS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "subscriptions": ("SUB", lambda: b"".join(frame(b"\x01" + os.urandom(60)) for _ in range(500))),
    "an endless subscription": ("SUB", lambda: frame(b"\x01" + bytes(500), more=True) * 100),
    "an endless message": ("DEALER", lambda: frame(bytes(1 << 16), more=True) * 32),
    "large requests": ("DEALER", lambda: frame(bytes(1 << 24))),
    "small messages": ("DEALER", lambda: frame(b"junk") * 20_000),
    "empty parts": ("DEALER", lambda: frame(b"", more=True) * 40_000),
}
"""Type of socket, and what is sent again and again."""


def send_until_cut_off(stranger: socket.socket, make: Callable[[], bytes], process: psutil.Process) -> None:
    """Send until the process has closed the connection, which the kernel does not always tell the sender."""
    stranger.settimeout(1)
    deadline_s = time.monotonic() + PATIENCE_S
    while any(item.status == psutil.CONN_ESTABLISHED for item in process.net_connections("tcp")):
        assert time.monotonic() < deadline_s
        with contextlib.suppress(OSError):
            stranger.sendall(make())


@pytest.mark.parametrize(("kind", "make"), STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_that_never_ends_is_cut_off(kind: str, make: Callable[[], bytes]) -> None:
    """The guard is a thread of the process; on a busy machine it may be late, but not each time."""
    assert any(take_memory(kind, make) < 64 * MEBIBYTE for _ in range(3))


def take_memory(kind: str, make: Callable[[], bytes]) -> int:
    """Return the bytes by which a process has grown when it has cut off a stranger and has answered another peer."""
    role = ("camera", TCP, "cam0", "newest", 500, 100_000, 16) if kind == "SUB" else ("server", TCP)
    with peer(*role) as process:
        endpoint = process.next_line()
        inspected = psutil.Process(process.process.pid)
        before = inspected.memory_info().rss
        with raw_peer(endpoint, kind) as stranger:
            send_until_cut_off(stranger, make, inspected)
        if kind == "SUB":
            assert publishes(endpoint)
        else:
            with transport.ControlClient(endpoint) as client:
                assert client.call("status") == {}
        return int(inspected.memory_info().rss - before)


def test_a_message_that_waits_takes_its_own_size() -> None:
    """By default, libzmq keeps the buffer of 8 KiB with which it has read the message."""
    process = psutil.Process()
    kept = []
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
    with peer(*role) as process, raw_peer(process.next_line(), kind) as stranger:
        stranger.settimeout(PATIENCE_S)
        stranger.sendall(frame(bytes(size))[:300])
        read_to_end(stranger)
        assert process.process.poll() is None


def test_readers_of_many_cameras_and_peers_with_heartbeats_are_not_cut_off() -> None:
    topics = b"".join(frame(b"\x01frame/%060d" % number) for number in range(256))
    with peer("camera", TCP, "0" * 60, "newest", 20, 100_000, 16) as process:
        endpoint = process.next_line()
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
        read_to_end(extra)
        wait_until(lambda: guard_of(server).cut_off == 1)


OLD_GREETINGS = {
    "ZMTP 1": b"\x01\x00",
    "ZMTP 1 by a later peer": b"\xff" + bytes(7) + b"\x01\x7f\x00",
    "ZMTP 2": b"\xff" + bytes(7) + b"\x01\x7f\x01\x01\x00\x00",
}


@pytest.mark.parametrize("greeting", OLD_GREETINGS.values(), ids=OLD_GREETINGS)
def test_strangers_of_old_protocols_do_not_make_a_peer_uncounted(greeting: bytes) -> None:
    """Their connections end without any event of a handshake."""
    with transport.FramePublisher(TCP) as camera, transport.FrameSubscriber([camera.endpoint]) as reader:
        assert camera.wait_for_peer(1000 * PATIENCE_S)
        for _ in range(3):
            with connect(camera.endpoint) as stranger:
                stranger.settimeout(PATIENCE_S)
                stranger.sendall(greeting + b"\xff" * 64)  # a part of 16 EiB
                read_to_end(stranger)
        guard = guard_of(camera)
        wait_until(lambda: guard.count_connections() == 1)
        assert camera.wait_for_peer(0)
        reader.close()
        wait_until(lambda: not camera.wait_for_peer(0))


GOOD: dict[str, list[bytes]] = {
    "frame": [bytes(part) for part in pack_frame(make_frame(1))],
    "masks": [bytes(part) for part in pack_masks(make_masks(1))],
    "request": [pack_request(Request(1, "add_object", {"points": [[1, 2]], "label": "cup"}))],
}
SUBSCRIBERS: dict[str, Callable[[str, Delivery], Any]] = {
    "frame": lambda endpoint, delivery: transport.FrameSubscriber([endpoint], delivery),
    "masks": lambda endpoint, delivery: transport.MaskSubscriber(endpoint, delivery),
}


@pytest.mark.parametrize("kind", ["frame", "masks"])
def test_each_hostile_message_is_counted_or_taken(kind: str) -> None:
    count = 4000
    sent = 0
    taken = 0
    with open_peer(zmq.PUSH) as publisher, SUBSCRIBERS[kind](place_of(publisher), "every") as subscriber:
        for parts in mutations(GOOD[kind], count, 0):
            while not publisher.poll(5, zmq.POLLOUT):
                taken += subscriber.take(0) is not None
            publisher.send_multipart(parts)
            sent += 1
            taken += subscriber.take(0) is not None

        def settled() -> bool:
            nonlocal taken
            taken += subscriber.take(1) is not None
            return bool(subscriber.rejected + taken == sent)

        wait_until(settled)
        assert subscriber.rejected > count // 2
        assert subscriber.last_error
        publisher.send_multipart(GOOD[kind])
        assert subscriber.take(PATIENCE_MS) is not None


@pytest.mark.parametrize("kind", ["frame", "masks"])
def test_a_live_subscriber_survives_hostile_messages(kind: str) -> None:
    with open_peer(zmq.PUB) as publisher, SUBSCRIBERS[kind](place_of(publisher), "newest") as subscriber:
        wait_until(lambda: publisher.send_multipart(GOOD[kind]) or subscriber.take(20))
        for number, parts in enumerate(mutations(GOOD[kind], 2000, 0)):
            publisher.send_multipart(parts)
            if number % 100 == 0:
                subscriber.take(10)
        wait_until(lambda: subscriber.rejected > 0)
        subscriber.take(20)
        wait_until(lambda: publisher.send_multipart(GOOD[kind]) or subscriber.take(20))


def test_each_hostile_request_is_answered() -> None:
    batches = [list(mutations(GOOD["request"], 40, seed)) for seed in range(100)]
    good = 0
    with ControlServer(TCP) as server, open_peer(zmq.DEALER, server.endpoint) as asker:
        for number, batch in enumerate(batches, start=1):
            for parts in batch:
                asker.send_multipart(parts)
            while server.rejected + good < number * len(batch):
                good += refuse(server)
            for _ in batch:
                take_error(asker)
    assert server.rejected > 2000


def refuse(server: ControlServer) -> bool:
    """Answer one valid request. Return True if there was one."""
    received = server.receive(1)
    if received is not None:
        server.reply(received[0], Reply.failed(received[1].id, RequestError("not now")))
    return received is not None


@pytest.mark.parametrize("opener", [transport.FramePublisher, transport.MaskPublisher, ControlServer])
def test_a_socket_still_works_after_garbage_at_its_port(opener: Callable[[str], Any]) -> None:
    rng = random.Random(5)
    greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + b"\0" * 48
    huge = greeting + b"\x02" + (1 << 62).to_bytes(8, "big")
    with opener(TCP) as bound:
        port = int(bound.endpoint.rsplit(":", 1)[1])
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
        for number, client in enumerate(clients):
            garbage = (b"GET / HTTP/1.1\r\n\r\n", huge, greeting + rng.randbytes(300), rng.randbytes(900))
            client.sendall(garbage[number % 4])
        assert serves(bound)
        for client in clients:
            client.close()
        assert serves(bound)


def serves(bound: Any) -> bool:
    if isinstance(bound, ControlServer):
        with open_peer(zmq.DEALER, bound.endpoint) as asker:
            asker.send(GOOD["request"][0])
            return bound.receive(PATIENCE_MS) is not None
    kind, message = (
        ("frame", make_frame(0)) if isinstance(bound, transport.FramePublisher) else ("masks", make_masks(0))
    )
    with SUBSCRIBERS[kind](bound.endpoint, "newest") as subscriber:
        wait_until(lambda: bound.send(message) and subscriber.take(20))
    return True


@pytest.mark.parametrize("delivery", ["newest", "every"])
def test_memory_stays_bounded_when_no_message_is_taken(delivery: Delivery) -> None:
    process = psutil.Process(os.getpid())
    with transport.FramePublisher(TCP, delivery) as publisher:
        with transport.FrameSubscriber([publisher.endpoint], delivery) as subscriber:
            wait_until(
                lambda: publisher.send(make_frame(0, side=1000), timeout_ms=10) and subscriber.take(10)
            )
            before = process.memory_info().rss
            for seq in range(300):
                publisher.send(make_frame(seq, side=1000), timeout_ms=1)
            assert process.memory_info().rss - before < 60 * MEBIBYTE
        publisher.close(0)


def test_memory_stays_bounded_when_a_subscriber_hangs() -> None:
    process = psutil.Process(os.getpid())
    with transport.FramePublisher(TCP) as publisher, peer("reader", publisher.endpoint, "newest") as reader:
        wait_until(lambda: publisher.send(make_frame(0, side=1000)) and reader.seen)
        reader.process.send_signal(signal.SIGSTOP)
        before = process.memory_info().rss
        for seq in range(300):
            publisher.send(make_frame(seq, side=1000))
        assert process.memory_info().rss - before < 60 * MEBIBYTE
