"""Corrects a dataset after the fact: episodes are dropped, trimmed, split and renamed in a copy.

The dataset itself stays as it is, and the copy appears under its name when it is complete. Files that do not change are
hard links. An episode of version 3.0 that begins later shows a part of the same video, so that only its table and the
statistics of its rows are made anew.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from ...errors import OutputError, require
from ...files import (
    check_inside,
    explain_os_error,
    link_or_copy,
    make_folder,
    move_inside,
    read_regular,
    remove_folder_inside,
    write_atomically,
)
from ...types import NANOSECONDS, Image
from .dataset import BATCH_ROWS, DatasetFolder, write_meta, write_record
from .forms import ObjectRow, RowCounts
from .groot import MODALITY
from .layouts import EXTRA, DatasetLayout, LayoutV3
from .masks import FEATURE, VALID, VALID_FEATURE
from .records import (
    DROPPED,
    INDICES,
    MAX_RECORD_BYTES,
    RECORDS,
    EpisodeRecord,
    list_tasks,
    read_dropped,
)
from .statistics import NamedStats, PixelStatistics, describe_numbers, name_pixel_stats, thin


@dataclass(frozen=True)
class Edits:
    """What is changed, by the numbers of episodes. Times are seconds from an episode's first row."""

    drop: frozenset[int] = frozenset()
    trim: Mapping[int, tuple[float, float | None]] = field(default_factory=dict)
    """Begin and end of what is kept; None: its own end"""
    split: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """Times at which another episode begins"""
    tasks: Mapping[int, str] = field(default_factory=dict)

    @property
    def episodes(self) -> set[int]:
        """The episodes that are named."""
        return {*self.drop, *self.trim, *self.split, *self.tasks}


class Piece(NamedTuple):
    """Rows of an episode, from `begin` to the one before `end`, which become an episode of the copy."""

    episode: EpisodeRecord
    begin: int
    end: int
    task: str

    @property
    def is_whole(self) -> bool:
        """True if it has all rows of the episode."""
        return self.end - self.begin == self.episode.length

    def describe(self) -> str:
        """Return the piece in words."""
        seconds = (self.end - self.begin) / self.episode.fps
        rows = "all rows" if self.is_whole else f"rows {self.begin} to {self.end - 1}"
        return f"episode {self.episode.number}: {rows}, {seconds:.1f} s, task {self.task!r:.100}"


def plan_pieces(episodes: Sequence[EpisodeRecord], layout: type[DatasetLayout], edits: Edits) -> list[Piece]:
    """Return the episodes of the copy, in their order.

    Raises OutputError for an episode that does not exist, for a time outside of it, if nothing is left, and for times
    where the layout has videos that cannot be cut.
    """
    unknown = edits.episodes - {episode.number for episode in episodes}
    if unknown:
        raise OutputError(
            f"expected episodes 0 to {len(episodes) - 1}, found {min(unknown)}; list them first"
        )
    pieces = []
    for episode in episodes:
        if episode.number in edits.drop:
            continue
        edges = _list_edges(episode, edits)
        task = edits.tasks.get(episode.number, episode.task)
        pieces += [Piece(episode, begin, end, task) for begin, end in pairwise(edges)]
    if not pieces:
        raise OutputError("expected an episode that stays, found none; remove the folder instead")
    if layout is not LayoutV3 and not all(piece.is_whole for piece in pieces):
        raise OutputError(
            f"expected a dataset of version 3.0 to trim or split, found one of {layout.version}, whose videos would "
            "have to be encoded again; edit one of version 3.0, or convert its recordings again"
        )
    return pieces


def _list_edges(episode: EpisodeRecord, edits: Edits) -> list[int]:
    """Return the rows at which pieces of an episode begin, and the one behind the last piece."""
    begin_s, end_s = edits.trim.get(episode.number, (0.0, None))
    times_s = [begin_s, *sorted(edits.split.get(episode.number, ()))]
    rows = [round(time_s * episode.fps) for time_s in times_s]
    rows.append(episode.length if end_s is None else round(end_s * episode.fps))
    is_within = rows[0] >= 0 and rows[-1] <= episode.length
    if not is_within or any(later <= earlier for earlier, later in pairwise(rows)):
        raise OutputError(
            f"episode {episode.number}: expected times within its {episode.length / episode.fps:.2f} s, one after the "
            f"other, found {', '.join(f'{row / episode.fps:.2f}' for row in rows)}"
        )
    return rows


def write_copy(source: Path, edits: Edits, target: Path) -> list[str]:
    """Write the dataset with the edits as a new folder. Return a line about each change.

    Raises OutputError for a folder that is no dataset of this package, edits that do not fit, and a target that exists.
    """
    require_dataset(source)
    if os.path.lexists(target):
        raise OutputError(f"expected a new folder, found {target}; name another one")
    with DatasetFolder(source) as dataset, explain_os_error(OutputError, f"cannot write {target}"):
        pieces = plan_pieces(dataset.episodes, dataset.layout, edits)
        make_folder(target.parent)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            lines = _DatasetCopy(dataset, unfinished, pieces).write()
            unfinished.chmod(source.stat().st_mode)
            move_inside(target.parent, unfinished, target)
        except BaseException:
            remove_folder_inside(target.parent, unfinished)
            raise
    dropped = [episode for episode in dataset.episodes if episode.number in edits.drop]
    return [f"episode {episode.number}: dropped, task {episode.task!r:.100}" for episode in dropped] + lines


class _DatasetCopy:
    """Writes the pieces of a dataset to a new folder."""

    def __init__(self, dataset: DatasetFolder, folder: Path, pieces: Sequence[Piece]) -> None:
        self._parquet = require("pyarrow.parquet", EXTRA)
        self._arrow = require("pyarrow", EXTRA)
        self._source = dataset.path
        self._all = dataset.episodes
        self._layout: type[DatasetLayout] = dataset.layout
        self._folder = folder
        self._pieces = pieces
        self._records: list[EpisodeRecord] = []
        self._tasks = list(dict.fromkeys(piece.task for piece in pieces))
        self._old_tasks = list_tasks(dataset.episodes)

    def write(self) -> list[str]:
        """Write all of it. Return a line about each episode that is not as it was."""
        lines = []
        for number, piece in enumerate(self._pieces):
            first_row = sum(record.length for record in self._records)
            with explain_damage(piece.episode):
                self._records.append(self._copy(piece, number, first_row))
            if not piece.is_whole or piece.task != piece.episode.task:
                lines.append(f"{piece.describe()}: episode {number}")
        make_folder(self._folder / RECORDS)
        for record in self._records:
            write_record(self._folder, record)
        # `convert` would append an episode that is not there
        kept = {record.key for record in self._records}
        gone = {episode.key for episode in self._all} | read_dropped(self._source)
        write_atomically(self._folder / DROPPED, json.dumps({"keys": sorted(gone - kept)}).encode())
        write_meta(self._folder, self._layout, self._records)
        # its groups may have been corrected by hand
        groups = check_inside(self._source, self._source / MODALITY)
        if groups.is_file():
            write_atomically(self._folder / MODALITY, read_regular(groups, MAX_RECORD_BYTES))
        return lines

    def _copy(self, piece: Piece, number: int, first_row: int) -> EpisodeRecord:
        """Write the files of one episode, and return its record."""
        old = piece.episode
        layout = self._layout
        table = layout.place(layout.data, old.number)
        moved = dict(
            zip(
                layout.list_places(old.number, old.features),
                layout.list_places(number, old.features),
                strict=True,
            )
        )
        for place, new in moved.items():
            make_folder((self._folder / new).parent)
            if place != table and check_inside(self._source, self._source / place).exists():
                link_or_copy(self._source / place, self._folder / new)

        length = piece.end - piece.begin
        task = self._tasks.index(piece.task)
        indices = {
            "timestamp": np.arange(length) / old.fps,
            "frame_index": np.arange(length),
            "episode_index": np.full(length, number),
            "index": first_row + np.arange(length),
            "task_index": np.full(length, task),
        }
        statistics = dict(old.statistics)
        is_same = (number, first_row, task) == (old.number, old.first_row, self._old_tasks.index(old.task))
        rows = None
        if piece.is_whole and is_same:
            link_or_copy(check_inside(self._source, self._source / table), self._folder / moved[table])
        else:
            rows = read_rows(self._source, layout, piece)
            self._write_table(rows, indices, self._folder / moved[table])
            statistics |= {key: describe_numbers(values[:, None]) for key, values in indices.items()}
        record = replace(
            old, number=number, first_row=first_row, task=piece.task, length=length, statistics=statistics
        )
        record.objects = [_cut_object(found, piece, number) for found in old.objects]
        if not piece.is_whole:
            record.video_row = old.video_row + piece.begin
            record.statistics |= self._describe(piece, rows)
            _count(record, rows, piece)
        return record

    def _write_table(self, rows: Any, indices: Mapping[str, Any], path: Path) -> None:
        """Write rows with other numbers."""
        for key, values in indices.items():
            kind = rows.schema.field(key)
            column = rows.schema.get_field_index(key)
            rows = rows.set_column(column, kind, self._arrow.array(values.astype(INDICES[key])))
        self._parquet.write_table(rows, path, row_group_size=BATCH_ROWS)

    def _describe(self, piece: Piece, rows: Any) -> dict[str, NamedStats]:
        """Return the statistics of a piece's rows, of all features but the indices."""
        length = piece.end - piece.begin
        found = {}
        for key, feature in piece.episode.features.items():
            kind = feature["dtype"]
            if kind in ("video", "image"):
                pixels = PixelStatistics()
                for image in read_pictures(self._source, self._layout, piece, key, rows):
                    # masks as they are, frames as at their conversion
                    pixels.add(0, (image if key.startswith(FEATURE.format("")) else thin(image))[..., ::-1])
                found[key] = name_pixel_stats(pixels.describe_all(), length)
            elif key not in INDICES and feature != VALID:
                found[key] = describe_numbers(np.array(rows.column(key).to_pylist()))
        return found


@contextmanager
def explain_damage(episode: EpisodeRecord) -> Iterator[None]:
    """Raise OutputError where the files of an episode are not as this package has written them."""
    try:
        yield
    # what pyarrow, PyAV and OpenCV raise for damaged files, and what follows from columns that lack
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, cv2.error) as error:
        raise OutputError(
            f"episode {episode.number}: expected files as sam3-node has written them, found {error!r:.200}; drop the "
            "episode, or convert its recording again"
        ) from error


def read_rows(
    folder: Path, layout: type[DatasetLayout], piece: Piece, columns: Sequence[str] | None = None
) -> Any:
    """Return a piece's rows, with all columns or these. Raises ValueError for a table of another length."""
    path = check_inside(folder, folder / layout.place(layout.data, piece.episode.number))
    table = require("pyarrow.parquet", EXTRA).read_table(path, columns=columns)
    if table.num_rows != piece.episode.length:
        raise ValueError(f"{table.num_rows} rows in place of {piece.episode.length}")
    return table.slice(piece.begin, piece.end - piece.begin)


def read_pictures(
    folder: Path,
    layout: type[DatasetLayout],
    piece: Piece,
    key: str,
    rows: Any | None = None,
    wanted: Container[int] | None = None,
) -> Iterator[Image]:
    """Yield the pictures of a piece's rows, BGR uint8 [h, w, 3]: those of its video, else those of the table's rows.

    `wanted` are the rows of the piece whose pictures are yielded, by default all. Raises ValueError for damaged
    pictures, and if there are too few.
    """
    if piece.episode.features[key]["dtype"] == "image":
        assert rows is not None
        for row, cell in enumerate(rows.column(key).to_pylist()):
            if wanted is not None and row not in wanted:
                continue
            image = cv2.imdecode(np.frombuffer(cell["bytes"], np.uint8), cv2.IMREAD_COLOR)
            if image is None:
                raise ValueError(f"damaged pictures in {key}")
            yield np.asarray(image, np.uint8)
        return
    av = require("av", "bags")
    first = piece.episode.video_row + piece.begin
    last = piece.episode.video_row + piece.end
    path = check_inside(folder, folder / layout.place(layout.video, piece.episode.number, key))
    count = 0
    try:
        with av.open(str(path)) as file:
            for frame in islice(file.decode(video=0), first, last):
                if wanted is None or count in wanted:
                    yield frame.to_ndarray(format="bgr24")
                count += 1
    except av.FFmpegError as error:
        raise ValueError(f"the video of {key}: {error}") from error
    if count < last - first:
        raise ValueError(f"{count} pictures in place of {last - first} in the video of {key}")


def _cut_object(found: ObjectRow, piece: Piece, number: int) -> ObjectRow:
    """Return an object as it is on a piece's rows."""
    cut = found.copy()
    cut["episode"] = number
    runs = [
        [max(first, piece.begin) - piece.begin, min(last, piece.end - 1) - piece.begin]
        for first, last in cut.pop("doubtful", [])
        if first < piece.end and last >= piece.begin
    ]
    if runs:
        cut["doubtful"] = runs
    return cut


def _count(record: EpisodeRecord, rows: Any, piece: Piece) -> None:
    """Count the rows of a piece that have no masks, or a doubtful object, and note when it was."""
    prefix = VALID_FEATURE.format("")
    columns = [rows.column(key).to_pylist() for key in record.features if key.startswith(prefix)]
    if columns:
        record.missing = sum(not valid for column in columns for valid in column)
    else:
        record.missing = min(record.missing, record.length)
    source = record.source.copy()
    # which rows are off in time is not known: at most as many as before
    before = source.get("rows")
    if before is not None:
        doubtful = {
            row
            for found in record.objects
            for first, last in found.get("doubtful", [])
            for row in range(first, last + 1)
        }
        counts: RowCounts = {
            "without_masks": sum(not all(valid) for valid in zip(*columns, strict=True)),
            "doubtful": len(doubtful),
            "off_in_time": min(before["off_in_time"], record.length),
        }
        source["rows"] = counts
    begin_ns = source.get("begin_ns")
    if begin_ns is not None:
        source["begin_ns"] = begin_ns + round(piece.begin / record.fps * NANOSECONDS)
        source["end_ns"] = begin_ns + round((piece.end - 1) / record.fps * NANOSECONDS)
    record.source = source


def require_dataset(folder: Path) -> None:
    """Raise OutputError for a folder that is no dataset of this package."""
    if not (folder / RECORDS).is_dir():
        raise OutputError(
            f"expected a dataset that sam3-node has written, found none in {folder}; edit others with lerobot's own "
            "tools"
        )
