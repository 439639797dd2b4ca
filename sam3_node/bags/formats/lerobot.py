"""Reader of LeRobot datasets: all cameras of all episodes, from videos and from images in the tables.

The number of a frame (`seq`) is the number of its row in the dataset. A frame's stamp is the time at which its row
would be if the episodes followed each other at the dataset's rate: the beginning of the episode, by the number of its
first row, plus the row's own timestamp. A state is read as poses if its names are those that lerobot's own kinematics
give the gripper in the robot's base, POSE. Other states, actions and tasks are not read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import BagError
from ...geometry import quaternion_from_rotation, rotation_from_vector
from ...types import NANOSECONDS, Clock, Closeable, FramePose, Image
from ..episodes import split_selection
from ..isolated import IsolatedCalls
from ..pairing import UNIX_SINCE_NS
from ..samples import Colour, Losses, LossLimit, Sample, Topic
from .lerobot_layout import Episode, ImageFeature, LeRobotLayout, VideoPart, is_lerobot, read_layout
from .video import Playback

ROWS = 16
MAX_TIME_S = 1e9
EPISODE_LOSSES = 20
"""Losses that an episode counts for, of those that end the reading of a dataset."""


POSE = ("ee.x", "ee.y", "ee.z", "ee.wx", "ee.wy", "ee.wz")
"""Names of a position in metres and of a rotation vector in radians."""
STATE = "observation.state"


class _Row(NamedTuple):
    number: int
    time_s: float
    cells: dict[str, Any]


class LeRobotBag(Closeable):
    """A dataset as a SampleReader in which each picture feature is a camera. `PATH#episode=3` chooses episodes.

    Rows whose picture is absent or cannot be decoded are passed over, and `lost` says so. Raises BagError for a damaged
    description, MissingExtraError without pyarrow.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._selection = split_selection(path)
        self._tables = IsolatedCalls("pyarrow", "lerobot-datasets")
        self._losses = Losses()
        try:
            self.layout = read_layout(self._selection.path, self._tables)
        except BaseException:
            self._tables.close()
            raise
        chosen = [episode for episode in self.layout.episodes if self._selection.has(episode.number)]
        if not chosen:
            self._tables.close()
            numbers = [episode.number for episode in self.layout.episodes]
            raise BagError(f"{path}: expected episodes {min(numbers)} to {max(numbers)}, found none of them")
        self._episodes = tuple(chosen)
        self.episode_starts = tuple(episode.first_row for episode in chosen)
        self.topics = tuple(_topic(image) for image in self.layout.images)

    @staticmethod
    def recognises(path: Path) -> bool:
        """Return True for the folder of a LeRobot dataset, also with a selection of episodes."""
        return is_lerobot(split_selection(path).path)

    @property
    def lost(self) -> str | None:
        """Description of what could not be read, once `samples` has ended; None if nothing was lost."""
        return "; ".join([*self.layout.left_out, *filter(None, [self._losses.text()])]) or None

    def samples(self, topics: Collection[str]) -> Iterator[Sample]:
        """Yield the pictures on these topics, row by row."""
        yield from self.samples_from(topics, 0)

    def samples_from(self, topics: Collection[str], begin_ns: int) -> Iterator[Sample]:
        """Yield as `samples` does, from the row at `begin_ns`."""
        self._losses, limit = Losses(), LossLimit()
        images = [image for image in self.layout.images if _topic(image).name in topics]
        for episode in self._episodes:
            start_ns = round(episode.first_row / self.layout.fps * NANOSECONDS)
            if (
                start_ns + round((episode.length + 1) / self.layout.fps * NANOSECONDS) < begin_ns
                or not images
            ):
                continue
            reader = _EpisodeReader(self.layout, episode, images, self._tables, self._losses)
            try:
                for sample in reader.samples(start_ns, begin_ns):
                    limit.reset()
                    yield sample
            except BagError as error:
                self._losses.skip("episodes", f"episode {episode.number}: {error}")
            if limit.is_reached(EPISODE_LOSSES if episode.table.exists() else 0):
                self._losses.add(
                    f"nothing was read from episode {episode.number} on, after many that are damaged"
                )
                return

    def robot_poses(self) -> Iterator[FramePose]:
        """Yield the gripper's poses in the base, with the stamps of the rows; none if the state has no names POSE."""
        indices = _find_pose(self.layout.info)
        if indices is None:
            return
        for episode in self._episodes:
            start_ns = round(episode.first_row / self.layout.fps * NANOSECONDS)
            reader = _EpisodeReader(self.layout, episode, (), self._tables, self._losses)
            with suppress(BagError):  # told where the episode's pictures are read
                for time_ns, state in reader.states():
                    pose = [state[index] for index in indices if index < len(state)]
                    if len(pose) == len(POSE) and all(isinstance(value, float) for value in pose):
                        yield _make_pose(start_ns + time_ns, pose)

    def close(self) -> None:
        """End the process that reads the tables. Idempotent."""
        self._tables.close()


def _topic(image: ImageFeature) -> Topic:
    return Topic(f"/{image.name}/image", "video" if image.is_video else "image", "colour")


def _find_pose(info: Mapping[str, Any]) -> list[int] | None:
    """Return where the values POSE are in the state; None if the state's names are others."""
    feature = info["features"].get(STATE)
    names = feature.get("names") if isinstance(feature, dict) else None
    if isinstance(names, dict):  # version 2: {"motors": names}
        names = next(iter(names.values()), None)
    if not isinstance(names, list) or not set(POSE) <= {name for name in names if isinstance(name, str)}:
        return None
    return [names.index(name) for name in POSE]


def _make_pose(stamp_ns: int, pose: Sequence[float]) -> FramePose:
    x, y, z, *vector = pose
    quaternion = quaternion_from_rotation(rotation_from_vector(vector))
    clock: Clock = "system" if stamp_ns >= UNIX_SINCE_NS else "device"  # as of the frames
    a, b, c, d = (float(value) for value in quaternion)
    return FramePose("gripper", "base", stamp_ns, (x, y, z), (a, b, c, d), clock)


class _EpisodeReader:
    """Reads the pictures and states of one episode."""

    def __init__(
        self,
        layout: LeRobotLayout,
        episode: Episode,
        images: Sequence[ImageFeature],
        tables: IsolatedCalls,
        losses: Losses,
    ) -> None:
        self._episode, self._images, self._tables, self._losses = episode, images, tables, losses
        self._period_ns = round(NANOSECONDS / layout.fps)

    def samples(self, start_ns: int, begin_ns: int) -> Iterator[Sample]:
        """Yield the pictures from `begin_ns`; the episode begins at `start_ns`."""
        offset_ns = max(begin_ns - start_ns, 0)
        videos = {
            image.key: _VideoFrames(self._episode.videos[image.key], offset_ns, self._period_ns)
            for image in self._images
            if image.is_video
        }
        limit = LossLimit()
        for row in self._rows([image.key for image in self._images if not image.is_video]):
            if limit.is_reached():
                raise BagError(f"expected pictures in its rows, found none before the row {row.number}")
            if not math.isfinite(row.time_s) or not 0 <= row.time_s < MAX_TIME_S:
                self._losses.skip(f"episode {self._episode.number}", f"expected a time, found {row.time_s}")
                continue
            time_ns = round(row.time_s * NANOSECONDS)
            if time_ns < offset_ns:
                continue
            for image in self._images:
                topic = _topic(image).name
                try:
                    cell = row.cells.get(image.key)
                    colour = videos[image.key].find(time_ns) if image.is_video else _decode_cell(cell)
                except BagError as error:
                    self._losses.skip(topic, error)
                    continue
                limit.reset()
                stamp_ns = start_ns + time_ns
                yield Sample(topic, stamp_ns, stamp_ns, colour, row.number)

    def states(self) -> Iterator[tuple[int, list[Any]]]:
        """Yield the time in the episode, in ns, and the state of each row."""
        for row in self._rows([STATE]):
            state = row.cells[STATE]
            if isinstance(state, list) and math.isfinite(row.time_s) and 0 <= row.time_s < MAX_TIME_S:
                yield round(row.time_s * NANOSECONDS), state

    def _rows(self, keys: Sequence[str]) -> Iterator[_Row]:
        episode, done = self._episode, 0
        while done < episode.length:
            found = self._tables.call(
                "read_rows",
                episode.table,
                columns=["episode_index", "timestamp", *keys],
                first=episode.table_row + done,
                count=min(ROWS, episode.length - done),
            )
            numbers = found["episode_index"]
            if not numbers or any(number != episode.number for number in numbers):
                raise BagError(
                    f"{episode.table}: expected {episode.length} rows of episode {episode.number} from the row "
                    f"{episode.table_row}, found {done}"
                )
            for index in range(len(numbers)):
                time_s = found["timestamp"][index]
                cells = {key: found[key][index] for key in keys}
                yield _Row(episode.first_row + done + index, _to_float(time_s), cells)
            done += len(numbers)


def _to_float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _decode_cell(cell: object) -> Colour:
    """Return the image in a cell of a table, {bytes, path}."""
    data = cell.get("bytes") if isinstance(cell, dict) else None
    if not isinstance(data, bytes):
        raise BagError("expected the bytes of an image in the table, found none")
    return Colour.from_compressed(data)


class _VideoFrames:
    """The frames of an episode in a video, found by time, which does not go back."""

    def __init__(self, part: VideoPart, offset_ns: int, period_ns: int) -> None:
        self._path, self._half_ns = part.path, period_ns // 2
        self._begin_ns = round(part.begin_s * NANOSECONDS)
        first_ns = max(self._begin_ns + offset_ns - self._half_ns, 0)
        self._frames = Playback(part.path, first_ns).frames()
        self._next: tuple[int, Image] | None = None

    def find(self, time_ns: int) -> Colour:
        """Return the frame within half a period of a time of the episode. Raises BagError if there is none."""
        wanted_ns = self._begin_ns + time_ns
        while self._next is None or self._next[0] < wanted_ns - self._half_ns:
            frame = next(self._frames, None)
            if frame is None:
                raise BagError(f"{self._path.name} has no frame at {wanted_ns / NANOSECONDS:.3f} s")
            self._next = frame[1], frame[2]
        stamp_ns, image = self._next
        if stamp_ns > wanted_ns + self._half_ns:
            raise BagError(f"{self._path.name} has no frame at {wanted_ns / NANOSECONDS:.3f} s")
        height, width = image.shape[:2]
        return Colour(width, height, "bgr8", np.ascontiguousarray(image).data.cast("B"))
