"""Tests of endpoints that cannot be bound, of parts that are too large, and of resources after close."""

import dataclasses
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from sam3_node import transport
from sam3_node.errors import TransportError, WireError
from sam3_node.settings import TransportSettings
from sam3_node.transport.control_server import ControlServer
from sam3_node.transport.foreign import ForeignHub
from sam3_node.transport.security import is_local
from sam3_node.transport.sockets import check_free
from sam3_node.types import Delivery, Frame
from sam3_node.wire import Reply
from tests.support.hostility import make_pipe
from tests.support.refuses import refuses
from tests.support.resources import nothing_added
from tests.support.tables import each_row
from tests.support.transport_peer import TCP, make_frame, wait_until


@pytest.mark.parametrize("opener", [transport.FramePublisher, transport.MaskPublisher, ControlServer])
def test_an_address_in_use_is_an_error(opener: type[transport.FramePublisher], endpoint: str) -> None:
    with opener(endpoint) as first:
        with refuses(TransportError, field=("process", "uses")) as caught:
            opener(first.endpoint)
        assert first.endpoint in str(caught.value)
    with opener(first.endpoint):
        pass


def test_an_endpoint_is_tried_without_binding_it(endpoint: str) -> None:
    with transport.MaskPublisher(endpoint) as first:
        with refuses(TransportError, field=("process", "uses")) as caught:
            check_free(first.endpoint)
        assert caught.value.may_pass
    for place in (first.endpoint, "tcp://*:*", "tcp://no.such.host.invalid:5551", "ipc://*"):
        check_free(place)
    with transport.MaskPublisher(first.endpoint):
        pass


@each_row(
    "endpoint",
    [
        "",
        "ipc://a\x00b",
        "camera",
        "tcp://",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:70000",
        "udp://127.0.0.1:5",
        "ipc://",
    ],
)
def test_malformed_endpoints_are_errors(endpoint: str) -> None:
    for opener in (
        transport.FramePublisher,
        ControlServer,
        lambda endpoint: transport.FrameSubscriber([TCP[:-1] + "9", endpoint]),
    ):
        with refuses(TransportError, field=("tcp://host:port", "ipc://path")):
            opener(endpoint)
    with refuses(TransportError, field="endpoint"):
        transport.FrameSubscriber([])


def test_an_address_of_another_machine_is_an_error() -> None:
    for endpoint in ("tcp://192.0.2.1:5550", "ipc:///no/such/folder/frames"):
        with refuses(TransportError, field=("address", "machine")):
            transport.FramePublisher(endpoint, security=transport.Security(insecure=True))


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "192.0.2.1", "eth0", "[::]", "camera.local"])
def test_other_addresses_than_loopback_need_keys(host: str) -> None:
    with refuses(TransportError, field=("bound", "true")):
        transport.FramePublisher(f"tcp://{host}:*")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    with transport.FramePublisher(f"tcp://{host}:*") as publisher:
        assert "127.0.0.1" in publisher.endpoint


def test_defaults_are_on_this_machine_only() -> None:
    settings = TransportSettings()
    for endpoint in (*settings.frames, settings.masks, settings.control):
        assert endpoint.startswith("tcp://127.0.0.1:")


def test_frames_that_are_too_large_for_subscribers_are_refused() -> None:
    huge = np.zeros(transport.sockets.MAX_FRAME_BYTES + 1, np.uint8)
    frame = Frame("cam0", 0, 0, 16384, 16384, "jpeg", huge.data)
    with transport.FramePublisher(TCP) as publisher:
        with pytest.raises(WireError):
            publisher.send(dataclasses.replace(make_frame(0), width=17))
        with refuses(TransportError, field=(str(transport.sockets.MAX_FRAME_BYTES), str(huge.size))):
            publisher.send(frame)


def test_close_wakes_waiting_threads() -> None:
    subscriber = transport.FrameSubscriber(["tcp://127.0.0.1:9"])
    closer = threading.Timer(0.1, subscriber.close)
    closer.start()
    assert subscriber.take() is None
    closer.join()
    subscriber.close()
    assert subscriber.take(10) is None


@pytest.mark.parametrize("delivery", ["newest", "every"])
def test_no_resource_is_left_after_close(delivery: Delivery) -> None:
    def once() -> None:
        with (
            transport.FramePublisher(TCP, delivery) as publisher,
            transport.FrameSubscriber([publisher.endpoint], delivery) as reader,
        ):
            for seq in range(3):
                publisher.send(make_frame(seq, side=400), timeout_ms=2000)
            reader.take(200)

    once()
    process = psutil.Process(os.getpid())
    system_threads = process.num_threads()
    with nothing_added():
        for _ in range(10):
            once()
    wait_until(lambda: process.num_threads() <= system_threads)


BINDERS: list[Callable[[str], object]] = [
    transport.FramePublisher,
    lambda endpoint: transport.FramePublisher(endpoint, "every"),
    transport.MaskPublisher,
    transport.PosePublisher,
    ControlServer,
    lambda endpoint: ForeignHub(endpoint, lambda *_: None),
]


def make_thing(kind: str, path: Path) -> None:
    other = path.with_name("other")
    if kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        make_pipe(path)
    elif kind == "symbolic link":
        other.write_text("my data")
        path.symlink_to(other)
    elif kind == "dangling symbolic link":
        path.symlink_to(other)
    else:
        path.write_text("my data")


def describe(path: Path) -> tuple[int, ...]:
    """Return what tells a changed thing from the same; to look at a link changes the time of its last access."""
    status = path.lstat()
    return status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@each_row("kind", ["file", "folder", "FIFO", "symbolic link", "dangling symbolic link"])
@each_row("binder", range(len(BINDERS)))
def test_only_a_socket_is_replaced_at_an_ipc_path(binder: int, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "thing"
    make_thing(kind, path)
    before = describe(path)
    named = kind.removeprefix("dangling ")
    with refuses(TransportError, field=(str(path), str(named))):
        BINDERS[binder](f"ipc://{path}")
    assert describe(path) == before
    if kind in ("file", "symbolic link"):
        assert path.read_text() == "my data"


def test_a_device_is_not_replaced() -> None:
    with refuses(TransportError, field="/dev/null"):
        transport.FramePublisher("ipc:///dev/null")
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("binder", range(len(BINDERS)))
def test_an_abandoned_socket_is_replaced(binder: int, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as abandoned:
        abandoned.bind(str(path))
    with BINDERS[binder](f"ipc://{path}"), socket.socket(socket.AF_UNIX) as peer:  # type: ignore[attr-defined]
        peer.connect(str(path))  # refused by an abandoned one


def test_a_socket_that_somebody_uses_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "datagrams"
    full = tmp_path / "full"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as used, socket.socket(socket.AF_UNIX) as busy:
        used.bind(str(path))
        busy.bind(str(full))
        busy.listen(0)
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.connect(str(full))
            for place in (path, full):
                with refuses(TransportError, field=("process", "uses")) as caught:
                    transport.FramePublisher(f"ipc://{place}")
                assert caught.value.may_pass
                assert place.is_socket()


LOCAL = "[::1] ::1 [0:0:0:0:0:0:0:1] [::1%lo] [::ffff:127.0.0.1] [::ffff:127.8.9.10] 127.0.0.1 127.9.9.9 localhost"
PUBLIC = """
    [::] [::0] [::%lo] [::ffff:0.0.0.0] [::ffff:10.0.0.1] [::127.0.0.1] [fe80::1%eth0] [fe80::1%lo] [2001:db8::1]
    [[::1]] [::1]x * 0.0.0.0 127.0.0.1;0.0.0.0
"""


@each_row(
    ("host", "local"),
    [*((host, True) for host in LOCAL.split()), *((host, False) for host in PUBLIC.split())],
)
def test_which_addresses_only_this_machine_reaches(host: str, local: bool) -> None:
    assert is_local(f"tcp://{host}:5550") is local
    if not local:
        with refuses(TransportError, field=("bound", "keys")):
            transport.FramePublisher(f"tcp://{host}:*")
        with refuses(TransportError, field=("senders", "keys")):
            ForeignHub(f"tcp://{host}:*", lambda *_: None)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["[::1]", "::1", "[::ffff:127.0.0.1]"])
def test_addresses_of_ipv6_carry_frames_and_requests(host: str) -> None:
    with (
        transport.FramePublisher(f"tcp://{host}:*") as publisher,
        transport.FrameSubscriber([publisher.endpoint]) as subscriber,
    ):
        assert ":" in publisher.endpoint.removeprefix("tcp://").rpartition(":")[0]
        wait_until(lambda: publisher.send(make_frame(1)) and subscriber.take(20) is not None)
    with (
        ControlServer(f"tcp://{host}:*", lambda request: Reply(request.id, "done")) as server,
        transport.ControlClient(server.endpoint, 20_000) as client,
    ):
        assert client.call("status") == "done"


def test_an_address_of_ipv6_that_cannot_be_bound_says_so() -> None:
    with pytest.raises(TransportError, match="IPv6") as caught:
        transport.FramePublisher("tcp://[2001:db8::1]:*", security=transport.Security(insecure=True))
    assert caught.value.may_pass  # the network may not be up yet
    with pytest.raises(TransportError) as caught:
        transport.FramePublisher("tcp://192.0.2.1:5550", security=transport.Security(insecure=True))
    assert "IPv6" not in str(caught.value)


def test_other_hosts_stay_with_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    with transport.FramePublisher("tcp://*:*", security=transport.Security(insecure=True)) as publisher:
        assert publisher.endpoint.startswith("tcp://0.0.0.0:")
    answers = {"six": [socket.AF_INET6], "both": [socket.AF_INET6, socket.AF_INET], "four": [socket.AF_INET]}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: [(family,) for family in answers[host]])
    hosts = ("six", "both", "four", "localhost", "*", "10.0.0.1")
    assert [host for host in hosts if transport.sockets._has_ipv6_only(host)] == ["six"]


def test_a_closed_publisher_says_so() -> None:
    publisher = transport.FramePublisher(TCP)
    publisher.close()
    for call in (lambda: publisher.send(make_frame(1)), lambda: publisher.wait_for_peer(0)):
        with refuses(TransportError, field="FramePublisher"):
            call()
