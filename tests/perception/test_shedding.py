"""Load that is shed in a fixed order while frames take longer than the budget, and taken back without flapping."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from sam3_node.detection.detectors import prepare_prompts
from sam3_node.models import TrackerModel
from sam3_node.perception.pipeline import Pipeline
from sam3_node.perception.shedding import (
    DETECTION_STRETCH,
    MAX_LEVEL,
    MAX_PATIENCE,
    MIN_MISSES,
    WINDOW,
    LoadShedder,
)
from sam3_node.perception.step import StepFrame
from sam3_node.settings import DetectorSettings, TrackerSettings
from sam3_node.types import MaskFrame, Shed, StepDecisions
from sam3_node.wire.frame_prompt import FramePrompt
from tests.perception.test_pipeline import ids
from tests.support.coloured_blocks import ColourDetector, frame

BUDGET_MS = 50.0
Cost = Callable[[int, int], float]
"""Milliseconds of a frame, from its number and the level of its step."""


def run(shedder: LoadShedder, frames: int, cost: Cost, start: int = 0) -> list[int]:
    """Return the level of each step."""
    levels = []
    for number in range(start, start + frames):
        levels.append(shedder.level)
        shedder.observe(cost(number, shedder.level))
    return levels


def changes(levels: list[int]) -> list[int]:
    """Return the frames on which the level changed."""
    return [index for index in range(1, len(levels)) if levels[index] != levels[index - 1]]


def constant(*costs_ms: float) -> Cost:
    """Return a cost that depends on the level only."""
    return lambda number, level: costs_ms[level]


def test_without_a_budget_nothing_is_shed() -> None:
    shedder = LoadShedder(0)
    assert set(run(shedder, 100, constant(1e6))) == {0}
    assert shedder.over_budget == 0


def test_single_slow_frames_change_nothing() -> None:
    rare = WINDOW // (MIN_MISSES - 1)
    levels = run(LoadShedder(BUDGET_MS), 500, lambda number, level: 500 if number % rare == 0 else 40)
    assert set(levels) == {0}


def test_a_step_that_slows_down_and_recovers_raises_each_level_once_and_lowers_each_once() -> None:
    shedder = LoadShedder(BUDGET_MS)
    assert set(run(shedder, 100, constant(30))) == {0}
    slow = run(shedder, 200, constant(120, 100, 80))
    assert slow == [0] * MIN_MISSES + [1] * MIN_MISSES + [2] * (200 - 2 * MIN_MISSES)
    assert shedder.over_budget == 200
    fast = run(shedder, 500, constant(30, 25, 20))
    # the frames that were slow have to leave the window first
    assert changes(fast) == [2 * WINDOW - MIN_MISSES, 3 * WINDOW - MIN_MISSES]
    assert fast[-1] == 0
    assert shedder.over_budget == 200


def test_a_load_that_only_the_shed_level_bears_is_tried_ever_less_often() -> None:
    shedder = LoadShedder(BUDGET_MS)
    levels = run(shedder, 5000, constant(60, 40, 30))
    tries = changes(levels)[1::2]
    waits = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert waits[:3] == sorted(waits[:3])
    assert set(waits[3:]) == {MAX_PATIENCE + MIN_MISSES}
    assert set(levels) == {0, 1}
    assert levels.count(0) < 0.03 * len(levels)
    # and once the load has gone, the level falls for good
    after = run(shedder, 1000, constant(30, 20, 10))
    assert len(changes(after)) <= 1
    assert after[MAX_PATIENCE + WINDOW :] == [0] * (1000 - MAX_PATIENCE - WINDOW)


def test_a_load_between_the_limits_keeps_the_level() -> None:
    """Loads between 80 % of the budget and the budget are too much to take work back, and too little to shed more."""
    shedder = LoadShedder(BUDGET_MS)
    run(shedder, WINDOW, constant(60, 45, 45))
    assert set(run(shedder, 2000, constant(60, 45, 45))) == {1}


@pytest.mark.parametrize("seed", range(5))
def test_noise_around_the_budget_does_not_make_the_level_flap(seed: int) -> None:
    noise_ms = np.random.default_rng(seed).normal(0, 8, 20_000)
    costs_ms = (BUDGET_MS, 0.9 * BUDGET_MS, 0.6 * BUDGET_MS)
    levels = run(LoadShedder(BUDGET_MS), 20_000, lambda number, level: costs_ms[level] + noise_ms[number])
    assert len(changes(levels)) < 20_000 / MAX_PATIENCE * 2 * MAX_LEVEL


@pytest.fixture
def pipeline(model: TrackerModel) -> Pipeline:
    """Four objects after two frames; those with the ids 2 and 3 are of low priority."""
    made = Pipeline(model, TrackerSettings(max_objects=4, feature_cache=3, feature_cache_s=0), "cam0")
    made.step(frame(0, {}))
    for x in (40, 120, 200, 280):
        low = x in (120, 200)
        made.add(FramePrompt(points=[(x, 120)]), priority="low" if low else "normal")
    assert ids(made.step(frame(1, {}))) == [1, 2, 3, 4]
    return made


def shedding(level: int) -> StepDecisions:
    return StepDecisions(shed=Shed(level) if level else None)


def steps(pipeline: Pipeline, seqs: range, level: int) -> Iterator[MaskFrame]:
    return (pipeline.step(StepFrame(frame(seq, {}), decisions=shedding(level))) for seq in seqs)


def test_low_priority_objects_take_turns_at_level_2_and_say_so(pipeline: Pipeline) -> None:
    for masks in steps(pipeline, range(2, 4), 1):
        assert (ids(masks), masks.shed) == ([1, 2, 3, 4], Shed(1))
    shed = list(steps(pipeline, range(4, 10), 2))
    assert [ids(masks) for masks in shed] == [[1, 2, 4], [1, 3, 4]] * 3
    assert [masks.shed for masks in shed] == [Shed(2, (3,)), Shed(2, (2,))] * 3
    assert {status.id: status.age for status in pipeline.objects} == {1: 9, 2: 6, 3: 6, 4: 9}
    (masks,) = steps(pipeline, range(10, 11), 0)
    assert (ids(masks), masks.shed) == ([1, 2, 3, 4], None)


def test_a_held_object_is_the_same_as_one_that_never_had_the_frame(
    model: TrackerModel, pipeline: Pipeline
) -> None:
    """An object depends on the frames that it was tracked on, and not on the objects beside it."""
    alone = Pipeline(model, TrackerSettings(max_objects=1), "cam0")
    alone.step(frame(0, {}))
    alone.add(FramePrompt(points=[(120, 120)]), priority="low")
    alone.step(frame(1, {}))
    for masks in steps(pipeline, range(2, 9), 2):
        if 2 not in ids(masks):
            alone.prompting.tracker.frame_number += 1  # the frame passes without being seen
            continue
        (one,) = alone.step(frame(masks.seq, {})).instances
        (same,) = (item for item in masks.instances if item.id == 2)
        assert np.mean(one.mask.full() != same.mask.full()) < 1e-3


def test_points_correct_an_object_that_was_held_on_the_latest_frame(pipeline: Pipeline) -> None:
    (masks,) = steps(pipeline, range(2, 3), 2)
    (held,) = masks.shed.held
    result = pipeline.refine(held, FramePrompt(points=[(130, 130)]))
    assert result.seq == 2
    assert held in ids(next(steps(pipeline, range(3, 4), 2)))


def test_an_object_that_enters_is_tracked_on_its_first_frame(pipeline: Pipeline) -> None:
    for seq in (2, 3):
        pipeline.remove(pipeline.objects[0].id)
        added = pipeline.add(FramePrompt(points=[(100, 100)]), priority="low")
        assert added.id in ids(next(steps(pipeline, range(seq, seq + 1), 2)))


class Searched:
    """A pipeline that looks for blocks, all of low priority, with a detection on every second frame."""

    def __init__(self, model: TrackerModel) -> None:
        self.detector = ColourDetector()
        settings = DetectorSettings(kind="yolo-world", every=2)
        self.pipeline = Pipeline(model, TrackerSettings(max_objects=4), "cam0", self.detector, settings)
        self.ask("low")
        self._seq = 0

    def ask(self, priority: str) -> None:
        prompts = prepare_prompts(self.detector, ["red"], 0.5, priorities={"red": priority})  # type: ignore[dict-item]
        self.pipeline.set_prompts(prompts)

    def step(self, level: int) -> MaskFrame:
        self._seq += 1
        drawn = frame(self._seq, {(40, 40): "red", (200, 120): "red"})
        return self.pipeline.step(StepFrame(drawn, decisions=shedding(level)))


def test_detection_is_stretched_and_holds_nothing_on_its_frame(nano: TrackerModel) -> None:
    world = Searched(nano)
    for _ in range(4):
        world.step(0)
    before = len(world.pipeline.objects)
    assert before == 2
    assert {status.priority for status in world.pipeline.objects} == {"low"}
    held = []
    calls = world.detector.calls
    for _ in range(4 * DETECTION_STRETCH):
        seen = world.detector.calls
        masks = world.step(2)
        held.append(masks.shed.held)
        assert not (masks.shed.held and world.detector.calls > seen)
    assert any(held)
    assert world.detector.calls - calls == 2
    assert len(world.pipeline.objects) == before, "a held object was found again"


def test_prompts_of_another_priority_change_that_of_known_objects(nano: TrackerModel) -> None:
    world = Searched(nano)
    world.step(0)
    assert {status.priority for status in world.pipeline.objects} == {"low"}
    world.ask("normal")
    assert {status.priority for status in world.pipeline.objects} == {"normal"}
