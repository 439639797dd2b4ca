"""Mutated files for each reader: an error of the package, or a value, in bounded time and memory.

`FUZZ_FILES=100000 pytest tests/test_file_fuzz.py` tries that many in all, in place of a few of each kind.
"""

import os
from pathlib import Path

import pytest

from tests.support.file_fuzz import FILES, FuzzedFile, fuzz
from tests.support.repeats import repetitions

COUNT = int(os.environ.get("FUZZ_FILES", len(FILES) * repetitions(8, 40)))
"""Files of all kinds together."""

pytestmark = pytest.mark.timeout(60 + COUNT)


@pytest.mark.parametrize("kind", FILES, ids=lambda kind: kind.name)
def test_mutated_files_are_read_or_refused(kind: FuzzedFile, tmp_path: Path) -> None:
    faults = list(fuzz(kind, tmp_path, COUNT // len(FILES)))
    assert not faults, "\n".join(map(str, faults[:20]))
