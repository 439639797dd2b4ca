"""Tests of clients with keys: each learns at once why it is refused, and needs its own keys to begin."""

from __future__ import annotations

import re
import socket
import threading
import time
from contextlib import ExitStack, suppress

import pytest

from sam3_node.errors import AuthenticationError, ForbiddenError
from sam3_node.transport import (
    ControlClient,
    ControlServer,
    FramePublisher,
    MaskPublisher,
    MaskSubscriber,
    Security,
)
from sam3_node.transport.sockets import HandshakeWatch
from tests.support.key_rig import TCP, Keys, echo, serve
from tests.support.refuses import refuses
from tests.support.transport_peer import wait_until

PLAIN = Security()
NO_KEYS = "speaks plain text|or has no keys"
"""Both ends close the connection, and a client does not always learn first what the other end speaks."""


def test_a_monitor_ends_before_its_socket(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event for a monitor that is gone would stop libzmq's thread, and with it all sockets of the process."""
    were_open, close = [], HandshakeWatch.close

    def note(watch: HandshakeWatch) -> None:
        if not watch.monitor.closed:
            were_open.append(not watch._socket.closed)
        close(watch)

    monkeypatch.setattr(HandshakeWatch, "close", note)
    with ExitStack() as stack:
        control = serve(stack, keys.machine("node", "node"))
        client = stack.enter_context(
            ControlClient(control.endpoint, 60_000, keys.stranger("stranger", "operator"))
        )
        for _ in range(3):
            with pytest.raises(AuthenticationError):
                client.call("status")
    assert were_open == [True] * 3


def test_a_key_that_was_refused_before_the_first_call_is_told(keys: Keys) -> None:
    """libzmq does not repeat that handshake."""
    with ExitStack() as stack:
        control = serve(stack, keys.machine("node", "node"))
        client = stack.enter_context(
            ControlClient(control.endpoint, 60_000, keys.stranger("stranger", "operator"))
        )
        wait_until(lambda: control.peers_refused)
        begin_s = time.monotonic()
        with refuses(AuthenticationError, field=("key", "stranger")):
            client.call("status")
        assert time.monotonic() - begin_s < 30  # not the timeout of 60 s


def test_a_client_without_a_key_is_told_though_the_node_ends_each_connection_at_once() -> None:
    """A node that expects a key may end a connection before its own greeting has been sent."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def end_each() -> None:
            with suppress(OSError):
                while True:
                    server.accept()[0].close()

        thread = threading.Thread(target=end_each)
        thread.start()
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with (
            ControlClient(endpoint, 60_000) as client,
            refuses(AuthenticationError, field=("expects", "key")),
        ):
            client.call("status")
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_plain_server_is_refused(keys: Keys) -> None:
    with (
        ControlServer(TCP, echo, security=PLAIN) as control,
        MaskPublisher(TCP, security=PLAIN) as masks,
        ControlClient(control.endpoint, 60_000, keys.machine("policy", "policy")) as client,
        MaskSubscriber(masks.endpoint, security=keys.machine("watcher", "watcher")) as reader,
    ):
        with pytest.raises(AuthenticationError, match=NO_KEYS):
            client.call("status")
        wait_until(lambda: reader.refusals)
        assert re.search(NO_KEYS, reader.refusals[0])


def test_a_server_without_its_key_does_not_start(keys: Keys) -> None:
    policy = keys.machine("policy", "policy")
    with refuses(AuthenticationError, field=("role", "node")):
        ControlServer(TCP, echo, security=policy)
    with refuses(AuthenticationError, field="cam0"):
        FramePublisher(TCP, security=policy.for_camera("cam0"))
    empty = Security(keys.root / "absent")
    with refuses(AuthenticationError, field="sam3-node"):
        ControlClient(TCP.replace("*", "9"), security=empty)


def test_keys_come_from_the_environment(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        control = serve(stack, keys.machine("node", "node"))
        folder = keys.machine("both", "policy", "watcher").keys
        monkeypatch.setenv("SAM3_TRANSPORT__KEYS", str(folder))
        with ControlClient(control.endpoint, 5000) as client:
            assert client.call("reset") == "reset"
        monkeypatch.setenv("SAM3_TRANSPORT__KEY", "watcher")
        with ControlClient(control.endpoint, 5000) as client, pytest.raises(ForbiddenError):
            client.call("reset")
