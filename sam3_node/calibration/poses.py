"""Poses of the robot: a file of them, and a track that is interpolated at the time of an image.

A pose file is JSON, TOML or CSV; docs/calibration.md describes all three. Poses are base_from_gripper: position in
metres (or the unit that the file names) and a unit quaternion x, y, z, w, or a 4x4 matrix. Each pose names its image
or has a stamp, or brings the pose of the board in the camera.
"""

from __future__ import annotations

import bisect
import csv
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import CalibrationError
from ..geometry import (
    Array,
    invert,
    rigid,
    rotation_from_quaternion,
    rotation_from_vector,
    vector_from_rotation,
)
from ..types import FramePose

MAX_FILE_BYTES = 64 << 20
_UNITS = {"m": 1.0, "mm": 1e-3}
_MAX_REACH_M = 20.0
_RIGID_TOLERANCE = 1e-2
_QUATERNION_KEYS, _POSITION_KEYS = ("qx", "qy", "qz", "qw"), ("x", "y", "z")
_MATRIX_KEYS = tuple(f"m{row}{column}" for row in range(4) for column in range(4))


class _Entry(BaseModel):
    """One pose as a file gives it."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    position: tuple[float, float, float] | None = None
    quaternion_xyzw: tuple[float, float, float, float] | None = None
    matrix: tuple[tuple[float, float, float, float], ...] | None = Field(None, min_length=4, max_length=4)

    @model_validator(mode="after")
    def _one_form(self) -> _Entry:
        if (self.matrix is None) == (self.position is None or self.quaternion_xyzw is None):
            raise ValueError("expected either matrix, or position and quaternion_xyzw")
        return self

    def to_matrix(self, scale: float) -> Array:
        """Return the pose [4, 4] in metres. Raises ValueError if it is not rigid."""
        if self.matrix is None:
            assert self.position is not None
            assert self.quaternion_xyzw is not None
            length = float(np.linalg.norm(self.quaternion_xyzw))
            if abs(length - 1) > _RIGID_TOLERANCE:
                raise ValueError(f"expected a quaternion x, y, z, w of length 1, found length {length:.4g}")
            return rigid(rotation_from_quaternion(self.quaternion_xyzw), np.array(self.position) * scale)
        matrix = np.array(self.matrix, np.float64)
        rotation = matrix[:3, :3]
        if np.abs(rotation @ rotation.T - np.eye(3)).max() > _RIGID_TOLERANCE or not np.allclose(
            matrix[3], (0, 0, 0, 1)
        ):
            raise ValueError("expected a rigid matrix: a rotation, a translation and the last row 0 0 0 1")
        if np.linalg.det(rotation) < 0:
            raise ValueError("expected a rotation, found a reflection: an axis of the frame is mirrored")
        left, _, right = np.linalg.svd(rotation)
        return rigid(left @ right, matrix[:3, 3] * scale)


class _FileEntry(_Entry):
    image: str | None = None
    """Name of the image that was taken at this pose."""
    stamp_ns: Annotated[int, Field(ge=0)] | None = None
    """Time of the pose, by the clock of the images."""
    board: _Entry | None = None
    """Pose of the board in the camera, for a file without images."""


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    unit: Literal["m", "mm"] = "m"
    """Unit of all positions of the robot."""
    board_unit: Literal["m", "mm"] = "m"
    """Unit of all positions of the board."""
    inverse: bool = False
    """true: the file holds gripper_from_base."""
    poses: tuple[_FileEntry, ...] = Field(min_length=1, max_length=100_000)


@dataclass(frozen=True, slots=True)
class RobotPose:
    """One pose of a file: base_from_gripper [4, 4], with its image, its stamp, or the board's pose in the camera."""

    name: str
    base_from_gripper: Array
    image: str | None = None
    stamp_ns: int | None = None
    camera_from_board: Array | None = None


def read_poses(path: Path) -> list[RobotPose]:
    """Read a file of poses. Raises CalibrationError that names the entry and what it should be."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CalibrationError(f"{path}: expected at most {MAX_FILE_BYTES} bytes")
        file = _File.model_validate(_read(path))
    except (OSError, UnicodeDecodeError, csv.Error, json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise CalibrationError(
            f"cannot read poses from {path}: {getattr(error, 'strerror', None) or error}"
        ) from error
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()[:5])
        raise CalibrationError(f"{path} is not a file of poses: {wrong}") from error
    poses = []
    for number, entry in enumerate(file.poses):
        name = entry.image or f"pose {number}"
        try:
            poses.append(_make_pose(name, entry, file))
        except ValueError as error:
            raise CalibrationError(f"{path}: {name}: {error}") from error
    _check_unit(path, poses)
    _check_images(path, poses)
    return poses


def _make_pose(name: str, entry: _FileEntry, file: _File) -> RobotPose:
    pose = entry.to_matrix(_UNITS[file.unit])
    board = entry.board.to_matrix(_UNITS[file.board_unit]) if entry.board is not None else None
    return RobotPose(name, invert(pose) if file.inverse else pose, entry.image, entry.stamp_ns, board)


def _check_unit(path: Path, poses: Iterable[RobotPose]) -> None:
    for pose in poses:
        reach = float(np.linalg.norm(pose.base_from_gripper[:3, 3]))
        if reach > _MAX_REACH_M:
            raise CalibrationError(
                f'{path}: {pose.name} is {reach:.0f} m from the base: for positions in millimetres write unit = "mm"'
            )


def _check_images(path: Path, poses: Iterable[RobotPose]) -> None:
    seen: set[str] = set()
    for name in (PurePath(pose.image).name for pose in poses if pose.image):
        if name in seen:
            raise CalibrationError(f"{path}: expected one pose for each image, found two for {name}")
        seen.add(name)


def _read(path: Path) -> Mapping[str, Any]:
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix == ".csv":
        return _read_csv(text)
    return tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)


def _read_csv(text: str) -> Mapping[str, Any]:
    """Read rows with image, stamp_ns, and x y z qx qy qz qw or m00 to m33; x_mm y_mm z_mm are millimetres."""
    rows = list(csv.DictReader(text.splitlines(), skipinitialspace=True))
    columns = set(rows[0]) if rows else set()
    unit = "mm" if {"x_mm", "y_mm", "z_mm"} <= columns else "m"
    position = tuple(f"{key}_mm" for key in _POSITION_KEYS) if unit == "mm" else _POSITION_KEYS
    return {"unit": unit, "poses": [_read_row(row, position) for row in rows]}


def _read_row(row: Mapping[str, str], position: tuple[str, ...]) -> dict[str, Any]:
    entry: dict[str, Any] = {key: row[key] for key in ("image", "stamp_ns") if row.get(key)}
    if all(row.get(key) for key in _MATRIX_KEYS):
        entry["matrix"] = [[row[key] for key in _MATRIX_KEYS[start : start + 4]] for start in range(0, 16, 4)]
    elif all(row.get(key) for key in (*position, *_QUATERNION_KEYS)):
        entry["position"] = [row[key] for key in position]
        entry["quaternion_xyzw"] = [row[key] for key in _QUATERNION_KEYS]
    return entry


class PoseTrack:
    """Poses of one frame over time; `at` interpolates between them. The oldest beyond `capacity` are forgotten."""

    def __init__(self, capacity: int = 100_000) -> None:
        self._capacity = capacity
        self._stamps: list[int] = []
        self._poses: list[Array] = []

    def __len__(self) -> int:
        return len(self._stamps)

    def add(self, pose: FramePose) -> None:
        """Add a pose as a message gives it; poses may come in any order."""
        self.add_matrix(pose.stamp_ns, rigid(rotation_from_quaternion(pose.quaternion_xyzw), pose.position_m))

    def add_matrix(self, stamp_ns: int, parent_from_frame: Array) -> None:
        """Add the pose [4, 4] at a time; it replaces one of the same time."""
        index = bisect.bisect_left(self._stamps, stamp_ns)
        if index < len(self._stamps) and self._stamps[index] == stamp_ns:
            self._poses[index] = parent_from_frame
            return
        self._stamps.insert(index, stamp_ns)
        self._poses.insert(index, parent_from_frame)
        if len(self._stamps) > self._capacity:
            del self._stamps[0], self._poses[0]

    def at(self, stamp_ns: int, max_gap_ns: int, max_ahead_ns: int = 0) -> Array:
        """Return the pose [4, 4] at a time, between two poses at most `max_gap_ns` apart.

        Positions are interpolated linearly, orientations at constant angular velocity. A time up to `max_ahead_ns`
        after the last pose is extrapolated at the velocity of the last poses. Raises CalibrationError for another
        time outside the track or inside a longer gap, with the distance to the nearest pose.
        """
        after = bisect.bisect_left(self._stamps, stamp_ns)
        if after < len(self._stamps) and self._stamps[after] == stamp_ns:
            return self._poses[after]
        if after == len(self._stamps) > 0 and stamp_ns - self._stamps[-1] <= max_ahead_ns:
            before = self._find_before_last(stamp_ns - self._stamps[-1])
            if before is not None and self._stamps[-1] - self._stamps[before] <= max_gap_ns:
                return self._blend(before, after - 1, stamp_ns)
        if not 0 < after < len(self._stamps):
            nearest = min(
                (abs(stamp - stamp_ns) for stamp in (self._stamps[:1] + self._stamps[-1:])), default=None
            )
            found = "none" if nearest is None else f"the nearest {nearest / 1e6:.0f} ms away"
            raise CalibrationError(
                f"stale pose: expected robot poses before and after the image, found {found}"
            )
        before_ns, after_ns = self._stamps[after - 1], self._stamps[after]
        if after_ns - before_ns > max_gap_ns:
            raise CalibrationError(
                f"stale pose: expected robot poses at most {max_gap_ns / 1e6:.0f} ms apart, found a gap of "
                f"{(after_ns - before_ns) / 1e6:.0f} ms at the time of the image"
            )
        return self._blend(after - 1, after, stamp_ns)

    def _find_before_last(self, ahead_ns: int) -> int | None:
        """Return the newest pose at least `ahead_ns` before the last, so that noise grows by a factor of 3 at most."""
        index = bisect.bisect_right(self._stamps, self._stamps[-1] - ahead_ns) - 1
        return min(index, len(self._stamps) - 2) if index >= 0 and len(self._stamps) > 1 else None

    def _blend(self, first: int, second: int, stamp_ns: int) -> Array:
        share = (stamp_ns - self._stamps[first]) / (self._stamps[second] - self._stamps[first])
        return interpolate(self._poses[first], self._poses[second], share)


def interpolate(first: Array, second: Array, share: float) -> Array:
    """Return the pose [4, 4] at `share` of the way from the first (0) to the second (1), or beyond it."""
    turn = vector_from_rotation(first[:3, :3].T @ second[:3, :3])
    position = first[:3, 3] + share * (second[:3, 3] - first[:3, 3])
    return rigid(first[:3, :3] @ rotation_from_vector(share * turn), position)
