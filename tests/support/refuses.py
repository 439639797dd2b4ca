"""Assert that something is refused, by the class of its error and what the message names, not by its sentence."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest


@contextmanager
def refuses(
    error: type[Exception] | tuple[type[Exception], ...], *, field: str | Sequence[str] = ()
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Assert that the block raises `error` and that its message names each `field`.

    A field is what a user looks for: a setting, an argument, a value, a path, or the thing that is wrong. It matches as
    a whole word, so `4` does not match 40.
    """
    with pytest.raises(error) as caught:
        yield caught
    for name in [field] if isinstance(field, str) else field:
        assert mentions(str(caught.value), name), (
            f"expected the error to name {name!r}, found: {caught.value}"
        )


def mentions(text: str, *fields: str) -> bool:
    """Return True if a text, such as a note, a log or a printed line, has each field as a whole word."""
    return all(re.search(rf"(?<!\w){re.escape(field)}(?!\w)", text) for field in fields)
