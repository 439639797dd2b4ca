"""SAM 3.1's steps cost the same for 1 and for 16 objects, and hold the same memory however many come and go."""

import re

import pytest

from sam3_node.models.sam31.random_weights import random_model, small_sizes
from tools.bench.common import Figures
from tools.bench.latency.groups import GROUP, come_and_go, count_operations


@pytest.mark.engines
def test_a_group_costs_what_one_object_costs(capsys: pytest.CaptureFixture[str]) -> None:
    count_operations(Figures("latency.groups", []), small_sizes(56, 32))
    shown = capsys.readouterr().out
    ratios = [float(found) for found in re.findall(r": ([\d.]+) x \(target", shown)]
    assert ratios == [1.0, 1.0]
    # a seventeenth object is in a group of its own
    work = [float(found) for found in re.findall(r"objects?: ([\d.e-]+) TFLOP", shown)]
    assert work[0] == work[1] < work[2] < work[3]


def test_objects_come_and_go_in_all_slots() -> None:
    moved: list[int] = []
    for tracker in come_and_go(random_model(56, 32), 120):
        assert len(tracker.ids) == GROUP
        moved += tracker.take_moved()
    assert moved
