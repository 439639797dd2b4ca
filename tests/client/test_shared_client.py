"""One client, many threads: looking, taking, callbacks and waiting, with a real publisher."""

import logging
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sam3_node import client as api
from sam3_node.client import PerceptionClient
from sam3_node.errors import AmbiguousError, NodeRestarted, NotSeenError, RequestError, TransportError
from sam3_node.schema.operations import Pause
from sam3_node.transport import MaskPublisher
from sam3_node.transport.control_server import ControlServer
from sam3_node.types import MaskFrame
from sam3_node.wire import Reply, Request
from tests.client.test_perception_client import node
from tests.support.node_rig import until
from tests.support.patience import PATIENCE_MS, PATIENCE_S
from tests.support.refuses import mentions, refuses
from tests.support.transport_peer import NOBODY, TCP, make_masks, wait_until


@pytest.fixture
def publisher() -> Iterator[MaskPublisher]:
    with MaskPublisher(TCP) as publisher:
        yield publisher


@pytest.fixture
def client(publisher: MaskPublisher) -> Iterator[PerceptionClient]:
    with PerceptionClient(publisher.endpoint, NOBODY, timeout_ms=100) as client:
        yield client


def masks_of(seq: int, camera: str = "cam0", epoch: int | None = 1, **changes: Any) -> MaskFrame:
    """Return masks of one cup, changed."""
    masks = make_masks(seq, camera, epoch=epoch, prompts=("cup",))
    return replace(masks, instances=(replace(masks.instances[0], **changes),))


def send_until(publisher: MaskPublisher, masks: MaskFrame, condition: Any) -> None:
    """Publish masks until they have had an effect: what is sent before the client has joined is lost."""
    wait_until(lambda: publisher.send(masks) and condition())


def test_the_newest_are_looked_at_without_waiting_and_stay(
    publisher: MaskPublisher, client: PerceptionClient
) -> None:
    assert client.newest() is None
    send_until(publisher, masks_of(1), lambda: client.newest("cam0"))
    send_until(publisher, masks_of(2, "left"), lambda: client.newest("left"))
    assert client.newest("other") is None
    found = client.newest("cam0")
    assert found is client.newest("cam0")  # nothing takes them
    assert client.latest(PATIENCE_MS) is not None  # nor do they take anything
    last = client.newest()
    assert (found.seq, last.camera, last.seq) == (1, "left", 2)
    send_until(publisher, masks_of(3), lambda: getattr(client.newest("cam0"), "seq", 0) == 3)


def test_age_epoch_and_doubt_are_values() -> None:
    doubtful = masks_of(1, confidence=0.25, doubtful=True)
    with node(lambda request: {"objects": [line, line | {"id": 8}]}) as (masks, client, _):
        line = {"id": 7, "camera": "cam0", "label": "cup", "state": "tracked", "score": 0.5, "epoch": 1}
        line |= {"age": 3, "frames_since_seen": 0}
        send_until(masks, doubtful, client.newest)
        seen = client.newest()
        assert 0 <= seen.age_ms < PATIENCE_MS
        assert not seen.is_stale(PATIENCE_MS)
        until(lambda: seen.is_stale(10), "staleness")
        assert (seen.epoch, seen.instances[0].confidence, seen.instances[0].doubtful) == (1, 0.25, True)
        cup, other = client.list_objects()
        assert (cup.confidence, cup.doubtful, cup.epoch) == (0.25, True, 1)
        assert (other.confidence, other.doubtful) == (None, False)


def test_a_restart_is_raised_by_looking_too(publisher: MaskPublisher, client: PerceptionClient) -> None:
    send_until(publisher, masks_of(1), client.newest)

    def restarted() -> bool:
        try:
            client.newest()
        except NodeRestarted as error:
            return (error.old_epoch, error.new_epoch) == (1, 2)
        return False

    send_until(publisher, masks_of(2, epoch=2), restarted)
    assert client.newest().epoch == 2


def test_callbacks_run_in_one_thread_and_survive_what_they_raise(
    publisher: MaskPublisher, client: PerceptionClient, caplog: pytest.LogCaptureFixture
) -> None:
    threads: set[str] = set()
    seen: list[int] = []
    told: list[BaseException] = []

    def fail(masks: MaskFrame) -> None:
        threads.add(threading.current_thread().name)
        if masks.seq == 1:
            raise ZeroDivisionError("of a callback")
        if masks.seq == 2:
            sys.exit()

    with caplog.at_level(logging.ERROR):
        client.on_masks(fail)
        client.on_masks(fail, on_error=told.append)
        client.on_masks(lambda masks: seen.append(masks.seq), lambda error: 1 / 0)
        for seq in (1, 2, 3):
            send_until(publisher, masks_of(seq), lambda seq=seq: seq in seen)
        assert {type(error) for error in told} == {ZeroDivisionError, SystemExit}
        assert mentions(caplog.text, "ZeroDivisionError")
        assert "Traceback" in caplog.text
        send_until(publisher, masks_of(4, epoch=2), lambda: 4 in seen)  # the other on_error has raised
    assert any(isinstance(error, NodeRestarted) for error in told)
    assert threads == {"sam3-node callbacks"}
    for take in (lambda: client.latest(0), lambda: next(iter(client))):
        with refuses(TransportError, field="callbacks"):
            take()
    assert client.newest() is not None


@pytest.mark.parametrize("error", [TransportError("refused"), ValueError("wrong")])
def test_callbacks_survive_what_on_restart_raises(publisher: MaskPublisher, error: Exception) -> None:
    def fail(restart: NodeRestarted) -> None:
        raise error

    told: list[BaseException] = []
    seen: list[int] = []
    with PerceptionClient(publisher.endpoint, NOBODY, on_restart=fail) as client:
        client.on_masks(lambda masks: seen.append(masks.seq), told.append)
        send_until(publisher, masks_of(1), lambda: 1 in seen)
        send_until(publisher, masks_of(2, epoch=2), lambda: 2 in seen)
    assert told == [error]


def test_no_callback_runs_after_close_and_a_callback_may_close(publisher: MaskPublisher) -> None:
    client = PerceptionClient(publisher.endpoint, NOBODY)
    begun = threading.Event()
    go_on = threading.Event()
    ended = threading.Event()

    def slow(masks: MaskFrame) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        ended.set()

    client.on_masks(slow)
    send_until(publisher, masks_of(1), begun.is_set)
    threading.Timer(0.05, go_on.set).start()
    client.close()
    assert ended.is_set()
    with refuses(TransportError, field=("client", "closed")):
        client.on_masks(slow)
    closing = PerceptionClient(publisher.endpoint, NOBODY)
    closing.on_masks(lambda masks: closing.close())
    send_until(publisher, masks_of(2), lambda: closing.closed)
    closing.close()


def test_lossless_delivery_calls_back_with_every_frame(tmp_path: Path) -> None:
    seen: list[int] = []
    endpoint = f"ipc://{tmp_path}/masks"
    with (
        MaskPublisher(endpoint, "every") as publisher,
        PerceptionClient(endpoint, NOBODY, delivery="every") as client,
    ):
        client.on_masks(lambda masks: seen.append(masks.seq))
        for seq in range(30):
            assert publisher.send(masks_of(seq), PATIENCE_MS)
        wait_until(lambda: len(seen) == 30)
        assert seen == list(range(30))
        for look in (client.newest, lambda: client.wait_for("cup", 0)):
            with refuses(TransportError, field="newest"):
                look()


def test_threads_share_a_client(publisher: MaskPublisher) -> None:
    """Each message goes to one thread, and each thread gets its own answers."""
    taken: list[list[int]] = [[] for _ in range(4)]
    sums: list[int] = []
    stop = threading.Event()

    def answer(request: Request) -> Reply:
        return Reply(request.id, {"seq": request.args["seq"], "score": 0.5, "mask": mask})

    mask = {"encoding": "rle", "size": [2, 2], "box": [0, 0, 0, 0], "data": b"4"}

    def take(mine: list[int]) -> None:
        while not stop.is_set():
            if (masks := client.latest(20)) is not None:
                mine.append(masks.seq)
                assert masks.instances[0].mask.crop.any()
                assert client.newest() is not None

    def ask(first: int) -> None:
        for seq in range(first, first + 40):
            assert client.segment(points=[(1, 1)], seq=seq).seq == seq
            sums.append(seq)

    with (
        ControlServer(TCP, answer) as control,
        PerceptionClient(publisher.endpoint, control.endpoint, timeout_ms=PATIENCE_MS) as client,
        ThreadPoolExecutor(8) as threads,
    ):
        work = [threads.submit(take, mine) for mine in taken] + [
            threads.submit(ask, 100 * n) for n in range(4)
        ]
        for seq in range(200):
            publisher.send(masks_of(seq))
        send_until(publisher, masks_of(999), lambda: any(999 in mine for mine in taken))
        while not control.receive(0) and len(sums) < 160:
            pass
        stop.set()
        for job in work:
            job.result(60)
    all_seqs = [seq for mine in taken for seq in mine if seq != 999]
    assert len(set(all_seqs)) == len(all_seqs)  # none twice
    assert all(mine == sorted(mine) for mine in taken)  # in order


def test_waiting_for_an_object_ends_when_it_is_tracked(
    publisher: MaskPublisher, client: PerceptionClient
) -> None:
    send_until(publisher, masks_of(1, state="tentative"), client.newest)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(client.wait_for, "Cup", PATIENCE_MS)
        publisher.send(masks_of(2, state="occluded"))
        send_until(publisher, masks_of(3), waiting.done)
        found = waiting.result()
    assert (found.masks.seq, found.instance.id, found.instance.state) == (3, 7, "tracked")
    assert client.latest(PATIENCE_MS) is not None  # they were not taken


def test_more_objects_than_were_asked_for_are_refused(
    publisher: MaskPublisher, client: PerceptionClient
) -> None:
    one = masks_of(1)
    other = replace(one.instances[0], id=9, score=0.99, name_confidence=0.6)
    both = replace(one, seq=2, instances=(*one.instances, other))
    send_until(publisher, one, client.newest)
    assert client.wait_for("cup", PATIENCE_MS, most=1).instance.id == 7
    send_until(publisher, both, lambda: getattr(client.newest(), "seq", 0) == 2)
    with refuses(AmbiguousError, field=("1", "cup", "7", "9")):
        client.wait_for("cup", PATIENCE_MS, most=1)
    assert client.wait_for("cup", PATIENCE_MS, most=2).instance.id == 9
    assert client.wait_for("cup", PATIENCE_MS).instance.id == 9
    doubtful = replace(both, seq=3, instances=(one.instances[0], replace(other, doubtful=True)))
    with PerceptionClient(publisher.endpoint, NOBODY, timeout_ms=100, sure_only=True) as sure:
        send_until(publisher, doubtful, sure.newest)
        assert sure.wait_for("cup", PATIENCE_MS, most=1).instance.id == 7
    for most in (0, True):
        with refuses(RequestError, field="most"):
            client.wait_for("cup", 0, most=most)


def test_waiting_for_a_held_object_ends_when_it_is_held(
    publisher: MaskPublisher, client: PerceptionClient
) -> None:
    send_until(publisher, masks_of(1), client.newest)
    with refuses(NotSeenError, field=("object 7", "not held", "7 cup (tracked)", "spatial.poses")):
        client.wait_for_held(7, 0)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(client.wait_for_held, 7, PATIENCE_MS)
        send_until(publisher, masks_of(2, state="occluded", held=True), waiting.done)
        assert waiting.result().masks.seq == 2


def test_waiting_until_an_object_is_seen_ends_with_a_sure_mask(
    publisher: MaskPublisher, client: PerceptionClient
) -> None:
    send_until(publisher, masks_of(1, doubtful=True, confidence=0.1), client.newest)
    for target, said in ((7, "object 7 was not seen"), ("Cup", "no object 'Cup' was seen")):
        with refuses(NotSeenError, field=(said, "doubtful")):
            client.wait_until_seen(target, 0)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(client.wait_until_seen, target, PATIENCE_MS) for target in (7, "Cup")]
        send_until(publisher, masks_of(2), lambda: all(each.done() for each in waiting))
        assert [each.result().instance.id for each in waiting] == [7, 7]


def not_seen(publisher: MaskPublisher, client: PerceptionClient, label: str) -> str:
    """Return what the client says of a label that no masks have, while they are sent."""
    said: list[str] = []

    def look() -> bool:
        try:
            client.wait_for(label, 0)
        except NotSeenError as error:
            said.append(str(error))
        except TransportError:  # the last masks are too old, on a machine that is busy
            pass
        return bool(said)

    send_until(publisher, masks_of(1, doubtful=True, confidence=0.1), look)
    return said[0]


def test_waiting_in_vain_says_what_was_seen(publisher: MaskPublisher) -> None:
    with PerceptionClient(publisher.endpoint, NOBODY, timeout_ms=100, sure_only=True) as client:
        wait_until(lambda: client.connected)
        with refuses(TransportError, field=("50", "answers")):
            client.wait_for("cup", 50)
        said = not_seen(publisher, client, "cups")
        assert said.startswith(
            "no object 'cups' was tracked within 0 ms: the newest masks of cam0 have cup ("
        )
        assert mentions(said, "cup (tracked, doubtful)", "set_prompts")
        assert not_seen(publisher, client, "cup").startswith("no object 'cup'")
        with refuses(TransportError, field=("masks", "came")):
            client.wait_for("cup", 0, camera="left")
        threading.Timer(0.05, client.close).start()
        with refuses(TransportError, field="cup"):
            client.wait_for("cup", None)


def test_a_closed_client_raises_in_every_method(publisher: MaskPublisher) -> None:
    client = PerceptionClient(publisher.endpoint, NOBODY, timeout_ms=100)
    send_until(publisher, masks_of(1), client.newest)
    begun = iter(client)
    with ThreadPoolExecutor(1) as thread:
        assert next(begun).seq == 1
        while client.latest(50) is not None:
            pass
        waiting = thread.submit(client.latest)
        threading.Timer(0.05, client.close).start()
        assert waiting.result(60) is None  # it was closed meanwhile
    assert list(begun) == []
    arguments: dict[str, tuple[Any, ...]] = {"rename_object": (1, "cup"), "on_masks": (print,)}
    arguments |= {"add_exemplar": ("cup", [(0, 0, 9, 9)]), "ask": (Pause(),)}
    numbered = ("refine_object", "remove_object", "points", "grasps", "pin_frame", "wait_for_held", "picture")
    arguments |= dict.fromkeys(numbered, (1,))
    arguments |= dict.fromkeys(("wait_for", "wait_until_seen", "snapshot", "restore"), ("cup",))
    arguments |= dict.fromkeys(("latest_of_all", "set_prompts"), (["cup"],))
    methods = {name for name in dir(client) if not name.startswith("_")} - {"close", "closed", "connected"}
    for name in sorted(methods):
        keywords = {"points": [(1, 1)]} if name in ("add_object", "segment", "refine_object") else {}
        if name == "segment_photo":
            keywords = {"photo": b"JPEG", "names": ["cup"]}
        with refuses(TransportError, field=("client", "closed")):
            getattr(client, name)(*arguments.get(name, ()), **keywords)
    with refuses(TransportError, field=("client", "closed")):
        iter(client)
    assert client.closed
    assert not client.connected
    client.close()


def test_a_node_that_was_away_is_not_noticed(tmp_path: Path) -> None:
    """It continues its ids, as one with a snapshot does."""
    endpoints = f"ipc://{tmp_path}/masks", f"ipc://{tmp_path}/control"
    seen: list[int] = []
    with PerceptionClient(*endpoints, timeout_ms=PATIENCE_MS) as client:
        client.on_masks(lambda masks: seen.append(masks.seq))
        for seq in (1, 2):
            with (
                MaskPublisher(endpoints[0]) as publisher,
                ControlServer(endpoints[1], lambda request: Reply(request.id, {"paused": False})),
            ):
                send_until(publisher, masks_of(seq), lambda seq=seq: seq in seen)
                assert client.status() == {"paused": False}
                found = client.wait_for("cup", PATIENCE_MS)
                assert found.masks.seq == seq
            wait_until(lambda: not client.connected)


def test_a_request_may_name_the_epoch_of_its_id(publisher: MaskPublisher) -> None:
    with node(lambda request: {}) as (masks, client, requests):
        send_until(masks, masks_of(1, epoch=2), client.newest)
        client.remove_object(7)
        client.remove_object(7, epoch=1)  # of a thread that has not heard of the restart
        assert [request.args["epoch"] for request in requests] == [2, 1]
        assert requests[1].args["camera"] == "cam0"


def test_masks_are_decoded_when_their_pixels_are_used(
    publisher: MaskPublisher, client: PerceptionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sam3_node.wire import codec

    decoded: list[int] = []
    decompress = codec.decompress
    monkeypatch.setattr(codec, "decompress", lambda *args: decoded.append(args[1]) or decompress(*args))
    send_until(publisher, masks_of(1), client.newest)
    (instance,) = client.latest(PATIENCE_MS).instances
    mask = instance.mask
    truth = make_masks(1).instances[0].mask
    assert (mask.box, mask.area, instance.box) == (truth.box, truth.area, truth.box)
    assert decoded == []
    assert (mask.full() == truth.full()).all()
    assert (mask.crop == truth.crop).all()
    assert decoded == [(truth.crop.size + 7) // 8]  # once


def test_the_public_names_are_there() -> None:
    assert all(getattr(api, name) for name in api.__all__)
    with refuses(AttributeError, field="absent"):
        _ = api.absent


MS = 1_000_000


def masks(camera: str, seq: int, capture_ms: int, epoch: int = 1) -> MaskFrame:
    return MaskFrame(camera, seq, capture_ms * MS, 8, 8, epoch=epoch)


def test_the_newest_masks_of_all_cameras_and_their_spread(tmp_path: Path) -> None:
    at = f"ipc://{tmp_path}/m"
    with MaskPublisher(at) as node, PerceptionClient(at, f"ipc://{tmp_path}/c") as client:
        while client.latest(50) is None:
            node.send(masks("other", 0, 0))
        node.send(masks("left", 1, 100))
        assert client.latest_of_all(["left", "right"], timeout_ms=50) is None
        node.send(masks("right", 1, 130))
        found = client.latest_of_all(["left", "right"], PATIENCE_MS)
        assert [item.seq for item in found.masks.values()] == [1, 1]
        assert found.spread_ms == 30
        node.send(masks("right", 2, 230))
        assert client.latest_of_all(["left", "right"], 200, max_spread_ms=50) is None
        node.send(masks("left", 2, 220))
        found = client.latest_of_all(["left", "right"], PATIENCE_MS, max_spread_ms=50)
        assert ([item.seq for item in found.masks.values()], found.spread_ms) == ([2, 2], 10)


def test_masks_from_before_a_restart_are_forgotten(tmp_path: Path) -> None:
    at = f"ipc://{tmp_path}/m"
    with MaskPublisher(at) as node, PerceptionClient(at, f"ipc://{tmp_path}/c") as client:
        found = None
        while found is None:
            for camera in ("left", "right"):
                node.send(masks(camera, 0, 0))
            found = client.latest_of_all(["left", "right"], 50)
        while client.latest(100) is not None:
            pass
        node.send(masks("left", 0, 10, epoch=2))
        with pytest.raises(NodeRestarted):
            client.latest_of_all(["left", "right"], PATIENCE_MS)
        assert client.latest_of_all(["left", "right"], 100) is None
