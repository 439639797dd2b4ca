"""What owns a socket or a file closes it at the end of a `with` block."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self


class Closing:
    """A context manager that calls `close`."""

    # subclasses may take options, such as how long to linger
    close: Any

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
