"""Writes masks into a copy of a LeRobot dataset, as an added feature of each camera that lerobot's own loader opens.

The feature `observation.masks.<camera>` is a lossless PNG in the table, of the size of the camera's frames. Its pixels
are (label, object, score x 255), and 0 for the background. They have three channels, so that policies take the feature
as any camera. Labels are numbered over the whole dataset, objects over their episode and camera, both from 1.
meta/sam3_masks.json names them, and lists the frames of the episode on which each object was doubtful, as runs of
[first, last]. The statistics are exact, in 0..1 as the loader gives the pixels. `observation.masks_valid.<camera>` and
`observation.objects.<camera>` are added, too. A dataset of version 2 also gets its masks as GR00T reads them.

All that speaks of objects is of one replay: what the dataset had of them is written anew. Features of masks and objects
of cameras that were not replayed are left out, because labels have new numbers.
"""

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...bags.formats.lerobot_layout import (
    EPISODES_V3,
    INFO,
    Episode,
    LeRobotLayout,
    is_lerobot,
    read_layout,
)
from ...bags.isolated import IsolatedCalls
from ...bags.samples import split_selection
from ...errors import BagError, ReplayError, WireError, find_version, install_advice
from ...files import check_inside, has_home, link_or_copy, write_atomically, write_new
from ...recording.lerobot.dataset import LOCK, UNFINISHED
from ...recording.lerobot.forms import Feature, MaskNames, PictureCell
from ...recording.lerobot.groot import (
    MODALITY,
    Modality,
    RegionFile,
    describe_modality,
    name_regions,
    name_views,
    number_regions,
)
from ...recording.lerobot.layouts import FILES_PER_CHUNK, LayoutV2
from ...recording.lerobot.masks import (
    CHANNELS,
    FEATURE,
    IMAGE,
    NAMES,
    OBJECT_FIELDS,
    OBJECTS_FEATURE,
    VALID,
    VALID_FEATURE,
    CameraMasks,
    describe_objects,
    encode_picture,
)
from ...recording.lerobot.records import RECORDS
from ...recording.lerobot.statistics import NamedStats, NumberStatistics, PixelStatistics, name_pixel_stats
from ...resources import Closeable
from ...schema.fields import convert, decode_json
from ...settings import LeRobotSettings
from ...types import MaskFrame
from ..davis_png import MaskSource, NumberTable
from .output import OutputFormat, Progress, Sources

FOLDER = "lerobot"
"""Folder of the copy, in that of the outputs."""
STATS = "meta/stats.json"
"""File with the statistics of the whole dataset."""
EPISODE_STATS_V2 = "meta/episodes_stats.jsonl"
"""File with the statistics of each episode, in version 2.1."""
SLOTS: int = LeRobotSettings().objects
"""Number of objects in a new feature of objects."""
MAX_SLOTS = 64
"""Largest number of objects in a feature of objects, as `lerobot.objects` allows."""
COPIED = ("meta", "data", "videos", "images")
"""Folders of a dataset that are copied."""
NOT_COPIED = (RECORDS, LOCK, UNFINISHED)
"""Files by which `convert` appends episodes: their labels have other numbers than the new masks."""


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
) -> str:
    """Write the copy of the dataset at `path` into `folder`/lerobot. Videos are hard links where possible.

    Return a line that says which rows may be learnt from.

    `labels` are numbered first, in their order; others follow by name. A row without masks, because it was not replayed
    or could not be, has the background alone, and is counted in NAMES. Raises BagError for a damaged dataset.
    """
    check_lerobot(path)
    # the description comes last, because it has the statistics of all pixels
    with IsolatedCalls("pyarrow", "lerobot-datasets") as tables:
        writer = _DatasetWriter(path, folder / FOLDER, tables, masks, progress, labels)
        writer.copy_files()
        with writer:
            writer.write_tables()
        try:
            writer.write_meta()
        except (ValueError, LookupError, TypeError, AttributeError, WireError) as error:
            raise BagError(
                f"{path}: expected descriptions as lerobot writes them in meta, found {error!r:.200}"
            ) from error
        return writer.count_rows()


class _DatasetWriter(Closeable):
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
        self._slots = _count_slots(self._layout.info, self._cameras)
        """Number of objects of each camera that have numbers."""
        self._dropped = _list_stale(root, self._layout.info, self._cameras)
        self._masks: dict[tuple[str, int], CameraMasks] = {}
        """The converter of the masks of a camera in an episode."""
        self._pixels = {camera: PixelStatistics() for camera in self._cameras}
        self._object_numbers = {camera: NumberStatistics() for camera in self._slots}
        self._lengths = {episode.number: episode.length for episode in self._layout.episodes}
        # the loader expects the same statistics of each camera: those of the first one show which
        self._described = self._layout.images[0].key
        self._episodes = sorted(self._layout.episodes, key=lambda episode: episode.first_row)
        self._starts = [episode.first_row for episode in self._episodes]
        self._rows = {camera: _CameraRows(camera, masks()) for camera in self._cameras}
        self._regions = _RegionFiles(self._layout, target) if self._layout.version != "v3.0" else None
        """Masks as GR00T reads them, which knows no version 3.0."""
        self._progress = progress
        self._written = 0

    def copy_files(self) -> None:
        """Link or copy all files but the tables of rows and episodes."""
        root = self._layout.root
        tables = {episode.table for episode in self._episodes}
        left = {root / place for place in NOT_COPIED}
        for name in COPIED:
            for path in sorted((root / name).rglob("*")):
                # a copy is published: what a link brings from elsewhere is not the dataset's
                if not has_home(root, path):
                    raise BagError(
                        f"{root}: expected a dataset whose files lie in its folder, found that {path} leads to "
                        f"{path.resolve()}; copy it there"
                    )
                if any(place in (path, *path.parents) for place in left):
                    continue
                self._find_target(path).parent.mkdir(parents=True, exist_ok=True)
                if not path.is_file() or path in tables or (root / EPISODES_V3) in path.parents:
                    continue
                # files of meta are changed afterwards: a link would change the original
                if (root / "meta") in path.parents:
                    write_new(self._find_target(path), path.read_bytes())
                else:
                    link_or_copy(path, self._find_target(path))

    def write_tables(self) -> None:
        """Write the tables of rows."""
        # the number in the dataset of each table's first row
        firsts: dict[Path, int] = {}
        for episode in self._episodes:
            firsts.setdefault(episode.table, episode.first_row - episode.table_row)
        for table, row in firsts.items():
            self._write_table(table, row)
        if self._regions is not None:
            self._regions.finish()

    def close(self) -> None:
        """Close the files that a failure has left open. Idempotent."""
        if self._regions is not None:
            self._regions.close()

    def _write_table(self, table: Path, row: int) -> None:
        count = self._begin_copy(table, self._dropped)
        while count:
            added: dict[str, list[Any]] = defaultdict(list)
            for number in range(row, row + count):
                episode = self._find_episode(table, number)
                for camera in self._cameras:
                    self._add_cells(added, camera, number, episode)
            row += count
            count = self._tables.call("append_copy", table, added=dict(added))

    def _begin_copy(self, table: Path, dropped: Collection[str]) -> int:
        """Begin the copy of a table without these columns. Return the number of rows of the first batch."""
        target = self._find_target(table)
        target.parent.mkdir(parents=True, exist_ok=True)
        vectors = [OBJECTS_FEATURE.format(camera) for camera in self._slots]
        count: int = self._tables.call(
            "begin_copy", table, target=target, dropped=list(dropped), vectors=vectors
        )
        return count

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

    def _add_cells(self, added: dict[str, list[Any]], camera: str, row: int, episode: Episode | None) -> None:
        """Add the cells of a camera's masks in a row."""
        # a row without an episode belongs to the statistics of none
        masks = None
        number = -1
        first_row = row
        if episode is not None:
            masks = self._rows[camera].find(row)
            number = episode.number
            first_row = episode.first_row

        if masks is not None:
            self._written += 1
            self._progress(self._written)
        found = self._masks.get((camera, number))
        if found is None:
            width, height = self._cameras[camera]
            found = CameraMasks((height, width), self._slots[camera], self._numbers.__getitem__)
            self._masks[camera, number] = found
        made = found.add(row - first_row, masks)
        self._pixels[camera].add(number, made.picture)
        cell: PictureCell = {"bytes": encode_picture(made.picture), "path": None}
        added[FEATURE.format(camera)].append(cell)
        values = made.numbers.ravel().tolist()
        self._object_numbers[camera].add(number, values)
        added[OBJECTS_FEATURE.format(camera)].append(values)
        added[VALID_FEATURE.format(camera)].append(made.is_valid)
        if self._regions is not None and episode is not None:
            regions = number_regions(made.picture, masks)
            self._regions.find(camera, episode).add(regions, made.is_valid)

    def count_rows(self) -> str:
        """Return a line that says which rows may be learnt from."""
        without = set()
        doubtful = set()
        for (_, episode), masks in self._masks.items():
            without |= {(episode, row) for row in masks.invalid}
            doubtful |= {(episode, row) for row in masks.doubted}
        return (
            f"{sum(self._lengths.values())} rows in {len(self._lengths)} episodes: {len(without)} without masks of a "
            f"camera, {len(doubtful)} with a doubtful object"
        )

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
        for camera, slots in self._slots.items():
            added[OBJECTS_FEATURE.format(camera)] = describe_objects(slots)
            added[VALID_FEATURE.format(camera)] = VALID
        features = {**self._layout.info["features"], **added}
        for name in self._dropped:
            features.pop(name, None)
        info = {**self._layout.info, "features": features}
        if self._regions is not None:
            info["mask_path"] = LayoutV2.masks
            self._write_text(MODALITY, json.dumps(self._describe_modality(features), indent=1))
        self._write_text(INFO, json.dumps(info, indent=4, ensure_ascii=False))
        self._write_text(NAMES, json.dumps(self._describe(), indent=1, ensure_ascii=False) + "\n")

        # the statistics of the whole dataset, then those of the episodes, where the version has them
        if (self._target / STATS).is_file():
            stats = decode_json(self._read_text(STATS), STATS)
            stats |= self._describe_all(stats.get(self._described, ()))
            for name in self._dropped:
                stats.pop(name, None)
            self._write_text(STATS, json.dumps(stats, indent=4))
        if self._layout.version == "v3.0":
            self._write_episodes_v3()
        elif (self._target / EPISODE_STATS_V2).is_file():
            self._write_episode_stats_v2()

    def _read_text(self, name: str) -> str:
        return (self._target / name).read_text(encoding="utf-8")

    def _write_text(self, name: str, text: str) -> None:
        write_atomically(self._target / name, text.encode())

    def _describe_modality(self, features: Mapping[str, Any]) -> Modality:
        """Return the dataset's own modality.json, or one by the names of its joints, with the masks."""
        modality = describe_modality(features)
        if (self._target / MODALITY).is_file():
            modality = convert(decode_json(self._read_text(MODALITY), MODALITY), Modality, MODALITY)
        # masks have the names of their cameras
        names = {
            view.get("original_key", IMAGE.format(name)): name
            for name, view in modality.get("video", {}).items()
        }
        modality["mask"] = {}
        for image in self._layout.images:
            if image.name in self._cameras:
                ((name, view),) = name_views([image.key]).items()
                modality["mask"][names.get(image.key, name)] = view
        return modality

    def _describe(self) -> MaskNames:
        missing: Counter[int] = Counter()
        for (_, episode), found in self._masks.items():
            if found.missing:
                missing[episode] += found.missing
        labels = {number: label for label, number in self._numbers}
        names: MaskNames = {
            "channels": CHANNELS,
            "labels": labels,
            "objects": [
                row
                for (camera, episode), masks in sorted(self._masks.items())
                for row in masks.describe(episode, camera)
            ],
            "frames_without_masks": dict(sorted(missing.items())),
        }
        if self._regions is not None:
            names["regions"] = name_regions(labels)
        return names

    def _describe_all(self, names: Collection[str]) -> dict[str, NamedStats]:
        """Return the statistics with these names of all added features in the whole dataset."""
        rows = sum(self._lengths.values())
        stats = {
            FEATURE.format(camera): name_pixel_stats(found.describe_all(), rows)
            for camera, found in self._pixels.items()
        }
        for camera, numbers in self._object_numbers.items():
            stats[OBJECTS_FEATURE.format(camera)] = numbers.describe_all()
        return _choose_stats(stats, names)

    def _describe_episode(self, number: int, names: Collection[str]) -> dict[str, NamedStats]:
        """Return the statistics with these names of all added features in an episode."""
        rows = self._lengths.get(number, 0)
        stats = {
            FEATURE.format(camera): name_pixel_stats(found.describe_episode(number), rows)
            for camera, found in self._pixels.items()
        }
        for camera, numbers in self._object_numbers.items():
            stats[OBJECTS_FEATURE.format(camera)] = numbers.describe_episode(number)
        return _choose_stats(stats, names)

    def _write_episode_stats_v2(self) -> None:
        lines = []
        for line in self._read_text(EPISODE_STATS_V2).splitlines():
            row = decode_json(line, EPISODE_STATS_V2)
            row["stats"] |= self._describe_episode(
                row["episode_index"], row["stats"].get(self._described, ())
            )
            for name in self._dropped:
                row["stats"].pop(name, None)
            lines.append(json.dumps(row))
        self._write_text(EPISODE_STATS_V2, "\n".join(lines) + "\n")

    def _write_episodes_v3(self) -> None:
        prefix = f"stats/{self._described}/"
        for path in sorted((self._layout.root / EPISODES_V3).glob("*/*.parquet")):
            columns = self._tables.call("list_columns", path)
            names = [name.removeprefix(prefix) for name in columns if name.startswith(prefix)]
            stale = tuple(f"stats/{name}/" for name in self._dropped)
            dropped = [name for name in columns if name.startswith(stale)] if stale else []

            # the copy goes batch by batch; the numbers of its episodes are read on the way
            done = 0
            count = self._begin_copy(path, dropped)
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


class _RegionFiles(Closeable):
    """Writes the masks of one episode after the other as GR00T reads them."""

    def __init__(self, layout: LeRobotLayout, target: Path) -> None:
        self._target = target
        self._keys = {image.name: image.key for image in layout.images}
        self._chunk_size = layout.info.get("chunks_size", FILES_PER_CHUNK)
        self._open: dict[str, tuple[int, RegionFile]] = {}
        """The episode and file of each camera."""

    def find(self, camera: str, episode: Episode) -> RegionFile:
        """Return the file of an episode. An earlier one of the camera is finished."""
        number, file = self._open.get(camera, (-1, None))
        if file is None or number != episode.number:
            if file is not None:
                file.finish()
            place = LayoutV2.place(LayoutV2.masks, episode.number, self._keys[camera], self._chunk_size)
            file = RegionFile(check_inside(self._target, self._target / place), episode.length)
            self._open[camera] = episode.number, file
        return file

    def finish(self) -> None:
        """Finish all files."""
        for _, file in self._open.values():
            file.finish()

    def close(self) -> None:
        """Close all files. Idempotent."""
        for _, file in self._open.values():
            file.close()


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


def _count_slots(info: Mapping[str, Any], cameras: Collection[str]) -> dict[str, int]:
    """Return the number of objects in the feature of objects of each of these cameras: SLOTS if it is a new one."""
    slots = dict.fromkeys(cameras, SLOTS)
    for camera in cameras:
        feature = info["features"].get(OBJECTS_FEATURE.format(camera))
        shape = feature.get("shape") if isinstance(feature, dict) else None
        if isinstance(shape, list) and len(shape) == 1 and type(shape[0]) is int:
            count, rest = divmod(shape[0], len(OBJECT_FIELDS))
            if not rest and 0 < count <= MAX_SLOTS:
                slots[camera] = count
    return slots


def _list_stale(root: Path, info: Mapping[str, Any], cameras: Collection[str]) -> list[str]:
    """Return the features of masks and objects that are not written anew, if this package has written them."""
    if not (root / NAMES).is_file():
        return []
    written = (FEATURE, OBJECTS_FEATURE, VALID_FEATURE)
    kept = {feature.format(camera) for feature in written for camera in cameras}
    begins = tuple(feature.format("") for feature in written)
    return [name for name in info["features"] if name.startswith(begins) and name not in kept]


def _choose_stats(stats: Mapping[str, NamedStats], names: Collection[str]) -> dict[str, NamedStats]:
    """Return the statistics with these names of each feature: a dataset has the same ones of all, or of no picture."""
    return {
        feature: {name: value for name, value in values.items() if name in names}
        for feature, values in stats.items()
        if names
    }


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
    def write(cls, folder: Path, sources: Sources, progress: Progress) -> str:
        """Write the copy of the dataset that was replayed. Return which rows may be learnt from."""
        if sources.dataset is None:
            raise ReplayError("the output lerobot: expected a LeRobot dataset to add masks to, found none")
        return write_lerobot(folder, sources.dataset.path, sources.labels, progress, sources.dataset.prompts)
