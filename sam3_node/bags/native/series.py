"""Says which files belong to one recording: those that one recorder has written from one beginning.

Names alone do not tell: `take_0001.mcap` may be the first take of a day, or a later part of `take.mcap`. So the parts
of a split recording carry the time at which it began. Files without it, which programs other than the recorder write,
are parts where the names say it whole: NAME.mcap, NAME_0001.mcap, NAME_0002.mcap, without a gap.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

from ...errors import BagError
from ..samples import natural_order
from . import RECORDER
from .reader import read_record

_PART = re.compile(r"(?P<stem>.+)_(?P<number>\d{4,})")
MAX_NAMED = 5
"""Recordings that a message names."""


class _Part(NamedTuple):
    path: Path
    began_ns: object
    """when its recording began; None: the file does not say"""
    stem: str
    number: int
    """0: the name has none"""


def group_by_recording(files: Iterable[Path]) -> list[list[Path]]:
    """Return the files of each recording, in the order in which they were written."""
    parts = [_read_part(path) for path in sorted(set(files), key=natural_order)]
    # files without a mark, by folder and stem, and their numbers
    unmarked: dict[tuple[Path, str], dict[int, Path]] = {}
    for part in parts:
        if part.began_ns is None:
            unmarked.setdefault((part.path.parent, part.stem), {}).setdefault(part.number, part.path)
    groups: dict[object, list[Path]] = {}
    for part in parts:
        recording: object = part.path.parent, part.began_ns
        if part.began_ns is None:
            alike = part.path.parent, part.stem
            # numbers from the first file on, without a gap, are parts
            numbers = unmarked[alike]
            is_part = part.number < _count_from_first(numbers) and numbers[part.number] == part.path
            recording = alike if is_part else part.path
        groups.setdefault(recording, []).append(part.path)
    return list(groups.values())


def _count_from_first(numbers: Collection[int]) -> int:
    """Return how many of the numbers 0, 1, 2 and so on there are before the first that is absent."""
    return next(number for number in count() if number not in numbers)


def require_one_recording(path: Path, files: Sequence[Path]) -> None:
    """Raise BagError that names the recordings if the files of a folder belong to several."""
    groups = group_by_recording(files)
    if len(groups) > 1:
        names = ", ".join(group[0].name for group in groups[:MAX_NAMED])
        raise BagError(
            f"{path}: expected one recording in the folder, found {len(groups)} recordings ({names}"
            f"{', ...' if len(groups) > MAX_NAMED else ''}); name one of them, or move each into a folder of its own"
        )


def require_whole(files: Sequence[Path]) -> None:
    """Raise BagError if other parts of the recording of these files lie beside them."""
    given = set(files)
    # a copy of a file under another name has the same mark, and is no other part
    known = {(part.stem, part.began_ns) for part in map(_read_part, files) if part.began_ns is not None}
    for folder in {path.parent for path in files}:
        others = [_read_part(path) for path in folder.glob("*.mcap") if path not in given]
        left = [part.path for part in others if (part.stem, part.began_ns) in known]
        if left:
            raise BagError(
                f"{files[0]}: expected all files of the recording, found {len(given)} of {len(given) + len(left)}; "
                f"name {min(left, key=natural_order).name} and the other parts, too, or their folder"
            )


def _read_part(path: Path) -> _Part:
    match = _PART.fullmatch(path.stem)
    stem, number = (match["stem"], int(match["number"])) if match else (path.stem, 0)
    record = read_record(path, RECORDER)
    return _Part(path, (record or {}).get("began_ns"), stem, number)
