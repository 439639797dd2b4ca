"""A LeRobot dataset of version 3.0 in a folder, to which episodes are appended one by one.

Each episode has files of its own: a table of its rows, and a video of each camera. A record of the episode in RECORDS
makes it part of the dataset, and it is written last. All of `meta` is made of these records. So a process that is
killed leaves a whole dataset: without its episode, or with it.
"""

import fcntl
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

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
from ...schema.fields import FromOne, Natural, Text, convert, decode_json
from ...settings import MAX_DATASET_FPS
from ...types import Image
from ...visualization import VideoWriter
from .forms import Cells, EpisodeSource, Feature, Features, Info, MaskNames, ObjectRow, TaskRow
from .masks import CHANNELS, NAMES
from .statistics import CHANNELS as COLOURS
from .statistics import NamedStats, add_up, check_stats

VERSION = "v3.0"
"""Version of the datasets that are written."""
EXTRA = "lerobot-datasets"
"""Extra of this package that has pyarrow."""
INFO = "meta/info.json"
"""File with the description of the dataset."""
STATS = "meta/stats.json"
"""File with the statistics of the whole dataset."""
TASKS = "meta/tasks.parquet"
"""Table of the tasks."""
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
"""Table of the episodes."""
RECORDS = "meta/sam3_episodes"
"""Folder of the records of this package, one JSON file of each episode."""
LOCK = "meta/.sam3_lock"
"""File that the process that writes locks."""
UNFINISHED = "meta/.sam3_unfinished"
"""File with the places of the files of the episode that is being written, a line each. Only these are removed after a
process was killed."""
MAX_RECORD_BYTES = 16 << 20
"""Size of the largest record of an episode, or description of a dataset, that is read."""
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
"""Place of an episode's table, as INFO names it."""
VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
"""Place of an episode's video, as INFO names it."""
FILES_PER_CHUNK = 1000
"""Number of files in a folder of tables or videos."""
_KEY = re.compile(r"(?!\.+\Z)[A-Za-z0-9_.-]{1,128}")
"""Keys of videos, which become names of folders."""
BATCH_ROWS = 64
"""Number of rows that are written to a table at once. They may hold pictures."""
KEYFRAME_EVERY = 2
"""Frames from one keyframe of a video to the next. lerobot reads single frames in any order, and writes 2 itself."""
PARTIAL = ".partial"
"""Ending of a table that is not complete. lerobot reads all that end in .parquet."""

PICTURES = ("image", "video")
"""Types of the features that are pictures."""
INDICES: dict[str, str] = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
"""Types of the columns that number a row, which each dataset has."""


@dataclass
class EpisodeRecord:
    """What the dataset's description needs of one episode."""

    number: Natural
    key: Natural
    """Number by which a recording's episode is recognised, so that it is appended once."""
    task: Text
    length: FromOne
    first_row: Natural
    fps: Annotated[int, Meta(ge=1, le=MAX_DATASET_FPS)]
    features: Features
    labels: list[str]
    """All labels of the dataset up to this episode, in the order of their numbers."""
    objects: list[ObjectRow]
    """Objects as NAMES lists them."""
    missing: Natural
    """Number of frames without masks, of all cameras."""
    statistics: dict[str, NamedStats]
    source: EpisodeSource = field(default_factory=EpisodeSource)


class FileNumber(NamedTuple):
    """The place of an episode's files."""

    chunk_index: int
    file_index: int

    @classmethod
    def of(cls, episode: int) -> "FileNumber":
        """Return the place of the files of an episode."""
        return cls(episode // FILES_PER_CHUNK, episode % FILES_PER_CHUNK)


class DatasetFolder(Closeable):
    """A dataset to which episodes are appended. A context manager; one process at a time may have it open.

    Raises OutputError for a folder that has another content, MissingExtraError without pyarrow.
    """

    def __init__(self, path: Path) -> None:
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
        for place in (RECORDS, LOCK, UNFINISHED, INFO, STATS, NAMES, TASKS, EPISODES):
            check_inside(path, path / place)
        make_folder(records)
        self._lock = _lock(path / LOCK)
        try:
            self.episodes = _read_records(records)
            self._check_writers()
            self._repair()
        except BaseException:
            self.close()
            raise

    @property
    def keys(self) -> set[int]:
        """Keys of the episodes."""
        return {episode.key for episode in self.episodes}

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
        tasks = self._list_tasks()
        if task in tasks:
            return tasks.index(task)
        return len(tasks)

    def begin(self, features: Features, fps: int) -> "EpisodeFiles":
        """Begin an episode. Raises BagError if it does not have the features and the rate of the dataset."""
        if self.episodes:
            first = self.episodes[0]
            if first.fps != fps:
                raise BagError(f"expected {first.fps} rows per second as in the dataset, found {fps}")
            _require_equal(first.features, features)
        number = len(self.episodes)
        places = _list_places(number, features)
        for place in places:
            if os.path.lexists(check_inside(self.path, self.path / place)):
                raise OutputError(
                    f"expected no file of a new episode, found {self.path / place}, which another program has written; "
                    "move it, or name another folder"
                )
        # first, so that what a killed process leaves is known for its own
        with explain_os_error(OutputError, f"cannot write the dataset {self.path}"):
            write_atomically(self.path / UNFINISHED, "\n".join(places).encode())
        return EpisodeFiles(self.path, number, features, fps)

    def append(self, record: EpisodeRecord, files: "EpisodeFiles") -> None:
        """Make a finished episode part of the dataset."""
        with explain_os_error(OutputError, f"cannot write the dataset {self.path}"):
            files.publish()
            text = json.dumps(asdict(record), ensure_ascii=False)
            name = f"episode-{record.number:06d}.json"
            write_atomically(self.path / RECORDS / name, text.encode())
            self.episodes.append(record)
            self._write_meta()
            remove_inside(self.path, self.path / UNFINISHED)

    def close(self) -> None:
        """Let other processes write. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

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
            for place in _list_places(episode.number, episode.features):
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
        expected = _list_places(number, self._features())
        journal = self.path / UNFINISHED
        if journal.exists():
            with explain_os_error(OutputError, f"cannot repair {self.path}"):
                # a file that somebody made up may name any file: only those of the next episode are removed
                for place in read_regular(journal, MAX_RECORD_BYTES).decode(errors="replace").split("\n"):
                    if place in expected or (not self.episodes and _is_place(place)):
                        remove_inside(self.path, self.path / place)
                remove_inside(self.path, journal)
        # a process may have been killed between the record of an episode and the description
        if self.episodes and self._count_described() != number:
            with explain_os_error(OutputError, f"cannot repair {self.path}"):
                self._write_meta()

    def _features(self) -> Features:
        if not self.episodes:
            return {}
        return self.episodes[0].features

    def _list_tasks(self) -> list[str]:
        return list(dict.fromkeys(episode.task for episode in self.episodes))

    def _write_meta(self) -> None:
        """Write all that describes the dataset. The description of it comes last."""
        _write_table(self.path / TASKS, *self._describe_tasks())
        _write_table(self.path / EPISODES, self._describe_episodes())
        names = self._features()
        stats = {name: add_up(episode.statistics[name] for episode in self.episodes) for name in names}
        self._write_json(STATS, stats)
        self._write_json(NAMES, self._describe_masks())
        self._write_json(INFO, self._describe())

    def _write_json(self, name: str, values: Mapping[str, object]) -> None:
        write_atomically(self.path / name, json.dumps(values, indent=1, ensure_ascii=False).encode())

    def _describe(self) -> Info:
        # not `robot_type`: nothing that was recorded names it
        return {
            "codebase_version": VERSION,
            "robot_type": None,
            "total_episodes": len(self.episodes),
            "total_frames": self.rows,
            "total_tasks": len(self._list_tasks()),
            "chunks_size": FILES_PER_CHUNK,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200,
            "fps": self.episodes[0].fps,
            "splits": {"train": f"0:{len(self.episodes)}"},
            "data_path": DATA,
            "video_path": VIDEO,
            "features": self._features(),
        }

    def _describe_masks(self) -> MaskNames:
        missing = {episode.number: episode.missing for episode in self.episodes if episode.missing}
        return {
            "channels": CHANNELS,
            "labels": dict(enumerate(self.labels, start=1)),
            "objects": [found for episode in self.episodes for found in episode.objects],
            "frames_without_masks": missing,
        }

    def _describe_tasks(self) -> tuple[list[TaskRow], dict[bytes, bytes]]:
        """Return the rows of TASKS, and the metadata by which pandas takes the texts for the index, as lerobot does."""
        tasks = self._list_tasks()
        columns = [
            {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
            for name, kind, numpy in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
        ]
        pandas = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "attributes": {}}
        metadata = {b"pandas": json.dumps({**pandas, "pandas_version": "2.0.0"}).encode()}
        return [{"task_index": number, "task": task} for number, task in enumerate(tasks)], metadata

    def _describe_episodes(self) -> list[Cells]:
        rows = []
        for episode in self.episodes:
            place = FileNumber.of(episode.number)
            row: Cells = {"episode_index": episode.number, "tasks": [episode.task]}
            row["length"] = episode.length
            row |= {f"data/{name}": value for name, value in place._asdict().items()}
            row["dataset_from_index"] = episode.first_row
            row["dataset_to_index"] = episode.first_row + episode.length
            for key in _list_videos(episode.features):
                row |= {f"videos/{key}/{name}": value for name, value in place._asdict().items()}
                row[f"videos/{key}/from_timestamp"] = 0.0
                row[f"videos/{key}/to_timestamp"] = episode.length / episode.fps
            for feature, stats in episode.statistics.items():
                row |= {f"stats/{feature}/{name}": value for name, value in stats.items()}
            # the table of episodes is one file
            row |= {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
            rows.append(row)
        return rows


def _list_places(number: int, features: Features) -> list[str]:
    """Return the places of the files of an episode in its dataset, also of the table while it is not complete."""
    places = [DATA, DATA + PARTIAL, *(VIDEO.replace("{video_key}", key) for key in _list_videos(features))]
    numbers = FileNumber.of(number)._asdict()
    return [place.format(**numbers) for place in places]


def _is_place(place: str) -> bool:
    """Return True for the place of a file of the first episode, whose features no record tells."""
    parts = place.split("/")
    is_table = place in _list_places(0, {})
    is_video = len(parts) == 4 and parts[0] == "videos" and parts[2:] == ["chunk-000", "file-000.mp4"]
    return is_table or is_video


class EpisodeFiles(Closeable):
    """The files of an episode while it is written. A context manager: at its end, unfinished files are removed."""

    def __init__(self, folder: Path, number: int, features: Features, fps: int) -> None:
        self._parquet = require("pyarrow.parquet", EXTRA)
        self._arrow = require("pyarrow", EXTRA)
        self.number = number
        self._folder = folder
        place = FileNumber.of(number)._asdict()
        self._data = folder / DATA.format(**place)
        self._partial = self._data.with_name(self._data.name + PARTIAL)
        make_folder(self._partial.parent)
        self._schema = _make_schema(features)
        self._waiting: list[Cells] = []
        self._is_published = False
        self._table: Any = self._parquet.ParquetWriter(self._partial, self._schema)
        self._videos = {}
        for key in _list_videos(features):
            path = folder / VIDEO.format(video_key=key, **place)
            self._videos[key] = VideoWriter(path, float(fps), keyframe_every=KEYFRAME_EVERY)

    def add_row(self, cells: Cells) -> None:
        """Add the next row of the table, a cell for each column."""
        self._waiting.append(cells)
        if len(self._waiting) >= BATCH_ROWS:
            self._flush()

    def add_image(self, key: str, image: Image) -> None:
        """Add the next frame of a video, BGR uint8 [h, w, 3]."""
        self._videos[key].write(image)

    def publish(self) -> None:
        """Finish the files, and give them their names."""
        self._flush()
        self._table.close()
        for video in self._videos.values():
            video.close()
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
        elif kind != "video":
            (length,) = feature["shape"]
            columns.append((key, arrow.list_(arrow.type_for_alias(kind), length)))
    return arrow.schema(columns)


def _write_table(
    path: Path, rows: Sequence[Mapping[str, object]], metadata: Mapping[bytes, bytes] | None = None
) -> None:
    """Replace a table by these rows."""
    arrow = require("pyarrow", EXTRA)
    parquet = require("pyarrow.parquet", EXTRA)
    table = arrow.Table.from_pylist(list(rows))
    if metadata:
        table = table.replace_schema_metadata(metadata)
    sink = arrow.BufferOutputStream()
    parquet.write_table(table, sink)
    make_folder(path.parent)
    write_atomically(path, sink.getvalue().to_pybytes())


def _list_videos(features: Features) -> list[str]:
    return [key for key, feature in features.items() if feature["dtype"] == "video"]


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


def _read_records(folder: Path) -> list[EpisodeRecord]:
    """Read the records of all episodes. Raises OutputError if one is absent or damaged."""
    records = []
    first_row = 0
    for number, path in enumerate(sorted(folder.glob("episode-*.json"))):
        try:
            values = decode_json(read_regular(path, MAX_RECORD_BYTES), "record")
            # a check only: `convert` would drop what a later version has added to features
            convert(values, EpisodeRecord, "record")
            record = EpisodeRecord(**values)
            _check_features(record)
        except (OSError, ValueError, TypeError, WireError) as error:
            raise OutputError(
                f"{path}: expected a record of sam3-node, found {str(error)[:200]}; name another folder"
            ) from error
        if record.number != number or record.first_row != first_row:
            raise OutputError(
                f"{path}: expected the record of episode {number}, which begins with row {first_row}, found that of "
                f"{record.number}, row {record.first_row}; name another folder"
            )
        first_row += record.length
        records.append(record)
    return records


def _check_features(record: EpisodeRecord) -> None:
    """Raise ValueError for features that no dataset of this package has, or for statistics of others."""
    for key, feature in record.features.items():
        kind = feature["dtype"]
        is_picture = kind in PICTURES
        # a video's key becomes the name of a folder
        if kind == "video" and not _KEY.fullmatch(key):
            raise ValueError(
                f"a video's key of letters, digits, '_', '.' and '-' was expected, found {key!r:.80}"
            )
        known = [INDICES[key]] if key in INDICES else [*PICTURES, "float32"]
        if kind not in known or len(feature["shape"]) != (3 if is_picture else 1):
            raise ValueError(
                f"a feature of the type {' or '.join(known)} was expected, found {key!r:.80} of {kind!r:.20} with "
                f"{len(feature['shape'])} dimensions"
            )
        shape = (COLOURS, 1, 1) if is_picture else (feature["shape"][0],)
        check_stats(record.statistics.get(key, {}), shape)


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
