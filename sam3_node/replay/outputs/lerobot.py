"""Writes masks into a copy of a LeRobot dataset, as an added feature of each camera that lerobot's own loader opens.

The feature `observation.masks.<camera>` is a lossless PNG in the table, of the size of the camera's frames. Its pixels
are (label, object, score x 255), and 0 for the background. They have three channels, so that policies take the feature
as any camera. Labels are numbered over the whole dataset, objects over their episode and camera, both from 1.
meta/sam3_masks.json names them, and lists the frames of the episode on which each object was doubtful, as runs of
[first, last]. The statistics are exact, in 0..1 as the loader gives the pixels.
"""

import json
import os
import shutil
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...bags.formats.lerobot_layout import EPISODES_V3, INFO, Episode, is_lerobot, read_layout
from ...bags.isolated import IsolatedCalls
from ...bags.samples import split_selection
from ...errors import BagError, ReplayError, find_version, install_advice
from ...files import check_inside, has_home
from ...recording.lerobot.forms import Feature, MaskNames, PictureCell
from ...recording.lerobot.masks import (
    CHANNELS,
    FEATURE,
    NAMES,
    add_to_runs,
    encode_picture,
    make_object_row,
    paint_object,
)
from ...recording.lerobot.statistics import NamedStats, PixelStatistics, Stats, name_pixel_stats
from ...types import MaskFrame
from ..davis_png import MaskSource, NumberTable
from .output import OutputFormat, Progress, Sources

FOLDER = "lerobot"
"""Folder of the copy, in that of the outputs."""
STATS = "meta/stats.json"
"""File with the statistics of the whole dataset."""
EPISODE_STATS_V2 = "meta/episodes_stats.jsonl"
"""File with the statistics of each episode, in version 2.1."""
COPIED = ("meta", "data", "videos", "images")
"""Folders of a dataset that are copied."""


def check_lerobot(path: Path) -> None:
    """Raise ReplayError that names everything that is missing, unless a recording is a whole LeRobot dataset."""
    selection = split_selection(path)
    missing = []
    if not is_lerobot(selection.path):
        missing.append(
            f"a LeRobot dataset, with the robot's states, actions and tasks: {selection.path} has no {INFO}; record "
            "with lerobot, or convert the recording with its tools"
        )
    if not selection.is_whole:
        missing.append(
            "all episodes, because the output is a copy of the dataset: leave out the selection behind #"
        )
    if find_version("pyarrow") is None:
        missing.append(f"pyarrow: {install_advice('lerobot-datasets')}")
    if missing:
        listed = "".join(f"\n- {item}" for item in missing)
        raise ReplayError(
            f"the output lerobot adds masks to a LeRobot dataset; {path} lacks:{listed}\n"
            "For the masks alone, use --outputs coco, davis or mcap"
        )


def write_lerobot(
    folder: Path, path: Path, masks: MaskSource, progress: Callable[[int], None], labels: Sequence[str]
) -> None:
    """Write the copy of the dataset at `path` into `folder`/lerobot. Videos are hard links where possible.

    `labels` are numbered first, in their order; others follow by name. A row without masks, because it was not replayed
    or could not be, has the background alone, and is counted in NAMES. Raises BagError for a damaged dataset.
    """
    check_lerobot(path)
    # the description comes last, because it has the statistics of all pixels
    with IsolatedCalls("pyarrow", "lerobot-datasets") as tables:
        writer = _DatasetWriter(path, folder / FOLDER, tables, masks, progress, labels)
        writer.copy_files()
        writer.write_tables()
        try:
            writer.write_meta()
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise BagError(
                f"{path}: expected statistics as lerobot writes them in meta, found {error!r:.200}"
            ) from error


def _link(path: Path, target: Path) -> None:
    try:
        os.link(path.resolve(), target)  # behind the links of a download cache
    except OSError:
        shutil.copyfile(path, target)


class _DatasetWriter:
    """Writes tables with a column of masks for each camera, and then what describes these columns."""

    def __init__(
        self,
        root: Path,
        target: Path,
        tables: IsolatedCalls,
        masks: MaskSource,
        progress: Callable[[int], None],
        labels: Sequence[str],
    ) -> None:
        self._layout = read_layout(root, tables)
        self._target = target
        self._tables = tables

        # one pass for the size of each camera and all labels, which are numbered before the first PNG
        sizes = {}
        others = set()
        for frame in masks():
            sizes[frame.camera] = frame.width, frame.height
            others |= {instance.label for instance in frame.instances}
        if not sizes:
            raise ReplayError("the output lerobot: expected masks of at least one frame, found none")
        self._cameras = dict(sorted(sizes.items()))
        """Size (width, height) of each camera."""
        self._numbers = NumberTable[str]()
        for label in (*labels, *sorted(others - set(labels))):
            _ = self._numbers[label]
        # labels by id, in the order of the objects' numbers, by camera and episode
        self._objects: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
        # frames on which an object was doubtful, by camera, episode and id
        self._doubtful: dict[tuple[str, int, int], list[list[int]]] = defaultdict(list)
        self._missing: Counter[int] = Counter()  # frames without masks, by episode
        self._statistics = {camera: PixelStatistics() for camera in self._cameras}
        self._lengths = {episode.number: episode.length for episode in self._layout.episodes}
        # the loader expects the same statistics of each camera: those of the first one show which
        self._described = self._layout.images[0].key
        self._episodes = sorted(self._layout.episodes, key=lambda episode: episode.first_row)
        self._starts = [episode.first_row for episode in self._episodes]
        self._rows = {camera: _CameraRows(camera, masks()) for camera in self._cameras}
        self._progress = progress
        self._written = 0

    def copy_files(self) -> None:
        """Link or copy all files but the tables of rows and episodes."""
        root = self._layout.root
        tables = {episode.table for episode in self._episodes}
        for name in COPIED:
            for path in sorted((root / name).rglob("*")):
                # a copy is published: what a link brings from elsewhere is not the dataset's
                if not has_home(root, path):
                    raise BagError(
                        f"{root}: expected a dataset whose files lie in its folder, found that {path} leads to "
                        f"{path.resolve()}; copy it there"
                    )
                self._find_target(path).parent.mkdir(parents=True, exist_ok=True)
                if not path.is_file() or path in tables or (root / EPISODES_V3) in path.parents:
                    continue
                # files of meta are changed afterwards: a link would change the original
                if (root / "meta") in path.parents:
                    shutil.copyfile(path, self._find_target(path))
                else:
                    _link(path, self._find_target(path))

    def write_tables(self) -> None:
        """Write the tables of rows."""
        # the number in the dataset of each table's first row
        firsts: dict[Path, int] = {}
        for episode in self._episodes:
            firsts.setdefault(episode.table, episode.first_row - episode.table_row)
        for table, row in firsts.items():
            self._write_table(table, row)

    def _write_table(self, table: Path, row: int) -> None:
        self._find_target(table).parent.mkdir(parents=True, exist_ok=True)
        count = self._tables.call("begin_copy", table, target=self._find_target(table))
        while count:
            added: dict[str, list[PictureCell]] = {}
            for camera in self._cameras:
                images: list[PictureCell] = []
                for number in range(row, row + count):
                    image = self._draw(camera, number, self._find_episode(table, number))
                    images.append({"bytes": image, "path": None})
                added[FEATURE.format(camera)] = images
            row += count
            count = self._tables.call("append_copy", table, added=added)

    def _find_target(self, path: Path) -> Path:
        return check_inside(self._target, self._target / path.relative_to(self._layout.root))

    def _find_episode(self, table: Path, row: int) -> Episode | None:
        """Return the episode of a row; None for a row of a table that is longer than its episodes."""
        at = bisect_right(self._starts, row) - 1
        if at < 0:
            return None
        episode = self._episodes[at]
        if episode.table != table or row - episode.first_row >= episode.length:
            return None
        return episode

    def _draw(self, camera: str, row: int, episode: Episode | None) -> bytes:
        """Return the PNG of a camera's masks in a row."""
        # the statistics of rows without an episode belong to no episode
        masks = None
        number = -1
        if episode is not None:
            masks = self._rows[camera].find(row)
            number = episode.number

        width, height = self._cameras[camera]
        image = np.zeros((height, width, len(CHANNELS)), np.uint8)
        if masks is None or (masks.width, masks.height) != (width, height):
            self._missing[number] += 1
        else:
            self._written += 1
            self._progress(self._written)
            objects = self._objects[camera, number]
            for instance in sorted(masks.instances, key=lambda instance: instance.paint_order):
                paint_object(image, instance, objects, self._numbers.__getitem__)
                if instance.doubtful and episode is not None:
                    add_to_runs(self._doubtful[camera, number, instance.id], row - episode.first_row)
        self._statistics[camera].add(number, image)
        return encode_picture(image)

    def write_meta(self) -> None:
        """Write what describes the added features: info, statistics and names."""
        # lerobot looks for these names; NAMES has the meaning of the channels
        names = ["height", "width", "channels"]
        added: dict[str, Feature] = {
            FEATURE.format(camera): {
                "dtype": "image",
                "names": names,
                "shape": [height, width, len(CHANNELS)],
            }
            for camera, (width, height) in self._cameras.items()
        }
        info = {**self._layout.info, "features": {**self._layout.info["features"], **added}}
        self._write_text(INFO, json.dumps(info, indent=4, ensure_ascii=False))
        self._write_text(NAMES, json.dumps(self._describe(), indent=1, ensure_ascii=False) + "\n")

        # the statistics of the whole dataset, then those of the episodes, where the version has them
        if (self._target / STATS).is_file():
            stats = json.loads(self._read_text(STATS))
            totals = {camera: found.describe_all() for camera, found in self._statistics.items()}
            stats |= _name_stats(totals, sum(self._lengths.values()), stats.get(self._described, ()))
            self._write_text(STATS, json.dumps(stats, indent=4))
        if self._layout.version == "v3.0":
            self._write_episodes_v3()
        elif (self._target / EPISODE_STATS_V2).is_file():
            self._write_episode_stats_v2()

    def _read_text(self, name: str) -> str:
        return (self._target / name).read_text(encoding="utf-8")

    def _write_text(self, name: str, text: str) -> None:
        (self._target / name).write_text(text, encoding="utf-8")

    def _describe(self) -> MaskNames:
        return {
            "channels": CHANNELS,
            "labels": {number: label for label, number in self._numbers},
            "objects": [
                make_object_row(
                    episode, camera, index, object_id, label, self._doubtful.get((camera, episode, object_id))
                )
                for (camera, episode), labels in sorted(self._objects.items())
                for index, (object_id, label) in enumerate(labels.items(), start=1)
            ],
            "frames_without_masks": dict(sorted(self._missing.items())),
        }

    def _describe_episode(self, number: int, names: Collection[str]) -> dict[str, NamedStats]:
        """Return the statistics with these names of all features in an episode."""
        stats = {camera: found.describe_episode(number) for camera, found in self._statistics.items()}
        return _name_stats(stats, self._lengths.get(number, 0), names)

    def _write_episode_stats_v2(self) -> None:
        lines = []
        for line in self._read_text(EPISODE_STATS_V2).splitlines():
            row = json.loads(line)
            row["stats"] |= self._describe_episode(
                row["episode_index"], row["stats"].get(self._described, ())
            )
            lines.append(json.dumps(row))
        self._write_text(EPISODE_STATS_V2, "\n".join(lines) + "\n")

    def _write_episodes_v3(self) -> None:
        prefix = f"stats/{self._described}/"
        for path in sorted((self._layout.root / EPISODES_V3).glob("*/*.parquet")):
            self._find_target(path).parent.mkdir(parents=True, exist_ok=True)
            columns = self._tables.call("list_columns", path)
            names = [name.removeprefix(prefix) for name in columns if name.startswith(prefix)]

            # the copy goes batch by batch; the numbers of its episodes are read on the way
            done = 0
            count = self._tables.call("begin_copy", path, target=self._find_target(path))
            while count:
                rows = self._tables.call(
                    "read_rows", path, columns=["episode_index"], first=done, count=count
                )
                added: dict[str, list[Any]] = defaultdict(list)
                for number in rows["episode_index"]:
                    for feature, stats in self._describe_episode(number, names).items():
                        for name, value in stats.items():
                            added[f"stats/{feature}/{name}"].append(value)
                done += count
                count = self._tables.call("append_copy", path, added=dict(added))


class _CameraRows:
    """Finds the masks of one camera by their row, in ascending order."""

    def __init__(self, camera: str, masks: Iterator[MaskFrame]) -> None:
        self._masks = (frame for frame in masks if frame.camera == camera)
        self._next = next(self._masks, None)

    def find(self, row: int) -> MaskFrame | None:
        while self._next is not None and self._next.seq < row:
            self._next = next(self._masks, None)
        if self._next is None or self._next.seq != row:
            return None
        return self._next


def _name_stats(stats: Mapping[str, Stats], frames: int, names: Collection[str]) -> dict[str, NamedStats]:
    """Return the statistics of cameras by their features, those with these names: each [3][1][1], `count` [frames]."""
    # lerobot stores the statistics of images as [channels][1][1], and of each feature its number of frames
    named: dict[str, NamedStats] = {}
    for camera, rows in stats.items():
        values = name_pixel_stats(rows, frames)
        named[FEATURE.format(camera)] = {name: value for name, value in values.items() if name in names}
    return named


class LeRobot(OutputFormat):
    """lerobot/, the dataset with masks."""

    file = "`lerobot/`: the LeRobot dataset with masks as an added feature of each camera"
    is_label = True
    pixel_bytes = 0.02

    @classmethod
    def check(cls, recording: Path) -> None:
        """Raise ReplayError unless the recording is a whole LeRobot dataset."""
        check_lerobot(recording)

    @classmethod
    def write(cls, folder: Path, sources: Sources, progress: Progress) -> None:
        """Write the copy of the dataset that was replayed."""
        if sources.dataset is None:
            raise ReplayError("the output lerobot: expected a LeRobot dataset to add masks to, found none")
        write_lerobot(folder, sources.dataset.path, sources.labels, progress, sources.dataset.prompts)
