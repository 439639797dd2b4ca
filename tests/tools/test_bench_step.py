"""The comparison with transformers runs on random weights whose logits have a trained model's size."""

from __future__ import annotations

import pytest
import torch

from tools.bench.latency.step import TRAINED_LOGIT, Times, compare, random_source, row, stages


@pytest.mark.parametrize("name", ["nano", "small"])
def test_parity_is_shown_at_logits_of_a_trained_models_size(name: str) -> None:
    with torch.inference_mode():
        source = random_source(name, "cpu")
        (times,) = compare(source, stages(source), objects=2, frames=4, warm=1, runs=1)
    assert times.least_logit >= TRAINED_LOGIT
    assert times.difference < 1e-3


def test_a_row_says_where_logits_are_too_small_to_show_parity() -> None:
    assert row(1, [Times(1.0, 2.0, 1e-9, 1e-3)]).endswith("1.0e-03, no parity shown")
    assert row(1, [Times(1.0, 2.0, 1e-5, 7.0)]).endswith("7.0")
