"""Long requests between the frames: `segment_everything` is carried out in turns, and masks are published meanwhile."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from sam3_node.errors import BusyError, SupersededError
from sam3_node.node import node as node_module
from sam3_node.perception import output_masks
from sam3_node.perception.pipeline import Pipeline
from sam3_node.perception.prompting import Prompting
from sam3_node.resumable import Resumable
from sam3_node.tracking import everything
from sam3_node.transport import ControlClient, control_server
from sam3_node.wire import Request, pack_request, unpack_reply
from tests.support.near_node import NearNode
from tests.support.node_rig import picture, until
from tests.support.patience import PATIENCE_MS
from tests.support.refuses import refuses
from tests.support.transport_peer import open_peer, take_error

# random weights are sure of nothing
ALL = {"min_iou": 0.0, "min_stability": 0.0, "max_overlap": 1.0, "most": 256}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NearNode]:
    with NearNode(tmp_path_factory.mktemp("served")) as served:
        served.send()
        yield served


def ask(served: NearNode, **args: Any) -> Future[Any]:
    """Ask for everything on a connection of its own."""

    def call() -> Any:
        with ControlClient(served.control, PATIENCE_MS) as client:
            return client.call("segment_everything", **args)

    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future


def test_a_frame_is_stepped_between_any_two_turns(served: NearNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame is sent, and has arrived, before each turn ends; requests have no time beyond one turn."""
    order: list[str] = []
    step = Pipeline.step
    send = served.send

    def wait_for_frame() -> None:
        order.append("turn")
        arrived = zmq.Poller()
        arrived.register(served.node.cameras.frames.wakeup, zmq.POLLIN)
        until(lambda: served.camera.send(picture(1)) and arrived.poll(100), "a frame")

    def after_a_frame(work: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_work(*args: Any) -> Any:
            wait_for_frame()
            return work(*args)

        return wait_and_work

    def count_step(*args: Any) -> Any:
        order.append("step")
        return step(*args)

    monkeypatch.setattr(node_module, "STEP_SHARE_OF_REQUESTS", 0.0)
    send()  # the budget is what the last step left
    for module, name in ((everything, "_decode"), (output_masks, "to_prompt_results")):
        monkeypatch.setattr(module, name, after_a_frame(getattr(module, name)))
    monkeypatch.setattr(Pipeline, "step", count_step)
    masks = ask(served, grid=7, **ALL).result(300)["masks"]
    turns = [place for place, what in enumerate(order) if what == "turn"]
    assert len(turns) >= 4 + len(masks) // 8
    assert all("step" in order[begin:end] for begin, end in itertools.pairwise(turns))


class Held:
    """Searches that do turn after turn until the test lets them end."""

    def __init__(self) -> None:
        self.begun = []
        self.ended = 0
        self.go = threading.Event()

    @contextmanager
    def under_way(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
        search = Prompting.find_everything

        def wait(queries: Prompting, *args: Any) -> Resumable[Any]:
            self.begun.append(queries.camera)
            try:
                while not self.go.is_set():
                    yield
                return (yield from search(queries, *args))
            finally:
                self.ended += 1

        with monkeypatch.context() as patch:
            patch.setattr(Prompting, "find_everything", wait)
            yield self
            self.go.set()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    with Held().under_way(monkeypatch) as held:
        yield held


def test_masks_and_requests_go_on_meanwhile(served: NearNode, held: Held) -> None:
    reply = ask(served, grid=3, **ALL)
    until(lambda: held.begun, "the search begins")
    for seq in (5000, 5001):
        served.send(seq)
    added = served.client.call("add_object", points=[[30, 20]], seq=5001)
    served.client.call("reset")
    assert served.client.call("list_objects") == {"objects": []}
    assert added["id"]
    assert not reply.done()
    held.go.set()
    assert reply.result(300)["masks"]


def test_while_paused(served: NearNode, held: Held) -> None:
    served.client.call("pause")
    reply = ask(served, grid=3, **ALL)
    until(lambda: held.begun, "the search begins")
    held.go.set()
    assert reply.result(300)["masks"]
    served.client.call("resume")
    served.send()


def test_a_second_search_waits_for_the_first_and_goes_on_if_its_peer_departs(
    served: NearNode, held: Held
) -> None:
    with open_peer(zmq.DEALER, served.control) as first:
        first.send(pack_request(Request(1, "segment_everything", {"camera": "cam1"})))
        until(lambda: held.begun, "the first search begins")
        second = ask(served, grid=3, **ALL)
        third = ask(served, grid=99)
        with refuses(Exception, field=("grid", "1", "32")):  # an error need not wait
            third.result(300)
        served.send()
        assert len(held.begun) == 1
    until(lambda: held.ended == 1 and len(held.begun) == 2, "the search of the peer that has gone ends")
    held.go.set()
    assert second.result(300)["masks"]
    assert not served.node.perception.searching


def test_a_newer_search_of_the_same_peer_supersedes_it(served: NearNode, held: Held) -> None:
    with open_peer(zmq.DEALER, served.control) as peer:
        peer.send(pack_request(Request(1, "segment_everything", {"camera": "cam1"})))
        until(lambda: held.begun, "the first search begins")
        peer.send(pack_request(Request(2, "segment_everything", {"camera": "cam1", "grid": 2, **ALL})))
        assert take_error(peer) == (1, SupersededError.code)
        until(lambda: len(held.begun) == 2, "the second search begins")
        assert held.ended == 1
        held.go.set()
        assert peer.poll(PATIENCE_MS)
        reply = unpack_reply(peer.recv())
        assert (reply.id, reply.error) == (2, None)


def test_a_node_that_stops_refuses_it(tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "LINGER_MS", PATIENCE_MS)  # a busy machine sends the reply late
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        with NearNode(tmp_path) as served:
            served.send()
            peer.connect(served.control)
            peer.send(pack_request(Request(1, "segment_everything", {"camera": "cam1"})))
            until(lambda: held.begun, "the search begins")
            served.client.close()
        assert peer.poll(PATIENCE_MS)
        error = unpack_reply(peer.recv()).error
    assert (error.code, error.message) == (BusyError.code, "not carried out: the node stops")
    assert held.ended == 1
