"""The peer process of the transport tests, and helpers that they share."""

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import zmq

from sam3_node import transport
from sam3_node.errors import TransportError
from sam3_node.transport.control_server import ControlServer, poll
from sam3_node.transport.limits import ConnectionGuard
from sam3_node.transport.tap import StreamTap
from sam3_node.types import Frame, Instance, Mask, MaskFrame
from sam3_node.wire import Reply, Request, unpack_reply
from tests.support.patience import PATIENCE_MS, PATIENCE_S
from tests.support.processes import ForkedProcess, Process

TCP = "tcp://127.0.0.1:*"
NOBODY = "tcp://127.0.0.1:9"


def make_frame(seq: int, camera: str = "cam0", side: int = 16) -> Frame:
    """Return a grey frame of `side` x `side` pixels whose value is its number."""
    colour = np.full(side * side, seq % 256, np.uint8)
    return Frame(camera, seq, time.time_ns(), side, side, "mono8", colour.data, clock="system")


def make_masks(seq: int, camera: str = "cam0", **fields: Any) -> MaskFrame:
    """Return masks of one object on a frame of 40 x 30 pixels."""
    full = np.zeros((30, 40), np.bool_)
    full[5:20, 10:30] = seq % 2
    full[0, 0] = True
    instance = Instance(7, "cup", 0.5, "tracked", seq, 0, Mask.from_full(full))
    return MaskFrame(camera, seq, time.time_ns(), 40, 30, instances=(instance,), **fields)


def guard_of(owner: Any) -> ConnectionGuard:
    """Return the guard of the connections of a server or publisher."""
    guard: ConnectionGuard = owner._bound.guard
    return guard


def sockets_of(receiver: Any) -> list[Any]:
    """Return the connecting sockets of a subscriber or tap, which count their handshakes."""
    return list(receiver._sockets)


def count_waiting(tap: StreamTap) -> int:
    """Return the number of messages that a tap holds for its taker."""
    return len(tap._waiting)


def bound_cameras(subscriber: transport.FrameSubscriber) -> set[str]:
    """Return the cameras whose names are bound to an endpoint."""
    return set(subscriber.names._bindings)


def waiting_bodies(server: ControlServer) -> bytes:
    """Return the requests that wait, as bytes."""
    with server._requests._changed:
        contents = [
            waiting.content for queue in server._requests._peers.values() for waiting in queue.requests
        ]
    return b"".join(
        repr(content).encode() if isinstance(content, Request) else bytes(content) for content in contents
    )


@contextmanager
def open_peer(kind: int, endpoint: str = "") -> Iterator[zmq.Socket[bytes]]:
    """Open a plain socket that is connected to `endpoint`, or bound to a port of its own without one."""
    with zmq.Context() as context, context.socket(kind) as opened:
        opened.linger = 0
        if endpoint:
            opened.connect(endpoint)
        else:
            opened.bind("tcp://127.0.0.1:*")
        yield opened


def place_of(bound: zmq.Socket[bytes]) -> str:
    """Return the endpoint of a bound socket."""
    return bound.getsockopt_string(zmq.LAST_ENDPOINT)


def take_frame(subscriber: transport.FrameSubscriber) -> transport.ReceivedFrame:
    """Return the next frame, which must come."""
    received = subscriber.take(round(1000 * PATIENCE_S))
    assert received is not None
    return received


def take_error(asker: zmq.Socket[bytes]) -> tuple[int, str]:
    """Return request and code of the next reply, an error."""
    assert asker.poll(PATIENCE_MS), "neither answered nor counted"
    reply = unpack_reply(asker.recv_multipart()[-1])
    return reply.id, reply.error.code


def wait_until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Wait until a condition is true. Fail after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition was not true in time"
        time.sleep(0.005)


def peer(*args: object) -> Process:
    """Run one of ROLES as a process. The end of a `with` block kills it."""
    return Process(ForkedProcess(play, [str(arg) for arg in args]))


def print_line(line: object) -> None:
    print(line, flush=True)


def run_camera(endpoint: str, camera: str, delivery: str, interval_ms: str, count: str, side: str) -> None:
    with transport.FramePublisher(endpoint, delivery) as publisher:  # type: ignore[arg-type]
        print_line(publisher.endpoint)
        for seq in range(int(count)):
            publisher.send(make_frame(seq, camera, int(side)))
            if delivery == "every":
                print_line(seq)
            time.sleep(int(interval_ms) / 1000)


def run_reader(endpoint: str, delivery: str) -> None:
    with transport.FrameSubscriber([endpoint], delivery) as subscriber:  # type: ignore[arg-type]
        while (received := subscriber.take()) is not None:
            print_line(received.frame.seq)


def run_server(endpoint: str) -> None:
    with ControlServer(endpoint) as server:
        print_line(server.endpoint)
        while True:
            received = server.receive(1000)
            if received is not None:
                peer_id, request = received
                time.sleep(request.args.get("seconds", 0))
                server.reply(peer_id, Reply(request.id, request.args))


def run_node(frames: str, masks: str, control: str) -> None:
    """Answer each frame with masks, and each request with its arguments, as a node does."""
    with (
        transport.FrameSubscriber([frames]) as subscriber,
        transport.MaskPublisher(masks) as publisher,
        ControlServer(control) as server,
    ):
        print_line(publisher.endpoint)
        while True:
            poll(subscriber, server, 1000)
            while (received := server.receive(0)) is not None:
                server.reply(received[0], Reply(received[1].id, received[1].args))
            if (taken := subscriber.take(0)) is not None:
                publisher.send(make_masks(taken.frame.seq))
                print_line(taken.frame.seq)


def run_policy(masks: str, hold_ms: str) -> None:
    """Take masks, and keep all threads of Python from running for `hold_ms` after each."""
    with transport.MaskSubscriber(masks) as subscriber:
        print_line("ready")
        while (received := subscriber.take()) is not None:
            print_line(received.seq)
            hold_interpreter(int(hold_ms))


def run_recorder(frames: str, masks: str) -> None:
    with StreamTap([frames], masks, [f"cam{n}" for n in range(10)], 1 << 24) as tap:
        print_line("ready")
        while True:
            if (message := tap.take(1000)) is not None:
                print_line(bytes(message.parts[0]).decode())


def run_asker(control: str) -> None:
    with transport.ControlClient(control, timeout_ms=300) as client:
        print_line("ready")
        while True:
            try:
                client.call("status")
                print_line("answer")
            except TransportError:
                print_line("none")
            time.sleep(0.01)


def hold_interpreter(milliseconds: int) -> None:
    """Sleep in C without releasing the interpreter lock."""
    ctypes.PyDLL(None).usleep(milliseconds * 1000)


ROLES: dict[str, Callable[..., None]] = {
    "camera": run_camera,
    "reader": run_reader,
    "server": run_server,
    "node": run_node,
    "policy": run_policy,
    "recorder": run_recorder,
    "asker": run_asker,
}


def play(role: str, *arguments: str) -> None:
    """Do what a role does: the main function of a process."""
    ROLES[role](*arguments)
