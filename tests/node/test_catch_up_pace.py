"""The pace of objects that catch up, in simulated time: how long frames wait for slices, and that objects arrive."""

import random
from collections.abc import Callable
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sam3_node.errors import CapacityError, UnknownFrameError
from sam3_node.node.cameras import CatchUpPace
from sam3_node.node.hand_over import HandOverState
from sam3_node.node.operations import MAX_PINNED, describe_change, handle_request
from sam3_node.perception.identity import LiveIdentity
from sam3_node.perception.perception import Perception
from sam3_node.schema.replies import MAX_STRIDE
from sam3_node.wire import Reply, Request
from tests.support.live import moving_frame, tiny_settings

MS = 1_000_000
INTERVAL_NS = 1000 * MS // 15
FRAMES = 22
"""that the prompts are old"""
PROMPT_EVERY = 60


class Way:
    """The way of at most one object through the frames of a camera."""

    def __init__(self) -> None:
        self.latest = 0
        self.stride = 1
        self.place: int | None = None
        self.own_stride = 1

    @property
    def behind(self) -> int:
        return 0 if self.place is None else ceil((self.latest - self.place) / self.own_stride)

    def get_stride(self) -> int | None:
        return None if self.place is None else self.own_stride

    def begin(self, frames: int = FRAMES) -> None:
        self.place = self.latest - frames
        self.own_stride = self.stride

    def advance(self) -> bool:
        self.place = min(self.latest, self.place + self.own_stride)
        arrived = self.place == self.latest
        self.place = None if arrived else self.place
        return arrived


class Loop:
    """The node's loop with a camera, with times that vary: mean and spread as measured on two cores."""

    def __init__(self, step_ms: float, slice_ms: float) -> None:
        self._random = random.Random(1)
        self._step_ms = step_ms
        self._slice_ms = slice_ms
        self.pace = CatchUpPace(live=True)
        self.way = Way()
        self.pipeline = SimpleNamespace(catch_ups=self.way)
        self.now_ns = 0
        self._taken = -1
        self._begun = 0
        self.ages_ms: list[float] = []
        self.arrivals: list[int] = []  # steps

    def run(self, steps: int, prompt: Callable[[int], bool]) -> None:
        for number in range(steps):
            if prompt(number) and self.way.place is None:
                self.way.begin()
                self._begun = number
            while not self._frame_waits() and self._may_slice():
                self._slice(number)
            self._step()
            while self._may_slice():
                self._slice(number)
                if not self.pace.is_due:
                    break

    def _frame_waits(self) -> bool:
        return self.now_ns // INTERVAL_NS > self._taken

    def _may_slice(self) -> bool:
        return self.pace.choose([self.pipeline], self.now_ns, self._frame_waits) is not None

    def _slice(self, number: int) -> None:
        took_ns = self._vary(self._slice_ms)
        self.now_ns += took_ns
        self.pace.note_slice(took_ns)
        if self.way.advance():
            self.arrivals.append(number - self._begun)

    def _step(self) -> None:
        self.now_ns = max(self.now_ns, (self._taken + 1) * INTERVAL_NS)
        newest = self.now_ns // INTERVAL_NS
        self.pace.note_frame("cam0", newest * INTERVAL_NS, newest - self._taken - 1)
        self._taken = newest
        self.now_ns += self._vary(self._step_ms)
        self.way.latest += 1
        self.ages_ms.append((self.now_ns - newest * INTERVAL_NS) / MS)
        self.pace.note_step(self.way, round(1.06 * self._step_ms * MS), self.now_ns)

    def _vary(self, mean_ms: float) -> int:
        return round((0.94 * mean_ms + self._random.expovariate(1 / (0.09 * mean_ms))) * MS)


def p99(ages: list[float]) -> float:
    return float(np.percentile(ages, 99))


@pytest.mark.parametrize(("step_ms", "slice_ms"), [(10, 5), (30, 15), (47, 18), (47, 24)])
def test_live_frames_hardly_wait_for_objects_that_catch_up(step_ms: float, slice_ms: float) -> None:
    alone = Loop(step_ms, slice_ms)
    loop = Loop(step_ms, slice_ms)
    alone.run(6000, lambda number: False)
    loop.run(6000, lambda number: number % PROMPT_EVERY == PROMPT_EVERY - 1)
    assert p99(loop.ages_ms) < 1.2 * p99(alone.ages_ms)
    assert len(loop.arrivals) >= 6000 // PROMPT_EVERY - 1
    assert max(loop.arrivals) <= FRAMES + MAX_STRIDE


def test_objects_arrive_although_steps_leave_no_time() -> None:
    loop = Loop(90, 45)
    loop.run(600, lambda number: number % PROMPT_EVERY == PROMPT_EVERY - 1)
    assert len(loop.arrivals) == 600 // PROMPT_EVERY - 1
    assert max(loop.arrivals) <= FRAMES + MAX_STRIDE
    assert loop.way.stride == MAX_STRIDE


def test_a_click_on_the_frame_before_the_newest_takes_one_slice() -> None:
    """Even where steps leave no time."""
    loop = Loop(90, 45)
    loop.run(50, lambda number: False)
    loop.way.begin(1)
    loop.run(1, lambda number: False)
    assert loop.way.place is None


def test_a_machine_with_time_tracks_on_every_frame_at_once() -> None:
    loop = Loop(10, 5)
    loop.run(100, lambda number: number == 80)
    assert loop.way.own_stride == 1
    assert loop.arrivals[0] <= 4


def test_without_frames_slices_need_not_wait() -> None:
    loop = Loop(47, 30)
    loop.run(50, lambda number: False)
    loop.way.begin()
    silent_ns = loop.now_ns + 10 * INTERVAL_NS
    assert loop.pace.choose([loop.pipeline], silent_ns, frame_waits=lambda: False) is loop.pipeline


def test_lossless_delivery_tracks_on_every_frame() -> None:
    pace = CatchUpPace(live=False)
    way = Way()
    for number in range(30):
        pace.note_frame("cam0", number * MS, 0)
        pace.note_step(way, 100 * MS, number * MS)
    assert way.stride == 1


def test_events_of_prompts_have_the_stride_and_pinned_frames_may_be_old(tmp_path: Path) -> None:
    perception = Perception.load(tiny_settings(tmp_path))
    pipeline = perception.serve("left")
    for seq in range(9):
        pipeline.step(moving_frame(seq))
    pipeline.catch_ups.stride = 3
    idle = SimpleNamespace(hand_over_state=HandOverState(1.0))
    host = SimpleNamespace(perception=perception, snapshots=idle)

    def ask(op: str, **args: Any) -> tuple[Reply, dict[str, Any]]:
        prompt = {} if op == "pin_frame" else {"points": [[30, 20]]}
        request = Request(1, op, {"camera": "left", **prompt, **args})
        reply = handle_request(host, request)
        return reply, describe_change(request, reply) or {}

    def refusal(op: str, **args: Any) -> str | None:
        error = ask(op, **args)[0].error
        return error and error.code

    for reply, event in (ask("add_object", seq=2), ask("refine_object", seq=3, id=1)):
        assert (reply.result["stride"], event["stride"]) == (3, 3)
    assert "stride" not in ask("add_object", seq=2, stride=1)[0].result
    assert "stride" not in ask("add_object", seq=8)[1]
    assert "stride" in ask("add_object", seq=2, stride=MAX_STRIDE + 1)[0].error.message
    assert ask("pin_frame", seq=2)[1] == {"camera": "left", "seq": 2}
    perception.session = LiveIdentity(lambda camera: 0.0, 1e-9, live=True)  # now all frames are too old
    assert refusal("segment", seq=2) is None
    assert refusal("segment", seq=3) == refusal("pin_frame", seq=3) == UnknownFrameError.code
    perception.session = None
    assert [refusal("pin_frame", seq=seq) for seq in range(3, 2 + MAX_PINNED)] == [None] * (MAX_PINNED - 1)
    assert refusal("pin_frame", seq=0) == CapacityError.code
    assert refusal("pin_frame", seq=2, lease_s=0) is refusal("pin_frame", seq=0) is None
