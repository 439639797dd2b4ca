"""Edits of a dataset's episodes that people have made and not written yet, in a file beside the dataset.

The file of `pick` is `pick.edits.json`: {"edits": [{key, episode, dropped}, …]}, in the order in which they were made,
so that the last one can be taken back. The dataset itself stays as it is. `write_copy` writes the copy, as for the
command `episodes`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Annotated

import msgspec
from msgspec import Meta

from ...errors import OutputError, RequestError, WireError
from ...files import child_path, explain_os_error, read_json, remove_inside, safe_file_name, write_output
from ...schema.fields import Natural, convert
from ...schema.operations import Line, check_line
from .dataset import find_layouts
from .editing import Edits, Piece, plan_pieces, require_dataset, write_copy
from .layouts import DatasetLayout, LayoutV3
from .records import RECORDS, EpisodeRecord, count_rows, read_records

SUFFIX = ".edits.json"
"""What the name of a dataset gets for the file of its edits."""
MAX_BYTES = 4 << 20
"""Size of the largest file of edits. A larger one is refused."""
MAX_EDITS = 4096
"""Largest number of edits that are pending."""
MAX_NAME = 56
"""Characters of a dataset's name that the suggested name of its copy keeps."""

Seconds = Annotated[float, Meta(ge=0.0, lt=1e6)]


class EpisodeEdit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One edit of an episode. Times are seconds from its first row."""

    episode: Natural
    """number of the episode"""
    key: Natural | None = None
    """of the episode's record; the file has it, so that edits of another dataset are recognised"""
    dropped: bool = False
    """true: it is left out"""
    begin_s: Seconds | None = None
    """beginning of what stays; with end_s or alone"""
    end_s: Seconds | None = None
    """end of what stays"""
    split_s: Seconds | None = None
    """time at which another episode begins"""
    task: Line | None = None
    """another task"""
    restored: bool = False
    """true: all edits of the episode before this one are taken back"""

    def check(self) -> None:
        """Raise RequestError unless it says exactly one thing, with a task of printable text."""
        is_trim = self.begin_s is not None or self.end_s is not None
        said = [self.dropped, self.restored, is_trim, self.split_s is not None, self.task is not None]
        if sum(said) != 1:
            raise RequestError(
                "edit: expected one of dropped, begin_s and end_s, split_s, task or restored, found none or several"
            )
        check_line("edit", "task", self.task)


class _EditsFile(msgspec.Struct):
    """The content of a file of edits."""

    edits: list[EpisodeEdit] = []


@dataclass(frozen=True)
class PendingDataset:
    """The episodes of a dataset, and the edits that are pending."""

    episodes: Sequence[EpisodeRecord]
    layout: type[DatasetLayout]
    edits: tuple[EpisodeEdit, ...]
    pieces: Sequence[Piece]
    """what becomes of the episodes"""


@dataclass(frozen=True)
class WrittenDataset:
    """A copy with the edits: its folder, a line about each change, and one about its rows."""

    folder: Path
    changes: Sequence[str]
    rows: str


def name_edits(dataset: Path) -> Path:
    """Return the path of the file of edits beside a dataset."""
    return dataset.with_name(f"{dataset.name}{SUFFIX}")


def read_edits(path: Path) -> tuple[EpisodeEdit, ...]:
    """Return the edits of a file in their order; none if there is no file. Raises OutputError for any other content."""
    try:
        content = read_json(path, MAX_BYTES, OutputError, "edits as JSON")
    except FileNotFoundError:
        return ()
    try:
        edits = convert(content, _EditsFile, str(path)).edits
        if len(edits) > MAX_EDITS:
            raise RequestError(f"expected at most {MAX_EDITS} edits, found {len(edits)}")
        for edit in edits:
            edit.check()
    except (WireError, RequestError) as error:
        raise OutputError(f"cannot read {path}: {error}; correct it, or move it away") from error
    return tuple(edits)


def write_edits(path: Path, edits: Sequence[EpisodeEdit]) -> None:
    """Write edits over the file, or remove it if there are none. Raises RequestError for too many, and OutputError."""
    if not edits:
        with explain_os_error(OutputError, f"cannot remove {path}"):
            remove_inside(path.parent, path)
        return
    # one edit a line, so that people and version control can read what changed
    lines = (f"\n {json.dumps(msgspec.to_builtins(edit), ensure_ascii=False)}" for edit in edits)
    data = f'{{"edits": [{",".join(lines)}\n]}}\n'.encode()
    if len(data) > MAX_BYTES:
        raise RequestError(f"edit: expected edits of at most {MAX_BYTES} bytes, found more; write them first")
    write_output(path, data)


def join_edits(edits: Iterable[EpisodeEdit]) -> Edits:
    """Return what edits that were made one after the other amount to."""
    drop: set[int] = set()
    trim: dict[int, tuple[float, float | None]] = {}
    split: dict[int, list[float]] = {}
    tasks: dict[int, str] = {}
    for edit in edits:
        number = edit.episode
        if edit.restored:
            drop.discard(number)
            for changes in (trim, split, tasks):
                changes.pop(number, None)
        elif edit.dropped:
            drop.add(number)
        elif edit.split_s is not None:
            split.setdefault(number, []).append(edit.split_s)
        elif edit.task is not None:
            tasks[number] = edit.task
        else:
            trim[number] = (edit.begin_s or 0.0, edit.end_s)
    return Edits(frozenset(drop), trim, split, tasks)


class PendingEdits:
    """The edits of one dataset, in their file. Each change is on disk before it returns. Threads may share it.

    `shown` is the number of edits that somebody has seen who takes one back or writes the copy: another person may
    have gone on. Raises OutputError for a folder that is no dataset of this package, and for a file of other content.
    """

    def __init__(self, dataset: Path) -> None:
        # the copy and the file lie beside the folder itself, not beside a link to it
        self.dataset = dataset.resolve()
        require_dataset(self.dataset)
        self.path = name_edits(self.dataset)
        self._lock = Lock()
        self._is_writing = False
        self._records: Sequence[EpisodeRecord] = ()
        self._read_ns = 0  # change of the folder of records when they were read
        self.read()

    def read(self) -> PendingDataset:
        """Return the episodes and the edits. Raises OutputError if one of them cannot be read, or both do not fit."""
        with self._lock:
            return self._read()

    def add(self, edit: EpisodeEdit) -> PendingDataset:
        """Append an edit. Raises RequestError for a wrong one or one too many, OutputError if it does not fit."""
        edit.check()
        with self._lock:
            found = self._read_to_change()
            if len(found.edits) >= MAX_EDITS:
                raise RequestError(
                    f"edit: expected at most {MAX_EDITS} edits, found as many; write them first"
                )
            if edit.episode >= len(found.episodes):
                raise RequestError(
                    f"edit: expected an episode below {len(found.episodes)}, found {edit.episode}"
                )
            kept = msgspec.structs.replace(edit, key=found.episodes[edit.episode].key)
            return self._keep(found, (*found.edits, kept))

    def undo(self, shown: int) -> PendingDataset:
        """Take back the last edit. Raises RequestError if there is none, or if others were shown, and OutputError."""
        with self._lock:
            found = self._read_to_change(shown)
            if not found.edits:
                raise RequestError("undo: expected an edit to take back, found none")
            return self._keep(found, found.edits[:-1])

    def write(self, name: str, shown: int) -> WrittenDataset:
        """Write the copy as a new folder beside the dataset. Its edits are then no longer pending.

        Raises RequestError if others were shown, and what `write_copy` raises.
        """
        with self._lock:
            found = self._read_to_change(shown)
            edits = join_edits(found.edits)
            if not edits.episodes:
                raise RequestError("write: expected edits, found none that change an episode")
            target = child_path(self.dataset.parent, name)
            self._is_writing = True
        try:
            changes = write_copy(self.dataset, edits, target)
            with self._lock:
                # another process may have added some
                write_edits(self.path, read_edits(self.path)[len(found.edits) :])
            return WrittenDataset(target, changes, count_rows(target) or "")
        finally:
            self._is_writing = False

    def suggest_name(self) -> str:
        """Return a name for the copy that nothing beside the dataset has."""
        stem = safe_file_name(re.sub(r"-\d+$", "", self.dataset.name))[:MAX_NAME]
        number = 2
        while os.path.lexists(self.dataset.with_name(f"{stem}-{number}")):
            number += 1
        return f"{stem}-{number}"

    def _read(self) -> PendingDataset:
        require_dataset(self.dataset)
        # a record appears by a rename, which changes its folder; thousands of them take seconds to read
        with explain_os_error(OutputError, f"cannot read {self.dataset}"):
            changed_ns = (self.dataset / RECORDS).stat().st_mtime_ns
        if changed_ns != self._read_ns:
            self._records = read_records(self.dataset / RECORDS)
            self._read_ns = changed_ns
        layout = [*find_layouts(self.dataset), LayoutV3][0]
        edits = read_edits(self.path)
        keys = {record.number: record.key for record in self._records}
        for edit in edits:
            if keys.get(edit.episode) != edit.key:
                raise OutputError(
                    f"{self.path}: expected edits of the episodes in {self.dataset}, found one of another episode "
                    f"{edit.episode}; move the file away"
                )
        try:
            return _plan(self._records, layout, edits)
        except OutputError as error:
            raise OutputError(f"{self.path}: {error}; correct it, or move it away") from error

    def _read_to_change(self, shown: int | None = None) -> PendingDataset:
        if self._is_writing:
            raise RequestError("expected no copy that is being written, found one; wait for its end")
        found = self._read()
        if shown is not None and shown != len(found.edits):
            raise RequestError(
                f"expected the {len(found.edits)} edits that are pending, found {shown}; somebody else has gone on"
            )
        return found

    def _keep(self, found: PendingDataset, edits: tuple[EpisodeEdit, ...]) -> PendingDataset:
        """Keep edits if they fit the episodes."""
        planned = _plan(found.episodes, found.layout, edits)
        write_edits(self.path, edits)
        return planned


def _plan(
    records: Sequence[EpisodeRecord], layout: type[DatasetLayout], edits: tuple[EpisodeEdit, ...]
) -> PendingDataset:
    """Return what becomes of the episodes. Raises OutputError for edits that do not fit them."""
    # a dataset to which nothing has been appended yet has no episode that stays
    pieces = plan_pieces(records, layout, join_edits(edits)) if records else []
    return PendingDataset(records, layout, edits, pieces)
