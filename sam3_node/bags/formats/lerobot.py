"""Reads LeRobot datasets (2.0, 2.1, 3.0): all cameras of all episodes, from videos and images in tables, with depth.

`lerobot_layout` says where everything is. A frame's `seq` is the number of its row over the whole dataset. Its stamp is
the beginning of the episode plus the row's own timestamp, which `lerobot_times` checks; the episode begins at the
number of its first row divided by the dataset's rate. A state is read as poses if it has the names POSE, which
lerobot's own kinematics give the gripper. Any other state is read as joints.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import BagError, WireError
from ...files import describe_stand_in
from ...geometry import pose_of, rigid, rotation_from_vector
from ...resources import closed_on_error
from ...schema.fields import Plain
from ...types import NANOSECONDS, ROBOT, Depth, JointState, RobotMessage
from ...wire import encode_depth
from ...wire.video import read_pixels
from .. import samples
from ..decompression import decode_float_tiff, make_bgr
from ..isolated import IsolatedCalls
from ..messages.ros_images import MILLIMETRE, naming, read_depth, to_millimetres
from .lerobot_layout import (
    DepthFormat,
    Episode,
    ImageFeature,
    LeRobotLayout,
    is_lerobot,
    read_layout,
    read_rows,
)
from .lerobot_times import RowTime, RowTimes, VideoPart
from .video import Playback

ROWS = 16
"""Number of rows of an episode that one call reads. They may hold images."""
MAX_TIME_S = 1e9
"""Time of a row, in seconds, from which on it is taken for damage."""
EPISODE_MISSES = 20
"""What a damaged episode adds to the unreadable rows that MAX_MISSES limits."""

STATE = "observation.state"
"""Column of the robot's state."""
POSE = ("ee.x", "ee.y", "ee.z", "ee.wx", "ee.wy", "ee.wz")
"""Names of a position in metres and of a rotation vector in radians."""
MOTOR = ".pos"
"""End of the names of lerobot's motors, which its own kinematics take in degrees. Other joints are in radians."""

# codes of depth in a video, which have 12 bits
_CODES = 1 << 12
# words by which the names of colour and depth of one camera differ
_ROLES = re.compile(r"(^|[_.-])(depth|rgb|colou?r|image|map)(?=$|[_.-])", re.IGNORECASE)


class _Row(NamedTuple):
    """A row of an episode: its number in the dataset, its time, and its columns by their names."""

    number: int
    time: RowTime | None
    cells: Plain


class LeRobotBag(samples.SampleReader):
    """A dataset in which each picture feature is a camera. `PATH#episode=3` chooses episodes.

    Rows whose picture is absent or cannot be decoded are skipped, and `lost` says so. Raises BagError for a damaged
    description, MissingExtraError without pyarrow.
    """

    can_seek = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._selection = samples.split_selection(path)
        self.tables = IsolatedCalls("pyarrow", "lerobot-datasets")
        # the child process ends if the dataset cannot be opened
        with closed_on_error(self.tables):
            self.layout = read_layout(self._selection.path, self.tables)
            self.opening.add(*self.layout.left_out)
            numbers = [episode.number for episode in self.layout.episodes]
            if not any(map(self._selection.has, numbers)):
                raise BagError(f"{path}: expected episodes {min(numbers)} to {max(numbers)}, found others")

        self._episodes = [episode for episode in self.layout.episodes if self._selection.has(episode.number)]
        self.episode_starts = tuple(episode.first_row for episode in self._episodes)
        self._has_noted = False
        self._pictures = _name_topics(self.layout)
        topics = []
        for topic, image in self._pictures.items():
            stored = "video" if image.is_video else "image"
            kind: samples.Kind = "depth" if image.depth else "colour"
            topics.append(samples.Topic(topic, stored, kind))
        self.topics = tuple(topics)

    @staticmethod
    def recognises(path: Path) -> bool:
        """Return True for the folder of a LeRobot dataset, also with a selection of episodes."""
        return is_lerobot(samples.split_selection(path).path)

    def _read(self, topics: Collection[str], begin_ns: int) -> Iterator[samples.Sample]:
        misses = 0
        pictures = {topic: image for topic, image in self._pictures.items() if topic in topics}
        if not pictures:
            return
        for episode in self._episodes:
            # skip episodes before the beginning; one row of margin, because rows have times of their own
            end_ns = self._start_ns(episode) + round((episode.length + 1) / self.layout.fps * NANOSECONDS)
            if end_ns < begin_ns:
                continue
            # a damaged episode is a loss; many of them in a row end the reading
            reader = _EpisodeReader(self, episode, pictures)
            try:
                for sample in reader.samples(self._start_ns(episode), begin_ns):
                    misses = 0
                    yield sample
            except BagError as error:
                self.report.skip("episodes", f"episode {episode.number}: {error}")
            # the files of a dataset may be downloaded in part: an absent one is no damage
            if reader.has_files:
                misses += EPISODE_MISSES
            if misses > samples.MAX_MISSES:
                self.report.add(
                    f"nothing was read from episode {episode.number} on, after many that are damaged"
                )
                return

    def robot(self, joints: bool = True) -> Iterator[RobotMessage]:
        """Yield the gripper's poses in the base if the state has the names POSE, else joints by the state's names.

        Stamps are the times of the rows.
        """
        names, fault = _list_state_names(self.layout.info)
        if not joints and (fault is not None or not set(POSE) <= set(names)):
            return
        if fault is not None:
            self.robot_notes.add(f"no joints: {fault}")
            return
        for episode in self._episodes:
            start_ns = self._start_ns(episode)
            reader = _EpisodeReader(self, episode, {})
            with suppress(BagError):  # told where the episode's pictures are read
                for row in reader.rows([STATE]):
                    values = row.cells[STATE]
                    if not isinstance(values, list) or row.time is None:
                        continue
                    # which value is which is not known
                    if names and len(names) != len(values):
                        self.robot_notes.add(
                            f"no joints: expected as many names as values in {STATE}, found {len(names)} names "
                            f"({', '.join(names)[:200]}) and {len(values)} values; correct meta/info.json"
                        )
                        return
                    # a state without names has numbered joints
                    state = dict(zip(names or map(str, range(len(values))), values, strict=True))
                    is_whole = all(_is_position(value) for value in state.values())
                    if state and is_whole:
                        self._note_motors(state)
                        yield _make_robot_message(start_ns + row.time.time_ns, state)

    def _note_motors(self, state: Mapping[str, float]) -> None:
        """Note once that the motors of lerobot are read as degrees: older versions wrote -100..100 by default."""
        motors = [name for name in state if name.endswith(MOTOR)]
        if motors and not self._has_noted:
            self._has_noted = True
            self.robot_notes.add(
                f"joints {', '.join(motors)[:300]} are read as degrees: if the dataset has normalised values "
                "(-100..100) or a gripper in percent, the robot is drawn elsewhere; record with use_degrees"
            )

    def _start_ns(self, episode: Episode) -> int:
        return round(episode.first_row / self.layout.fps * NANOSECONDS)

    def close(self) -> None:
        """End the process that reads the tables. Idempotent."""
        self.tables.close()


def _name_topics(layout: LeRobotLayout) -> dict[str, ImageFeature]:
    """Return the pictures by their topics: /front/image, and /front/depth for the depth of the camera front.

    Depth belongs to the colour whose name differs in words such as depth and rgb alone: front_depth, front_rgb.
    """
    topics = {f"/{image.name}/image": image for image in layout.images}
    sensors = {_ROLES.sub("", image.name): image.name for image in reversed(layout.images)}
    for depth in layout.depths:
        sensor = sensors.get(_ROLES.sub("", depth.name), depth.name)
        topic = f"/{sensor}/depth"
        # a second depth of one colour is a camera of its own
        if topic in topics:
            topic = f"/{depth.name}/depth"
        topics[topic] = depth
    return topics


def _is_position(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _list_state_names(info: Mapping[str, Any]) -> tuple[list[str], str | None]:
    """Return the names of the values of the state, none if they have no names, and what is wrong with them."""
    feature = info["features"].get(STATE)
    names = feature.get("names") if isinstance(feature, dict) else None
    if isinstance(names, dict):  # version 2: {"motors": names}
        if len(names) > 1:
            groups = ", ".join(map(str, names))
            return [], (
                f"expected the names of {STATE} in one group, found the groups {groups:.200}, whose order is not "
                "known; write them as one list in meta/info.json"
            )
        names = next(iter(names.values()), None)
    # converters write a list of one list
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], list):
        names = names[0]
    if not isinstance(names, list):
        return [], None
    others = [name for name in names if not isinstance(name, str | int)]
    if others:
        return [], f"expected names in {STATE}, found {others[0]!r:.200}; correct meta/info.json"
    found = [str(name) for name in names]
    repeated = [name for name in found if found.count(name) > 1]
    if repeated:
        return (
            [],
            f"expected each name of {STATE} once, found {repeated[0]:.200} twice; correct meta/info.json",
        )
    return found, None


def _make_robot_message(stamp_ns: int, state: Mapping[str, float]) -> RobotMessage:
    # poses of the gripper where the state has them, else joints, whose motors are in degrees
    clock = samples.find_clock(stamp_ns)
    if state.keys() >= set(POSE):
        pose = np.array([state[name] for name in POSE])
        return pose_of(rigid(rotation_from_vector(pose[3:]), pose[:3]), "gripper", "base", stamp_ns, clock)
    joints = {}
    for name, value in state.items():
        if name.endswith(MOTOR):
            joints[name.removesuffix(MOTOR)] = math.radians(value)
        else:
            joints[name] = float(value)
    return JointState(ROBOT, stamp_ns, joints, clock)


class _EpisodeReader:
    """Reads the pictures and states of one episode."""

    def __init__(self, bag: LeRobotBag, episode: Episode, pictures: Mapping[str, ImageFeature]) -> None:
        self._episode = episode
        self._tables = bag.tables
        self._report = bag.report
        self._fps = bag.layout.fps
        self._period_ns = round(NANOSECONDS / bag.layout.fps)
        self._pictures: dict[str, ImageFeature] = {}
        # depth comes before the colour of its time
        for topic, image in sorted(pictures.items(), key=lambda item: item[1].depth is None):
            absence = None
            if image.is_video:
                part = episode.videos[image.key]
                absence = part.fault or _describe_absence(part.path)
            if absence is None:
                self._pictures[topic] = image
            else:
                self._report.add(absence)
        self.has_files = bool(self._pictures) and _describe_absence(episode.table) is None
        """True if the table of the episode and at least one picture are there."""

    def samples(self, start_ns: int, begin_ns: int) -> Iterator[samples.Sample]:
        """Yield the pictures from `begin_ns`. The episode begins at `start_ns`."""
        if not self._pictures:
            return
        offset_ns = max(begin_ns - start_ns, 0)
        pictures = self._pictures
        videos = {
            image.key: _VideoFrames(self._episode.videos[image.key], offset_ns, self._period_ns, image.depth)
            for image in pictures.values()
            if image.is_video
        }

        misses = 0
        for row in self.rows([image.key for image in pictures.values() if not image.is_video]):
            # a small table can declare endless rows without pictures
            misses += 1
            if misses > samples.MAX_MISSES:
                raise BagError(f"expected pictures in its rows, found none before the row {row.number}")
            if row.time is None:
                reason = f"expected a time after that of the row before, found {row.cells['timestamp']!r:.60}"
                self._report.skip(f"episode {self._episode.number}", reason)
                continue
            time_ns = row.time.time_ns
            if time_ns < offset_ns:
                continue

            for topic, image in pictures.items():
                picture: samples.Colour | Depth
                try:
                    if image.is_video:
                        picture = videos[image.key].find(row.time.video_ns)
                    else:
                        picture = _decode_cell(row.cells.get(image.key), image)
                except (BagError, WireError) as error:
                    self._report.skip(topic, error)
                    continue
                misses = 0
                yield samples.Sample(topic, start_ns + time_ns, start_ns + time_ns, picture, row.number)

    def rows(self, keys: Sequence[str]) -> Iterator[_Row]:
        """Yield the rows with these columns. The time is None where the table has no time of the episode.

        Raises BagError for a table without the rows, and for times that do not tell which pictures are theirs.
        """
        episode = self._episode
        times = RowTimes(episode.length, self._fps, list(episode.videos.values()))
        done = 0
        columns = ["episode_index", "timestamp", *keys]
        for cells in read_rows(self._tables, episode.table, columns, episode.table_row, episode.length, ROWS):
            if cells["episode_index"] != episode.number:
                break
            # a table may hold anything
            time_s = cells["timestamp"]
            time = None
            if isinstance(time_s, int | float) and 0 <= time_s < MAX_TIME_S:
                time = times.find(done, round(time_s * NANOSECONDS))
            yield _Row(episode.first_row + done, time, cells)
            done += 1
        if times.note is not None:
            self._report.add(f"episode {episode.number}: {times.note}")
        if done < episode.length:
            raise BagError(
                f"{episode.table}: expected {episode.length} rows of episode {episode.number} from the row "
                f"{episode.table_row}, found {done}"
            )


def _describe_absence(path: Path) -> str | None:
    """Return that a file of an episode is absent, or what stands in its place; None if it is there."""
    found = describe_stand_in(path)
    if not found and not path.is_file():
        found = "no file"
    if not found:
        return None
    return f"expected a file of the dataset at {path}, found {found}"


def _decode_cell(cell: object, image: ImageFeature) -> samples.Colour | Depth:
    """Return the image in a cell of a table, {bytes, path}."""
    data = cell.get("bytes") if isinstance(cell, dict) else None
    if not isinstance(data, bytes):
        raise BagError("expected the bytes of an image in the table, found none")
    if image.depth is None:
        return samples.Colour.from_compressed(data)

    # a TIFF of floats is metres unless the description says otherwise, 16-bit grey is millimetres
    unit_m = image.depth.unit_m
    with naming(image.key):
        values = decode_float_tiff(data)
    if values is None:
        return read_depth(data, image.key, unit_m or MILLIMETRE, aligned=False)
    return encode_depth(to_millimetres(values * np.float32(unit_m or 1.0)), "z16", MILLIMETRE, aligned=False)


def _read_codes(frame: Any) -> npt.NDArray[np.uint16]:
    """Return the brightness of a decoded frame of 12 bits as it is stored, [height, width]; BagError for others."""
    name = frame.format.name
    plane = frame.planes[0]
    if not re.match(r"(gray|yuv\d{3}p)12[lb]e$", name):
        raise BagError(f"expected depth in a video of 12 bits, found one of {name}: it has no exact values")
    order = "<" if name.endswith("le") else ">"
    rows = np.frombuffer(plane, f"{order}u2").reshape(frame.height, -1)
    return rows[:, : frame.width]  # behind the width is padding


def _make_table(depth: DepthFormat) -> tuple[npt.NDArray[np.uint16], float]:
    """Return the depth of each code, and its unit in metres.

    The lowest and the highest code become 0, which is unknown: lerobot clips nearer and farther values to them.
    """
    # even steps of the depth, or of its logarithm, from the lowest code to the highest
    steps = np.arange(_CODES) / (_CODES - 1)
    if depth.is_log:
        low = math.log(depth.min_m + depth.shift_m)
        high = math.log(depth.max_m + depth.shift_m)
        metres = np.exp(low + steps * (high - low)) - depth.shift_m
    else:
        metres = depth.min_m + steps * (depth.max_m - depth.min_m)
    # the unit that uses all of 16 bits
    unit_m = depth.max_m / np.iinfo(np.uint16).max
    table = np.rint(np.clip(metres, 0, depth.max_m) / unit_m).astype(np.uint16)
    table[[0, -1]] = 0
    return table, unit_m


class _VideoFrames:
    """The frames of an episode in a video, found by ascending times."""

    def __init__(self, part: VideoPart, offset_ns: int, period_ns: int, depth: DepthFormat | None) -> None:
        self._path = part.path
        self._half_ns = period_ns // 2
        self._begin_ns = round(part.begin_s * NANOSECONDS)
        first_ns = max(self._begin_ns + offset_ns - self._half_ns, 0)
        self._depth: tuple[npt.NDArray[np.uint16], float] | None = None
        convert: Callable[[Any], npt.NDArray[Any]] = read_pixels
        if depth is not None:
            self._depth = _make_table(depth)
            convert = _read_codes
        self._frames = Playback(part.path, first_ns, convert).frames()
        # the last frame that was decoded, with its stamp in the video
        self._next: tuple[int, npt.NDArray[Any]] | None = None

    def find(self, time_ns: int) -> samples.Colour | Depth:
        """Return the frame within half a period of a time of the episode. Raises BagError if there is none."""
        # times of rows are rounded: half a period of tolerance
        wanted_ns = self._begin_ns + time_ns
        while self._next is None or self._next[0] < wanted_ns - self._half_ns:
            frame = next(self._frames, None)
            if frame is None:
                break
            self._next = frame[1], frame[2]
        if self._next is None or abs(self._next[0] - wanted_ns) > self._half_ns:
            raise BagError(f"{self._path.name} has no frame at {wanted_ns / NANOSECONDS:.3f} s")
        image = self._next[1]
        if self._depth is not None:
            table, unit_m = self._depth
            return encode_depth(table[np.minimum(image, _CODES - 1)], "z16", unit_m, aligned=False)
        return make_bgr(image)
