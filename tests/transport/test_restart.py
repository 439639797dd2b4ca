"""Tests of reconnection after processes are killed, hang or send garbage."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from sam3_node.transport import FramePublisher, FrameSubscriber
from sam3_node.types import Delivery
from sam3_node.wire import pack_frame
from tests.support.transport_peer import make_frame, next_line, output_of, peer, wait_until

GREETINGS = {
    "http": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "unknown mechanism": b"\xff" + b"\0" * 8 + b"\x7f\x03\0XXXX" + b"\0" * 60,
    "silence": b"",
}
DELIVERIES: tuple[Delivery, ...] = ("newest", "every")


@pytest.fixture(params=["tcp", "ipc"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return an endpoint that is not in use."""
    return free_endpoint() if request.param == "tcp" else f"ipc://{tmp_path}/frames"


def free_endpoint() -> str:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return f"tcp://127.0.0.1:{server.getsockname()[1]}"


def kill(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_a_killed_camera_comes_back_on_its_endpoint(endpoint: str, delivery: Delivery) -> None:
    with FrameSubscriber([endpoint], delivery) as subscriber:
        with peer("camera", endpoint, "cam0", delivery, 5, 100_000, 16) as camera:
            assert next_line(camera) == endpoint
            for _ in range(5):
                assert subscriber.take(5000) is not None
            kill(camera)
        wait_until(lambda: not subscriber.connected)
        while subscriber.take(0) is not None:
            pass
        with peer("camera", endpoint, "cam0", delivery, 5, 100_000, 16) as camera:
            assert next_line(camera) == endpoint
            again = subscriber.take(5000)
            assert again is not None
            wait_until(lambda: subscriber.connected == (endpoint,))


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_a_killed_subscriber_comes_back(endpoint: str, delivery: Delivery) -> None:
    with FramePublisher(endpoint, delivery) as publisher:
        reached = []
        for start in (0, 1000):
            with peer("reader", publisher.endpoint, delivery) as reader:
                os.set_blocking(output_of(reader).fileno(), False)
                seq, line = start, ""
                deadline = time.monotonic() + 10
                while not line and time.monotonic() < deadline:
                    publisher.send(make_frame(seq), timeout_ms=50)
                    seq, line = seq + 1, next_line(reader)
                    time.sleep(0.01)
                reached.append(int(line))
                kill(reader)
    assert reached[0] < 1000 <= reached[1]


def test_a_hung_camera_is_detected_and_received_again_when_it_continues(endpoint: str) -> None:
    with (
        peer("camera", endpoint, "cam0", "newest", 5, 100_000, 16) as camera,
        FrameSubscriber([next_line(camera)]) as subscriber,
    ):
        assert subscriber.take(5000) is not None
        wait_until(lambda: subscriber.connected == (endpoint,))
        os.kill(camera.pid, signal.SIGSTOP)
        wait_until(lambda: not subscriber.connected)
        os.kill(camera.pid, signal.SIGCONT)
        wait_until(lambda: subscriber.connected)
        asked_ns = time.time_ns()
        wait_until(lambda: (got := subscriber.take(1000)) and got.frame.capture_ns > asked_ns)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("greeting", GREETINGS.values(), ids=GREETINGS)
def test_a_camera_is_received_after_another_program_used_its_port(greeting: bytes, host: str) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    with FrameSubscriber([f"tcp://{host}:{port}"]) as subscriber:
        connection, _ = server.accept()
        connection.sendall(greeting)
        time.sleep(0.1)
        assert not subscriber.connected
        connection.close()
        server.close()
        with FramePublisher(f"tcp://127.0.0.1:{port}") as publisher:
            wait_until(lambda: publisher.send(make_frame(0)) and subscriber.take(20))
            assert subscriber.connected == (f"tcp://{host}:{port}",)


def test_a_camera_is_received_again_after_a_part_that_was_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sam3_node.transport.channels.MAX_FRAME_BYTES", 10_000)
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.linger = 0
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        with FrameSubscriber([f"tcp://127.0.0.1:{port}"]) as subscriber:
            wait_until(lambda: publisher.send_multipart(pack_frame(make_frame(0))) or subscriber.take(20))
            publisher.send_multipart([b"frame/cam0", b"x" * 20_000])
            wait_until(lambda: not subscriber.connected)
            wait_until(lambda: publisher.send_multipart(pack_frame(make_frame(0))) or subscriber.take(20))
