"""How much tests do: the length of those that repeat one thing many times, and which ones need a reason to run."""

import os
import subprocess

import pytest

from tests.support.paths import ROOT

WHOLE = os.environ.get("WHOLE_TESTS") == "1"
PAGES = ("docs", "sam3_node/cli", "tests/docs", "tests/test_guides.py")


def if_pages_changed() -> pytest.MarkDecorator:
    """Mark a test that types the commands of a page, which takes long: it runs where pages or commands changed.

    On the branch main, that is where they were changed after the last commit.
    """
    command = [ROOT / ".ci/changed", *PAGES]
    runs = WHOLE or subprocess.run(command, env=os.environ | {"OR_SINCE": "HEAD"}).returncode == 0
    return pytest.mark.skipif(not runs, reason="WHOLE_TESTS=1, or a change of pages or commands, runs it")


def if_whole(reason: str) -> pytest.MarkDecorator:
    """Mark a test that runs where WHOLE_TESTS=1 is set alone: what a user could lose by it, shorter tests show."""
    return pytest.mark.skipif(not WHOLE, reason=f"WHOLE_TESTS=1 runs it; {reason}")


def repetitions(short: int, whole: int) -> int:
    """Return `whole` where WHOLE_TESTS=1 is set, as the continuous integration does, otherwise `short`."""
    return whole if WHOLE else short
