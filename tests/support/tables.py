"""Table-driven tests: one test goes through all rows of a table and tells every row that fails."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pytest

MAX_LABEL = 120
"""Characters of a value in the message."""


def each_row(
    names: str | Sequence[str],
    rows: Iterable[Any],
    ids: Callable[[Any], str] | Collection[str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test for each row, with the arguments of `pytest.mark.parametrize`, but as one test.

    It suits rows that need no set-up of their own: all share the fixtures of the test, except that each has a folder
    of its own in `tmp_path`.
    """
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = list(rows)
    labels = [describe(row, ids) for row in table] if ids is None or callable(ids) else list(ids)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            assert table, "the table has no rows"
            problems = []
            for number, (row, label) in enumerate(zip(table, labels, strict=True)):
                values = [row] if len(arguments) == 1 else row
                more = make_folder(fixtures, number) | dict(zip(arguments, values, strict=True))
                try:
                    test(**fixtures | more)
                except (Exception, SystemExit, pytest.fail.Exception) as error:
                    error.add_note(f"in the row {label}")
                    if "pytest-timeout" in str(error):  # which has no second limit for the other rows
                        raise
                    problems.append((label, error))
            if problems:
                told = "\n".join(f"{label}: {type(error).__name__}: {error}" for label, error in problems)
                raise AssertionError(f"{len(problems)} of {len(table)} rows fail:\n{told}") from problems[0][
                    1
                ]

        signature = inspect.signature(test)
        kept = [value for name, value in signature.parameters.items() if name not in arguments]
        run.__signature__ = signature.replace(parameters=kept)
        return run

    return decorate


def make_folder(fixtures: dict[str, Any], number: int) -> dict[str, Any]:
    """Return `tmp_path` for a row, if the test has it."""
    if "tmp_path" not in fixtures:
        return {}
    folder = fixtures["tmp_path"] / str(number)
    folder.mkdir()
    return {"tmp_path": folder}


def describe(row: Any, ids: Callable[[Any], str] | None) -> str:
    """Return the values of a row in a few words."""
    values = row if isinstance(row, tuple) else (row,)
    return ", ".join((ids or repr)(value)[:MAX_LABEL] for value in values)
