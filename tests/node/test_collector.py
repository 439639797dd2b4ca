"""Hostile collectors: endless, packed, slow and redirecting answers, and what they cost the node."""

import contextlib
import gzip
import socket
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Self

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")

from sam3_node.node.collector import MAX_ANSWER_BYTES, CollectorSession
from sam3_node.node.spans import FrameSpans
from sam3_node.settings import MonitoringSettings
from sam3_node.transport import ReceivedFrame
from sam3_node.types import Frame, MaskFrame
from tests.support.hostility import MEGABYTE, limited_memory
from tests.support.near_node import NearNode
from tests.support.node_rig import until
from tests.support.patience import PATIENCE_S
from tests.support.resources import nothing_added


def send_endless(peer: socket.socket) -> None:
    """Send a body without an end, which a reader of whole answers would keep in memory."""
    peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        peer.sendall(bytes(MEGABYTE))


def send_chunks(peer: socket.socket) -> None:
    """Send the same in chunks."""
    peer.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        peer.sendall(b"100000\r\n" + bytes(MEGABYTE) + b"\r\n")


@cache
def make_bomb() -> bytes:
    """Return 1 GiB as a gzip of gzips, which is shorter than an answer may be."""
    bomb = gzip.compress(gzip.compress(bytes(64 * MEGABYTE)) * 16)
    assert len(bomb) < MAX_ANSWER_BYTES
    return bomb


def send_bomb(peer: socket.socket) -> None:
    """Send an answer that must not be unpacked."""
    bomb = make_bomb()
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip, gzip\r\nContent-Length: {len(bomb)}\r\n\r\n"
    peer.sendall(head.encode() + bomb)


def send_redirect(peer: socket.socket) -> None:
    """Send a redirect to the collector itself, at another path."""
    peer.sendall(b"HTTP/1.1 307 Elsewhere\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n")


def send_drops(peer: socket.socket) -> None:
    """Send a head that grows by a byte before each time-out of the socket."""
    peer.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        peer.sendall(b"x")
        time.sleep(0.05)


def send_interim(peer: socket.socket) -> None:
    """Send interim answers for ever."""
    while True:
        peer.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)


def send_late(peer: socket.socket) -> None:
    """Send the end of an answer only when the peer has gone."""
    peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n")
    while peer.recv(1 << 16):
        pass


def send_headers(peer: socket.socket) -> None:
    """Send a head of some megabytes."""
    peer.sendall(b"HTTP/1.1 200 OK\r\n" + b"X: " + bytes(4 * MEGABYTE) + b"\r\n\r\n")


def send_cookies(peer: socket.socket) -> None:
    """Send cookies, which a browser would keep."""
    cookies = "".join(f"Set-Cookie: cookie{n}={'x' * 500}\r\n" for n in range(90))
    peer.sendall(f"HTTP/1.1 200 OK\r\n{cookies}Content-Length: 0\r\n\r\n".encode())


UNFINISHED = "found it unfinished"
LONGER = f"at most {MAX_ANSWER_BYTES} bytes"
HOSTILE: dict[Callable[[socket.socket], None], str | None] = {
    send_endless: None,
    send_chunks: None,
    send_bomb: None,
    send_redirect: "redirect to /elsewhere",
    send_drops: UNFINISHED,
    send_interim: LONGER,
    send_headers: LONGER,
    send_late: None,
    send_cookies: None,
}
"""Answers, and the words of the error that tells of each; None if the answer counts as one."""


class HostileCollector:
    """A server that answers each request by a function. `requests` are the first lines that came."""

    def __init__(self, answer: Callable[[socket.socket], None]) -> None:
        self.requests: list[bytes] = []
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        # shut down first: closing alone would not wake the thread
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "a connection of the exporter is still open"

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                with peer, contextlib.suppress(OSError):
                    with peer.makefile("rb") as lines:
                        self.requests.append(lines.readline())
                        length = 0
                        while (line := lines.readline()).strip():
                            name, _, value = line.lower().partition(b":")
                            if name == b"content-length":
                                length = int(value)
                        lines.read(length)
                    self._answer(peer)


@pytest.mark.parametrize("answer", HOSTILE, ids=lambda answer: answer.__name__)
def test_a_hostile_answer_costs_little_and_is_told(
    answer: Callable[[socket.socket], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = HOSTILE[answer]
    # an answer that breaks another rule must do so before its time has passed, however loaded the machine is
    limit_s = 0.5 if expected == UNFINISHED else PATIENCE_S
    monkeypatch.setattr("sam3_node.node.spans.EXPORT_S", limit_s)
    with nothing_added(), HostileCollector(answer) as collector:
        # the first export imports modules and makes the answer
        with FrameSpans(collector.address, "node") as spans:
            send_span(spans)
        with limited_memory(16), FrameSpans(collector.address, "node") as spans:
            send_span(spans)
        paths = {line.split()[1] for line in collector.requests}
    assert paths == {b"/v1/traces"}
    assert (expected or "") in caplog.text
    assert ("Failed to export" in caplog.text) == (expected is not None)


@pytest.mark.parametrize(
    "answer", [send_chunks, send_interim, send_drops], ids=lambda answer: answer.__name__
)
def test_masks_go_on_while_a_collector_answers_without_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Callable[[socket.socket], None]
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with HostileCollector(answer) as collector:
        monitoring = MonitoringSettings(otlp_endpoint=collector.address)
        with NearNode(tmp_path, monitoring=monitoring) as node:
            until(lambda: node.send() and len(collector.requests) > 1, "two exports")
            assert node.send().seq < node.send().seq


def test_no_cookie_is_kept() -> None:
    with HostileCollector(send_cookies) as collector, CollectorSession(PATIENCE_S) as session:
        answer = session.post(collector.address, data=b"spans")
        assert len(answer.headers["Set-Cookie"]) > 90 * 500
        assert not list(session.cookies)


def test_the_end_of_a_node_ends_the_request_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_added(), HostileCollector(send_drops) as collector:
        # the exporter alone would wait for PATIENCE_S
        monkeypatch.setattr("sam3_node.node.spans.EXPORT_S", PATIENCE_S)
        spans = FrameSpans(collector.address, "node")
        monkeypatch.setattr("sam3_node.node.spans.EXPORT_S", 0.2)
        send_span(spans)
        spans.close()
    assert len(collector.requests) == 1


def send_span(spans: FrameSpans) -> None:
    """Record the spans of a frame."""
    frame = Frame("cam0", 1, time.time_ns(), 8, 8, "bgr8", bytes(192))
    spans.record(MaskFrame("cam0", 1, frame.capture_ns, 8, 8), ReceivedFrame(frame, time.time_ns(), 0))
