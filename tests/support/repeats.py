"""Length of tests that repeat one thing many times."""

import os

WHOLE = os.environ.get("WHOLE_TESTS") == "1"


def repetitions(short: int, whole: int) -> int:
    """Return `whole` where WHOLE_TESTS=1 is set, as the continuous integration does, otherwise `short`."""
    return whole if WHOLE else short
