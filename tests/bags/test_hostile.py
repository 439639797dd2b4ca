"""Recordings of 64 KB stay within limits of memory and disk, and no damage raises anything but this package's errors.

These are a selection; `python -m tools.bench.replay.hostile` opens all, measures time, too, and prints the worst.
"""

from __future__ import annotations

from pathlib import Path

from tests.support import hostile_media  # it adds its cases
from tests.support.confined import read_confined
from tests.support.damaged_recordings import GOOD, write_damaged
from tests.support.hostile_recordings import CASES, LIMIT
from tests.support.repeats import repetitions

SHORT = (
    "mcap: chunks of empty messages in zstd",
    "mcap: hundreds of topics behind thousands of messages",
    "bag: chunks of small records in bz2",
    "ros 2: a database in zstd that grows",
    "images: webp that declares 16000 x 16000",
    "images: progressive JPEG of 8000 x 8000",
    "video: mp4 with a hundred million samples of one byte",
)
assert hostile_media.KINDS


def test_hostile_recordings_stay_within_limits(tmp_path: Path) -> None:
    names = {}
    for index, name in enumerate(dict.fromkeys([*SHORT, *list(CASES)[:: repetitions(len(CASES), 4)]])):
        (tmp_path / str(index)).mkdir()
        path = CASES[name](tmp_path / str(index))
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        assert sum(file.stat().st_size for file in files) <= LIMIT, name
        names[path] = name
    broken = {names[out.path]: out.problem for out in read_confined(list(names)) if out.problem is not None}
    assert not broken


def test_damaged_recordings_are_read_or_refused(tmp_path: Path) -> None:
    damaged = {path: name for name, path in write_damaged(tmp_path, repetitions(3, 15) * len(GOOD))}
    outcomes = list(read_confined(list(damaged), together=110))
    assert {damaged[out.path]: out.problem for out in outcomes if out.problem is not None} == {}
    assert sum(not out.result.startswith("refused") for out in outcomes) > len(outcomes) / 3
