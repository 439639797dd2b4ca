"""Reads a file of robot poses, and interpolates a track of poses or of joints at the time of an image.

A pose file is JSON, TOML, CSV or TUM's text; docs/calibration.md describes them. Poses are base_from_gripper. A pose is
a position in metres (or the unit that the file names) with a unit quaternion x, y, z, w or a rotation vector, or it is
a 4x4 matrix. Each pose names its image, has a stamp, or brings the pose of the board in the camera.
"""

from __future__ import annotations

import bisect
import codecs
import csv
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import partial
from itertools import pairwise
from pathlib import Path, PurePath
from statistics import median
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .. import geometry
from ..errors import CalibrationError
from ..files import parse_json, parse_toml, read_regular
from ..settings import describe_fault
from ..types import FramePose, JointState

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 << 20
"""Size of the largest file that is read."""
ENDED_PERIODS = 4
"""Usual times between two messages of a joint after which it counts as ended, while others go on."""
MAX_SETS = 256
"""Sets in which a robot's joints may come apart. Another one replaces that which came longest ago."""

Unit = Literal["m", "cm", "mm", "in"]
# metres in each unit
_UNITS: dict[Unit, float] = {"m": 1.0, "cm": 1e-2, "mm": 1e-3, "in": 0.0254}
# poses that show how often they come
_RECENT = 16
# distance of a gripper from its base above which the unit must be wrong
_MAX_REACH_M = 20.0
# how far a quaternion's length or a matrix may be off: files have few digits
_RIGID_TOLERANCE = 1e-2
# longest rotation vector: a full turn, and a little more
_MAX_TURN_RAD = 6.3

# names of the columns of tables
_POSITION_KEYS: dict[Unit, tuple[str, ...]] = {
    "mm": ("x_mm", "y_mm", "z_mm"),
    "cm": ("x_cm", "y_cm", "z_cm"),
    "in": ("x_in", "y_in", "z_in"),
    "m": ("x", "y", "z"),
}
_QUATERNION_KEYS = ("qx", "qy", "qz", "qw")
_VECTOR_KEYS = ("rx_rad", "ry_rad", "rz_rad")
# of Universal Robots: a rotation vector in radians
_UR_KEYS = ("rx", "ry", "rz")
_MATRIX_KEYS = tuple(f"m{row}{column}" for row in range(4) for column in range(4))
_ROTATION_KEYS = (_QUATERNION_KEYS, _VECTOR_KEYS)
_TUM_KEYS = ("stamp_s", "x", "y", "z", *_QUATERNION_KEYS)

_SUFFIXES = ".csv (or .tsv, .txt), .tum, .json or .toml"
_COLUMNS = (
    "image or stamp_ns, and x, y, z (or x_mm, y_mm, z_mm) with qx, qy, qz, qw, or with rx, ry, rz (a rotation vector "
    "in radians, as Universal Robots give it), or m00 to m33"
)
_EULER = "their order differs from robot to robot: convert Euler angles to a quaternion"
_ORDER = "name them qx, qy, qz, qw by their meaning"
# what to do about columns that are not read
_HINTS = {
    "roll, pitch, yaw": _EULER,
    "a, b, c": _EULER,
    "w, p, r": _EULER,
    "rx_deg, ry_deg, rz_deg": _EULER,
    "q1, q2, q3, q4": _ORDER,
    "q0, q1, q2, q3": _ORDER,
}


class _Entry(BaseModel):
    """One pose as a file gives it."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    position: tuple[float, float, float] | None = None
    quaternion_xyzw: tuple[float, float, float, float] | None = None
    rotation_vector_rad: tuple[float, float, float] | None = None
    matrix: tuple[tuple[float, float, float, float], ...] | None = Field(None, min_length=4, max_length=4)

    @model_validator(mode="after")
    def _one_form(self) -> _Entry:
        rotations = (self.quaternion_xyzw is not None) + (self.rotation_vector_rad is not None)
        if (self.matrix is None) == (self.position is None or not rotations) or rotations > 1:
            raise ValueError("expected either matrix, or position and quaternion_xyzw or rotation_vector_rad")
        return self

    def to_matrix(self, scale: float) -> geometry.Array:
        """Return the pose [4, 4] in metres. Raises ValueError if it is not rigid."""
        if self.matrix is None:
            assert self.position is not None
            return geometry.rigid(self._to_rotation(), np.array(self.position) * scale)

        matrix = np.array(self.matrix, np.float64)
        rotation = matrix[:3, :3]
        is_rotation = np.abs(rotation @ rotation.T - np.eye(3)).max() <= _RIGID_TOLERANCE
        if not is_rotation or not np.allclose(matrix[3], (0, 0, 0, 1)):
            found = ", found it transposed" if np.allclose(matrix[:, 3], (0, 0, 0, 1)) else ""
            raise ValueError(
                f"expected a rigid matrix: a rotation, a translation and the last row 0 0 0 1{found}"
            )
        if np.linalg.det(rotation) < 0:
            raise ValueError("expected a rotation, found a reflection: an axis of the frame is mirrored")
        # the nearest exact rotation
        left, _, right = np.linalg.svd(rotation)
        return geometry.rigid(left @ right, matrix[:3, 3] * scale)

    def _to_rotation(self) -> geometry.Array:
        if self.quaternion_xyzw is None:
            turn = float(np.linalg.norm(np.array(self.rotation_vector_rad)))
            if turn > _MAX_TURN_RAD:
                raise ValueError(
                    f"expected a rotation vector of at most a full turn in radians, found length {turn:.4g}: it may be "
                    "in degrees, or Euler angles; convert them"
                )
            return geometry.rotation_from_vector(np.array(self.rotation_vector_rad))
        length = float(np.linalg.norm(self.quaternion_xyzw))
        if abs(length - 1) > _RIGID_TOLERANCE:
            raise ValueError(f"expected a quaternion x, y, z, w of length 1, found length {length:.4g}")
        return geometry.rotation_from_quaternion(self.quaternion_xyzw)


class _FileEntry(_Entry):
    """One pose of the robot, with the image or the board that belongs to it."""

    image: str | None = None
    """Name of the image that was taken at this pose."""
    stamp_ns: Annotated[int, Field(ge=0)] | None = None
    """Time of the pose, by the clock of the images."""
    board: _Entry | None = None
    """Pose of the board in the camera, for a file without images."""


class _PosesFile(BaseModel):
    """The content of a file."""

    model_config = ConfigDict(extra="forbid")

    unit: Unit = "m"
    """Unit of all positions of the robot."""
    board_unit: Unit = "m"
    """Unit of all positions of the board."""
    inverse: bool = False
    """True if the file holds gripper_from_base."""
    poses: tuple[_FileEntry, ...] = Field(min_length=1, max_length=100_000)


@dataclass(frozen=True, slots=True)
class RobotPose:
    """One pose of a file: base_from_gripper [4, 4], with its image, its stamp, or the board's pose in the camera."""

    name: str
    base_from_gripper: geometry.Array
    image: str | None = None
    stamp_ns: int | None = None
    camera_from_board: geometry.Array | None = None


def read_poses(path: Path) -> list[RobotPose]:
    """Read a file of poses. Raises CalibrationError that names the entry and what it should be."""
    # each kind of file has its own errors: say for all of them which file it is, and what was expected
    try:
        content, label = _read(path)
        file = _PosesFile.model_validate(content)
    except UnicodeDecodeError as error:
        raise CalibrationError(
            f"cannot read poses from {path}: expected text in UTF-8 as {_SUFFIXES}, found other data"
        ) from error
    except ValidationError as error:
        # a wrong entry also makes the list too short
        items = [item for item in error.errors() if item["type"] != "too_short"] or error.errors()
        wrong = "; ".join(_describe_wrong(items)[:5])
        raise CalibrationError(f"{path} is not a file of poses: {wrong}") from error
    except (OSError, csv.Error, ValueError) as error:
        raise CalibrationError(
            f"cannot read poses from {path}: {getattr(error, 'strerror', None) or f'{path.suffix}: {error}'}"
        ) from error

    poses = []
    for number, entry in enumerate(file.poses):
        name = entry.image or f"pose {number}"
        try:
            poses.append(_make_pose(name, entry, file))
        except ValueError as error:
            raise CalibrationError(f"{label}: {name}: {error}") from error

    # images are found by their names alone
    images = Counter(PurePath(pose.image).name for pose in poses if pose.image)
    for name, count in images.items():
        if count > 1:
            raise CalibrationError(f"{label}: expected one pose for each image, found two for {name}")
    return poses


def _describe_wrong(items: Sequence[Any]) -> list[str]:
    """Return the wrong fields, each once for all poses, with what is expected: for an unknown one, the known ones."""
    # a field's place has a part in the file, two in an entry of the list, and more in its board
    models: dict[int, type[BaseModel]] = {1: _PosesFile, 3: _FileEntry}
    counts = Counter[str]()
    for item in items:
        place = ".".join(str(part) for part in item["loc"] if not isinstance(part, int))
        fault = describe_fault(item)
        if item["type"] == "extra_forbidden":
            model = models.get(len(item["loc"]), _Entry)
            fault = f"unknown, expected {', '.join(model.model_fields)}"
        counts[f"{place or 'the whole'}: {fault}"] += 1

    lines = []
    for line, count in counts.items():
        lines.append(f"{line} ({count} times)" if count > 1 else line)
    return lines


def _make_pose(name: str, entry: _FileEntry, file: _PosesFile) -> RobotPose:
    """Return an entry as a pose in metres. Raises ValueError if it is none that a robot can have."""
    pose = entry.to_matrix(_UNITS[file.unit])
    if file.inverse:
        pose = geometry.invert(pose)
    # the most frequent mistake is millimetres that are taken for metres
    reach = float(np.linalg.norm(pose[:3, 3]))
    if reach > _MAX_REACH_M:
        raise ValueError(
            f'{reach:.0f} m from the base: for positions in millimetres write unit = "mm" or columns x_mm, y_mm, z_mm, '
            'in centimetres "cm", in inches "in"'
        )
    board = entry.board.to_matrix(_UNITS[file.board_unit]) if entry.board is not None else None
    return RobotPose(name, pose, entry.image, entry.stamp_ns, board)


def _read(path: Path) -> tuple[Mapping[str, Any], str]:
    """Return the content of a file, and its name with what is unusual in its form."""
    data = read_regular(path, MAX_FILE_BYTES)
    suffix = path.suffix.lower()

    # spreadsheets write "Unicode text" as UTF-16
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = data.decode("utf-16" if wide else "utf-8-sig")
    # the suffix tells TOML, the first character JSON from a table
    if suffix == ".toml":
        return parse_toml(text.encode()), str(path)
    if suffix in (".csv", ".tsv", ".txt", ".tum") and text.lstrip()[:1] not in ("{", "["):
        return _read_rows(path, text)
    if suffix != ".json" and text.lstrip()[:1] not in ("{", "["):
        raise CalibrationError(f"{path}: expected a file of poses {_SUFFIXES}, found {suffix or 'no suffix'}")
    return parse_json(text), str(path)


def _read_rows(path: Path, text: str) -> tuple[Mapping[str, Any], str]:
    """Read rows whose columns are separated by commas, semicolons, tabs or spaces. The first row names the columns.

    Rows of 8 numbers separated by spaces need no names. They are stamp in s, position and quaternion, as TUM has them.
    """
    # spreadsheets may write a first line `sep=;`
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        is_comment = line.lstrip().startswith("#") or line.lower().startswith("sep=")
        if line.strip() and not is_comment:
            lines.append((number, line))
    if not lines:
        raise CalibrationError(f"{path}: expected poses with the columns {_COLUMNS}, found no rows")

    # an unusual separator is named in errors, because it may be a wrong guess
    _, first = lines[0]
    separator = next((mark for mark in (";", "\t", ",") if mark in first), " ")
    label = str(path)
    words = {";": "semicolons", "\t": "tabs", " ": "spaces"}.get(separator)
    if words is not None:
        label = f"{path} (columns separated by {words})"

    rows = [(number, _split(line, separator)) for number, line in lines]
    names = [cell.lower() for cell in rows[0][1]]
    if set(_UR_KEYS) <= set(names):
        log.warning(
            "%s: took rx, ry, rz for a rotation vector in radians, as Universal Robots give it", label
        )
        renamed = dict(zip(_UR_KEYS, _VECTOR_KEYS, strict=True))
        names = [renamed.get(name, name) for name in names]
    try:
        if separator == " " and len(names) == len(_TUM_KEYS) and all(map(_is_number, names)):
            names = list(_TUM_KEYS)
        else:
            _check_columns(names)
            rows = rows[1:]
        unit: Unit = next((unit for unit, keys in _POSITION_KEYS.items() if set(keys) <= set(names)), "m")
        poses = [_read_row(number, names, row, unit) for number, row in rows]
    except ValueError as error:
        raise CalibrationError(f"{label}: {error}") from error
    return {"unit": unit, "poses": poses}, label


def _split(line: str, separator: str) -> list[str]:
    if separator == " ":
        return line.split()
    cells = next(csv.reader([line], delimiter=separator, skipinitialspace=True), [])
    return [cell.strip() for cell in cells]


def _is_number(cell: str) -> bool:
    try:
        _parse_number(cell)
    except ValueError:
        return False
    return True


def _parse_number(cell: str) -> Decimal:
    """Return a number with a decimal point or comma. Raises ValueError for other text."""
    # Decimal would accept underscores between digits
    try:
        number = Decimal(cell.replace(",", ".").replace("_", "?"))
    except InvalidOperation as error:
        raise ValueError(f"expected a number, found {cell!r}") from error
    if not number.is_finite():
        raise ValueError(f"expected a finite number, found {cell!r}")
    return number


def _parse_stamp(cell: str, unit_ns: int) -> int:
    """Return a time in ns. Raises ValueError for other text, and for a number that a spreadsheet has rounded."""
    stamp = _parse_number(cell) * unit_ns
    if "e" in cell.lower() or (unit_ns == 1 and stamp != int(stamp)):
        raise ValueError(f"expected all digits of a time, in whole nanoseconds, found {cell!r}")
    return int(stamp)


def _check_columns(names: Sequence[str]) -> None:
    """Raise ValueError for rows without the columns of a pose. The error lists the columns that they have."""
    columns = set(names)
    positions = any(columns.issuperset(keys) for keys in _POSITION_KEYS.values())
    rotations = any(columns.issuperset(keys) for keys in _ROTATION_KEYS)
    if (positions and rotations) or columns.issuperset(_MATRIX_KEYS):
        twice = {name for name in names if name and names.count(name) > 1}
        if twice:
            raise ValueError(f"expected each column once, found two of {', '.join(sorted(twice))}")
        return
    # what may have been meant: no header, or angles and quaternions of unknown order
    if any(map(_is_number, names)):
        raise ValueError(
            f"expected a header, a first line that names the columns {_COLUMNS}; found {', '.join(names)[:80]}"
        )
    hints = [f"; {keys}: {hint}" for keys, hint in _HINTS.items() if columns.issuperset(keys.split(", "))]
    raise ValueError(f"expected the columns {_COLUMNS}; found {', '.join(names)[:200]}{''.join(hints[:1])}")


class _PoseRow(TypedDict, total=False):
    """An entry of a table, with the image or the time that it belongs to, before its check."""

    image: str
    stamp_ns: Decimal | int
    matrix: list[list[Decimal | int]]
    position: list[Decimal | int]
    quaternion_xyzw: list[Decimal | int]
    rotation_vector_rad: list[Decimal | int]


def _read_row(number: int, names: Sequence[str], cells: Sequence[str], unit: Unit) -> _PoseRow:
    """Return one row as an entry. Raises ValueError that names the line and the column."""
    if any(cells[len(names) :]):
        raise ValueError(
            f"line {number}: expected {len(names)} columns, found {len(cells)}; decimal commas need another "
            "separator, such as a semicolon"
        )
    row = {name: cell for name, cell in zip(names, cells, strict=False) if cell}

    def parse(key: str, convert: Callable[[str], Decimal | int] = _parse_number) -> Decimal | int:
        try:
            return convert(row.get(key, ""))
        except ValueError as error:
            raise ValueError(f"line {number}, column {key}: {error}") from error

    # which image the pose belongs to
    entry: _PoseRow = {}
    if "image" in row:
        entry["image"] = row["image"]
    for key, unit_ns in (("stamp_ns", 1), ("stamp_s", 10**9)):
        if key in row:
            entry["stamp_ns"] = parse(key, partial(_parse_stamp, unit_ns=unit_ns))

    # the pose, in the form that this row has
    position = _POSITION_KEYS[unit]
    if row.keys() >= set(_MATRIX_KEYS) or not set(names) >= set(position):
        values = [parse(key) for key in _MATRIX_KEYS]
        entry["matrix"] = [values[start : start + 4] for start in range(0, 16, 4)]
        return entry
    entry["position"] = [parse(key) for key in position]
    if set(_QUATERNION_KEYS) <= set(names):
        entry["quaternion_xyzw"] = [parse(key) for key in _QUATERNION_KEYS]
    else:
        entry["rotation_vector_rad"] = [parse(key) for key in _VECTOR_KEYS]
    return entry


class PoseTrack:
    """Poses of one frame over time. `at` interpolates between them.

    At most `capacity` poses are kept, of at most `max_values` numbers together. Those that came longest ago are
    forgotten, whatever their stamps: poses of a clock that was wrong once must not outlast later ones. With
    `max_back_ns`, a pose that is older than the newest by more begins the track anew.
    """

    _kind = "pose"
    _values = 16
    """Numbers of one pose."""

    def __init__(
        self, capacity: int = 100_000, max_values: int | None = None, max_back_ns: int | None = None
    ) -> None:
        self.restarts = 0
        """How often the track began anew because its clock stepped back by more than `max_back_ns`."""
        self._capacity = capacity
        self._max_values = max_values
        self._max_back_ns = max_back_ns
        self._stamps: list[int] = []
        self._poses: list[geometry.Array] = []
        self._arrivals: deque[int] = deque()
        """The same stamps in the order of arrival."""

    def __len__(self) -> int:
        return len(self._stamps)

    def add(self, pose: FramePose) -> None:
        """Add a pose as a message gives it. Poses may come in any order."""
        self.add_matrix(pose.stamp_ns, geometry.matrix_of(pose))

    def add_matrix(self, stamp_ns: int, parent_from_frame: geometry.Array) -> None:
        """Add the pose [4, 4] at a time. It replaces one of the same time."""
        # the poses before a step of the clock lie among those after it, and the robot was elsewhere
        if self.steps_back(stamp_ns):
            self.restarts += 1
            self.forget_all()
        # messages of several sources may come out of order
        index = bisect.bisect_left(self._stamps, stamp_ns)
        if index < len(self._stamps) and self._stamps[index] == stamp_ns:
            self._poses[index] = parent_from_frame
            return
        self._stamps.insert(index, stamp_ns)
        self._poses.insert(index, parent_from_frame)
        self._arrivals.append(stamp_ns)
        self._trim()

    def _trim(self) -> None:
        """Forget the oldest poses beyond the limit."""
        while len(self._stamps) > self._find_limit():
            oldest = bisect.bisect_left(self._stamps, self._arrivals.popleft())
            del self._stamps[oldest], self._poses[oldest]

    @property
    def newest_ns(self) -> int:
        """The latest stamp; 0 if there is none."""
        return self._stamps[-1] if self._stamps else 0

    def measure_period_ns(self) -> int | None:
        """Return the usual time between two poses, of the last ones; None before the second."""
        last = self._stamps[-_RECENT:]
        return round(median(after - before for before, after in pairwise(last))) if len(last) > 1 else None

    def steps_back(self, stamp_ns: int) -> bool:
        """Return True if a pose at a time would begin the track anew, because the clock has stepped back."""
        if self._max_back_ns is None or not self._stamps:
            return False
        return stamp_ns < self._stamps[-1] - self._max_back_ns

    def limit_values(self, max_values: int) -> None:
        """Keep at most so many numbers from now on."""
        self._max_values = max_values
        self._trim()

    def forget_all(self) -> None:
        """Forget all poses."""
        self._stamps.clear()
        self._poses.clear()
        self._arrivals.clear()

    def forget_after(self, stamp_ns: int) -> None:
        """Forget the poses later than a time."""
        first = bisect.bisect_right(self._stamps, stamp_ns)
        # the usual case: there are none
        if first < len(self._stamps):
            del self._stamps[first:], self._poses[first:]
            self._arrivals = deque(stamp for stamp in self._arrivals if stamp <= stamp_ns)

    def at(self, stamp_ns: int, max_gap_ns: int, max_ahead_ns: int = 0) -> geometry.Array:
        """Return the pose [4, 4] at a time, between two poses at most `max_gap_ns` apart.

        Positions are interpolated linearly, orientations at constant angular velocity. A time up to `max_ahead_ns`
        after the last pose, or after the last one before a longer gap, is extrapolated at the velocity of the poses
        before it. Raises CalibrationError for another time outside the track or inside a longer gap, with the distance
        to the nearest pose.
        """
        after = bisect.bisect_left(self._stamps, stamp_ns)
        if after < len(self._stamps) and self._stamps[after] == stamp_ns:
            return self._poses[after]

        # between two poses: near enough to each other that the way between them is known
        last = after - 1
        is_between = 0 < after < len(self._stamps)
        if is_between and self._stamps[after] - self._stamps[last] <= max_gap_ns:
            return self._blend(last, after, stamp_ns)

        # shortly after a pose: go on at the last velocity. A pose of a clock that was far ahead must not prevent it
        if last >= 0 and stamp_ns - self._stamps[last] <= max_ahead_ns:
            before = self._find_before(last, stamp_ns - self._stamps[last])
            if before is not None and self._stamps[last] - self._stamps[before] <= max_gap_ns:
                return self._blend(before, last, stamp_ns)

        if is_between:
            gap_ns = self._stamps[after] - self._stamps[last]
            raise CalibrationError(
                f"stale {self._kind}: expected robot {self._kind}s at most {max_gap_ns / 1e6:.0f} ms apart, found a "
                f"gap of {gap_ns / 1e6:.0f} ms at the time of the image"
            )
        found = "none"
        if self._stamps:
            nearest_ns = min(abs(self._stamps[0] - stamp_ns), abs(self._stamps[-1] - stamp_ns))
            found = f"the nearest {nearest_ns / 1e6:.0f} ms away"
        raise CalibrationError(
            f"stale {self._kind}: expected robot {self._kind}s before and after the image, found {found}"
        )

    def _find_limit(self) -> int:
        """Return the number of poses that are kept. Two are needed to interpolate."""
        if self._max_values is None:
            return self._capacity
        return min(self._capacity, max(2, self._max_values // max(1, self._values)))

    def _find_before(self, last: int, ahead_ns: int) -> int | None:
        """Return the newest pose at least `ahead_ns` before `last`, so that noise grows by a factor of 3 at most."""
        index = bisect.bisect_right(self._stamps, self._stamps[last] - ahead_ns, hi=last + 1) - 1
        if index < 0 or last < 1:
            return None
        return min(index, last - 1)

    def _blend(self, first: int, second: int, stamp_ns: int) -> geometry.Array:
        share = (stamp_ns - self._stamps[first]) / (self._stamps[second] - self._stamps[first])
        return self._interpolate(self._poses[first], self._poses[second], share)

    def _interpolate(self, first: geometry.Array, second: geometry.Array, share: float) -> geometry.Array:
        return interpolate(first, second, share)


class JointTrack(PoseTrack):
    """Joints of one robot over time, which always come together. `at` gives the positions [n] of the joints `names`."""

    _kind = "joint state"

    def __init__(self, names: Sequence[str], capacity: int, max_back_ns: int | None = None) -> None:
        super().__init__(capacity, max_back_ns=max_back_ns)
        self.names = tuple(names)
        self._values = len(self.names)

    def add_joints(self, joints: JointState) -> None:
        """Add the joints `names` of a message, in any order of time."""
        self.add_matrix(joints.stamp_ns, np.array([joints.positions[name] for name in self.names]))

    def take_out(self, names: Collection[str]) -> JointTrack:
        """Return a track of these joints, with their past. They leave this one."""
        taken = [index for index, name in enumerate(self.names) if name in names]
        kept = [index for index, name in enumerate(self.names) if name not in names]
        other = JointTrack([self.names[index] for index in taken], self._capacity, self._max_back_ns)
        other._stamps = list(self._stamps)
        other._arrivals = deque(self._arrivals)
        other._poses = [positions[taken] for positions in self._poses]
        self._poses = [positions[kept] for positions in self._poses]
        self.names = tuple(self.names[index] for index in kept)
        self._values = len(kept)
        return other

    def _interpolate(self, first: geometry.Array, second: geometry.Array, share: float) -> geometry.Array:
        return geometry.interpolate_joints(first, second, share)


class JointTracks:
    """Joints of one robot over time. Each joint has the times of the messages that have it.

    An arm and its gripper may send theirs apart, a driver may send one joint a message, or those alone that moved. At
    most `capacity` states of each joint are kept, and `max_values` numbers together. `known` are the joints of the
    robot's URDF, if it is known: others may end, such as the wheels that another driver has sent once under the
    robot's name.
    """

    def __init__(
        self,
        capacity: int,
        max_values: int,
        max_back_ns: int | None = None,
        known: Collection[str] = frozenset(),
    ) -> None:
        self.restarts = 0
        """How often all tracks began anew because the clock stepped back by more than `max_back_ns`."""
        self._capacity = capacity
        self._max_values = max_values
        self._max_back_ns = max_back_ns
        self._known = frozenset(known)
        # joints that have always come together share a track: each joint is in one track
        self._tracks: list[JointTrack] = []
        self._by_names: dict[frozenset[str], list[JointTrack]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._tracks))

    def add_joints(self, joints: JointState) -> None:
        """Add joints as a message gives them."""
        tracks = self._find_tracks(joints.positions)
        if any(track.steps_back(joints.stamp_ns) for track in tracks):
            # the other tracks are also of the time before the step
            self.restarts += 1
            self._tracks.clear()
            self._by_names.clear()
            tracks = self._find_tracks(joints.positions)
        for track in tracks:
            track.add_joints(joints)

    def _find_tracks(self, positions: Collection[str]) -> list[JointTrack]:
        """Return the tracks that have these joints and no others."""
        names = frozenset(positions)
        if names in self._by_names:
            return self._by_names[names]
        # a new set of names: what is kept of others holds until tracks come, part or go
        if max(len(self._tracks), len(self._by_names)) > MAX_SETS:
            self._by_names.clear()
        while len(self._tracks) > MAX_SETS:
            self._tracks.remove(min(self._tracks, key=lambda track: track.newest_ns))
        known = {name for track in self._tracks for name in track.names}
        new = [name for name in positions if name not in known]
        parted = [
            track for track in self._tracks if 0 < len(names.intersection(track.names)) < len(track.names)
        ]
        if new or parted:
            self._by_names.clear()
            self._tracks += [track.take_out(names) for track in parted]
            self._tracks += [JointTrack(new, self._capacity, self._max_back_ns)] if new else []
            total = sum(len(track.names) for track in self._tracks)
            for track in self._tracks:
                track.limit_values(self._max_values * len(track.names) // total)
        self._by_names[names] = [track for track in self._tracks if names.issuperset(track.names)]
        return self._by_names[names]

    def measure_period_ns(self) -> int | None:
        """Return the longest usual time between two messages of a joint; None before the second.

        Joints that have ended do not count.
        """
        newest_ns = max((track.newest_ns for track in self._tracks), default=0)
        periods = [(track.measure_period_ns(), newest_ns - track.newest_ns) for track in self._tracks]
        return max(
            (period for period, age in periods if period and age <= ENDED_PERIODS * period), default=None
        )

    def forget_after(self, stamp_ns: int) -> None:
        """Forget the joints later than a time."""
        for track in self._tracks:
            track.forget_after(stamp_ns)

    def at(self, stamp_ns: int, max_gap_ns: int, max_ahead_ns: int = 0) -> dict[str, float]:
        """Return the position of each joint at a time, as `PoseTrack.at` does.

        Raises CalibrationError if a joint that was sent before has no position at that time, unless it came in a set
        that moves nothing of the robot.
        """
        found: dict[str, float] = {}
        stale: list[tuple[JointTrack, CalibrationError]] = []
        for track in self._tracks:
            try:
                values = track.at(stamp_ns, max_gap_ns, max_ahead_ns)
            except CalibrationError as error:
                stale.append((track, error))
            else:
                found |= zip(track.names, values.tolist(), strict=True)
        for track, reason in stale:
            # without any position there is nothing to go on with
            if not found:
                raise reason
            if self._known and self._known.isdisjoint(track.names):
                continue
            raise CalibrationError(
                f"{reason}; these are the joints {', '.join(track.names)[:200]}, which came apart from the others: if "
                "the robot has them no more, restart the node"
            )
        return found


def interpolate(first: geometry.Array, second: geometry.Array, share: float) -> geometry.Array:
    """Return the pose [4, 4] at `share` of the way from the first (0) to the second (1), or beyond it."""
    # a constant angular velocity is a rotation vector that grows evenly
    turn = geometry.vector_from_rotation(first[:3, :3].T @ second[:3, :3])
    position = first[:3, 3] + share * (second[:3, 3] - first[:3, 3])
    return geometry.rigid(first[:3, :3] @ geometry.rotation_from_vector(share * turn), position)
