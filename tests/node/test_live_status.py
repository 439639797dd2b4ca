"""Status and description of a node whose step takes long, whose camera jumps, or whose clients flood it."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sam3_node.errors import RequestError, Sam3NodeError
from sam3_node.node import node as node_module
from sam3_node.node import output
from sam3_node.node.node import Node
from sam3_node.perception.pipeline import Pipeline
from sam3_node.processes.notify import Watchdog
from sam3_node.schema.fields import MAX_INT
from sam3_node.settings import Settings
from sam3_node.transport import ControlClient
from sam3_node.transport.tap import StreamTap
from sam3_node.types import Mask
from sam3_node.wire import EVENTS_TOPIC, Request, codec, encode_mask, unpack_event
from tests.support.near_node import NearNode, held_step
from tests.support.node_rig import picture, until
from tests.support.patience import PATIENCE_MS
from tests.support.refuses import refuses
from tests.support.threads import in_thread


class CountingWatchdog(Watchdog):
    """A watchdog that counts the turns of the loop."""

    turns = 0

    def tick(self) -> None:
        self.turns += 1


class Served(NearNode):
    """A node whose watchdog counts."""

    def __init__(self, folder: Path) -> None:
        self.watchdog = CountingWatchdog()
        super().__init__(folder, watchdog=self.watchdog)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("served")) as served:
        yield served


def test_status_and_description_do_not_wait_for_a_step(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.send()

    def find_idle() -> dict[str, Any] | None:
        status = served.status()
        return None if status["stepping"] else status

    # the masks of a frame arrive before its step has ended
    idle = until(find_idle, "the end of the step")
    with held_step(lambda: served.camera.send(picture(0)), monkeypatch):
        busy = served.status()
        description = served.client.call("describe")
        assert (idle["stepping"], busy["stepping"]) == (False, True)
        assert busy["uptime_s"] >= idle["uptime_s"]
        assert busy["cameras"]["cam1"]["stepped"] == idle["cameras"]["cam1"]["stepped"]
        assert description["cameras"]["cam1"]["objects"] == 0
        with ControlClient(served.control, timeout_ms=100) as other, pytest.raises(Sam3NodeError):
            other.call("list_objects")  # the other requests still wait for the step
    until(lambda: served.status()["cameras"]["cam1"]["stepped"] > idle["cameras"]["cam1"]["stepped"], "it")


def test_the_loop_reports_its_turns_without_frames_and_while_paused(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    for op in ("pause", "resume"):
        served.client.call(op)
        before = served.watchdog.turns
        until(lambda: served.watchdog.turns > before + 2, "turns")  # noqa: B023
    with held_step(lambda: served.camera.send(picture(0)), monkeypatch):
        during = served.watchdog.turns
        served.status()
        assert served.watchdog.turns == during


def test_a_description_is_the_outcome_of_the_events_that_it_counts(served: Served) -> None:
    served.send()
    events: list[str] = []
    described: list[tuple[int, bool]] = []

    def describe(done: threading.Event) -> None:
        with ControlClient(served.control, timeout_ms=PATIENCE_MS) as client:
            while not done.is_set():
                found = client.call("describe")
                described.append((found["events"], found["paused"]))

    with StreamTap([served.frames], served.masks_at, (), 1 << 20) as tap:

        def take_events() -> bool:
            while (message := tap.take(0)) is not None:
                if message.parts[0] == EVENTS_TOPIC:
                    events.append(unpack_event(message.parts).op)
            return bool(events)

        until(lambda: served.client.call("reset") is not None and take_events(), "events")
        with in_thread(describe):
            for _ in range(100):
                served.client.call("pause")
                served.client.call("resume")
        first = served.client.call("describe")["events"] - 200
    until(lambda: len(described) > 1, "descriptions")
    for count, paused in described:
        if count >= first:
            assert paused == ((count - first) % 2 == 1), "pause and resume follow one another"


def test_jumps_of_seq_leave_the_counts_small(served: Served) -> None:
    served.send()
    before = served.status()["cameras"]["cam1"]["skipped"]
    for seq in (MAX_INT, 0, MAX_INT, 0, MAX_INT - 1, 0, 10):
        masks = served.send(seq)
        assert masks.skipped in (0, 9)
    assert served.status()["cameras"]["cam1"]["skipped"] < before + 1000
    assert served.client.call("describe")["cameras"]["cam1"]["skipped"] < before + 1000


def test_counts_stop_at_the_largest_integer_of_a_message(served: Served) -> None:
    served.send()
    served.node.output.stats["cam1"].skipped = MAX_INT - 1
    served.send()
    served.node.output.stats["cam1"].begin(picture(0), 0, MAX_INT)
    assert served.status()["cameras"]["cam1"]["skipped"] == MAX_INT
    assert served.status()["cameras"]["cam1"]["received"] == MAX_INT
    served.node.output.stats["cam1"].skipped = 0


def test_a_mask_of_another_size_is_refused_before_it_is_decoded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("decoded")

    large = np.zeros((16384, 16384), np.bool_)
    large[::2000, ::2000] = large[-1, -1] = True
    masks = [encode_mask(Mask.from_full(large), encoding) for encoding in ("bits+zstd", "rle")]
    served.send()  # now: prompts on an old frame are refused for its age
    with monkeypatch.context() as patch:
        patch.setattr(codec, "decompress", fail)
        patch.setattr("sam3_node.wire.masks.decode", fail)
        for mask in masks:
            for op in ("add_object", "segment"):
                with refuses(RequestError, field=("mask", "48", "64")):
                    served.client.call(op, mask=mask)


def test_an_error_with_bytes_of_a_path_is_shown(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("file \udcff" + "x" * 10_000)

    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "step", fail)
        patch.setattr(output.log, "disabled", True)  # parallel test processes cannot send such a log
        until(lambda: served.camera.send(picture(0)) and served.status()["cameras"]["cam1"]["failed"], "it")
    shown = served.status()["cameras"]["cam1"]["last_error"]
    assert shown.startswith("RuntimeError: file \\udcffxxx")
    assert len(shown) < 300
    served.send()


@pytest.mark.parametrize("label", ["mug\x1b[2J", "mug\u202egum", "a\x00b", "\u2066x"])
def test_labels_that_control_a_terminal_are_refused(served: Served, label: str) -> None:
    served.send()
    with refuses(RequestError, field="label"):
        served.client.call("add_object", points=[[5, 5]], label=label)
    assert not served.client.call("list_objects")["objects"]


def test_a_label_is_cleaned_and_a_blank_one_is_the_default(served: Served) -> None:
    served.send()
    for label in ("  red \n mug ", " "):
        served.client.call("add_object", points=[[5, 5]], label=label)
    objects = served.client.call("list_objects")["objects"]
    assert [found["label"] for found in objects] == ["red mug", "object"]
    served.client.call("reset")


class Requests:
    """A control server of which each request takes the same time, on a clock that only requests move."""

    def __init__(self, took_s: float, waiting: int) -> None:
        self.now_s = 1000.0
        self.took_s = took_s
        self.waiting = waiting
        self.replies = 0
        self.begun = None

    def receive(self, timeout_ms: int = 0) -> tuple[tuple[bytes, ...], Request] | None:
        self.waiting -= 1
        return ((b"peer",), Request(1, "list_objects")) if self.waiting >= 0 else None

    def reply(self, peer: object, reply: object) -> None:
        self.now_s += self.took_s
        self.replies += 1

    def monotonic(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("took_s", "budget_s", "waiting", "expected"),
    [(0.1, 0.45, 99, 4), (0.3, 0.45, 99, 1), (9.0, 0.45, 99, 1), (1e-9, 0.01, 20, 20), (0.1, 0.45, 2, 2)],
)
def test_requests_take_at_most_half_a_step_or_one_request(
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    took_s: float,
    budget_s: float,
    waiting: int,
    expected: int,
) -> None:
    node = Node(Settings())
    requests = Requests(took_s, waiting)
    monkeypatch.setattr(node_module.time, "monotonic", requests.monotonic)
    node._control = requests  # type: ignore[assignment]
    node._request_budget_s = budget_s
    node.perception = served.node.perception
    node._answer_requests()
    assert requests.replies == expected
