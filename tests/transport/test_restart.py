"""Processes are killed, hang or send garbage, and connections end before their reply: peers notice and reconnect."""

import itertools
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import zmq

from sam3_node import transport
from sam3_node.errors import NoAnswerError, TransportError
from sam3_node.transport.control_server import ControlServer, Peer
from sam3_node.transport.sockets import ReconnectingSocket, open_subscriber, receive_parts
from sam3_node.transport.tap import StreamTap
from sam3_node.types import Delivery
from sam3_node.wire import Reply, Request, pack_frame, pack_request
from tests.support.key_rig import Keys, revoke
from tests.support.patience import PATIENCE_MS, PATIENCE_S
from tests.support.processes import Process, Team, until
from tests.support.raw_zmtp import frame, ping, raw_peer, reset
from tests.support.refuses import refuses
from tests.support.repeats import repetitions
from tests.support.transport_peer import (
    TCP,
    hold_interpreter,
    make_frame,
    make_masks,
    open_peer,
    peer,
    place_of,
    sockets_of,
    take_frame,
    wait_until,
)
from tests.support.wire_examples import golden
from tools.bench.processes import free_endpoints, free_ports

GREETINGS = {
    "http": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "unknown mechanism": b"\xff" + b"\0" * 8 + b"\x7f\x03\0XXXX" + b"\0" * 60,
    "silence": b"",
}
DELIVERIES: tuple[Delivery, ...] = ("newest", "every")


@pytest.fixture(params=["tcp", "ipc"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return an endpoint that is not in use."""
    return free_endpoints(1)[0] if request.param == "tcp" else f"ipc://{tmp_path}/frames"


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_a_killed_camera_comes_back_on_its_endpoint(endpoint: str, delivery: Delivery) -> None:
    with transport.FrameSubscriber([endpoint], delivery) as subscriber:
        with peer("camera", endpoint, "cam0", delivery, 5, 100_000, 16) as camera:
            assert camera.next_line() == endpoint
            for _ in range(5):
                assert subscriber.take(PATIENCE_MS) is not None
        wait_until(lambda: not subscriber.connected)
        while subscriber.take(0) is not None:
            pass
        with peer("camera", endpoint, "cam0", delivery, 5, 100_000, 16) as camera:
            assert camera.next_line() == endpoint
            assert subscriber.take(PATIENCE_MS) is not None
            wait_until(lambda: subscriber.connected == (endpoint,))


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_a_killed_subscriber_comes_back(endpoint: str, delivery: Delivery) -> None:
    with transport.FramePublisher(endpoint, delivery) as publisher:
        reached = []
        for start in (0, 1000):
            with peer("reader", publisher.endpoint, delivery) as reader:
                seqs = itertools.count(start)
                wait_until(lambda: (publisher.send(make_frame(next(seqs)), 50), reader.seen)[1])  # noqa: B023
                reached.append(int(reader.seen[0]))
    assert reached[0] < 1000 <= reached[1]


def test_a_hung_camera_is_detected_and_received_again_when_it_continues(endpoint: str) -> None:
    with (
        peer("camera", endpoint, "cam0", "newest", 5, 100_000, 16) as camera,
        transport.FrameSubscriber([camera.next_line()]) as subscriber,
    ):
        assert subscriber.take(PATIENCE_MS) is not None
        wait_until(lambda: subscriber.connected == (endpoint,))
        camera.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: not subscriber.connected)
        camera.process.send_signal(signal.SIGCONT)
        wait_until(lambda: subscriber.connected)
        asked_ns = time.time_ns()

        def is_newer() -> bool:
            got = subscriber.take(1000)
            return got is not None and got.frame.capture_ns > asked_ns

        wait_until(is_newer)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("greeting", GREETINGS.values(), ids=GREETINGS)
def test_a_camera_is_received_after_another_program_used_its_port(greeting: bytes, host: str) -> None:
    (port,) = free_ports(1)
    server = socket.create_server(("127.0.0.1", port))
    with transport.FrameSubscriber([f"tcp://{host}:{port}"]) as subscriber:
        connection, _ = server.accept()
        connection.sendall(greeting)
        time.sleep(0.1)
        assert not subscriber.connected
        connection.close()
        server.close()
        with transport.FramePublisher(f"tcp://127.0.0.1:{port}") as publisher:
            wait_until(lambda: publisher.send(make_frame(0)) and subscriber.take(20))
            assert subscriber.connected == (f"tcp://{host}:{port}",)


def test_a_camera_is_received_again_after_a_part_that_was_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sam3_node.transport.sockets.MAX_FRAME_BYTES", 10_000)
    with open_peer(zmq.PUB) as publisher, transport.FrameSubscriber([place_of(publisher)]) as subscriber:
        wait_until(lambda: publisher.send_multipart(pack_frame(make_frame(0))) or subscriber.take(20))
        publisher.send_multipart([b"frame/cam0", b"x" * 20_000])
        wait_until(lambda: not subscriber.connected)
        wait_until(lambda: publisher.send_multipart(pack_frame(make_frame(0))) or subscriber.take(20))


"""Longer than a test may take: a call that ends before has not waited for its timeout."""


def next_request(server: ControlServer) -> tuple[Peer, Request]:
    return until(lambda: server.receive(100), "a request", PATIENCE_S / 2)


@pytest.mark.parametrize("op", ["list_objects", "add_object"])
def test_a_request_in_flight_when_another_key_is_revoked(keys: Keys, endpoint: str, op: str) -> None:
    """All connections are made anew then, and the reply has nowhere to go."""
    node = keys.machine("node", "node")
    with (
        ControlServer(endpoint, security=node) as server,
        transport.ControlClient(server.endpoint, PATIENCE_MS, keys.machine("policy", "policy")) as client,
        transport.ControlClient(server.endpoint, PATIENCE_MS, keys.machine("watcher", "watcher")),
        ThreadPoolExecutor(1) as thread,
    ):
        wait_until(lambda: len(server._bound.authenticator._admitted) == 2)
        call = thread.submit(client.call, op)
        first, request = next_request(server)
        revoke(node, "watcher")
        if op == "list_objects":  # the client asks again
            again, repeated = next_request(server)
            server.reply(first, Reply(request.id, "to nobody"))
            server.reply(again, Reply(repeated.id, "the objects"))
            assert call.result() == "the objects"
        else:
            with refuses(NoAnswerError, field="add_object"):
                call.result()
            server.reply(first, Reply(request.id, "to nobody"))
            call = thread.submit(client.call, "add_object")
            peer, request = next_request(server)
            server.reply(peer, Reply(request.id, "the new one"))
            assert call.result() == "the new one"


def test_a_request_is_repeated_to_the_next_node(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/control"
    with transport.ControlClient(endpoint, PATIENCE_MS) as client, ThreadPoolExecutor(1) as thread:
        with ControlServer(endpoint) as server:
            call = thread.submit(client.call, "status")
            next_request(server)
        with ControlServer(endpoint) as server:
            peer, request = next_request(server)
            server.reply(peer, Reply(request.id, "fine"))
            assert call.result() == "fine"


@contextmanager
def closing_listener() -> Iterator[tuple[str, list[int]]]:
    """Yield an endpoint where each connection is closed before its handshake, and a list with an item for each."""
    closed: list[int] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.close()
            closed.append(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", closed
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_an_idle_client_whose_handshakes_fail_stops_no_other_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once 1000 events wait in a monitor that nobody reads, libzmq's thread waits, and all sockets with it."""
    options = transport.sockets._COMMON_OPTIONS
    monkeypatch.setitem(options, zmq.RECONNECT_IVL, 1)
    monkeypatch.setitem(options, zmq.RECONNECT_IVL_MAX, 0)
    with closing_listener() as (endpoint, closed), transport.ControlClient(endpoint, 100) as idle:
        with refuses(TransportError, field=("program", "node")):
            idle.call("status")
        assert idle._watch.monitor.closed
        assert idle._socket._monitor_socket is None
        until(lambda: len(closed) > repetitions(50, 1100), "many failed handshakes")
        monkeypatch.undo()
        with transport.MaskPublisher(TCP) as masks, transport.MaskSubscriber(masks.endpoint) as subscriber:
            wait_until(lambda: masks.send(make_masks(1)) and subscriber.take(20))


def test_a_hung_node_is_noticed_by_masks_and_tap_and_received_again(tmp_path: Path) -> None:
    frames, masks, control = free_endpoints(3)
    with (
        peer("node", frames, masks, control) as node,
        transport.MaskSubscriber(masks) as subscriber,
        StreamTap([frames], masks, (), 1 << 20) as tap,
    ):
        node.next_line()
        wait_until(lambda: sockets_of(subscriber)[0]._watched and sockets_of(tap)[1]._watched)
        for _ in range(2):
            node.process.send_signal(signal.SIGSTOP)
            wait_until(lambda: not subscriber.connected and not tap.connected)
            node.process.send_signal(signal.SIGCONT)
            wait_until(lambda: subscriber.connected and tap.connected)
        with transport.FramePublisher(frames) as camera:
            wait_until(lambda: camera.send(make_frame(7)) and subscriber.take(100))

            def has_masks() -> bool:
                message = tap.take(100)
                return message is not None and bytes(message.parts[0]) == b"masks/cam0"

            wait_until(has_masks)


def test_the_sender_of_a_message_is_connected_though_its_handshake_was_not_looked_for() -> None:
    with transport.FramePublisher(TCP) as camera:
        connection = ReconnectingSocket(open_subscriber([b"frames"], 1 << 20), camera.endpoint)
        try:
            wait_until(lambda: camera.send(make_frame(7)) and receive_parts(connection.socket))
            assert not connection.alive
            connection.hear(is_beat=False)
            assert connection.alive
            assert connection.handshakes == 1
        finally:
            connection.close()


def test_idle_publishers_and_those_without_beats_are_not_taken_for_hung() -> None:
    with (
        transport.FramePublisher(TCP) as idle,
        open_peer(zmq.PUB) as plain,
        open_peer(zmq.SUB, idle.endpoint) as clock,
        transport.FrameSubscriber([idle.endpoint, place_of(plain)]) as subscriber,
    ):
        wait_until(lambda: plain.send_multipart(pack_frame(make_frame(0))) or subscriber.take(20))
        clock.subscribe(b"")
        beats = [clock.recv_multipart() for _ in range(6)]
        assert beats == [golden("beat")] * 6
        assert [socket.handshakes for socket in sockets_of(subscriber)] == [1, 1]
        assert subscriber.rejected == 0


def test_a_subscriber_that_could_not_listen_does_not_take_its_peer_for_hung() -> None:
    with (
        peer("camera", TCP, "cam0", "newest", 50, 100_000, 16) as camera,
        transport.FrameSubscriber([camera.next_line()]) as subscriber,
    ):
        seqs: list[int] = []
        for _ in range(2):
            seqs += [take_frame(subscriber).frame.seq for _ in range(3)]
            hold_interpreter(2500)

        def has_gone_on() -> bool:
            got = subscriber.take(1000)
            return got is not None and got.frame.seq > seqs[-1] + 40

        wait_until(has_gone_on)
        assert sockets_of(subscriber)[0].handshakes == 1
        assert seqs == sorted(set(seqs))


IDLE_MS = 1500
"""Interval of a camera that is idle, and so does not look at its socket, for longer than peers of old versions wait."""


def publishes(endpoint: str) -> bool:
    """Return True if a new subscriber receives a frame."""
    with transport.FrameSubscriber([endpoint]) as subscriber:
        return subscriber.take(PATIENCE_MS) is not None


@pytest.mark.parametrize("subscriptions", [9, 40])
def test_an_idle_publisher_survives_subscribers_that_leave(subscriptions: int) -> None:
    with peer("camera", TCP, "cam0", "newest", IDLE_MS, 100_000, 16) as camera:
        endpoint = camera.next_line()
        for _ in range(repetitions(2, 20)):
            with zmq.Context() as context, context.socket(zmq.SUB) as reader:
                for number in range(subscriptions):
                    reader.subscribe(f"frame/cam{number}")
                monitor = reader.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
                reader.connect(endpoint)
                assert monitor.poll(PATIENCE_MS)
                time.sleep(0.1)  # the subscriptions travel
                reader.disable_monitor()
        assert publishes(endpoint)
        assert camera.process.poll() is None


@pytest.mark.parametrize("kind", ["SUB", "DEALER"])
def test_a_peer_that_pings_and_leaves_ends_nobody(kind: str) -> None:
    """The pings lie behind more messages than a short queue holds: libzmq reads them after the peer has left."""
    role = ("camera", TCP, "cam0", "newest", 100, 100_000, 16) if kind == "SUB" else ("server", TCP)
    slow = pack_request(Request(1, "slow", {"seconds": 0.4}))
    with peer(*role) as process:
        endpoint = process.next_line()
        for _ in range(repetitions(2, 20)):
            with raw_peer(endpoint, kind) as stranger:
                parts = (frame(b"\x01topic%d" % n if kind == "SUB" else b"junk") + ping() for n in range(200))
                stranger.sendall((b"" if kind == "SUB" else frame(slow)) + b"".join(parts))
                time.sleep(0.2)
                reset(stranger)
            time.sleep(0.4)
            assert process.process.poll() is None
        with raw_peer(endpoint, kind):
            assert process.process.poll() is None


PROGRESS = {"node": "", "policy": "", "recorder": "masks/", "asker": "answer"}
"""Word in the lines that a process prints while all is well."""


@contextmanager
def robot(folder: Path) -> Iterator[Team]:
    """Run a camera, a node, a policy that holds the interpreter, a recorder and a client of control."""
    frames, control = free_endpoints(2)
    masks = f"ipc://{folder}/masks"
    with ExitStack() as stack:

        def run(*role: object) -> Callable[[], Process]:
            return lambda: stack.enter_context(peer(*role))

        yield Team(
            camera=run("camera", frames, "cam0", "newest", 10, 10_000_000, 300),
            node=run("node", frames, masks, control),
            policy=run("policy", masks, 300),
            recorder=run("recorder", frames, masks),
            asker=run("asker", control),
        )


@pytest.mark.parametrize("victim", ["camera", "node", "policy", "recorder", "asker"])
def test_every_process_goes_on_after_another_was_killed_or_hung(victim: str, tmp_path: Path) -> None:
    with robot(tmp_path) as team:
        for _ in range(repetitions(1, 6)):
            team.restart(victim)
            team.check(**PROGRESS)
            team.stop_for(victim, 0.7)  # the queues to it fill
            team.check(**PROGRESS)


def test_a_policy_that_holds_the_interpreter_survives_a_node_that_restarts(tmp_path: Path) -> None:
    with robot(tmp_path) as team, peer("policy", f"ipc://{tmp_path}/masks", 1500) as policy:
        policy.next_line()
        for _ in range(repetitions(1, 5)):
            policy.new_line()  # it begins to hold the interpreter, and masks pile up
            time.sleep(0.5)
            team.restart("node")
            for _ in range(2):
                policy.new_line()
            assert policy.process.poll() is None


def test_a_subscriber_with_many_topics_receives_each_of_them() -> None:
    cameras = [f"cam{number}" for number in range(40)]
    with (
        peer("camera", TCP, "cam39", "newest", 20, 100_000, 16) as process,
        transport.FrameSubscriber([process.next_line()], cameras=cameras, max_cameras=40) as subscriber,
    ):
        wait_until(lambda: subscriber.take(100))
