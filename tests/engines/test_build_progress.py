"""Progress of a build: nested phases, and steps that estimate their time by an earlier build."""

from __future__ import annotations

import pytest

from sam3_node.engines.export import BuildStep
from sam3_node.engines.tensorrt.builder import BuildProgress


def test_nested_phases_count_as_part_of_a_step() -> None:
    progress = BuildProgress()
    assert progress.fraction == 0
    progress.start("all", None, 4)
    progress.step("all")
    progress.start("part", "all", 2)
    progress.start("detail", "part", 10)
    for _ in range(5):
        progress.step("detail")
    assert progress.fraction == pytest.approx((1 + 0.5 / 2) / 4)
    progress.finish("detail")
    assert progress.fraction == pytest.approx((1 + 0.5 / 2) / 4)
    progress.finish("part")
    progress.step("all")
    assert progress.fraction == pytest.approx(2 / 4)
    progress.finish("all")
    assert progress.fraction == 1


def test_unknown_phases_are_ignored() -> None:
    progress = BuildProgress()
    progress.step("unknown")
    progress.finish("unknown")
    assert progress.fraction == 0


def test_a_step_reports_the_fraction_of_the_builder_and_measures_its_time() -> None:
    now, reports = [0.0], list[tuple[str, float]]()
    step = BuildStep("encode", lambda *report: reports.append(report), clock=lambda: now[0])
    step.update(0.25)
    step.update(1.0)  # a builder has ended its last phase, but has not returned
    now[0] = 30.04
    assert step.finish() == 30.0
    assert reports == [("encode", 0.0), ("encode", 0.25), ("encode", 0.99), ("encode", 1.0)]


def test_an_earlier_build_is_the_better_estimate() -> None:
    now, fractions = [0.0], list[float]()
    step = BuildStep("encode", lambda title, fraction: fractions.append(fraction), 25.0, lambda: now[0])
    for now[0] in (5.0, 28.0):
        step.update(0.9)
    step.finish()
    assert fractions == [0.0, 0.2, 0.99, 1.0]
