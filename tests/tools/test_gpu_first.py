"""The measurements for the first minutes on a GPU, in small sizes on a CPU."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tools.bench import gpu_first
from tools.bench.gpu_first import Journal, OutOfTimeError, read_lines


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a dry run of all sections."""
    path = tmp_path_factory.mktemp("first") / "first.jsonl"
    assert gpu_first.main(["--dry-run", "--out", str(path)]) == 0, path.read_text()
    return path


def test_a_dry_run_measures_every_figure_of_every_section(journal: Path) -> None:
    lines = read_lines(journal)
    assert not [line for line in lines if "error" in line]
    assert {line["section"] for line in lines} == set(gpu_first.SECTIONS)
    assert max(Counter((line["section"], line["figure"]) for line in lines).values()) == 1
    values: list[Any] = []
    for line in lines:
        assert {"unit", "value", "device", "versions", "took_s", "date"} <= line.keys()
        values += line["value"].values() if isinstance(line["value"], dict) else [line["value"]]
    assert all(isinstance(value, float) and value >= 0 for value in values)


def test_a_run_that_was_killed_goes_on_where_it_was(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = journal.read_text()
    *kept, last = text.splitlines(keepends=True)
    journal.write_text("".join(kept) + last[: len(last) // 2])
    capsys.readouterr()
    assert gpu_first.main(["--dry-run", "--section", "kernels", "peer", "node", "--out", str(journal)]) == 0
    (printed,) = capsys.readouterr().out.splitlines()
    assert json.loads(printed)["figure"] == json.loads(last)["figure"]
    assert [line["figure"] for line in read_lines(journal)] == [
        json.loads(line)["figure"] for line in [*kept, last]
    ]


def test_no_figure_begins_after_the_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "first.jsonl"
    assert gpu_first.main(["--dry-run", "--seconds", "0", "--out", str(path)]) == 3
    assert not path.exists()
    assert "time is over in kernels" in capsys.readouterr().err


def test_a_figure_that_fails_is_a_line_and_the_next_one_follows(tmp_path: Path) -> None:
    path = tmp_path / "first.jsonl"
    journal = Journal(path, "kernels", gpu_first.choose_scale(dry=True), end_s=float("inf"), context={})

    def fail() -> float:
        raise RuntimeError("no kernel\nfor this GPU")

    journal.measure("first", "ms", fail)
    journal.measure("second", "ms", lambda: 2)
    first, second = read_lines(path)
    assert first["error"] == "RuntimeError: no kernel"
    assert second["value"] == 2.0
    assert journal.errors == 1
    late = Journal(path, "kernels", journal.scale, end_s=0.0, context={})
    late.measure("second", "ms", fail)
    with pytest.raises(OutOfTimeError):
        late.measure("third", "ms", lambda: 3)
