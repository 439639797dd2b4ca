"""Markers of tests become the table of formats and peers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.refuses import refuses
from tools.docs.compatibility import Claim, collect_claims


def claims_of(folder: Path, text: str) -> list[Claim]:
    (folder / "tests").mkdir()
    (folder / "tests" / "test_one.py").write_text(f"import pytest\n{text}")
    return list(collect_claims(folder))


def test_markers_of_functions_and_modules_are_found(tmp_path: Path) -> None:
    text = (
        'pytestmark = [pytest.mark.verifies("viewer", "Rerun", "own package", by="rerun-sdk")]\n'
        '@pytest.mark.verifies("recording", "A | B", "layout", "bytes", missing="a file")\n'
        "def test_one(): ...\n"
    )
    place = "tests/test_one.py"
    assert claims_of(tmp_path, text) == [
        Claim("viewer", "Rerun", "own package", "rerun-sdk", "", place),
        Claim("recording", "A | B", "layout", "bytes", "a file", place),
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        *("", "NAME", '"cloud", "x", "layout", "by"', '"recording", "x", "hearsay", "by"'),
        *(f'"recording", "x", "layout"{more}' for more in ("", ', "by", "m", "more"', ', "by", reason="y"')),
    ],
)
def test_other_markers_are_refused_by_place(tmp_path: Path, arguments: str) -> None:
    text = f"@pytest.mark.verifies({arguments})\ndef test_one(): ...\n"
    with refuses(ValueError, field="tests/test_one.py:2"):
        claims_of(tmp_path, text)
