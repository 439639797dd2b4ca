"""Tests of hostile bytes: each message is counted or answered, and good messages still pass."""

from __future__ import annotations

import os
import random
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import zmq

from sam3_node.errors import RequestError
from sam3_node.transport import ControlServer, FramePublisher, FrameSubscriber, MaskPublisher, MaskSubscriber
from sam3_node.types import Delivery
from sam3_node.wire import Reply, Request, pack_frame, pack_masks, pack_request, unpack_reply
from tests.support.transport_peer import make_frame, make_masks, next_line, output_of, peer, wait_until

TCP = "tcp://127.0.0.1:*"
MEGABYTE = 1 << 20
GOOD: dict[str, list[bytes]] = {
    "frame": [bytes(part) for part in pack_frame(make_frame(1))],
    "masks": [bytes(part) for part in pack_masks(make_masks(1))],
    "request": [pack_request(Request(1, "add_object", {"points": [[1, 2]], "label": "cup"}))],
}
SUBSCRIBERS: dict[str, Callable[[str, Delivery], Any]] = {
    "frame": lambda endpoint, delivery: FrameSubscriber([endpoint], delivery),
    "masks": lambda endpoint, delivery: MaskSubscriber(endpoint, delivery),
}


def hostile(kind: str, count: int, seed: int = 0) -> Iterator[list[bytes]]:
    """Yield `count` messages: random parts, and good ones with bytes changed, cut, swapped, doubled or left out."""
    rng = random.Random(seed)
    for _ in range(count):
        parts = list(GOOD[kind])
        choice = rng.randrange(6)
        place = rng.randrange(len(parts))
        if choice == 0:
            parts = [rng.randbytes(rng.randrange(60)) for _ in range(rng.randrange(1, 12))]
        elif choice == 1:
            parts[place] = flipped(parts[place], rng)
        elif choice == 2:
            parts[place] = parts[place][: rng.randrange(len(parts[place]))]
        elif choice == 3:
            rng.shuffle(parts)
        elif choice == 4:
            parts += rng.choices(parts, k=rng.randrange(1, 20))
        else:
            parts[-1] = b"\x91" * rng.randrange(1, 5000)
        yield parts


def flipped(part: bytes, rng: random.Random) -> bytes:
    changed = bytearray(part)
    for _ in range(rng.randrange(1, 6)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


@pytest.mark.parametrize("kind", ["frame", "masks"])
def test_each_hostile_message_is_counted_or_taken(kind: str) -> None:
    count, sent, taken = 4000, 0, 0
    with zmq.Context() as context, context.socket(zmq.PUSH) as publisher:
        publisher.linger = 0
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        with SUBSCRIBERS[kind](f"tcp://127.0.0.1:{port}", "every") as subscriber:
            for parts in hostile(kind, count):
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
            assert subscriber.take(5000) is not None


@pytest.mark.parametrize("kind", ["frame", "masks"])
def test_a_live_subscriber_survives_hostile_messages(kind: str) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.linger = 0
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        with SUBSCRIBERS[kind](f"tcp://127.0.0.1:{port}", "newest") as subscriber:
            wait_until(lambda: publisher.send_multipart(GOOD[kind]) or subscriber.take(20))
            for number, parts in enumerate(hostile(kind, 2000)):
                publisher.send_multipart(parts)
                if number % 100 == 0:
                    subscriber.take(10)
            wait_until(lambda: subscriber.rejected > 0)
            subscriber.take(20)
            wait_until(lambda: publisher.send_multipart(GOOD[kind]) or subscriber.take(20))


def test_each_hostile_request_is_answered() -> None:
    batches = [list(hostile("request", 40, seed)) for seed in range(100)]
    good = 0
    with ControlServer(TCP) as server, zmq.Context() as context, context.socket(zmq.DEALER) as asker:
        asker.linger = 0
        asker.connect(server.endpoint)
        for number, batch in enumerate(batches, start=1):
            for parts in batch:
                asker.send_multipart(parts)
            while server.rejected + good < number * len(batch):
                good += refuse(server)
            for _ in batch:
                assert asker.poll(5000), "neither answered nor counted"
                assert unpack_reply(asker.recv_multipart()[-1]).error is not None
    assert server.rejected > 2000


def refuse(server: ControlServer) -> bool:
    """Answer one valid request. Return True if there was one."""
    received = server.receive(1)
    if received is not None:
        server.reply(received[0], Reply.failed(received[1].id, RequestError("not now")))
    return received is not None


@pytest.mark.parametrize("opener", [FramePublisher, MaskPublisher, ControlServer])
def test_a_socket_still_works_after_garbage_at_its_port(opener: Callable[[str], Any]) -> None:
    rng = random.Random(5)
    greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + b"\0" * 48
    huge = greeting + b"\x02" + (1 << 62).to_bytes(8, "big")
    with opener(TCP) as bound:
        port = int(bound.endpoint.rsplit(":", 1)[1])
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
        for number, client in enumerate(clients):
            client.sendall(
                (b"GET / HTTP/1.1\r\n\r\n", huge, greeting + rng.randbytes(300), rng.randbytes(900))[
                    number % 4
                ]
            )
        assert serves(bound)
        for client in clients:
            client.close()
        assert serves(bound)


def serves(bound: Any) -> bool:
    if isinstance(bound, ControlServer):
        with zmq.Context() as context, context.socket(zmq.DEALER) as asker:
            asker.connect(bound.endpoint)
            asker.send(GOOD["request"][0])
            return bound.receive(5000) is not None
    kind, message = (
        ("frame", make_frame(0)) if isinstance(bound, FramePublisher) else ("masks", make_masks(0))
    )
    with SUBSCRIBERS[kind](bound.endpoint, "newest") as subscriber:
        wait_until(lambda: bound.send(message) and subscriber.take(20))
    return True


@pytest.mark.parametrize("delivery", ["newest", "every"])
def test_memory_stays_bounded_when_no_message_is_taken(delivery: Delivery) -> None:
    process = psutil.Process(os.getpid())
    with FramePublisher(TCP, delivery) as publisher:
        with FrameSubscriber([publisher.endpoint], delivery) as subscriber:
            wait_until(
                lambda: publisher.send(make_frame(0, side=1000), timeout_ms=10) and subscriber.take(10)
            )
            before = process.memory_info().rss
            for seq in range(300):
                publisher.send(make_frame(seq, side=1000), timeout_ms=1)
            assert process.memory_info().rss - before < 60 * MEGABYTE
        publisher.close(0)


def test_memory_stays_bounded_when_a_subscriber_hangs() -> None:
    process = psutil.Process(os.getpid())
    with FramePublisher(TCP) as publisher, peer("reader", publisher.endpoint, "newest") as reader:
        os.set_blocking(output_of(reader).fileno(), False)
        wait_until(lambda: publisher.send(make_frame(0, side=1000)) and next_line(reader))
        os.kill(reader.pid, signal.SIGSTOP)
        before = process.memory_info().rss
        for seq in range(300):
            publisher.send(make_frame(seq, side=1000))
        assert process.memory_info().rss - before < 60 * MEGABYTE
