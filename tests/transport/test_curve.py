"""Sockets with keys: who has no right key gets nothing in and nothing out, is counted, and learns why."""

import logging
import re
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sam3_node.client import PerceptionClient
from sam3_node.errors import AuthenticationError, BusyError, ForbiddenError, TransportError
from sam3_node.transport import (
    ControlClient,
    FramePublisher,
    FrameSubscriber,
    MaskPublisher,
    MaskSubscriber,
    PosePublisher,
    Security,
    limits,
)
from sam3_node.transport.control_server import ControlServer
from sam3_node.transport.security import KeyFolder
from sam3_node.transport.sockets import HandshakeWatch
from sam3_node.transport.tap import PoseSubscriber, StreamTap
from tests.support.hostility import link_to_device, make_huge, make_pipe
from tests.support.key_rig import Keys, echo, revoke, serve
from tests.support.refuses import mentions, refuses
from tests.support.resources import nothing_added
from tests.support.transport_peer import TCP, guard_of, make_frame, make_masks, take_frame, wait_until
from tests.support.wire_examples import gripper_pose
from tests.transport.test_restart import closing_listener

PLAIN = Security()


def flow(send: Callable[[], object], receive: Callable[[], Any]) -> Any:
    """Send until something is received, and return that."""
    got: list[Any] = []
    wait_until(lambda: send() or got.append(receive()) or got[-1])
    return got[-1]


def test_the_right_keys_carry_all_messages(
    keys: Keys, stack: ExitStack, new_endpoint: Callable[[], str]
) -> None:
    node, cam0, policy = (keys.machine(name, name) for name in ("node", "cam0", "policy"))
    node, policy = (replace(security, camera_keys=("cam0",)) for security in (node, policy))
    enter = stack.enter_context
    camera = enter(FramePublisher(new_endpoint(), security=cam0.for_camera("cam0")))
    robot = enter(PosePublisher(new_endpoint(), keys.machine("robot", "robot")))
    masks = enter(MaskPublisher(new_endpoint(), security=node))
    control = serve(stack, node, new_endpoint())
    frames = enter(FrameSubscriber([camera.endpoint], security=node))
    poses = enter(PoseSubscriber(robot.endpoint, security=node))
    reader = enter(MaskSubscriber(masks.endpoint, security=keys.machine("watcher", "watcher")))
    tap = enter(StreamTap([camera.endpoint], masks.endpoint, (), 1 << 20, security=policy))
    assert flow(lambda: camera.send(make_frame(1)) and None, lambda: frames.take(50)).frame.seq == 1
    assert flow(lambda: robot.send(gripper_pose()) and None, lambda: poses.take(50))
    assert flow(lambda: masks.send(make_masks(1)) and None, lambda: reader.take(50)).seq == 1
    assert flow(lambda: camera.send(make_frame(2)) and None, lambda: tap.take(50))
    with ControlClient(control.endpoint, 5000, policy) as client:
        assert client.call("add_object") == "add_object"
    assert masks.peers_refused == control.peers_refused == camera.peers_refused == 0


def test_lossless_delivery_has_keys_too(keys: Keys) -> None:
    node = keys.machine("node", "node", camera_keys=("cam0",))
    cam0 = keys.machine("cam0", "cam0")
    with (
        FramePublisher(TCP, "every", cam0) as camera,
        FrameSubscriber([camera.endpoint], "every", security=node) as frames,
    ):
        for seq in range(5):
            assert camera.send(make_frame(seq), 5000)
            assert take_frame(frames).frame.seq == seq


def refused_clients(keys: Keys) -> Iterator[tuple[str, Security, str]]:
    """Yield clients that the node must refuse, and what each is told."""
    yield "plain", PLAIN, "expects a key, and this process has none: set transport.keys"
    yield "wrong", keys.stranger("wrong", "operator"), r"refuses the key stranger \(operator\)"
    camera = keys.machine("camera", "cam0")
    # a camera that takes itself for an operator
    secret = camera.keys / "cam0.secret"  # type: ignore[operator]
    secret.write_text(secret.read_text().replace('"camera"', '"operator"'))
    yield "role", camera, r"refuses the key cam0"
    other_node = keys.machine("other", "policy")
    revoke(other_node, "node")
    (other_node.keys / "authorised" / "cam1.pub").rename(  # type: ignore[operator]
        other_node.keys / "authorised" / "node.pub"  # type: ignore[operator]
    )
    public = other_node.keys / "authorised" / "node.pub"  # type: ignore[operator]
    public.write_text(public.read_text().replace('"camera"', '"node"'))
    yield "server", other_node, r"does not have the key node \(node\)"


def test_the_wrong_key_gets_nothing_and_learns_why(keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    node = keys.machine("node", "node")
    with ExitStack() as stack, caplog.at_level(logging.WARNING):
        masks = stack.enter_context(MaskPublisher(TCP, security=node))
        control = serve(stack, node)
        good = keys.machine("good", "policy")
        reader = stack.enter_context(MaskSubscriber(masks.endpoint, security=good))
        for name, security, reason in refused_clients(keys):
            with MaskSubscriber(masks.endpoint, security=security) as intruder:
                begin_s = time.monotonic()
                with (
                    ControlClient(control.endpoint, 300_000, security) as client,
                    pytest.raises(AuthenticationError, match=reason),
                ):
                    client.call("add_object")
                assert time.monotonic() - begin_s < 150, name  # not the timeout of 300 s
                wait_until(lambda intruder=intruder: intruder.refusals)
                flow(lambda: masks.send(make_masks(1)) and None, lambda: reader.take(50))
                assert intruder.take(0) is None, name
                assert not intruder.connected, name
                assert "refuse" in caplog.text or mentions(caplog.text, "transport.keys")
        assert control.rejected == 0  # no request came in
        assert control.peers_refused >= 2
        assert masks.peers_refused >= 2
        assert "the key cam0 (camera) was refused: its role may not connect here" in caplog.text + str(
            masks.last_refusal
        ) + str(control.last_refusal)
    for name in ("node", "policy", "cam0"):
        assert keys.all.find_own(("node", "operator", "camera"), name).secret.decode() not in caplog.text


def test_readers_may_not_change_anything(keys: Keys, stack: ExitStack, control: ControlServer) -> None:
    client = stack.enter_context(ControlClient(control.endpoint, 5000, keys.machine("w", "watcher")))
    assert client.call("status") == "status"
    with refuses(ForbiddenError, field="reset"):
        client.call("reset")
    assert control.rejected == 1
    assert "watcher" in str(control.last_error)


def test_a_revoked_key_is_cut_off(keys: Keys, stack: ExitStack, new_endpoint: Callable[[], str]) -> None:
    node = keys.machine("node", "node")
    masks = stack.enter_context(MaskPublisher(new_endpoint(), security=node))
    control = serve(stack, node, new_endpoint())
    good = keys.machine("good", "watcher")
    bad = keys.machine("bad", "policy")
    reader, other = (
        stack.enter_context(MaskSubscriber(masks.endpoint, security=security)) for security in (good, bad)
    )
    for each in (reader, other):
        flow(lambda: masks.send(make_masks(1)) and None, lambda each=each: each.take(50))
    client = stack.enter_context(ControlClient(control.endpoint, 5000, bad))
    assert client.call("reset") == "reset"
    revoke(node, "policy")
    with pytest.raises((ForbiddenError, TransportError)):  # at once, on the open connection
        client.call("reset")
    wait_until(lambda: other.refusals)
    assert mentions(other.refusals[0], "policy", "operator", "revoked")
    wait_until(lambda: reader.connected and not other.connected)
    flow(lambda: masks.send(make_masks(2)) and None, lambda: reader.take(50))
    while other.take(0):  # what had come before
        pass
    flow(lambda: masks.send(make_masks(3)) and None, lambda: reader.take(50))
    assert other.take(0) is None
    wait_until(lambda: mentions(str(masks.last_refusal), "policy", "operator", "revoked"))


def test_a_camera_sends_its_own_name_only(keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    node = keys.machine("node", "node")
    with (
        FramePublisher(TCP, security=keys.machine("cam0", "cam0")) as thief,
        FramePublisher(TCP, security=keys.machine("cam1", "cam1")) as camera,
    ):
        endpoints = [thief.endpoint, camera.endpoint]
        node = replace(node, camera_keys=("cam0", "cam1"))
        with (
            FrameSubscriber(endpoints, security=node) as frames,
            StreamTap(endpoints, TCP.replace("*", "9"), (), 1 << 20, security=node) as tap,
        ):
            wait_until(lambda: thief.send(make_frame(1, "cam1")) and frames.rejected and tap.refused)
            assert mentions(str(frames.last_error), "cam1")
            assert "cam0 (camera)" in str(frames.last_error)
            assert frames.take(0) is None
            assert tap.take(0) is None
            assert flow(lambda: camera.send(make_frame(7, "cam1")) and None, lambda: frames.take(50))
            assert flow(lambda: thief.send(make_frame(8, "cam0")) and None, lambda: frames.take(50))
    assert mentions(caplog.text, "send", "cam0")


def test_a_camera_of_another_key_is_not_heard(keys: Keys) -> None:
    node = keys.machine("node", "node", camera_keys=("cam0",))
    for security in (keys.machine("cam1", "cam1"), PLAIN):
        with (
            FramePublisher(TCP, security=security) as camera,
            FrameSubscriber([camera.endpoint], security=node) as frames,
        ):
            wait_until(lambda camera=camera, frames=frames: camera.send(make_frame(1)) and frames.refusals)
            assert frames.take(0) is None
            assert not frames.connected


def test_a_revoked_camera_is_left(keys: Keys) -> None:
    node = keys.machine("node", "node", camera_keys=("cam0",))
    with (
        FramePublisher(TCP, security=keys.machine("cam0", "cam0")) as camera,
        FrameSubscriber([camera.endpoint], security=node) as frames,
    ):
        flow(lambda: camera.send(make_frame(1)) and None, lambda: frames.take(50))
        revoke(node, "cam0")
        wait_until(lambda: frames.refusals and not frames.connected)
        assert mentions(frames.refusals[0], "authorised")
        (node.keys / "revoked" / "cam0.pub").rename(node.keys / "authorised" / "cam0.pub")
        flow(lambda: camera.send(make_frame(2)) and None, lambda: frames.take(50))


def test_encrypted_requests_count_as_read(keys: Keys, stack: ExitStack, control: ControlServer) -> None:
    client = stack.enter_context(ControlClient(control.endpoint, 5000, keys.machine("p", "policy")))
    client.call("status")
    connections = guard_of(control)._connections
    wait_until(lambda: any(found.received for found in connections.values()))
    (connection,) = connections.values()
    before = connection.received
    handshake = connection.unread
    for _ in range(100):  # 33 bytes of each are CURVE's
        client.call("status")
    wait_until(lambda: connection.received > before + 5000)
    assert connection.unread < handshake + 1000


def test_requests_of_a_key_are_limited(
    keys: Keys, stack: ExitStack, control: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        limits.CAPS, "reader", limits.Cap(requests_per_s=0.001, bytes_per_s=1000, connections=256)
    )
    monkeypatch.setattr(limits, "BURST_S", 3000)
    reader = keys.machine("w", "watcher")
    operator = keys.machine("p", "policy")
    clients = [stack.enter_context(ControlClient(control.endpoint, 5000, reader)) for _ in range(4)]
    for client in clients[:3]:  # three requests, over any connections
        assert client.call("status")
    with refuses(BusyError, field=("sends", "much")):
        clients[3].call("status")
    with ControlClient(control.endpoint, 5000, operator) as other:
        assert other.call("status")


def test_connections_of_a_role_are_limited(
    keys: Keys, stack: ExitStack, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(limits.CAPS, "reader", limits.CAPS["reader"]._replace(connections=2))
    masks = stack.enter_context(MaskPublisher(endpoint, security=keys.machine("node", "node")))

    def subscribe(security: Security) -> MaskSubscriber:
        return stack.enter_context(MaskSubscriber(masks.endpoint, security=security))

    watcher = keys.machine("w", "watcher")
    policy = keys.machine("p", "policy")
    for _ in range(2):
        first = subscribe(watcher)
        wait_until(lambda first=first: first.connected)
    extra = subscribe(watcher)
    wait_until(lambda: extra.refusals)
    assert re.search(r"refuses the key watcher \(reader\).*no connection left", extra.refusals[0])
    assert mentions(str(masks.last_refusal), "watcher", "reader", "2")
    operator = subscribe(policy)  # of a role with connections left
    wait_until(lambda: operator.connected and not extra.connected)
    operator.close()
    first.close()
    wait_until(lambda: extra.connected and not extra.refusals)  # it tries again by itself
    assert flow(lambda: masks.send(make_masks(1)) and None, lambda: extra.take(50))


def test_a_refused_peer_that_leaves_is_not_taken_for_one_that_was_connected(keys: Keys) -> None:
    with (
        MaskPublisher(TCP, security=keys.machine("node", "node")) as masks,
        MaskSubscriber(masks.endpoint, security=keys.machine("w", "watcher")) as reader,
    ):
        wait_until(lambda: reader.connected)
        with MaskSubscriber(masks.endpoint, security=keys.stranger("x", "operator")) as stranger:
            wait_until(lambda: stranger.refusals)
        wait_until(lambda: guard_of(masks).count_connections() == 1)
        assert masks.wait_for_peer(0)


def test_only_a_revoked_key_is_told_as_revoked(keys: Keys, stack: ExitStack) -> None:
    node = keys.machine("node", "node")
    masks = stack.enter_context(MaskPublisher(TCP, security=node))
    control = serve(stack, node)
    revoke(node, "policy")
    (node.keys / "authorised" / "watcher.pub").unlink()
    for name, told in (
        ("policy", "it was revoked there"),
        ("watcher", "it is not in the folder `authorised`"),
    ):
        security = keys.machine(f"machine of {name}", name)
        with PerceptionClient(
            masks.endpoint, control.endpoint, timeout_ms=60_000, security=security
        ) as client:
            for request in (client.status, lambda client=client: client.add_object(points=[(1, 1)])):
                with pytest.raises(AuthenticationError, match=told):
                    request()
            wait_until(lambda client=client: client._masks.refusals)
            for wait in (client.wait_for_camera, lambda ms, client=client: client.wait_for("cup", ms)):
                with pytest.raises(AuthenticationError, match=told):
                    wait(50)
            assert told in client.diagnosis()


def test_a_request_that_ends_with_its_key_says_that_it_was_revoked(keys: Keys) -> None:
    """The request is on its way when the connection ends, so that no answer tells why."""
    node = keys.machine("node", "node")
    with (
        ControlServer(TCP, security=node) as control,
        ControlClient(control.endpoint, 60_000, keys.machine("policy", "policy")) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        waiting = thread.submit(client.call, "add_object")
        wait_until(lambda: control.receive(20))
        revoke(node, "policy")
        with refuses(AuthenticationError, field=("revoked", "carried")):
            waiting.result(60)


NO_KEYS = "speaks plain text|or has no keys"
"""Both ends close the connection, and a client does not always learn first what the other end speaks."""


def test_a_monitor_ends_before_its_socket(
    keys: Keys, control: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event for a monitor that is gone would stop libzmq's thread, and with it all sockets of the process."""
    were_open = []
    close = HandshakeWatch.close

    def note(watch: HandshakeWatch) -> None:
        if not watch.monitor.closed:
            were_open.append(not watch._socket.closed)
        close(watch)

    monkeypatch.setattr(HandshakeWatch, "close", note)
    with ControlClient(control.endpoint, 60_000, keys.stranger("stranger", "operator")) as client:
        for _ in range(3):
            with pytest.raises(AuthenticationError):
                client.call("status")
    assert were_open == [True] * 3


def test_a_key_that_was_refused_before_the_first_call_is_told(keys: Keys, control: ControlServer) -> None:
    """libzmq does not repeat that handshake."""
    with ControlClient(control.endpoint, 300_000, keys.stranger("stranger", "operator")) as client:
        wait_until(lambda: control.peers_refused)
        begin_s = time.monotonic()
        with refuses(AuthenticationError, field=("key", "stranger")):
            client.call("status")
        assert time.monotonic() - begin_s < 150  # not the timeout of 300 s


def test_a_client_without_a_key_is_told_though_the_node_ends_each_connection_at_once() -> None:
    """A node that expects a key may end a connection before its own greeting has been sent."""
    with (
        closing_listener() as (endpoint, _),
        ControlClient(endpoint, 60_000) as client,
        refuses(AuthenticationError, field=("expects", "key")),
    ):
        client.call("status")


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


def test_keys_come_from_the_environment(
    keys: Keys, control: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = keys.machine("both", "policy", "watcher").keys
    monkeypatch.setenv("SAM3_TRANSPORT__KEYS", str(folder))
    with ControlClient(control.endpoint, 5000) as client:
        assert client.call("reset") == "reset"
    monkeypatch.setenv("SAM3_TRANSPORT__KEY", "watcher")
    with ControlClient(control.endpoint, 5000) as client, pytest.raises(ForbiddenError):
        client.call("reset")


@pytest.fixture
def own(tmp_path: Path) -> KeyFolder:
    folder = KeyFolder(tmp_path / "keys")
    folder.create("node", "node")
    return folder


def names(folder: KeyFolder) -> list[str]:
    return sorted(key.name for key in folder.authorised().values())


def test_secrets_are_private_and_separate(own: KeyFolder) -> None:
    pair = own.find_own(("node",))
    assert stat.S_IMODE(own.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((own.path / "node.secret").stat().st_mode) == 0o600
    assert pair.secret.decode() in (own.path / "node.secret").read_text()
    assert pair.secret.decode() not in (own.path / "authorised" / "node.pub").read_text()
    assert pair.secret.decode() not in repr(pair)
    assert pair.key.public in own.authorised()


def test_a_change_counts_at_once(own: KeyFolder) -> None:
    for number in range(20):  # faster than the clock of the file system
        own.create(f"policy{number}", "operator")
        assert f"policy{number}" in names(own)
        own.revoke(f"policy{number}")
        assert names(own) == ["node"]
    assert len(own.revoked()) == 20
    assert own.own_names() == {"node"}


def test_an_edit_in_place_counts_soon(own: KeyFolder) -> None:
    file = own.path / "authorised" / "node.pub"
    assert names(own) == ["node"]
    file.write_text("role = 'king'")
    wait_until(lambda: not names(own))


def test_a_name_can_be_revoked_again(own: KeyFolder) -> None:
    for _ in range(3):
        own.create("policy", "operator")
        own.revoke("policy")
    assert len(own.revoked()) == 3


@pytest.mark.parametrize("name", ["../node", "a/b", "", "x" * 65, ".secret"])
def test_names_stay_in_the_folder(own: KeyFolder, name: str) -> None:
    for change in (lambda: own.create(name, "reader"), lambda: own.revoke(name)):
        with pytest.raises(AuthenticationError, match="expected"):
            change()


def test_a_name_is_taken_once(own: KeyFolder) -> None:
    before = (own.path / "node.secret").read_bytes()
    with refuses(AuthenticationError, field=("exists", "already")):
        own.create("node", "node")
    assert (own.path / "node.secret").read_bytes() == before


def test_a_secret_that_others_may_read_is_refused(own: KeyFolder) -> None:
    (own.path / "node.secret").chmod(0o640)
    with refuses(AuthenticationError, field=("0640", "600")):
        own.find_own(("node",))


def test_a_folder_that_others_may_change_authorises_nobody(
    own: KeyFolder, caplog: pytest.LogCaptureFixture
) -> None:
    (own.path / "authorised").chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert not KeyFolder(own.path).authorised()
    assert mentions(caplog.text, "written")


def test_damaged_files_do_not_count_and_are_not_quoted(
    own: KeyFolder, caplog: pytest.LogCaptureFixture
) -> None:
    secret = own.find_own(("node",)).secret.decode()
    folder = own.path / "authorised"
    for number, text in enumerate(("", "\xff", "[", "role = 1", f"secret = '{secret}'", "x" * 10000)):
        (folder / f"bad{number}.pub").write_bytes(text.encode("latin-1"))
    (folder / "link.pub").symlink_to(folder / "node.pub")
    assert names(own) == ["node"]
    (own.path / "node.secret").write_text(f"role = 'node'\nsecret = '{secret}'\npublic = '{secret}'\n")
    with refuses(AuthenticationError, field="pair") as error:
        own.find_own(("node",))
    assert secret not in str(error.value) + caplog.text


def test_the_key_of_a_process_follows_from_its_role(own: KeyFolder) -> None:
    own.create("policy", "operator")
    own.create("watcher", "reader")
    own.create("front", "camera", ["cam0"])
    own.create("any", "camera", ["*"])
    assert own.find_own(("operator", "reader")).key.name == "policy"
    assert own.find_own(("operator", "reader"), "watcher").key.name == "watcher"
    assert own.find_own(("camera",), camera="cam0").key.name == "front"
    assert own.find_own(("camera",), camera="cam7").key.name == "any"
    assert own.find_own(("camera",), camera="*").key.name == "any"  # of a replay, which sends several
    with refuses(AuthenticationError, field=("node", "policy")):
        own.find_own(("node",), "policy")
    with refuses(AuthenticationError, field="cam1"):
        own.find_own(("camera",), "front", camera="cam1")
    with refuses(AuthenticationError, field=("NAME", "--role")):
        own.find_own(("robot",))
    with refuses(AuthenticationError, field=("name", "camera")):
        own.find_server("camera")
    own.create("policy2", "operator")
    with refuses(AuthenticationError, field=("policy2", "transport.key")):
        own.find_own(("operator", "reader"))


@pytest.mark.parametrize("kind", ["file", "dangling link", "link", "pipe", "absent"])
def test_what_takes_the_place_of_the_folder_authorises_nobody_until_it_is_back(
    own: KeyFolder, kind: str
) -> None:
    authorised = own.path / "authorised"
    kept = own.path / "kept"
    assert names(own) == ["node"]
    authorised.rename(kept)
    if kind == "file":
        authorised.write_text("role = 'operator'")
    elif kind == "pipe":
        make_pipe(authorised)
    elif kind != "absent":
        authorised.symlink_to(kept if kind == "link" else own.path / "nowhere")
    wait_until(lambda: not names(own))
    with refuses(AuthenticationError, field=("role", "node")):
        own.find_server("node")
    authorised.unlink(missing_ok=True)
    kept.rename(authorised)
    wait_until(lambda: names(own) == ["node"])


def test_things_that_are_no_key_files_cost_nothing(own: KeyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running process reads the folder each second for months."""
    folder = own.path / "authorised"
    (folder / "folder.pub").mkdir()
    make_pipe(folder / "pipe.pub")
    link_to_device(folder / "link.pub")
    make_huge(folder / "large.pub")
    monkeypatch.setattr("sam3_node.transport.security.RESCAN_S", 0.0)  # each question reads the folder
    with nothing_added():
        for _ in range(20):
            assert names(own) == ["node"]


def test_a_key_that_was_revoked_here_is_named(own: KeyFolder) -> None:
    own.create("policy", "operator")
    own.revoke("policy")
    for name in ("", "policy"):
        with refuses(AuthenticationError, field=("policy", "revoked")):
            own.find_own(("operator", "reader"), name)
    with pytest.raises(AuthenticationError) as caught:
        own.find_own(("camera",))
    assert "policy" not in str(caught.value)
    own.revoke("node")
    with refuses(AuthenticationError, field=("node", "revoked")):
        own.find_server("node")
