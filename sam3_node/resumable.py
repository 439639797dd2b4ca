"""Long work in turns: a generator that yields where other work may run."""

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Resumable = Generator[None, None, T]
"""Work that is done in turns. It yields where other work may run, and returns a result, which is never None.

Close it to cancel."""


def resume(work: Resumable[T]) -> T | None:
    """Run the work up to its next yield. Return its result, or None if it has not ended."""
    try:
        next(work)
    except StopIteration as end:
        # a generator hands its result over in the exception that ends it
        result: T = end.value
        return result
    return None


def run_to_end(work: Resumable[T]) -> T:
    """Run the work to its end at once, and return its result, which is never None."""
    result = resume(work)
    while result is None:
        result = resume(work)
    return result
