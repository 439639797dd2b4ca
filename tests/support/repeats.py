"""How much tests do: the length of those that repeat one thing many times, and which ones need a reason to run."""

import os
import subprocess

import pytest

from tests.support.paths import ROOT

WHOLE = os.environ.get("WHOLE_TESTS") == "1"
PAGES = ("docs", "sam3_node/cli", "tests/docs", "tests/test_guides.py")


def if_pages_changed() -> pytest.MarkDecorator:
    """Mark a test that types the commands of a page, which takes long: it runs where pages or commands changed."""
    runs = WHOLE or subprocess.run([ROOT / ".ci/changed", *PAGES]).returncode == 0
    return pytest.mark.skipif(not runs, reason="WHOLE_TESTS=1, or a change of pages or commands, runs it")


def repetitions(short: int, whole: int) -> int:
    """Return `whole` where WHOLE_TESTS=1 is set, as the continuous integration does, otherwise `short`."""
    return whole if WHOLE else short
