"""A LeRobot dataset in a folder, to which episodes are appended one by one.

Each episode has files of its own: a table of its rows, and a video of each camera. Where they are, and what describes
them, is the layout of the dataset's version. A record of the episode in RECORDS
makes it part of the dataset, and it is written last. All of `meta` is made of these records. So a process that is
killed leaves a whole dataset: without its episode, or with it.
"""

import fcntl
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...errors import BagError, OutputError, WireError, require
from ...files import (
    check_inside,
    explain_os_error,
    make_folder,
    move_inside,
    read_regular,
    remove_inside,
    write_atomically,
)
from ...resources import Closeable
from ...schema.fields import decode_json
from ...types import Image
from ...visualization import VideoWriter
from .forms import Cells, Feature, Features
from .groot import RegionFile, Regions, list_masked
from .layouts import EXTRA, LAYOUTS, PARTIAL, DatasetLayout, LayoutV3, pack_json
from .records import (
    DROPPED,
    FLAG,
    INDICES,
    MAX_RECORD_BYTES,
    RECORDS,
    EpisodeRecord,
    list_tasks,
    list_videos,
    read_dropped,
    read_records,
)

INFO = "meta/info.json"
"""File with the description of the dataset."""
LOCK = "meta/.sam3_lock"
"""File that the process that writes locks."""
UNFINISHED = "meta/.sam3_unfinished"
"""File with the places of the files of the episode that is being written, a line each. Only these are removed after a
process was killed."""
BATCH_ROWS = 64
"""Number of rows that are written to a table at once. They may hold pictures."""
KEYFRAME_EVERY = 2
"""Frames from one keyframe of a video to the next. lerobot reads single frames in any order, and writes 2 itself."""


class DatasetFolder(Closeable):
    """A dataset to which episodes are appended. A context manager; one process at a time may have it open.

    `version` is 2.1 or 3.0; without one it is that of the dataset, 3.0 for a new one. Raises OutputError for a folder
    that has another content or version, MissingExtraError without pyarrow.
    """

    def __init__(self, path: Path, version: str = "") -> None:
        require("pyarrow.parquet", EXTRA)
        self.path = path
        self.episodes: list[EpisodeRecord] = []
        records = path / RECORDS
        has_content = path.exists() and (not path.is_dir() or any(path.iterdir()))
        if has_content and not records.is_dir():
            raise OutputError(
                f"expected a new folder, or a dataset that sam3-node has written, found other content in {path}; "
                "name another folder"
            )
        described = [place for layout in LAYOUTS for place in layout.meta]
        for place in (RECORDS, DROPPED, LOCK, UNFINISHED, INFO, *described):
            check_inside(path, path / place)
        make_folder(records)
        self._lock = _lock(path / LOCK)
        try:
            self.episodes = read_records(records)
            self._dropped = read_dropped(path)
            self.layout = self._find_layout(version)
            self._check_writers()
            self._repair()
        except BaseException:
            self.close()
            raise

    @property
    def keys(self) -> set[int]:
        """Keys of the episodes, also of those that were dropped."""
        return {episode.key for episode in self.episodes} | self._dropped

    @property
    def labels(self) -> list[str]:
        """Labels of all objects, in the order of their numbers."""
        if not self.episodes:
            return []
        return list(self.episodes[-1].labels)

    @property
    def rows(self) -> int:
        """Number of rows of all episodes."""
        return sum(episode.length for episode in self.episodes)

    def number_task(self, task: str) -> int:
        """Return the number of a task: that of an earlier episode, or the next one."""
        tasks = list_tasks(self.episodes)
        if task in tasks:
            return tasks.index(task)
        return len(tasks)

    def begin(self, features: Features, fps: int, rows: int = 0) -> "EpisodeFiles":
        """Begin an episode of so many rows.

        Raises BagError if it does not have the features and the rate of the dataset.
        """
        if self.episodes:
            first = self.episodes[0]
            if first.fps != fps:
                raise BagError(f"expected {first.fps} rows per second as in the dataset, found {fps}")
            _require_equal(first.features, features)
        number = len(self.episodes)
        places = self.layout.list_places(number, features)
        for place in places:
            if os.path.lexists(check_inside(self.path, self.path / place)):
                raise OutputError(
                    f"expected no file of a new episode, found {self.path / place}, which another program has written; "
                    "move it, or name another folder"
                )
        # first, so that what a killed process leaves is known for its own
        with explain_os_error(OutputError, f"cannot write the dataset {self.path}"):
            write_atomically(self.path / UNFINISHED, "\n".join(places).encode())
        return EpisodeFiles(self.path, self.layout, number, features, fps, rows)

    def append(self, record: EpisodeRecord, files: "EpisodeFiles") -> None:
        """Make a finished episode part of the dataset."""
        with explain_os_error(OutputError, f"cannot write the dataset {self.path}"):
            files.publish()
            write_record(self.path, record)
            self.episodes.append(record)
            write_meta(self.path, self.layout, self.episodes)
            remove_inside(self.path, self.path / UNFINISHED)

    def close(self) -> None:
        """Let other processes write. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _find_layout(self, version: str) -> type[DatasetLayout]:
        """Return the layout of the dataset, or of a new one. Raises OutputError if it is of another version."""
        found = find_layouts(self.path)
        wanted = [layout for layout in LAYOUTS if layout.version == f"v{version}"]
        if self.episodes and found and wanted and found != wanted:
            raise OutputError(
                f"expected a dataset of version {version} in {self.path}, found one of {found[0].version}; leave out "
                "--lerobot-version, or name another folder"
            )
        return [*wanted, *found, LayoutV3][0]

    def _count_described(self) -> int:
        """Return the number of episodes in the description; 0 without one."""
        try:
            described = decode_json(read_regular(self.path / INFO, MAX_RECORD_BYTES), INFO)["total_episodes"]
        except (OSError, WireError, LookupError, TypeError):
            return 0
        return described if isinstance(described, int) else 0

    def _check_writers(self) -> None:
        """Raise OutputError for a dataset that another program has changed: episodes would be lost, or files lack."""
        for episode in self.episodes:
            for place in self.layout.list_places(episode.number, episode.features):
                if not place.endswith(PARTIAL) and not (self.path / place).is_file():
                    raise OutputError(
                        f"expected the files of all episodes in {self.path}, found no {place} of episode "
                        f"{episode.number}; restore it, or name another folder"
                    )
        described = self._count_described()
        if described > len(self.episodes):
            raise OutputError(
                f"expected a dataset that sam3-node alone has written, found {described} episodes in "
                f"{self.path / INFO}, of which {len(self.episodes)} have a record of it; name another folder"
            )

    def _repair(self) -> None:
        """Remove what a killed process of this package has left, and describe the episodes that are there."""
        number = len(self.episodes)
        expected = self.layout.list_places(number, self._features())
        journal = self.path / UNFINISHED
        if journal.exists():
            with explain_os_error(OutputError, f"cannot repair {self.path}"):
                # a file that somebody made up may name any file: only those of the next episode are removed
                for place in read_regular(journal, MAX_RECORD_BYTES).decode(errors="replace").split("\n"):
                    if place in expected or (not self.episodes and _is_first_place(place)):
                        remove_inside(self.path, self.path / place)
                remove_inside(self.path, journal)
        # a process may have been killed between the record of an episode and the description
        if self.episodes and self._count_described() != number:
            with explain_os_error(OutputError, f"cannot repair {self.path}"):
                write_meta(self.path, self.layout, self.episodes)

    def _features(self) -> Features:
        if not self.episodes:
            return {}
        return self.episodes[0].features


def find_layouts(folder: Path) -> list[type[DatasetLayout]]:
    """Return the layout of a dataset, by the place of its first table; none for a dataset without episodes."""
    return [layout for layout in LAYOUTS if (folder / layout.place(layout.data, 0)).is_file()]


def write_record(folder: Path, record: EpisodeRecord) -> None:
    """Write the record of an episode, which makes it part of the dataset. Raises OSError."""
    text = json.dumps(asdict(record), ensure_ascii=False)
    write_atomically(folder / RECORDS / f"episode-{record.number:06d}.json", text.encode())


def write_meta(folder: Path, layout: type[DatasetLayout], episodes: Sequence[EpisodeRecord]) -> None:
    """Write all that describes a dataset. The description of it comes last. Raises OSError."""
    for place, data in layout.describe(episodes):
        make_folder((folder / place).parent)
        write_atomically(folder / place, data)
    write_atomically(folder / INFO, pack_json(layout.describe_info(episodes)))


def _is_first_place(place: str) -> bool:
    """Return True for the place of a file of the first episode, whose features and version no record tells."""
    return any(layout.is_first_place(place) for layout in LAYOUTS)


class EpisodeFiles(Closeable):
    """The files of an episode while it is written. A context manager: at its end, unfinished files are removed."""

    def __init__(
        self, folder: Path, layout: type[DatasetLayout], number: int, features: Features, fps: int, rows: int
    ) -> None:
        self._parquet = require("pyarrow.parquet", EXTRA)
        self._arrow = require("pyarrow", EXTRA)
        self.number = number
        self._folder = folder
        self._data = folder / layout.place(layout.data, number)
        self._partial = self._data.with_name(self._data.name + PARTIAL)
        make_folder(self._partial.parent)
        self._schema = _make_schema(features)
        self._waiting: list[Cells] = []
        self._is_published = False
        self._table: Any = self._parquet.ParquetWriter(self._partial, self._schema)
        self._videos = {}
        for key in list_videos(features):
            path = folder / layout.place(layout.video, number, key)
            self._videos[key] = VideoWriter(path, float(fps), keyframe_every=KEYFRAME_EVERY)
        masked = list_masked(features) if layout.masks else []
        self._regions = {
            key: RegionFile(folder / layout.place(layout.masks, number, key), rows) for key in masked
        }

    def add_row(self, cells: Cells) -> None:
        """Add the next row of the table, a cell for each column."""
        self._waiting.append(cells)
        if len(self._waiting) >= BATCH_ROWS:
            self._flush()

    def add_image(self, key: str, image: Image) -> None:
        """Add the next frame of a video, BGR uint8 [h, w, 3]."""
        self._videos[key].write(image)

    @property
    def has_regions(self) -> bool:
        """True if the version has masks as numbers of regions, and the episode has masks."""
        return bool(self._regions)

    def add_regions(self, key: str, regions: Regions, is_valid: bool) -> None:
        """Add the regions of the next row of the pictures `key`."""
        self._regions[key].add(regions, is_valid)

    def publish(self) -> None:
        """Finish the files, and give them their names."""
        self._flush()
        self._table.close()
        for video in self._videos.values():
            video.close()
        for regions in self._regions.values():
            regions.finish()
        move_inside(self._folder, self._partial, self._data)
        self._is_published = True

    def close(self) -> None:
        """Remove the files, unless they were published. Idempotent."""
        if self._is_published:
            return
        self._table.close()
        remove_inside(self._folder, self._partial)
        for video in self._videos.values():
            with suppress(OutputError):
                video.close()
            remove_inside(self._folder, video.path)
        for regions in self._regions.values():
            with suppress(OSError):
                regions.close()
            remove_inside(self._folder, regions.path)

    def _flush(self) -> None:
        if self._waiting:
            self._table.write_table(self._arrow.Table.from_pylist(self._waiting, schema=self._schema))
            self._waiting.clear()


def _make_schema(features: Features) -> Any:
    """Return the columns of an episode's table: all features but videos."""
    arrow = require("pyarrow", EXTRA)
    picture = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    columns: list[tuple[str, Any]] = []
    for key, feature in features.items():
        kind = feature["dtype"]
        if key in INDICES:
            columns.append((key, arrow.type_for_alias(kind)))
        elif kind == "image":
            columns.append((key, picture))
        elif kind == FLAG:
            columns.append((key, arrow.bool_()))
        elif kind != "video":
            (length,) = feature["shape"]
            columns.append((key, arrow.list_(arrow.type_for_alias(kind), length)))
    # lerobot reads tables of version 2.1 without the description, so that they say themselves what a picture is
    pictures = {key: {"_type": "Image"} for key, feature in features.items() if feature["dtype"] == "image"}
    described = {b"huggingface": json.dumps({"info": {"features": pictures}}).encode()} if pictures else None
    return arrow.schema(columns, described)


def _require_equal(expected: Features, found: Features) -> None:
    """Raise BagError that names the first feature that differs."""
    for key in [*expected, *(key for key in found if key not in expected)]:
        if expected.get(key) != found.get(key):
            raise BagError(
                f"expected the features of the dataset's other episodes, {key}: {_shorten(expected.get(key))}, "
                f"found {_shorten(found.get(key))}; write this episode into another folder"
            )


def _shorten(feature: Feature | None) -> str:
    if feature is None:
        return "none"
    parts = [f"{feature['dtype']} of shape {feature['shape']}"]
    if names := feature.get("names"):
        parts.append(f"names {', '.join(names)[:200]}")
    return ", ".join(parts)


def _lock(path: Path) -> int:
    """Return a descriptor that holds the lock of the dataset. Raises OutputError if another process has it."""
    with explain_os_error(OutputError, f"cannot write {path}"):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise OutputError(
            f"expected a dataset that nobody else writes, found that another process appends to {path.parent.parent}; "
            "wait until it has ended"
        ) from None
    except OSError:
        # not every disk has locks
        return descriptor
    return descriptor
