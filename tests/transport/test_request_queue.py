"""The queue of requests: peers take turns, it is bounded, and a newer request supersedes an older one."""

import select
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import zmq

from sam3_node.resumable import Resumable, resume
from sam3_node.transport import control_server
from sam3_node.transport.control_server import (
    MAX_REQUESTS_PER_PEER,
    MAX_WAITING_BYTES,
    ControlServer,
    RequestQueue,
    WaitingRequest,
)
from sam3_node.wire import Reply, Request, pack_request, unpack_reply
from tests.support.patience import PATIENCE_MS
from tests.support.transport_peer import TCP, open_peer, take_error, wait_until, waiting_bodies


@pytest.fixture
def queue() -> Iterator[RequestQueue]:
    with closing(RequestQueue()) as opened:
        yield opened


def request(peer: str, number: int, size: int = 10) -> WaitingRequest:
    return WaitingRequest((peer.encode(),), number, b"", size + control_server.OVERHEAD_BYTES, 0.0)


def numbers(queue: RequestQueue) -> list[int]:
    taken = []
    while (waiting := queue.take(0)) is not None:
        taken.append(waiting.id)
    return taken


def is_readable(queue: RequestQueue) -> bool:
    return bool(select.select([queue], [], [], 0)[0])


def test_peers_take_turns_however_many_requests_they_have(queue: RequestQueue) -> None:
    for number in range(4):
        assert not queue.put(request("flood", number))
    for number in (10, 11):
        assert not queue.put(request("policy", number))
    assert is_readable(queue)
    assert numbers(queue) == [0, 10, 1, 11, 2, 3]
    assert not is_readable(queue)


def test_a_peer_with_a_full_line_is_refused_and_others_are_not(queue: RequestQueue) -> None:
    for number in range(MAX_REQUESTS_PER_PEER):
        assert not queue.put(request("flood", number))
    refused = request("flood", 99)
    assert queue.put(refused) == [refused]
    assert not queue.put(request("policy", 100))
    assert queue.take(0) == request("flood", 0)
    assert not queue.put(refused)


def test_large_requests_give_way_to_those_of_other_peers(queue: RequestQueue) -> None:
    large = MAX_WAITING_BYTES // 3 - control_server.OVERHEAD_BYTES
    for number in range(3):
        assert not queue.put(request("flood", number, large))
    assert [refused.id for refused in queue.put(request("flood", 3, large))] == [3]
    assert [displaced.id for displaced in queue.put(request("policy", 10, 1000))] == [2]
    assert [refused.id for refused in queue.put(request("policy", 11, MAX_WAITING_BYTES))] == [11]
    assert numbers(queue) == [0, 10, 1]
    largest = MAX_WAITING_BYTES - control_server.OVERHEAD_BYTES
    assert not queue.put(request("policy", 12, largest))
    assert numbers(queue) == [12]


def test_a_large_request_counts_while_it_is_carried_out(queue: RequestQueue) -> None:
    large = request("flood", 1, MAX_WAITING_BYTES - 2 * control_server.OVERHEAD_BYTES)
    assert not queue.put(large)
    assert queue.take(0) == large
    assert queue.put(large) == [large]
    assert not queue.put(request("policy", 10, 0))
    assert queue.take(0) == request("policy", 10, 0)
    assert not queue.put(large._replace(cost=large.cost - 1024))


def pointer(peer: str, number: int, size: int = 10, key: str = "cam0") -> WaitingRequest:
    return request(peer, number, size)._replace(supersede_key=key)


def test_a_newer_request_supersedes_the_older_one_of_its_peer_and_key(queue: RequestQueue) -> None:
    older = pointer("mouse", 0), request("mouse", 1), pointer("mouse", 2, key="cam1"), pointer("other", 10)
    assert not any(map(queue.put, older))
    assert queue.put(pointer("mouse", 3)) == [pointer("mouse", 0)]
    assert queue.put(pointer("mouse", 4)) == [pointer("mouse", 3)]
    assert numbers(queue) == [1, 10, 2, 4]
    assert not queue.put(pointer("mouse", 5))  # the older ones have begun
    assert is_readable(queue)


def test_a_peer_that_supersedes_its_requests_keeps_its_turn_and_its_place(queue: RequestQueue) -> None:
    assert not queue.put(pointer("mouse", 0))
    for number in range(1, 40):
        assert len(queue.put(pointer("mouse", number))) == 1
        queue.put(request("other", 100 + number))
    assert numbers(queue)[:2] == [39, 101]
    for number in range(MAX_REQUESTS_PER_PEER - 1):
        assert not queue.put(request("mouse", number))
    assert not queue.put(pointer("mouse", 50))
    assert queue.put(pointer("mouse", 51)) == [pointer("mouse", 50)]


def test_a_superseded_request_no_longer_counts(queue: RequestQueue) -> None:
    half = MAX_WAITING_BYTES // 2
    for number in range(8):
        assert len(queue.put(pointer("mouse", number, half))) == (number > 0)
    largest = request("other", 10, MAX_WAITING_BYTES - half - 2 * control_server.OVERHEAD_BYTES)
    assert not queue.put(largest)
    too_large = pointer("mouse", 9, half + 1)
    assert queue.put(too_large) == [too_large]  # the older one stays
    assert numbers(queue) == [7, 10]


def test_a_request_that_is_put_back_waits_behind_those_of_its_peer_and_of_others(queue: RequestQueue) -> None:
    for number in (0, 1):
        assert not queue.put(request("long", number))
    taken = queue.take(0)
    assert not queue.put(request("policy", 10))
    assert queue.put_back(taken)
    assert numbers(queue) == [1, 10, 0]
    assert not is_readable(queue)


def test_a_request_that_keeps_its_place_is_taken_before_those_of_its_peer(queue: RequestQueue) -> None:
    for number in (0, 1):
        assert not queue.put(request("change", number))
    taken = queue.take(0)
    assert not queue.put(request("policy", 10))
    assert queue.put_back(taken, keeps_place=True)
    assert numbers(queue) == [0, 10, 1]
    assert not is_readable(queue)


def test_a_request_that_is_put_back_is_superseded_as_others_are(queue: RequestQueue) -> None:
    assert not queue.put(pointer("mouse", 1))
    older = queue.take(0)
    assert queue.put_back(older)
    assert queue.put(pointer("mouse", 2)) == [older]
    older = queue.take(0)
    assert not queue.put(pointer("mouse", 3))
    assert not queue.put_back(older)
    assert queue.clear() == [pointer("mouse", 3)]
    assert not is_readable(queue)


def test_of_the_requests_of_a_moving_mouse_only_the_newest_is_carried_out() -> None:
    with (
        ControlServer(TCP) as server,
        open_peer(zmq.DEALER, server.endpoint) as mouse,
        open_peer(zmq.DEALER, server.endpoint) as other,
    ):
        other.send(pack_request(Request(1, "segment")))
        wait_until(lambda: b"segment" in waiting_bodies(server))
        count = MAX_REQUESTS_PER_PEER + 20
        for number in range(1, count + 1):
            mouse.send(pack_request(Request(number, "segment", {"points": [[number, 0]]})))
        for number in range(1, count):
            assert take_error(mouse) == (number, "superseded")
        taken = [server.receive(PATIENCE_MS) for _ in range(2)]
        assert [found and found[1].id for found in taken] == [1, count]
        assert server.receive(0) is None
        assert server.rejected == 0


class Work:
    """Work on a request that never ends by itself; it counts its turns."""

    def __init__(self) -> None:
        self.turns = 0
        self.is_closed = False

    def do(self) -> Resumable[None]:
        try:
            while True:
                self.turns += 1
                yield
        finally:
            self.is_closed = True


@contextmanager
def long_work(peer: str) -> Iterator[tuple[ControlServer, zmq.Socket, Work]]:
    """Yield a server, a peer on `peer`, tcp or ipc, and the work on its request 1, which was put back once."""
    with ControlServer(peer) as server, open_peer(zmq.DEALER, server.endpoint) as mouse:
        mouse.send(pack_request(Request(1, "segment_everything")))
        assert server.receive(PATIENCE_MS)
        assert server.begun is None
        work = Work()
        job = work.do()
        with closing(job):
            resume(job)
            server.put_back(job)
            yield server, mouse, work


def test_long_work_goes_on_when_its_request_is_received_again() -> None:
    with long_work(TCP) as (server, mouse, work):
        received = server.receive(PATIENCE_MS)
        assert received[1].id == 1
        resume(server.begun)
        assert work.turns == 2
        server.reply(received[0], Reply(1, "done"))
        assert mouse.poll(PATIENCE_MS)
        assert unpack_reply(mouse.recv()).result == "done"
        assert server.receive(0) is None
        assert server.begun is None


def test_long_work_is_not_refused_for_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    with long_work(TCP) as (server, _, _):
        monkeypatch.setattr(control_server, "MAX_WAIT_S", 0.0)
        assert server.receive(PATIENCE_MS)


def test_a_newer_request_ends_the_work_on_the_older_one() -> None:
    with long_work(TCP) as (server, mouse, work):
        mouse.send(pack_request(Request(2, "segment_everything")))
        assert take_error(mouse) == (1, "superseded")
        assert work.is_closed
        assert server.receive(PATIENCE_MS)[1].id == 2
        assert server.begun is None


def test_the_work_for_a_peer_that_has_gone_ends(endpoint: str) -> None:
    with long_work(endpoint) as (server, mouse, work):
        mouse.close()

        def goes_on() -> bool:
            if server.receive(20) and server.begun is not None:
                server.put_back(server.begun)
            return work.is_closed

        wait_until(goes_on)
        assert server.receive(0) is None


def test_work_that_keeps_its_place_goes_on_when_its_peer_has_gone(endpoint: str) -> None:
    with long_work(endpoint) as (server, mouse, work):
        assert server.receive(PATIENCE_MS)
        departed = server._taken
        mouse.close()
        wait_until(lambda: departed.has_departed)
        server.put_back(server.begun, keeps_place=True)
        assert server.receive(PATIENCE_MS)
        resume(server.begun)
        assert work.turns == 2


def test_a_server_that_closes_refuses_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "LINGER_MS", 60_000)  # a busy machine sends the reply late
    with long_work(TCP) as (server, mouse, work):
        server.close()
        assert take_error(mouse) == (1, "busy")
        assert work.is_closed
