"""Selection rules against plain loops over one object's frames."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sam3_node.errors import SettingsError
from sam3_node.tracking.memory import CONFIDENT_SCORE, get_rule

SCORES = st.lists(st.sampled_from([0.0, CONFIDENT_SCORE, 0.5, 0.9]), min_size=1, max_size=20)


def choose(name: str, ages: list[int], scores: list[float], limit: int) -> list[tuple[int, int]]:
    """(age, offset) of each frame chosen for one object."""
    age, score = np.array([ages]), np.array([scores], dtype=np.float32)
    order, offset, valid = get_rule(name).choose(age, score, np.ones_like(age, dtype=bool), limit)
    return [(int(age[0, i]), int(o)) for i, o, v in zip(order[0], offset[0], valid[0], strict=True) if v]


def sam3_frame_filter(ages: list[int], scores: list[float], limit: int) -> list[tuple[int, int]]:
    """SAM 3's rule as its authors write it: walk back from the last frame, which always counts."""
    kept = [
        age for age, score in sorted(zip(ages, scores, strict=True)) if score > CONFIDENT_SCORE or age == 1
    ]
    return [(age, rank) for rank, age in enumerate(kept[:limit], start=1)]


@given(SCORES, st.integers(1, 8), st.randoms())
def test_rules_equal_their_definitions(scores: list[float], limit: int, random) -> None:
    ages = list(range(1, len(scores) + 1))
    random.shuffle(ages)
    assert choose("recent", ages, scores, limit) == [(a, a) for a in range(1, min(limit, len(ages)) + 1)]
    assert choose("confident", ages, scores, limit) == sam3_frame_filter(ages, scores, limit)


def test_frames_not_held_are_never_chosen() -> None:
    ages, scores = np.array([[1, 2, 3]]), np.ones((1, 3), dtype=np.float32)
    _, _, valid = get_rule("recent").choose(ages, scores, np.array([[True, False, True]]), 3)
    assert valid.sum() == 2


def test_an_unknown_rule_is_named() -> None:
    with pytest.raises(SettingsError, match=r"'newest'.*recent, confident"):
        get_rule("newest")
