"""Named settings of an evaluation."""

from __future__ import annotations

import pytest

from sam3_node.errors import SettingsError
from sam3_node.settings import TrackerSettings
from tools.vos.followers import COMPARED, Setting, parse_settings


def test_settings_are_named_changes_of_a_base() -> None:
    text = "default,bank-off,bank=15+select=confident,dtype=bf16,prompt=point,size=160,read=sparse"
    default, bank_off, large, half, point, small, sparse = parse_settings(text, Setting(prompt="box"))
    assert (default.name, default.method, default.prompt) == ("default", "default", "box")
    assert bank_off.method == "bank-off"
    assert (large.bank_size, large.selection, large.dtype) == (15, "confident", "auto")
    assert (half.dtype, half.prompt, point.prompt) == ("bfloat16", "box", "point")
    assert small.model == ("auto", 160, "exact")
    assert sparse.model == ("auto", 0, "sparse")
    assert default.bank_size == TrackerSettings().bank_size


def test_the_settings_of_compare_are_valid() -> None:
    assert len(parse_settings(COMPARED, Setting())) == len(COMPARED.split(","))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "bank=1",
        "bank=x",
        "bank",
        "select=best",
        "dtype=int8",
        "size=x",
        "read=fast",
        "prompt=",
        "default,default",
    ],
)
def test_bad_settings_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="expected"):
        parse_settings(text, Setting())
