"""Tables and JSON of an evaluation."""

from __future__ import annotations

import pytest

from tools.vos import report
from tools.vos.evaluate import SequenceResult
from tools.vos.metrics import MaskScore, OcclusionCount


def results() -> dict[str, dict[str, SequenceResult]]:
    a = SequenceResult({1: MaskScore(0.8, 0.6), 2: MaskScore(0.6, 0.4)}, OcclusionCount(2, 1, 20, 5), 10.0)
    b = SequenceResult({1: MaskScore(0.1, 0.2)}, OcclusionCount(), 20.0)
    return {"default": {"cup": a, "jar": b}, "bank=3": {"cup": b, "jar": b}}


def test_json_has_the_first_settings_figures_and_then_all() -> None:
    figures = report.as_json(results())
    assert figures["J"] == pytest.approx(0.5)
    assert figures["F"] == pytest.approx(0.4)
    assert figures["J&F"] == pytest.approx(0.45)
    assert figures["sequences"]["cup"]["J"] == pytest.approx(0.7)
    assert figures["sequences"]["cup"]["objects"]["2"]["F"] == 0.4
    assert figures["occlusions"] == {
        "cases": 2,
        "recovered": 0.5,
        "hidden_frames": 20,
        "false_while_hidden": 0.25,
    }
    assert figures["settings"]["bank=3"]["J"] == pytest.approx(0.1)
    assert "settings" not in report.as_json({"default": results()["default"]})


def test_the_table_has_each_sequence_and_the_difference() -> None:
    lines = report.as_table(results()).splitlines()
    assert lines[1].split() == ["cup", "default", "2", "0.700", "0.500", "0.600", "10.0"]
    assert lines[2].split() == ["bank=3", "1", "0.100", "0.200", "0.150", "20.0"]
    assert lines[-1].split() == ["bank=3", "0.100", "0.200", "0.150", "-0.400", "-", "0", "-", "20.0"]
