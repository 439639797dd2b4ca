"""Quota of recordings in a folder: by total size and by age."""

from __future__ import annotations

import contextlib
import fcntl
import re
import time
from pathlib import Path
from typing import NamedTuple

from ..bags.formats.mcap_stream import McapStream
from ..bags.native.layout import RECORDER
from ..bags.native.reader import MAX_RECORDS_TO_LAYOUT
from ..errors import BagError
from ..settings import RecordSettings

TIME_FORMAT = "%Y%m%dT%H%M%SZ"
_TIME, _PART = r"\d{8}T\d{6}Z(-\d+)?", r"(_\d{4,})?"


class _File(NamedTuple):
    """A recording that may be deleted; files sort from the oldest to the newest."""

    changed_s: float
    path: Path
    size: int


class Quota:
    """Deletes the oldest recordings of one output, so that they keep to `record.max_total_gb` and `record.max_age_h`.

    Only files that a recorder made itself are deleted: they have the output's prefix and the recorder's metadata. Files
    that a recorder still writes, links, and files of any other name or content stay.
    """

    def __init__(self, record: RecordSettings) -> None:
        is_file = record.out.suffix == ".mcap"
        self._folder = record.out.parent if is_file else record.out
        prefix = rf"{re.escape(record.out.stem)}(-{_TIME})?" if is_file else _TIME
        self._name = re.compile(rf"{prefix}{_PART}\.mcap")
        self._max_bytes, self._max_age_s = record.max_total_gb * 1e9, record.max_age_h * 3600

    def enforce(self, current: Path | None) -> list[Path]:
        """Delete the files that are too old or too many, except `current`. Return the deleted files."""
        if not (self._max_bytes or self._max_age_s):
            return []
        files = sorted(self._list_files())
        total = sum(file.size for file in files)
        deleted = []
        for file in files:
            too_old = self._max_age_s and time.time() - file.changed_s > self._max_age_s
            too_many = self._max_bytes and total > self._max_bytes
            if (too_old or too_many) and file.path != current and _delete(file.path):
                total -= file.size
                deleted.append(file.path)
        return deleted

    def _list_files(self) -> list[_File]:
        files = []
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                if self._name.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                    status = path.stat()
                    files.append(_File(status.st_mtime, path, status.st_size))
        return files


def _delete(path: Path) -> bool:
    """Delete a finished recording of a recorder. Return False if this is none, or if it cannot be deleted."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a recorder locks the file that it writes
            names = [name for name, _ in McapStream(path).metadata(MAX_RECORDS_TO_LAYOUT)]
            if RECORDER not in names:
                return False
            path.unlink()
    except (OSError, BagError):
        return False
    return True
