"""The versions of LeRobot datasets that are written: where the files of an episode are, and the files in `meta`.

Version 3.0 has tables in `meta`, version 2.1 has lines of JSON. A dataset of version 2.1 also has what GR00T reads: the
groups of the robot's joints in MODALITY, statistics of the whole dataset, and masks as numbers of regions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from ...errors import require
from .forms import Cells, Features, Info, MaskNames, TaskRow
from .groot import MODALITY, describe_modality, list_masked, name_regions
from .masks import CHANNELS, NAMES
from .records import EpisodeRecord, list_tasks, list_videos
from .statistics import COUNT, add_up

EXTRA = "lerobot-datasets"
"""Extra of this package that has pyarrow."""
STATS = "meta/stats.json"
"""File with the statistics of the whole dataset."""
TASKS_V3 = "meta/tasks.parquet"
EPISODES_V3 = "meta/episodes/chunk-000/file-000.parquet"
TASKS_V2 = "meta/tasks.jsonl"
EPISODES_V2 = "meta/episodes.jsonl"
EPISODE_STATS_V2 = "meta/episodes_stats.jsonl"
FILES_PER_CHUNK = 1000
"""Number of files in a folder of tables or videos."""
PARTIAL = ".partial"
"""Ending of a table that is not complete. lerobot reads all that end in .parquet."""

Described = Iterator[tuple[str, bytes]]
"""Files in `meta`: the place of each, and its content."""


class DatasetLayout:
    """A version of datasets. A class has the templates of the places, and makes the files in `meta`."""

    version: ClassVar[str]
    data: ClassVar[str]
    """place of an episode's table"""
    video: ClassVar[str]
    """place of an episode's video"""
    masks: ClassVar[str] = ""
    """place of an episode's masks as numbers of regions, where the version has them"""
    meta: ClassVar[tuple[str, ...]]
    """places of the files in `meta` that describe the dataset, without the description itself"""

    @classmethod
    def place(cls, template: str, episode: int, key: str = "", chunk_size: int = FILES_PER_CHUNK) -> str:
        """Return the place of a file of an episode."""
        chunk, file = divmod(episode, chunk_size)
        numbers = {"chunk_index": chunk, "file_index": file, "episode_chunk": chunk, "episode_index": episode}
        # a key is no template, whatever it has
        filled = template.replace("{video_key}", "\0").replace("{mask_key}", "\0").format(**numbers)
        return filled.replace("\0", key)

    @classmethod
    def list_places(cls, episode: int, features: Features) -> list[str]:
        """Return the places of the files of an episode, also of the table while it is not complete."""
        table = cls.place(cls.data, episode)
        places = [table, table + PARTIAL]
        places += [cls.place(cls.video, episode, key) for key in list_videos(features)]
        if cls.masks:
            places += [cls.place(cls.masks, episode, key) for key in list_masked(features)]
        return places

    @classmethod
    def is_first_place(cls, place: str) -> bool:
        """Return True for the place of a file of the first episode, whose features no record tells."""
        keyed = [template for template in (cls.video, cls.masks) if template]
        patterns = [re.escape(cls.place(template, 0, "\0")).replace("\0", r"[^/\0]+") for template in keyed]
        return place in cls.list_places(0, {}) or any(re.fullmatch(pattern, place) for pattern in patterns)

    @classmethod
    def describe_info(cls, episodes: Sequence[EpisodeRecord]) -> Info:
        """Return the description of the dataset."""
        # not `robot_type`: nothing that was recorded names it
        info: Info = {
            "codebase_version": cls.version,
            "robot_type": None,
            "total_episodes": len(episodes),
            "total_frames": sum(episode.length for episode in episodes),
            "total_tasks": len(list_tasks(episodes)),
            "chunks_size": FILES_PER_CHUNK,
            "fps": episodes[0].fps,
            "splits": {"train": f"0:{len(episodes)}"},
            "data_path": cls.data,
            "video_path": cls.video,
            "features": episodes[0].features,
        }
        return info

    @classmethod
    def describe(cls, episodes: Sequence[EpisodeRecord]) -> Described:
        """Yield the files in `meta`, without the description."""
        raise NotImplementedError

    @classmethod
    def _describe_masks(cls, episodes: Sequence[EpisodeRecord]) -> MaskNames:
        missing = {episode.number: episode.missing for episode in episodes if episode.missing}
        return {
            "channels": CHANNELS,
            "labels": dict(enumerate(episodes[-1].labels, start=1)),
            "objects": [found for episode in episodes for found in episode.objects],
            "frames_without_masks": missing,
        }


class LayoutV3(DatasetLayout):
    """Version 3.0: lerobot's present one."""

    version = "v3.0"
    data = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    video = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    meta = (TASKS_V3, EPISODES_V3, STATS, NAMES)

    @classmethod
    def describe_info(cls, episodes: Sequence[EpisodeRecord]) -> Info:
        """Return the description of the dataset."""
        info = super().describe_info(episodes)
        info["data_files_size_in_mb"] = 100
        info["video_files_size_in_mb"] = 200
        return info

    @classmethod
    def describe(cls, episodes: Sequence[EpisodeRecord]) -> Described:
        """Yield the files in `meta`, without the description."""
        yield TASKS_V3, _pack_table(*_describe_tasks(list_tasks(episodes)))
        yield EPISODES_V3, _pack_table(_describe_episodes(episodes))
        yield STATS, pack_json(_add_up_all(episodes))
        yield NAMES, pack_json(cls._describe_masks(episodes))


class LayoutV2(DatasetLayout):
    """Version 2.1, which GR00T trains on."""

    version = "v2.1"
    data = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    video = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    masks = "masks/chunk-{episode_chunk:03d}/{mask_key}/episode_{episode_index:06d}.npz"
    meta = (TASKS_V2, EPISODES_V2, EPISODE_STATS_V2, STATS, MODALITY, NAMES)

    @classmethod
    def describe_info(cls, episodes: Sequence[EpisodeRecord]) -> Info:
        """Return the description of the dataset."""
        info = super().describe_info(episodes)
        info["total_videos"] = len(episodes) * len(list_videos(info["features"]))
        info["total_chunks"] = -(-len(episodes) // FILES_PER_CHUNK)
        if list_masked(info["features"]):
            info["mask_path"] = cls.masks
        return info

    @classmethod
    def describe(cls, episodes: Sequence[EpisodeRecord]) -> Described:
        """Yield the files in `meta`, without the description."""
        features = episodes[0].features
        yield (
            TASKS_V2,
            _pack_lines(
                [{"task_index": number, "task": task} for number, task in enumerate(list_tasks(episodes))]
            ),
        )
        yield (
            EPISODES_V2,
            _pack_lines(
                [
                    {"episode_index": episode.number, "tasks": [episode.task], "length": episode.length}
                    for episode in episodes
                ]
            ),
        )
        yield (
            EPISODE_STATS_V2,
            _pack_lines(
                [{"episode_index": episode.number, "stats": episode.statistics} for episode in episodes]
            ),
        )
        # GR00T cuts each statistic into the groups of joints: the number of rows is none
        stats = {
            name: {statistic: value for statistic, value in found.items() if statistic != COUNT}
            for name, found in _add_up_all(episodes).items()
        }
        yield STATS, pack_json(stats)
        yield MODALITY, pack_json(describe_modality(features))
        names = cls._describe_masks(episodes)
        if list_masked(features):
            names["regions"] = name_regions(names["labels"])
        yield NAMES, pack_json(names)


LAYOUTS: tuple[type[DatasetLayout], ...] = (LayoutV3, LayoutV2)
"""The versions."""


def pack_json(values: Mapping[str, object]) -> bytes:
    """Return the bytes of a file of JSON."""
    return json.dumps(values, indent=1, ensure_ascii=False).encode()


def _pack_lines(rows: Sequence[Mapping[str, object]]) -> bytes:
    """Return the bytes of a file with a line of JSON for each row."""
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def _pack_table(rows: Sequence[Mapping[str, object]], metadata: Mapping[bytes, bytes] | None = None) -> bytes:
    """Return the bytes of a Parquet file of these rows."""
    arrow = require("pyarrow", EXTRA)
    parquet = require("pyarrow.parquet", EXTRA)
    table = arrow.Table.from_pylist(list(rows))
    if metadata:
        table = table.replace_schema_metadata(metadata)
    sink = arrow.BufferOutputStream()
    parquet.write_table(table, sink)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _add_up_all(episodes: Sequence[EpisodeRecord]) -> dict[str, dict[str, list[Any]]]:
    """Return the statistics of the whole dataset, of each feature that has some."""
    names = episodes[0].statistics
    return {name: add_up(episode.statistics[name] for episode in episodes) for name in names}


def _describe_tasks(tasks: Sequence[str]) -> tuple[list[TaskRow], dict[bytes, bytes]]:
    """Return the rows of TASKS_V3, and the metadata by which pandas takes the texts for the index, as lerobot does."""
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
        for name, kind, numpy in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    pandas = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "attributes": {}}
    metadata = {b"pandas": json.dumps({**pandas, "pandas_version": "2.0.0"}).encode()}
    return [{"task_index": number, "task": task} for number, task in enumerate(tasks)], metadata


def _describe_episodes(episodes: Sequence[EpisodeRecord]) -> list[Cells]:
    """Return the rows of EPISODES_V3."""
    rows = []
    for episode in episodes:
        chunk, file = divmod(episode.number, FILES_PER_CHUNK)
        place = {"chunk_index": chunk, "file_index": file}
        row: Cells = {"episode_index": episode.number, "tasks": [episode.task]}
        row["length"] = episode.length
        row |= {f"data/{name}": value for name, value in place.items()}
        row["dataset_from_index"] = episode.first_row
        row["dataset_to_index"] = episode.first_row + episode.length
        for key in list_videos(episode.features):
            row |= {f"videos/{key}/{name}": value for name, value in place.items()}
            row[f"videos/{key}/from_timestamp"] = episode.video_row / episode.fps
            row[f"videos/{key}/to_timestamp"] = (episode.video_row + episode.length) / episode.fps
        for feature, stats in episode.statistics.items():
            row |= {f"stats/{feature}/{name}": value for name, value in stats.items()}
        # the table of episodes is one file
        row |= {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
        rows.append(row)
    return rows
