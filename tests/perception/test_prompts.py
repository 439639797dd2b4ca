"""Prompts in frame pixels and in model pixels pass the same checks."""

from typing import Any

import pytest
import torch

from sam3_node.errors import RequestError
from sam3_node.geometry import Scaling
from sam3_node.perception.prompts import to_model
from sam3_node.tracking import ObjectPrompt
from sam3_node.wire.frame_prompt import FramePrompt
from tests.support.tables import each_row

SIDE = 64
SAME = Scaling((SIDE, SIDE), SIDE)  # model pixels are frame pixels
CPU = torch.device("cpu")

GOOD: dict[str, dict[str, Any]] = {
    "one point": {"points": [(3, 4)]},
    "labels": {"points": [(3, 4), (5.5, 6)], "labels": [1, 0]},
    "box": {"box": [1, 2, 30, 40]},
    "box and points": {"points": [(3, 4)], "box": [1, 2, 30, 40]},
    "most points": {"points": [(3, 4)] * 64},
}
BAD: dict[str, dict[str, Any]] = {
    "nothing": {},
    "no points": {"points": []},
    "nan": {"points": [(float("nan"), 5)]},
    "infinite": {"points": [(float("inf"), 5)]},
    "infinite box": {"box": [0, 0, float("inf"), 5]},
    "text": {"points": ["5", "6"]},
    "triples": {"points": [(1, 2, 3)]},
    "flat": {"points": [1, 2]},
    "ragged": {"points": [(1, 2), (3,)]},
    "too many": {"points": [(1, 2)] * 65},
    "other labels": {"points": [(1, 2)], "labels": [2]},
    "missing labels": {"points": [(1, 2), (3, 4)], "labels": [1]},
    "nan label": {"points": [(1, 2)], "labels": [float("nan")]},
    "flat box": {"box": [5, 5, 5, 20]},
    "turned box": {"box": [50, 50, 20, 20]},
    "half a box": {"box": [5, 5]},
    "mask and box": {"mask": object(), "box": [0, 0, 5, 5]},
}


def as_tensors(prompt: ObjectPrompt) -> Any:
    return prompt.to_tensors(SIDE, CPU)[:2]


@pytest.mark.parametrize("fields", GOOD.values(), ids=GOOD)
def test_good_prompts_are_equal_in_both_forms(fields: dict[str, Any]) -> None:
    mine = to_model(FramePrompt(**fields), 1, SAME)
    direct = ObjectPrompt(1, **fields)
    for a, b in zip(as_tensors(mine), as_tensors(direct), strict=True):
        assert torch.equal(a, b)


@each_row("fields", BAD.values(), ids=BAD)
def test_bad_prompts_are_refused_in_both_forms_with_one_message(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as mine:
        to_model(FramePrompt(**fields), 1, SAME)
    with pytest.raises(RequestError) as direct:
        as_tensors(ObjectPrompt(1, **fields))
    assert str(mine.value) == str(direct.value)
