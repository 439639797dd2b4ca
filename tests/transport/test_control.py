"""Tests of requests and replies between sockets, threads and processes."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq

from sam3_node import errors
from sam3_node.transport import ControlClient
from sam3_node.transport.control_server import LARGE_BYTES, MAX_REQUESTS_PER_PEER, ControlServer
from sam3_node.transport.limits import rss_bytes
from sam3_node.wire import Failure, Reply, Request, pack, pack_reply, pack_request, unpack_reply
from tests.support.patience import PATIENCE_MS
from tests.support.refuses import refuses
from tests.support.tables import each_row
from tests.support.threads import repeating
from tests.support.transport_peer import (
    TCP,
    open_peer,
    peer,
    place_of,
    take_error,
    wait_until,
    waiting_bodies,
)
from tools.bench.processes import free_endpoints


@contextmanager
def serving(endpoint: str = TCP) -> Iterator[ControlServer]:
    """Start a server whose thread echoes arguments, or follows the operation."""
    with ControlServer(endpoint) as server, repeating(lambda: answer_one(server)):
        yield server


def answer_one(server: ControlServer) -> bool:
    received = server.receive(10)
    if received is not None:
        answer(server, *received)
    return received is not None


def answer(server: ControlServer, peer: tuple[bytes, ...], request: Request) -> None:
    args = request.args
    if request.op == "slow":
        time.sleep(args["seconds"])
    if request.op == "fail":
        server.reply(peer, Reply(request.id, error=Failure(args["code"], "expected this, found that")))
    elif request.op == "twice":
        server.reply(peer, Reply(request.id - 1, {"stale": True}))
        server.reply(peer, Reply(request.id, {"stale": False}))
    else:
        server.reply(peer, Reply(request.id, args))


def test_a_request_is_answered(endpoint: str) -> None:
    args = {"points": [[1.5, 2.0]], "label": "cup", "mask": {"data": b"\0" * 200_000}, "seq": 3}
    with serving(endpoint) as server, ControlClient(server.endpoint) as client:
        assert client.call("echo", **args) == args
        assert client.call("status") == {}


@each_row(
    "error_class",
    [
        errors.RequestError,
        errors.UnknownObjectError,
        errors.UnknownFrameError,
        errors.CapacityError,
        errors.BusyError,
        errors.SupersededError,
        errors.WireError,
    ],
)
def test_the_code_of_a_failure_is_raised_as_its_error(error_class: type[errors.Sam3NodeError]) -> None:
    with serving() as server, ControlClient(server.endpoint) as client:
        with pytest.raises(error_class, match="expected this, found that") as caught:
            client.call("fail", code=error_class.code)
        assert type(caught.value) is error_class
        with refuses(errors.RequestError, field="newer_code"):
            client.call("fail", code="newer_code")


def test_a_request_has_an_id_of_its_own_or_the_one_that_its_caller_gives() -> None:
    with (
        ControlServer(TCP, answer_status) as server,
        ControlClient(server.endpoint, timeout_ms=100) as client,
    ):
        wait_until(lambda: has_status(client))
        sent: list[str | None] = []
        for name in (None, None, "shelf-3", "shelf-3"):
            with errors.request_id(name), pytest.raises(errors.NoAnswerError) as caught:
                client.call("echo")
            sent.append(server.receive(PATIENCE_MS)[1].request_id)
            assert caught.value.request_id == sent[-1]
        assert sent[2:] == ["shelf-3", "shelf-3"]
        assert len({*sent} - {None}) == 3
        for bad in ("", "a b", "x" * 65):
            with refuses(errors.RequestError, field="request_id"), errors.request_id(bad):
                pass
        assert errors.RequestError("of none").request_id is None


def test_a_late_answer_is_not_taken_for_another() -> None:
    with serving() as server, ControlClient(server.endpoint, timeout_ms=1000) as client:
        with refuses(errors.TransportError, field="slow"):
            client.call("slow", seconds=1.5)
        wait_until(lambda: answered(client))
        assert client.call("echo", number=2) == {"number": 2}
        assert client.call("twice") == {"stale": False}


def answer_status(request: Request) -> Reply | None:
    """Answer `status` at once, and nothing else."""
    return Reply(request.id, "now") if request.op == "status" else None


def has_status(client: ControlClient) -> bool:
    """Ask for the status. It comes once the client is connected, which takes long on a busy machine."""
    try:
        return bool(client.call("status") == "now")
    except errors.TransportError:
        return False


def answered(client: ControlClient) -> bool:
    try:
        return bool(client.call("echo", number=1) == {"number": 1})
    except errors.TransportError:
        return False


def test_the_time_to_find_a_node_begins_with_the_turn_of_the_thread() -> None:
    with ControlServer(TCP) as server:
        endpoint = server.endpoint
    with ControlClient(endpoint) as client:
        found: list[object] = []
        waiting = threading.Thread(
            target=lambda: found.append(client.call_long(1000, 20_000, "echo", number=2))
        )
        # another thread has its turn for longer than the node may take to appear
        with client._turn:
            waiting.start()
            time.sleep(1.1)
        with serving(endpoint):
            waiting.join()
        assert found == [{"number": 2}]


def test_without_a_server_a_call_fails_in_time_and_is_not_executed_later() -> None:
    (endpoint,) = free_endpoints(1)
    with ControlClient(endpoint, timeout_ms=200) as client:
        with refuses(errors.TransportError, field=str(endpoint)):
            client.call("add_object")
        with ControlServer(endpoint) as server:
            assert server.receive(700) is None


def test_a_client_reconnects_to_a_killed_server() -> None:
    (endpoint,) = free_endpoints(1)
    with ControlClient(endpoint, timeout_ms=5000) as client:
        for number in range(3):
            with peer("server", endpoint) as process:
                assert process.next_line() == endpoint
                wait_until(lambda: answered(client))
                assert client.call("echo", number=number) == {"number": number}


def test_a_hung_server_is_an_error_in_time() -> None:
    with peer("server", TCP) as process, ControlClient(process.next_line(), timeout_ms=500) as client:
        wait_until(lambda: answered(client))
        process.process.send_signal(signal.SIGSTOP)
        for _ in range(3):
            with pytest.raises(errors.TransportError):
                client.call("echo")
        process.process.send_signal(signal.SIGCONT)
        wait_until(lambda: answered(client))


def test_many_clients_get_their_own_answers() -> None:
    wrong: list[object] = []

    def ask(name: int, client: ControlClient) -> None:
        for number in range(30):
            args = {"name": name, "number": number}
            wrong.extend(() if client.call("echo", **args) == args else (args,))

    with serving() as server, ControlClient(server.endpoint) as shared:
        clients = [ControlClient(server.endpoint) for _ in range(6)]
        threads = [
            threading.Thread(target=ask, args=pair) for pair in enumerate([*clients, shared, shared, shared])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for client in clients:
            client.close()
    assert not wrong


def test_a_plain_request_socket_is_served_too() -> None:
    with serving() as server, open_peer(zmq.REQ, server.endpoint) as socket:
        socket.send(pack_request(Request(5, "echo", {"a": 1})))
        assert socket.poll(PATIENCE_MS)
        assert unpack_reply(socket.recv()) == Reply(5, {"a": 1})


def test_a_malformed_request_is_answered_and_counted() -> None:
    with serving() as server, open_peer(zmq.DEALER, server.endpoint) as socket:
        bad = [[b""], [b"junk"], [b"a", b"b"], [b"", b"x", b"y"], [b"p"] * 50, [pack({"v": 2, "id": 1})]]
        for count, parts in enumerate(bad, start=1):
            socket.send_multipart(parts)
            assert take_error(socket)[1] == "bad_message"
            assert server.rejected == count
        assert "version 1" in str(server.last_error)


def test_a_reply_without_a_node_names_that_of_the_server() -> None:
    with (
        ControlServer(TCP, node="0123456789abcdef") as server,
        open_peer(zmq.DEALER, server.endpoint) as socket,
    ):
        socket.send(b"junk")
        assert socket.poll(PATIENCE_MS)
        assert unpack_reply(socket.recv()).node == "0123456789abcdef"


def test_a_flood_of_malformed_requests_blocks_neither_the_server_nor_a_good_client() -> None:
    with ControlServer(TCP) as server, open_peer(zmq.DEALER, server.endpoint) as flood:
        for _ in range(500):
            flood.send(b"junk")
        wait_until(lambda: server.receive(0) is None and server.rejected)
        assert server.rejected <= 500
        asker = threading.Thread(target=lambda: answers.append(client.call("echo", a=1)))
        answers: list[object] = []
        with ControlClient(server.endpoint, timeout_ms=PATIENCE_MS) as client:
            asker.start()
            wait_until(lambda: answer_one(server))
            asker.join()
        assert answers == [{"a": 1}]


def test_a_client_skips_messages_that_are_not_replies() -> None:
    with open_peer(zmq.ROUTER) as router:

        def serve() -> None:
            peer_id, _ = router.recv_multipart()
            for body in (b"", b"junk", pack([1]), pack_reply(Reply(99, "another's"))):
                router.send_multipart([peer_id, body])
            router.send_multipart([peer_id, pack_reply(Reply(1, "mine"))])

        thread = threading.Thread(target=serve)
        thread.start()
        with ControlClient(place_of(router)) as client:
            assert client.call("status") == "mine"
        thread.join()


def test_a_call_on_a_closed_client_is_an_error() -> None:
    client = ControlClient("tcp://127.0.0.1:9")
    client.close()
    client.close()
    with pytest.raises(errors.TransportError, match="closed"):
        client.call("status")


def test_a_quick_answer_does_not_wait_for_the_loop() -> None:
    with ControlServer(TCP, answer_status) as server, ControlClient(server.endpoint) as client:
        assert client.call("status") == "now"  # nobody calls `receive`
        with ControlClient(server.endpoint, timeout_ms=100) as other:
            wait_until(lambda: has_status(other))
            with pytest.raises(errors.TransportError):
                other.call("echo")
        assert server.receive(PATIENCE_MS)[1].op == "echo"


@pytest.mark.parametrize("result", [2**64, {1, 2}, object(), "\ud800", {"deep": [2**70]}, b"\0" * (17 << 20)])
def test_a_reply_that_cannot_be_sent_becomes_an_error(result: object) -> None:
    check_refused(lambda request: Reply(request.id, result), "internal")


def test_an_error_with_text_that_cannot_be_sent_is_still_an_error() -> None:
    check_refused(lambda request: Reply(1, error=Failure("bad_request", "file \udcff")), "sent")


def check_refused(answer_now: Callable[[Request], Reply], field: str) -> None:
    with (
        ControlServer(TCP, answer_now) as server,
        ControlClient(server.endpoint) as client,
        refuses(errors.RequestError, field=field),
    ):
        client.call("status")


def test_a_flood_of_one_peer_is_refused_and_another_peer_is_served() -> None:
    with ControlServer(TCP) as server, open_peer(zmq.DEALER, server.endpoint) as flood:
        count = MAX_REQUESTS_PER_PEER + 20
        for number in range(count):
            flood.send(pack_request(Request(number, "echo")))
        for _ in range(count - MAX_REQUESTS_PER_PEER):
            assert take_error(flood)[1] == "busy"
        with ControlClient(server.endpoint, timeout_ms=PATIENCE_MS) as client:
            asker = threading.Thread(target=client.call, args=("policy",))
            asker.start()
            ops = []
            while "policy" not in ops:
                received = server.receive(PATIENCE_MS)
                ops.append(received[1].op)
                answer(server, *received)
                if len(ops) == 1:
                    wait_until(lambda: b"policy" in waiting_bodies(server))
            asker.join()
        assert ops.index("policy") <= 2
        assert server.rejected == 20


def test_a_request_that_waited_too_long_is_not_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with ControlServer(TCP) as server, ControlClient(server.endpoint, timeout_ms=PATIENCE_MS) as client:
        refused: list[BaseException] = []

        def ask() -> None:
            with refuses(errors.BusyError, field="carried") as caught:
                client.call("echo")
            refused.append(caught.value)

        asker = threading.Thread(target=ask)
        asker.start()
        wait_until(lambda: b"echo" in waiting_bodies(server))
        monkeypatch.setattr("sam3_node.transport.control_server.MAX_WAIT_S", 0.0)
        assert server.receive(0) is None
        asker.join()
    assert refused


def test_a_peer_that_reads_no_replies_loses_them_and_stops_nobody() -> None:
    with (
        ControlServer(TCP, lambda request: Reply(request.id, b"\0" * 100_000)) as server,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as deaf,
    ):
        deaf.linger = 0
        deaf.rcvhwm = 1
        deaf.sndhwm = 0
        deaf.connect(server.endpoint)
        before = rss_bytes()
        for number in range(2000):
            deaf.send(pack_request(Request(number, "status")))
        with ControlClient(server.endpoint, timeout_ms=PATIENCE_MS) as client:
            for _ in range(50):
                client.call("status")
        assert rss_bytes() - before < 64 << 20


def test_large_requests_are_unpacked_when_they_are_taken() -> None:
    large = {"mask": b"\0" * (LARGE_BYTES + 1)}
    with serving() as server, ControlClient(server.endpoint, timeout_ms=PATIENCE_MS) as client:
        assert client.call("echo", **large) == large
        with open_peer(zmq.DEALER, server.endpoint) as socket:
            socket.send(pack_request(Request(3, "echo", large))[:-1])
            assert (*take_error(socket), server.rejected) == (0, "bad_message", 1)
        assert client.call("echo", a=1) == {"a": 1}


def test_a_failure_of_the_socket_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise zmq.ZMQError(zmq.ENOTSOCK)

    with ControlServer(TCP) as server, ControlClient(server.endpoint, timeout_ms=100) as client:
        monkeypatch.setattr("sam3_node.transport.sockets.receive_parts", fail)
        with pytest.raises((errors.TransportError, zmq.ZMQError)):
            client.call("echo")
        with refuses(errors.TransportError, field=("socket", "failed")):
            wait_until(lambda: server.receive(20))  # no request comes, and the failure ends the wait
