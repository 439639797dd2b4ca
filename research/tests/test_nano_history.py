"""The history of training: thinned losses, the line through J, and the picture."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from sam3_node.errors import ModelError
from research.nano_history import HISTORY, POINTS, REAL, fit_line, main, thin_loss
from training.nano.steps import KINDS


def test_a_loss_is_thinned_to_means_over_core_hours() -> None:
    records = [{"total": 36.0 * step, "loss": float(step % 2)} for step in range(400)]
    points = thin_loss(records, before=2.0)
    assert len(points) == POINTS
    assert points[0] == (pytest.approx(2.165), pytest.approx(0.5, abs=0.02))
    assert points[-1] == (pytest.approx(5.83), pytest.approx(0.5, abs=0.02))


def test_the_line_tells_what_a_doubling_brings() -> None:
    points = [{"core_hours": hours, "box": 0.5 + 0.03 * math.log2(hours)} for hours in (1.0, 4.0, 9.0)]
    assert fit_line(points, "box") == pytest.approx((0.5, 0.03))
    with pytest.raises(ModelError, match="two or more hours"):
        fit_line(points[:1], "box")


def test_the_history_that_is_kept_is_whole() -> None:
    history = json.loads(HISTORY.read_text())
    hours = [point["core_hours"] for point in history["validation"]]
    assert hours == sorted(hours)
    assert all(0 < point[kind] < 1 for point in history["validation"] for kind in (*KINDS, *REAL))


def test_the_command_keeps_the_loss_of_a_run_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    kept = tmp_path / "history.json"
    picture = tmp_path / "picture.png"
    log = tmp_path / "run" / "log.jsonl"
    kept.write_text(HISTORY.read_text())
    log.parent.mkdir()
    log.write_text("".join(json.dumps({"total": 60.0 * i, "loss": 1.0}) + "\n" for i in range(50)))
    words = ["--loss", log, "--before", 1, "--history", kept, "-o", picture]
    monkeypatch.setattr(sys, "argv", ["history", *map(str, words)])
    main()
    assert len(json.loads(kept.read_text())["loss"]["run"]) == POINTS
    assert picture.stat().st_size > 1000
    assert "with each doubling" in capsys.readouterr().out
