"""Tests of endpoints that cannot be bound, of parts that are too large, and of resources after close."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest

from sam3_node.errors import TransportError, WireError
from sam3_node.settings import TransportSettings
from sam3_node.transport import (
    ControlServer,
    FramePublisher,
    FrameSubscriber,
    MaskPublisher,
    Security,
    sockets,
)
from sam3_node.types import Delivery, Frame
from tests.support.transport_peer import make_frame, wait_until

TCP = "tcp://127.0.0.1:*"


@pytest.mark.parametrize("opener", [FramePublisher, MaskPublisher, ControlServer])
def test_an_address_in_use_is_an_error(opener: type[FramePublisher], tmp_path: Path) -> None:
    for endpoint in (TCP, f"ipc://{tmp_path}/one"):
        with opener(endpoint) as first:
            with pytest.raises(TransportError, match="another process uses it") as caught:
                opener(first.endpoint)
            assert first.endpoint in str(caught.value)
        with opener(first.endpoint):
            pass


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "camera",
        "tcp://",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:70000",
        "udp://127.0.0.1:5",
        "ipc://",
        "ipc://a\0b",
    ],
)
def test_malformed_endpoints_are_errors(endpoint: str) -> None:
    for opener in (
        FramePublisher,
        ControlServer,
        lambda endpoint: FrameSubscriber([TCP[:-1] + "9", endpoint]),
    ):
        with pytest.raises(TransportError, match="expected tcp://host:port or ipc://path"):
            opener(endpoint)
    with pytest.raises(TransportError, match="at least one endpoint"):
        FrameSubscriber([])


def test_an_address_of_another_machine_is_an_error() -> None:
    for endpoint in ("tcp://192.0.2.1:5550", "ipc:///no/such/folder/frames"):
        with pytest.raises(TransportError, match=r"cannot bind .* expected an address of this machine"):
            FramePublisher(endpoint, security=Security(insecure=True))


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "192.0.2.1", "eth0", "[::]", "camera.local"])
def test_other_addresses_than_loopback_need_keys(host: str) -> None:
    with pytest.raises(TransportError, match=r"not bound without keys.*keys new.*transport\.insecure = true"):
        FramePublisher(f"tcp://{host}:*")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    with FramePublisher(f"tcp://{host}:*") as publisher:
        assert "127.0.0.1" in publisher.endpoint


def test_defaults_are_on_this_machine_only() -> None:
    settings = TransportSettings()
    for endpoint in (*settings.frames, settings.masks, settings.control):
        assert endpoint.startswith("tcp://127.0.0.1:")


def test_frames_that_are_too_large_for_subscribers_are_refused() -> None:
    huge = np.zeros(sockets.MAX_FRAME_BYTES + 1, np.uint8)
    frame = Frame("cam0", 0, 0, 16384, 16384, "jpeg", huge.data)
    with FramePublisher(TCP) as publisher:
        with pytest.raises(WireError):
            publisher.send(dataclasses.replace(make_frame(0), width=17))
        with pytest.raises(
            TransportError, match=f"may hold {sockets.MAX_FRAME_BYTES} bytes, found {huge.size}"
        ):
            publisher.send(frame)


def test_close_wakes_waiting_threads() -> None:
    subscriber = FrameSubscriber(["tcp://127.0.0.1:9"])
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
            FramePublisher(TCP, delivery) as publisher,
            FrameSubscriber([publisher.endpoint], delivery) as reader,
        ):
            for seq in range(3):
                publisher.send(make_frame(seq, side=400), timeout_ms=2000)
            reader.take(200)

    once()
    process, threads = psutil.Process(os.getpid()), set(threading.enumerate())
    descriptors, system_threads = process.num_fds(), process.num_threads()
    for _ in range(10):
        once()
    assert set(threading.enumerate()) <= threads
    wait_until(lambda: process.num_fds() <= descriptors)
    wait_until(lambda: process.num_threads() <= system_threads)
