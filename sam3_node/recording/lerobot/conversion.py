"""Converts recordings of this package to a LeRobot dataset, episode by episode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...bags.native.reader import FrameHead, RecordingReader
from ...bags.native.series import group_by_recording, require_whole
from ...bags.pairing import TimeSpan
from ...errors import BagError, WireError
from ...settings import LeRobotSettings
from ...types import NANOSECONDS, Frame, FrameKey, Image, MaskFrame
from ...wire import decode_image
from ...wire.images import encode_image
from .dataset import DatasetFolder, EpisodeFiles
from .episodes import RecordedEpisode, find_episodes, read_index
from .forms import Cells, EpisodeSource, Feature, Features, PictureCell, RowCounts, VideoInfo
from .gripper import GripperFinder
from .groot import Regions, number_regions
from .masks import (
    FEATURE,
    IMAGE,
    OBJECTS_FEATURE,
    VALID,
    VALID_FEATURE,
    CameraMasks,
    RowMasks,
    describe_objects,
    encode_picture,
)
from .records import INDICES, EpisodeRecord
from .rows import SampledValues, choose_rows, measure_fps
from .statistics import NamedStats, PixelStatistics, describe_numbers, name_pixel_stats, thin

STATE = "observation.state"
"""Name of the joints."""
ACTION = "action"
"""Name of what the robot was told to do."""
AXES = ["height", "width", "channels"]
"""Names of a picture's axes, which lerobot looks for."""
LOSSLESS = ("jpeg", "png")
"""Encodings of frames that a table takes as they are."""


class Converted(NamedTuple):
    """The outcome of a conversion: numbers of episodes that were appended, were there before, and were left out."""

    appended: int
    present: int
    left_out: int


def convert_recordings(
    paths: Sequence[Path],
    settings: LeRobotSettings,
    folder: Path,
    report: Callable[[str], None],
    gripper: GripperFinder | None = None,
) -> Converted:
    """Append the episodes of a recording, of one file or of several that follow one another, to a dataset.

    An episode that the dataset has already is not appended again. One that does not fit is left out. `report` is called
    with a line about each. With `gripper`, masks for GR00T tell it from the arm. Raises BagError for files that are no
    recording, OutputError for a folder that cannot be written, and the errors of `gripper`.
    """
    reader = RecordingReader(paths)
    found = find_episodes(reader)
    # without marks the whole recording is the episode, of which a part shows an arm that does something else
    if any(episode.begin_ns is None for episode in found.episodes):
        require_whole(paths)
    for note in found.notes:
        report(note)
    if reader.lost is not None:
        report(f"the recording is damaged: {reader.lost}")

    appended = 0
    present = 0
    left_out = 0
    with DatasetFolder(folder, settings.version) as dataset:
        known = dataset.keys
        for episode in found.episodes:
            if episode.key in known:
                present += 1
                continue
            # an episode that does not fit costs no other
            try:
                report(_EpisodeConverter(reader, dataset, settings, episode, gripper).convert())
                appended += 1
            except (BagError, WireError) as error:
                left_out += 1
                report(f"left out {episode.name} of {paths[0].name}: {error}")
    return Converted(appended, present, left_out)


def group_files(paths: Iterable[Path]) -> list[list[Path]]:
    """Return the files of each recording among these files and folders, as `group_by_recording` does.

    Raises BagError for a folder without recordings.
    """
    found: list[Path] = []
    for path in paths:
        files = [path]
        if path.is_dir():
            files = sorted(path.glob("*.mcap"))
            if not files:
                raise BagError(f"expected recordings NAME.mcap in the folder {path}, found none")
        found += files
    return group_by_recording(found)


class _EpisodeConverter:
    """Converts one episode."""

    def __init__(
        self,
        reader: RecordingReader,
        dataset: DatasetFolder,
        settings: LeRobotSettings,
        episode: RecordedEpisode,
        gripper: GripperFinder | None,
    ) -> None:
        self._reader = reader
        self._dataset = dataset
        self._settings = settings
        self._episode = episode
        self._gripper = gripper
        self._max_gap_ns = round(settings.max_gap_s * NANOSECONDS)
        self._labels: dict[str, int] = {label: n for n, label in enumerate(dataset.labels, start=1)}
        self._statistics: dict[str, NamedStats] = {}

    def convert(self) -> str:
        """Append the episode to the dataset, and describe it in a line.

        Raises BagError or WireError for one that does not fit.
        """
        # what is where, without a pixel
        index = read_index(self._reader, self._episode, self._max_gap_ns)
        cameras = index.list_cameras()
        self._fps = self._choose_fps(lambda: measure_fps(cameras))
        rows = choose_rows(cameras, self._fps, self._max_gap_ns)
        self._index = index
        self._cameras = cameras
        self._rows = rows
        self._sizes = {camera: _pad_size(index.heads[camera][0]) for camera in cameras}
        masked = [camera for camera in cameras if cameras[camera].has_masks.any()]
        self._masks = {
            camera: CameraMasks(self._sizes[camera], self._settings.objects, self._number_label)
            for camera in masked
        }
        self._vectors = self._sample_vectors()

        # then the pixels, and all that belongs to a row
        features = self._describe_features()
        with self._dataset.begin(features, self._fps, len(rows.times_ns)) as files:
            self._write(files, features)
            record = self._make_record(files.number, features)
            self._dataset.append(record, files)
        return self._describe(record)

    def _choose_fps(self, measure: Callable[[], int]) -> int:
        """Return the rate: that of the settings, else of the dataset, else of the slowest camera."""
        if self._settings.fps:
            return self._settings.fps
        if self._dataset.episodes:
            return self._dataset.episodes[0].fps
        return measure()

    def _sample_vectors(self) -> dict[str, tuple[list[str], SampledValues]]:
        """Return names and values of the features of numbers that the robot gives, by their names."""
        vectors = {}
        state = self._index.sample_states(self._rows.times_ns, self._max_gap_ns)
        if state is not None:
            vectors[STATE] = state
        period_ns = NANOSECONDS // self._fps
        action = self._index.sample_actions(self._rows.times_ns, period_ns, self._max_gap_ns)
        if action is not None:
            vectors[ACTION] = action
        return {key: self._order(key, *found) for key, found in vectors.items()}

    def _order(self, key: str, names: list[str], sampled: SampledValues) -> tuple[list[str], SampledValues]:
        """Bring the values into the order of the dataset's earlier episodes, if they have the same names."""
        known = names
        if self._dataset.episodes:
            feature = self._dataset.episodes[0].features.get(key)
            known = (feature and feature.get("names")) or names
        if sorted(known) != sorted(names):
            return names, sampled
        columns = [names.index(name) for name in known]
        return list(known), sampled._replace(values=sampled.values[:, columns])

    def _describe_features(self) -> Features:
        """Return the features of the dataset as this episode has them."""
        features: Features = {}
        for camera, (height, width) in self._sizes.items():
            feature: Feature = {"dtype": "image", "shape": [height, width, 3], "names": AXES}
            if self._settings.pictures == "video":
                feature["dtype"] = "video"
                feature["info"] = _describe_video(height, width, self._fps)
            features[IMAGE.format(camera)] = feature
        for camera in self._masks:
            height, width = self._sizes[camera]
            features[FEATURE.format(camera)] = {"dtype": "image", "shape": [height, width, 3], "names": AXES}
            features[OBJECTS_FEATURE.format(camera)] = describe_objects(self._settings.objects)
            # a dataset of an earlier version goes on without it
            key = VALID_FEATURE.format(camera)
            if not self._dataset.episodes or key in self._dataset.episodes[0].features:
                features[key] = VALID
        for key, (names, _) in self._vectors.items():
            features[key] = _describe_vector(names)
        for key, kind in INDICES.items():
            features[key] = {"dtype": kind, "shape": [1], "names": None}
        return features

    def _write(self, files: EpisodeFiles, features: Features) -> None:
        """Write all frames and rows. The rows follow the frames, so that few pictures are in memory."""
        as_video = self._settings.pictures == "video"
        # rows of each camera that wait for the frame of another one
        ready: dict[str, list[bytes]] = {camera: [] for camera in self._sizes}
        pixels = {camera: PixelStatistics() for camera in self._sizes}
        table = _RowTable(self, files)
        for camera, frame, count in self._read_frames():
            image = self._fit(decode_image(frame), camera)
            pixels[camera].add(0, thin(image)[..., ::-1])
            if as_video:
                for _ in range(count):
                    files.add_image(IMAGE.format(camera), image)
                continue
            ready[camera] += [_encode_lossless(frame, image)] * count
            while all(ready.values()):
                table.add({IMAGE.format(name): waiting.pop(0) for name, waiting in ready.items()})
        if as_video:
            for _ in range(len(self._rows.times_ns)):
                table.add({})

        length = len(self._rows.times_ns)
        if table.length < length:
            raise BagError(f"expected the frames of {length} rows, found those of {table.length}")
        for camera, found in pixels.items():
            self._statistics[IMAGE.format(camera)] = name_pixel_stats(found.describe_all(), length)
        self._statistics |= table.describe()

    def _read_frames(self) -> Iterator[tuple[str, Frame, int]]:
        """Yield each frame that is in a row, with its camera and the number of its rows, in the recording's order.

        Raises BagError if one cannot be read.
        """
        wanted: dict[FrameKey, int] = {}
        for camera, rows in self._rows.cameras.items():
            heads = self._index.heads[camera]
            for chosen in rows.frames:
                key = heads[chosen].key
                wanted[key] = wanted.get(key, 0) + 1
        span = TimeSpan()
        if self._episode.begin_ns is not None and self._episode.end_ns is not None:
            span = TimeSpan(self._episode.begin_ns, self._episode.end_ns + 1)
        for frame in self._reader.frames(span):
            count = wanted.pop(FrameKey(frame.camera, frame.seq, frame.capture_ns), 0)
            if count:
                yield frame.camera, frame, count
        if wanted:
            lost = next(iter(wanted))
            raise BagError(
                f"camera {lost.camera}: expected frame {lost.seq} with its pixels, found it damaged or absent"
            )

    def _fit(self, image: Image, camera: str) -> Image:
        """Pad a picture to even sides, which video needs. Raises BagError for one of another size than the first."""
        height, width = self._sizes[camera]
        below = height - image.shape[0]
        right = width - image.shape[1]
        if below not in (0, 1) or right not in (0, 1):
            raise BagError(
                f"camera {camera}: expected pictures of {width}x{height} as at the beginning, found one of "
                f"{image.shape[1]}x{image.shape[0]}"
            )
        if not below and not right:
            return image
        padded: Image = np.pad(image, ((0, below), (0, right), (0, 0)), mode="edge")
        return padded

    def find_masks(self, camera: str, row: int) -> MaskFrame | None:
        """Return the masks of the frame that a camera has in a row."""
        frame = self._rows.cameras[camera].frames[row]
        return self._index.masks.get(self._index.heads[camera][frame].key)

    def find_regions(self, made: RowMasks, masks: MaskFrame | None) -> Regions:
        """Return a row's masks as numbers of regions."""
        gripper = None
        if self._gripper is not None and masks is not None and masks.robot_mask is not None:
            gripper = self._gripper.find(masks)
        return number_regions(made.picture, masks, gripper)

    @property
    def masks(self) -> dict[str, CameraMasks]:
        """The converter of the masks of each camera."""
        return self._masks

    @property
    def vectors(self) -> dict[str, tuple[list[str], SampledValues]]:
        """Names and values of each feature that is a list of numbers."""
        return self._vectors

    def number_row(self, row: int) -> dict[str, float]:
        """Return the cells of INDICES in a row."""
        return {
            "timestamp": row / self._fps,
            "frame_index": row,
            "episode_index": len(self._dataset.episodes),
            "index": self._dataset.rows + row,
            "task_index": self._dataset.number_task(self._task),
        }

    @property
    def _task(self) -> str:
        if self._episode.task:
            return self._episode.task
        return self._settings.task or self._index.task

    def _number_label(self, label: str) -> int:
        return self._labels.setdefault(label, len(self._labels) + 1)

    def _make_record(self, number: int, features: Features) -> EpisodeRecord:
        objects = []
        for camera, masks in self._masks.items():
            objects += masks.describe(number, camera)
        source: EpisodeSource = {
            "recording": [path.name for path in self._reader.paths],
            "begin_ns": int(self._rows.times_ns[0]),
            "end_ns": int(self._rows.times_ns[-1]),
            "max_stamp_ms": round(self._rows.max_stamp_ms, 3),
            "cameras": {
                camera: rows.describe(self._cameras[camera].measure_rate())
                for camera, rows in self._rows.cameras.items()
            },
            "max_gap_ms": {key: round(found.max_gap_ms, 3) for key, (_, found) in self._vectors.items()},
            "action_sources": self._index.sources,
            "timed_by_arrival": sorted(self._index.by_arrival),
            "rows": self._count_rows(),
        }
        return EpisodeRecord(
            number=number,
            key=self._episode.key,
            task=self._task,
            length=len(self._rows.times_ns),
            first_row=self._dataset.rows,
            fps=self._fps,
            features=features,
            labels=list(self._labels),
            objects=objects,
            missing=sum(masks.missing for masks in self._masks.values()),
            statistics={key: self._statistics[key] for key in features if features[key] != VALID},
            source=source,
        )

    def _count_rows(self) -> RowCounts:
        """Return how many rows have something that a policy should not learn from."""
        without: set[int] = set()
        doubtful: set[int] = set()
        for masks in self._masks.values():
            without |= masks.invalid
            doubtful |= masks.doubted
        off = set().union(*(rows.off for rows in self._rows.cameras.values()))
        return {"without_masks": len(without), "doubtful": len(doubtful), "off_in_time": len(off)}

    def _describe(self, record: EpisodeRecord) -> str:
        """Return a line about an appended episode: what it has, what was repeated, and the gaps."""
        parts = [
            f"episode {record.number}: {record.length} rows at {record.fps} fps, task {record.task!r:.100}",
            f"timestamps within {self._rows.max_stamp_ms:.0f} ms of the frames",
        ]
        for camera, rows in self._rows.cameras.items():
            rate = self._cameras[camera].measure_rate()
            told = f"{rate:.3g} fps, " if rate else ""
            part = f"camera {camera}: {told}within {rows.max_gap_ms:.0f} ms of the rows"
            if rows.repeated:
                part += f", {rows.repeated} rows repeat a frame"
            if rows.left_out:
                part += f", {rows.left_out} frames are in no row"
            if camera in self._masks and self._masks[camera].missing:
                part += f", {self._masks[camera].missing} rows have no masks"
            parts.append(part)
        for key, (_, sampled) in self._vectors.items():
            parts.append(f"{key} within {sampled.max_gap_ms:.0f} ms")
        if STATE not in self._vectors:
            parts.append(f"no {STATE}: the recording has no joints")
        if ACTION not in self._vectors:
            parts.append(f"no {ACTION}: the recording has none, and policies need it")
        if self._index.by_arrival:
            parts.append(f"timed by arrival: {', '.join(sorted(self._index.by_arrival))}")
        return "; ".join(parts)


class _RowTable:
    """Writes the rows of an episode to its table, and computes the statistics of all columns."""

    def __init__(self, episode: _EpisodeConverter, files: EpisodeFiles) -> None:
        self.length = 0
        self._episode = episode
        self._files = files
        self._pixels = {FEATURE.format(camera): PixelStatistics() for camera in episode.masks}
        self._numbers: dict[str, list[list[float]]] = {}

    def add(self, pictures: dict[str, bytes]) -> None:
        """Write the next row, with the pictures that are in the table."""
        row = self.length
        cells: Cells = {key: _make_cell(data) for key, data in pictures.items()}
        for camera, masks in self._episode.masks.items():
            found = self._episode.find_masks(camera, row)
            made = masks.add(row, found)
            self._pixels[FEATURE.format(camera)].add(0, made.picture)
            cells[FEATURE.format(camera)] = _make_cell(encode_picture(made.picture))
            self._add_numbers(cells, OBJECTS_FEATURE.format(camera), made.numbers.ravel().tolist())
            cells[VALID_FEATURE.format(camera)] = made.is_valid
            if self._files.has_regions:
                regions = self._episode.find_regions(made, found)
                self._files.add_regions(IMAGE.format(camera), regions, made.is_valid)
        for key, (_, sampled) in self._episode.vectors.items():
            self._add_numbers(cells, key, sampled.values[row].tolist())
        for key, value in self._episode.number_row(row).items():
            cells[key] = value
            self._numbers.setdefault(key, []).append([value])
        self._files.add_row(cells)
        self.length += 1

    def describe(self) -> dict[str, NamedStats]:
        """Return the statistics of all columns but the pictures of cameras."""
        stats = {
            key: name_pixel_stats(found.describe_all(), self.length) for key, found in self._pixels.items()
        }
        return stats | {key: describe_numbers(np.array(rows)) for key, rows in self._numbers.items()}

    def _add_numbers(self, cells: Cells, key: str, values: list[float]) -> None:
        cells[key] = values
        self._numbers.setdefault(key, []).append(values)


def _make_cell(data: bytes) -> PictureCell:
    return {"bytes": data, "path": None}


def _pad_size(head: FrameHead) -> tuple[int, int]:
    """Return the size (height, width) of a frame's picture in the dataset, with even sides."""
    return head.height + head.height % 2, head.width + head.width % 2


def _describe_vector(names: list[str]) -> Feature:
    return {"dtype": "float32", "shape": [len(names)], "names": names}


def _describe_video(height: int, width: int, fps: int) -> VideoInfo:
    """Return the description of a video that lerobot stores in the feature."""
    return {
        "video.height": height,
        "video.width": width,
        "video.codec": "h264",
        "video.pix_fmt": "yuv420p",
        "video.is_depth_map": False,
        "video.fps": fps,
        "video.channels": 3,
        "has_audio": False,
    }


def _encode_lossless(frame: Frame, image: Image) -> bytes:
    """Return a picture for a table, with exactly the pixels of the frame."""
    is_padded = image.shape[:2] != (frame.height, frame.width)
    if frame.encoding in LOSSLESS and not is_padded:
        return bytes(frame.colour)
    return bytes(encode_image(image, "png"))
