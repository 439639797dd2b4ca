"""Owners of a socket, a file or a process, which must be closed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self


class Closeable:
    """Base of types that own a socket, a file or a process: a context manager that calls `close`."""

    close: Any  # subclasses may add options, such as how long to linger

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def closed_on_error(owner: Closeable) -> Iterator[None]:
    """Close `owner` if the block raises, such as the rest of its constructor."""
    try:
        yield
    except BaseException:
        owner.close()
        raise
