"""Windows that open one by one while the steps leave time for them, and close when they do not."""

import itertools
from collections.abc import Callable

from sam3_node.perception.window_budget import (
    MAX_PATIENCE,
    MIN_MISSES,
    OBSERVED,
    StepCost,
    WindowBudget,
    estimate_window_ms,
)
from sam3_node.tracking.object_crops import MAX_CROPS

PERIOD_MS = 66.0
WINDOW_MS = 10.0


def run(
    budget: WindowBudget, steps: int, rest_ms: Callable[[int], float], objects: int = MAX_CROPS
) -> list[int]:
    """Return the number of windows of each step; a step takes its rest, and WINDOW_MS for each window."""
    counts = []
    for step in range(steps):
        windows = min(budget.count, objects)
        counts.append(windows)
        budget.observe(StepCost(rest_ms(step) + windows * WINDOW_MS, PERIOD_MS, WINDOW_MS, windows, objects))
    return counts


def test_windows_open_one_by_one_up_to_what_fits() -> None:
    counts = run(WindowBudget(), 200, lambda step: 30)
    assert counts[0] == 0
    assert sorted(set(counts)) == [0, 1, 2]
    assert counts == sorted(counts)
    assert run(WindowBudget(), 200, lambda step: 5)[-1] == MAX_CROPS


def test_no_window_opens_where_there_is_no_time_or_no_period() -> None:
    assert set(run(WindowBudget(), 500, lambda step: 45)) == {0}
    budget = WindowBudget()
    for _ in range(100):
        assert budget.observe(StepCost(10, 0, WINDOW_MS, 0, 1)) == 0


def test_a_single_slow_step_closes_nothing() -> None:
    budget = WindowBudget()
    run(budget, 200, lambda step: 30)
    assert set(run(budget, 500, lambda step: 500 if step % OBSERVED == 7 else 30)) == {2}


def test_windows_close_to_what_fits_when_steps_are_too_late() -> None:
    budget = WindowBudget()
    run(budget, 200, lambda step: 5)
    counts = run(budget, 100, lambda step: 40)
    assert counts[:MIN_MISSES] == [MAX_CROPS] * MIN_MISSES
    assert set(counts[MIN_MISSES:]) == {1}
    assert set(run(budget, 100, lambda step: 80)[MIN_MISSES:]) == {0}


def test_a_window_that_costs_more_than_was_estimated_is_tried_ever_less_often() -> None:
    budget = WindowBudget()
    counts = []
    for _ in range(4000):
        windows = budget.count
        counts.append(windows)
        # with the window, all takes longer than it was seen to take without
        budget.observe(StepCost(30 + 50 * windows, PERIOD_MS, WINDOW_MS, windows, 2))
    opened = [step for step in range(1, len(counts)) if counts[step] > counts[step - 1]]
    waits = [later - earlier for earlier, later in itertools.pairwise(opened)]
    assert waits == sorted(waits)
    assert waits[-1] >= MAX_PATIENCE
    assert counts.count(1) == MIN_MISSES * len(opened)


def test_windows_that_no_object_uses_do_not_wait_open() -> None:
    budget = WindowBudget()
    run(budget, 200, lambda step: 5)
    assert set(run(budget, 200, lambda step: 5, objects=1)) == {1}
    assert budget.count == 1
    assert run(budget, 200, lambda step: 5)[-1] == MAX_CROPS
    assert set(run(WindowBudget(), 100, lambda step: 5, objects=0)) == {0}


def test_a_window_is_estimated_from_the_stages_of_a_step() -> None:
    stages = {"encode": 20_000, "track": 30_000}
    assert estimate_window_ms(stages, 0, 3) == 30
    assert estimate_window_ms({**stages, "window": 50_000}, 2, 3) == 25
    assert estimate_window_ms({}, 0, 0) == 0
