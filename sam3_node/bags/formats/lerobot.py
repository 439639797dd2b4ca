"""Reader of LeRobot datasets: all cameras of all episodes, from videos and from images in the tables, with depth.

The number of a frame (`seq`) is the number of its row in the dataset. A frame's stamp is the time at which its row
would be if the episodes followed each other at the dataset's rate: the beginning of the episode, by the number of its
first row, plus the row's own timestamp. A state is read as poses if its names are those that lerobot's own kinematics
give the gripper in the robot's base, POSE. Other states, actions and tasks are not read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import BagError, WireError
from ...files import describe_stand_in
from ...geometry import quaternion_from_rotation, rotation_from_vector
from ...types import NANOSECONDS, Clock, Closeable, Depth, FramePose
from ...wire import encode_depth
from ...wire.images import compressed_size, is_depth_png
from .. import still_images
from ..episodes import split_selection
from ..isolated import IsolatedCalls
from ..messages.ros_images import MILLIMETRE, to_millimetres
from ..pairing import UNIX_SINCE_NS
from ..samples import Colour, Losses, LossLimit, Sample, Topic
from ..video_packets import read_bgr
from .lerobot_layout import (
    DepthFormat,
    Episode,
    ImageFeature,
    LeRobotLayout,
    VideoPart,
    is_lerobot,
    read_layout,
)
from .video import Playback

ROWS = 16
MAX_TIME_S = 1e9
EPISODE_LOSSES = 20
"""Losses that an episode counts for, of those that end the reading of a dataset."""


_CODES = 1 << 12
_ROLES = re.compile(r"(^|[_.-])(depth|rgb|colou?r|image|map)(?=$|[_.-])", re.IGNORECASE)

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
        self._pictures = _name_topics(self.layout)
        self.topics = tuple(
            Topic(topic, "video" if image.is_video else "image", "depth" if image.depth else "colour")
            for topic, image in self._pictures.items()
        )

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
        pictures = {topic: image for topic, image in self._pictures.items() if topic in topics}
        for episode in self._episodes:
            start_ns = round(episode.first_row / self.layout.fps * NANOSECONDS)
            if (
                start_ns + round((episode.length + 1) / self.layout.fps * NANOSECONDS) < begin_ns
                or not pictures
            ):
                continue
            reader = _EpisodeReader(self.layout, episode, pictures, self._tables, self._losses)
            try:
                for sample in reader.samples(start_ns, begin_ns):
                    limit.reset()
                    yield sample
            except BagError as error:
                self._losses.skip("episodes", f"episode {episode.number}: {error}")
            if limit.is_reached(EPISODE_LOSSES if reader.has_files else 0):
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
            reader = _EpisodeReader(self.layout, episode, {}, self._tables, self._losses)
            with suppress(BagError):  # told where the episode's pictures are read
                for time_ns, state in reader.states():
                    pose = [state[index] for index in indices if index < len(state)]
                    if len(pose) == len(POSE) and all(isinstance(value, float) for value in pose):
                        yield _make_pose(start_ns + time_ns, pose)

    def close(self) -> None:
        """End the process that reads the tables. Idempotent."""
        self._tables.close()


def _name_topics(layout: LeRobotLayout) -> dict[str, ImageFeature]:
    """Return the pictures by their topics: /front/image, and /front/depth for the depth of the camera front.

    Depth belongs to the colour of the same name but for words such as depth and rgb: front_depth, front_rgb.
    """
    topics = {f"/{image.name}/image": image for image in layout.images}
    sensors = {_ROLES.sub("", image.name): image.name for image in reversed(layout.images)}
    for depth in layout.depths:
        topic = f"/{sensors.get(_ROLES.sub('', depth.name), depth.name)}/depth"
        topics[topic if topic not in topics else f"/{depth.name}/depth"] = depth
    return topics


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
        pictures: Mapping[str, ImageFeature],
        tables: IsolatedCalls,
        losses: Losses,
    ) -> None:
        self._episode, self._tables, self._losses = episode, tables, losses
        self._period_ns = round(NANOSECONDS / layout.fps)
        self._pictures: dict[str, ImageFeature] = {}
        # depth comes before the colour of its time
        for topic, image in sorted(pictures.items(), key=lambda item: item[1].depth is None):
            if reason := _describe_absence(episode.videos[image.key].path) if image.is_video else None:
                losses.add(reason)
            else:
                self._pictures[topic] = image
        self.has_files = bool(self._pictures) and _describe_absence(episode.table) is None
        """True if the table of the episode and at least one picture are there."""

    def samples(self, start_ns: int, begin_ns: int) -> Iterator[Sample]:
        """Yield the pictures from `begin_ns`; the episode begins at `start_ns`."""
        if not self._pictures:
            return
        offset_ns, pictures = max(begin_ns - start_ns, 0), self._pictures
        videos = {
            image.key: _VideoFrames(self._episode.videos[image.key], offset_ns, self._period_ns, image.depth)
            for image in pictures.values()
            if image.is_video
        }
        limit = LossLimit()
        for row in self._rows([image.key for image in pictures.values() if not image.is_video]):
            if limit.is_reached():
                raise BagError(f"expected pictures in its rows, found none before the row {row.number}")
            if not math.isfinite(row.time_s) or not 0 <= row.time_s < MAX_TIME_S:
                self._losses.skip(f"episode {self._episode.number}", f"expected a time, found {row.time_s}")
                continue
            time_ns = round(row.time_s * NANOSECONDS)
            if time_ns < offset_ns:
                continue
            for topic, image in pictures.items():
                try:
                    cell = row.cells.get(image.key)
                    found = videos[image.key].find(time_ns) if image.is_video else _decode_cell(cell, image)
                except BagError as error:
                    self._losses.skip(topic, error)
                    continue
                limit.reset()
                stamp_ns = start_ns + time_ns
                yield Sample(topic, stamp_ns, stamp_ns, found, row.number)

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


def _describe_absence(path: Path) -> str | None:
    """Return that a file of an episode is absent, or what stands in its place; None if it is there."""
    found = describe_stand_in(path) or (None if path.is_file() else "no file")
    return found and f"expected a file of the dataset at {path}, found {found}"


def _decode_cell(cell: object, image: ImageFeature) -> Colour | Depth:
    """Return the image in a cell of a table, {bytes, path}."""
    data = cell.get("bytes") if isinstance(cell, dict) else None
    if not isinstance(data, bytes):
        raise BagError("expected the bytes of an image in the table, found none")
    if image.depth is None:
        return Colour.from_compressed(data)
    try:
        return _decode_depth(data, image.depth.unit_m)
    except ValueError as error:
        raise BagError(
            f"{image.key}: expected depth as PNG or TIFF of 16 bits, or TIFF of floats: {error}"
        ) from error


def _decode_depth(data: bytes, unit_m: float | None) -> Depth:
    """Return the depth in an image; `unit_m` as in DepthFormat. Raises ValueError, also as WireError, for others."""
    values = still_images.decode_float_tiff(data)
    if values is not None:
        metres = values * np.float32(unit_m or 1.0)
        return encode_depth(to_millimetres(metres), "z16", MILLIMETRE, aligned=False)
    scale_m = unit_m or MILLIMETRE
    if not is_depth_png(data):
        return still_images.decode_depth(data, scale_m, aligned=False)
    try:
        return Depth(*compressed_size(data, "png"), "png16", scale_m, False, data)
    except WireError as error:
        raise ValueError(str(error)) from error


def _read_codes(frame: Any) -> npt.NDArray[np.uint16]:
    """Return the brightness of a decoded frame of 12 bits as it is stored, [height, width]; BagError for others."""
    name, plane = frame.format.name, frame.planes[0]
    if not re.match(r"(gray|yuv\d{3}p)12[lb]e$", name):
        raise BagError(f"expected depth in a video of 12 bits, found one of {name}: it has no exact values")
    rows = np.frombuffer(plane, "<u2" if name.endswith("le") else ">u2").reshape(frame.height, -1)
    return rows[:, : frame.width]


def _make_table(depth: DepthFormat) -> tuple[npt.NDArray[np.uint16], float]:
    """Return the depth of each code, and its unit in metres.

    The lowest and the highest code are 0, which is unknown: all that is nearer or farther has them.
    """
    steps = np.arange(_CODES) / (_CODES - 1)
    if depth.is_log:
        low, high = math.log(depth.min_m + depth.shift_m), math.log(depth.max_m + depth.shift_m)
        metres = np.exp(low + steps * (high - low)) - depth.shift_m
    else:
        metres = depth.min_m + steps * (depth.max_m - depth.min_m)
    unit_m = depth.max_m / np.iinfo(np.uint16).max
    table = np.rint(np.clip(metres, 0, depth.max_m) / unit_m).astype(np.uint16)
    table[[0, -1]] = 0
    return table, unit_m


class _VideoFrames:
    """The frames of an episode in a video, found by time, which does not go back."""

    def __init__(self, part: VideoPart, offset_ns: int, period_ns: int, depth: DepthFormat | None) -> None:
        self._path, self._half_ns = part.path, period_ns // 2
        self._depth = None if depth is None else _make_table(depth)
        self._begin_ns = round(part.begin_s * NANOSECONDS)
        first_ns = max(self._begin_ns + offset_ns - self._half_ns, 0)
        self._frames = Playback(part.path, first_ns, read_bgr if depth is None else _read_codes).frames()
        self._next: tuple[int, npt.NDArray[Any]] | None = None

    def find(self, time_ns: int) -> Colour | Depth:
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
        if self._depth is not None:
            table, unit_m = self._depth
            return encode_depth(table[np.minimum(image, _CODES - 1)], "z16", unit_m, aligned=False)
        height, width = image.shape[:2]
        return Colour(width, height, "bgr8", np.ascontiguousarray(image).data.cast("B"))
