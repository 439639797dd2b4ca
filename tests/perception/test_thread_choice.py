"""The number of CPU threads follows from the times of steps."""

import itertools
import time
from collections.abc import Callable

import pytest

from sam3_node.perception.neighbours import CpuTimes, Neighbours, read_cpu_times
from sam3_node.perception.thread_choice import LONGEST_S, TURNS, ThreadChooser

Times = Callable[[int], float]


class Machine:
    """Steps whose time is a function of the number of threads."""

    def __init__(self, most: int, times: Times) -> None:
        self.now_s = 0.0
        self.times = times
        self.used: list[int] = []
        self.others = 0.0
        self.chooser = ThreadChooser(most, clock=lambda: self.now_s, measure_busy=lambda: self.others)

    def run(self, steps: int, hold: bool = False) -> None:
        for _ in range(steps):
            number = self.chooser.next(hold)
            step_s = self.times(number)
            self.now_s += step_s
            self.chooser.note(number, step_s)
            self.used.append(number)


def busy(number: int) -> float:
    return 0.03 * number**1.5


def idle(number: int) -> float:
    return 0.2 / number + 0.01


@pytest.mark.parametrize(
    ("most", "times", "best"), [(2, busy, 1), (8, busy, 1), (6, busy, 1), (2, idle, 2), (8, idle, 8)]
)
def test_the_fastest_number_is_found_and_kept(most: int, times: Times, best: int) -> None:
    machine = Machine(most, times)
    machine.run(300)
    assert machine.chooser.chosen == best
    assert f"{best}: " in machine.chooser.describe()
    machine.run(20_000)
    assert machine.chooser.chosen == best
    # trials become rare
    assert machine.used[-10_000:].count(best) > 0.98 * 10_000


def test_another_process_that_comes_and_goes_changes_the_number() -> None:
    machine = Machine(4, idle)
    machine.run(2000)
    assert machine.chooser.chosen == 4
    begin_s = machine.now_s
    machine.times = busy
    machine.run(150)
    assert machine.chooser.chosen == 1
    assert machine.now_s - begin_s < LONGEST_S
    machine.times = idle
    machine.run(150)
    assert machine.chooser.chosen == 4


def test_a_small_gain_changes_nothing_and_a_hopeless_number_is_dropped_early() -> None:
    machine = Machine(2, lambda number: 0.03 if number == 2 else 0.028)
    machine.run(500)
    assert machine.chooser.chosen == 2
    slow = Machine(2, lambda number: 0.03 if number == 2 else 0.3)
    slow.run(100)
    assert slow.used.count(1) == sum(TURNS[: len(TURNS) // 2])


def test_work_that_comes_every_few_frames_does_not_mislead() -> None:
    for period in (2, 3, 4, 8):
        frame = itertools.count()
        machine = Machine(2, lambda number: busy(number) + 0.1 * (next(frame) % period == 0))  # noqa: B023
        machine.run(500)
        assert machine.chooser.chosen == 1, f"detection every {period} frames"


def test_a_number_that_must_stay_stays_also_within_a_trial() -> None:
    machine = Machine(2, busy)
    while len(set(machine.used)) < 2:
        machine.run(1)
    last = machine.used[-1]
    machine.run(50, hold=True)
    assert set(machine.used[-50:]) == {last}
    machine.run(300)
    assert machine.chooser.chosen == 1


def test_processors_that_others_keep_busy_are_left_to_them_at_once() -> None:
    machine = Machine(8, idle)
    machine.run(2000)
    assert machine.chooser.chosen == 8
    machine.others = 3.1
    machine.run(1)
    assert machine.used[-1] == 4
    assert "leave 5 processors" in machine.chooser.describe()
    machine.run(3000)
    assert max(machine.used[-3000:]) == 4
    machine.others = 20.0
    machine.run(50)
    assert set(machine.used[-50:]) == {1}
    # a camera beside the node takes some of a processor
    machine.others = 0.7
    machine.run(3000)
    assert machine.chooser.chosen == 8


def test_others_are_what_the_machine_does_without_this_process() -> None:
    times = iter([CpuTimes(100.0, 10.0), CpuTimes(105.0, 12.0), None, CpuTimes(150.0, 20.0)])
    now_s = 0.0
    neighbours = Neighbours(lambda: next(times), lambda: now_s)
    now_s = 0.5
    assert neighbours.measure() == 0.0
    now_s = 2.0
    assert neighbours.measure() == 1.5
    # without times the last measurement stays
    now_s = 4.0
    assert neighbours.measure() == 1.5
    now_s = 6.0
    assert neighbours.measure() == 1.5


def test_a_busy_process_is_seen() -> None:
    before = read_cpu_times()
    if before is None:
        pytest.skip("this system does not tell processor times")
    while time.process_time() < before.process_s + 0.1:
        pass
    after = read_cpu_times()
    assert after is not None
    assert after.process_s - before.process_s >= 0.1
    assert after.machine_s - before.machine_s >= 0.05  # it counts in steps of 10 ms


def test_where_there_is_no_choice_nothing_is_tried() -> None:
    for chooser in (ThreadChooser(1), ThreadChooser(8, fixed=True)):
        for _ in range(100):
            number = chooser.next()
            chooser.note(number, 1.0)
        assert chooser.numbers == [number]
        assert "no choice" in chooser.describe()
