"""Tests of the queue of requests: peers take turns, and the queue is bounded for each peer and in all."""

from __future__ import annotations

import select

from sam3_node.transport import control_server
from sam3_node.transport.control_server import (
    MAX_REQUESTS_PER_PEER,
    MAX_WAITING_BYTES,
    RequestQueue,
    WaitingRequest,
)


def request(peer: str, number: int, size: int = 10) -> WaitingRequest:
    return WaitingRequest((peer.encode(),), number, b"", size + control_server.OVERHEAD_BYTES, 0.0)


def numbers(queue: RequestQueue) -> list[int]:
    taken = []
    while (waiting := queue.take(0)) is not None:
        taken.append(waiting.id)
    return taken


def is_readable(queue: RequestQueue) -> bool:
    return bool(select.select([queue], [], [], 0)[0])


def test_peers_take_turns_however_many_requests_they_have() -> None:
    queue = RequestQueue()
    for number in range(4):
        assert not queue.put(request("flood", number))
    for number in (10, 11):
        assert not queue.put(request("policy", number))
    assert is_readable(queue)
    assert numbers(queue) == [0, 10, 1, 11, 2, 3]
    assert not is_readable(queue)
    queue.close()


def test_a_peer_with_a_full_line_is_refused_and_others_are_not() -> None:
    queue = RequestQueue()
    for number in range(MAX_REQUESTS_PER_PEER):
        assert not queue.put(request("flood", number))
    refused = request("flood", 99)
    assert queue.put(refused) == [refused]
    assert not queue.put(request("policy", 100))
    assert queue.take(0) == request("flood", 0)
    assert not queue.put(refused)
    queue.close()


def test_large_requests_give_way_to_those_of_other_peers() -> None:
    queue, large = RequestQueue(), MAX_WAITING_BYTES // 3 - control_server.OVERHEAD_BYTES
    for number in range(3):
        assert not queue.put(request("flood", number, large))
    assert [refused.id for refused in queue.put(request("flood", 3, large))] == [3]
    assert [displaced.id for displaced in queue.put(request("policy", 10, 1000))] == [2]
    assert [refused.id for refused in queue.put(request("policy", 11, MAX_WAITING_BYTES))] == [11]
    assert numbers(queue) == [0, 10, 1]
    largest = MAX_WAITING_BYTES - control_server.OVERHEAD_BYTES
    assert not queue.put(request("policy", 12, largest))
    assert numbers(queue) == [12]
    queue.close()


def test_a_large_request_counts_while_it_is_carried_out() -> None:
    queue, large = RequestQueue(), request("flood", 1, MAX_WAITING_BYTES - 2 * control_server.OVERHEAD_BYTES)
    assert not queue.put(large)
    assert queue.take(0) == large
    assert queue.put(large) == [large]
    assert not queue.put(request("policy", 10, 0))
    assert queue.take(0) == request("policy", 10, 0)
    assert not queue.put(large._replace(cost=large.cost - 1024))
    queue.close()


def pointer(peer: str, number: int, size: int = 10, key: str = "cam0") -> WaitingRequest:
    return request(peer, number, size)._replace(supersede_key=key)


def test_a_newer_request_supersedes_the_older_one_of_its_peer_and_key() -> None:
    queue = RequestQueue()
    for first in (
        pointer("mouse", 0),
        request("mouse", 1),
        pointer("mouse", 2, key="cam1"),
        pointer("other", 10),
    ):
        assert not queue.put(first)
    assert queue.put(pointer("mouse", 3)) == [pointer("mouse", 0)]
    assert queue.put(pointer("mouse", 4)) == [pointer("mouse", 3)]
    assert numbers(queue) == [1, 10, 2, 4]
    assert not queue.put(pointer("mouse", 5))  # the older ones have begun
    assert is_readable(queue)
    queue.close()


def test_a_peer_that_supersedes_its_requests_keeps_its_turn_and_its_place() -> None:
    queue = RequestQueue()
    assert not queue.put(pointer("mouse", 0))
    for number in range(1, 40):
        assert len(queue.put(pointer("mouse", number))) == 1
        queue.put(request("other", 100 + number))
    assert numbers(queue)[:2] == [39, 101]
    for number in range(MAX_REQUESTS_PER_PEER - 1):
        assert not queue.put(request("mouse", number))
    assert not queue.put(pointer("mouse", 50))
    assert queue.put(pointer("mouse", 51)) == [pointer("mouse", 50)]
    queue.close()


def test_a_superseded_request_no_longer_counts() -> None:
    queue, half = RequestQueue(), MAX_WAITING_BYTES // 2
    for number in range(8):
        assert len(queue.put(pointer("mouse", number, half))) == (number > 0)
    largest = request("other", 10, MAX_WAITING_BYTES - half - 2 * control_server.OVERHEAD_BYTES)
    assert not queue.put(largest)
    too_large = pointer("mouse", 9, half + 1)
    assert queue.put(too_large) == [too_large]  # the older one stays
    assert numbers(queue) == [7, 10]
    queue.close()


def test_a_request_that_is_put_back_waits_behind_those_of_its_peer_and_of_others() -> None:
    queue = RequestQueue()
    for number in (0, 1):
        assert not queue.put(request("long", number))
    taken = queue.take(0)
    assert taken is not None
    assert not queue.put(request("policy", 10))
    assert queue.put_back(taken)
    assert numbers(queue) == [1, 10, 0]
    assert not is_readable(queue)
    queue.close()


def test_a_request_that_is_put_back_is_superseded_as_others_are() -> None:
    queue = RequestQueue()
    assert not queue.put(pointer("mouse", 1))
    older = queue.take(0)
    assert older is not None
    assert queue.put_back(older)
    assert queue.put(pointer("mouse", 2)) == [older]
    older = queue.take(0)
    assert older is not None
    assert not queue.put(pointer("mouse", 3))
    assert not queue.put_back(older)
    assert queue.clear() == [pointer("mouse", 3)]
    assert not is_readable(queue)
    queue.close()
