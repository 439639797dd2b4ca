"""The comparison with transformers runs on random weights whose logits have a trained model's size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tools.bench.common import Figures
from tools.bench.latency.step import (
    TRAINED_LOGIT,
    Taken,
    Times,
    compare,
    random_source,
    report,
    row,
    stages,
)


@pytest.mark.parametrize("name", ["nano", "small"])
def test_parity_is_shown_at_logits_of_a_trained_models_size(name: str) -> None:
    with torch.inference_mode():
        source = random_source(name, "cpu")
        (times,) = compare(source, stages(source), objects=2, frames=4, warm=1, runs=1)
    assert times.least_logit >= TRAINED_LOGIT
    assert times.difference < 1e-3


def test_a_row_says_where_logits_are_too_small_to_show_parity() -> None:
    ours, theirs = Taken(1.0, 2.0), Taken(2.0, 3.0)
    assert row(1, [Times(ours, theirs, 1e-9, 1e-3)]).endswith("1.0e-03, no parity shown")
    assert row(1, [Times(ours, theirs, 1e-5, 7.0)]).endswith("7.0")


def test_the_json_has_ratios_and_the_rate_of_a_matrix_product_of_the_same_run(tmp_path: Path) -> None:
    figures = Figures("latency.step", [])
    times = [Times(Taken(10.0, 20.0), Taken(30.0, 50.0), 1e-4, 9.0)]
    report("frame step", 1, times, (3.0, 80.0, 160.0), figures)
    figures.write(tmp_path / "step.json")
    records = {record["figure"]: record for record in json.loads((tmp_path / "step.json").read_text())}
    relative = "relative to transformers' streaming inference"
    assert records[f"frame step, speed {relative}"]["value"] == 3.0
    assert records[f"frame step, saving of CPU time {relative}"]["value"] == 2.5
    assert records["frame step, rate of gemm in the same run"]["value"] == 160.0
    assert records["frame step, rate as a part of that of gemm"]["value"] == 0.5
