"""Reads and writes the calibration file of one camera: intrinsics, depth scale and hand-eye, and their measurement.

See calibration/example.toml. Files without `version` are of version 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from ..errors import OutputError, SettingsError
from ..files import describe_stand_in, explain_os_error, read_regular, write_output
from ..geometry import Array, rigid, rotation_from_quaternion, rotation_from_vector, scale_intrinsics
from ..settings import MAX_TOML_BYTES, Section, describe_faults, read_toml
from ..types import Intrinsics

# numbers of coefficients of each lens model
_COEFFS = {"none": (0,), "brown_conrady": (5, 8), "fisheye": (4,)}
# how far the length of a quaternion may be from 1
_UNIT_TOLERANCE = 1e-3
# relative difference of aspect ratios up to which images are scaled calibration images: sides are whole pixels
_ASPECT_TOLERANCE = 0.01


class _Finite(Section):
    """A table of the file whose numbers are finite."""

    model_config = ConfigDict(allow_inf_nan=False)


class Distortion(_Finite):
    """Lens distortion."""

    model: Literal["none", "brown_conrady", "fisheye"] = "none"
    """Lens model."""
    coeffs: tuple[float, ...] = ()
    """Coefficients in OpenCV's order: none for none, 5 or 8 for brown_conrady, 4 for fisheye."""

    @field_validator("coeffs")
    @classmethod
    def _count(cls, coeffs: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        model = info.data.get("model")
        if model is not None and len(coeffs) not in _COEFFS[model]:
            expected = " or ".join(map(str, _COEFFS[model]))
            raise ValueError(f"expected {expected} coefficients for {model}, found {len(coeffs)}")
        return coeffs


class Measured(_Finite):
    """Record of a calibration: when, by which method, from which inputs, and how well the views agree."""

    date: datetime
    """Time of the calibration (UTC)."""
    method: str
    """Method that gave the result."""
    board: str = ""
    """Board in the text form of `sam3-node calibrate`."""
    views: int = Field(ge=0)
    """Number of views that took part."""
    rejected: dict[str, str] = Field(default_factory=dict)
    """Names of the rejected views, each with the reason."""
    inputs: dict[str, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]] = Field(default_factory=dict)
    """Names of the input files, with the SHA-256 of each."""


class IntrinsicsMeasured(Measured):
    rms_px: float = Field(ge=0)
    """Root mean square distance between measured and projected corners."""
    held_out_px: float = Field(ge=0)
    """The same on views that took no part in the fit."""
    coverage: float = Field(ge=0, le=1)
    """Share of an 8x6 grid of the image in which corners were seen."""
    board_bend_mm: float = Field(0.0, ge=0)
    """Largest estimated offset of the board's corners from their printed places; 0 for a board taken as flat."""
    sd_px: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Standard deviations of fx, fy, cx and cy."""


class HandEyeMeasured(Measured):
    leave_one_out_mm: float = Field(ge=0)
    """Root mean square error of the board's position in each view, with the other views as the calibration."""
    leave_one_out_deg: float = Field(ge=0)
    """The same for its orientation."""
    position_95_mm: float = Field(ge=0)
    """Error of the camera's position that is not exceeded with 95 % confidence."""
    rotation_95_deg: float = Field(ge=0)
    """The same for its orientation."""
    scale: float | None = Field(None, gt=0)
    """Size of the board by the robot's motion, as a share of the described size."""
    scale_sd: float = Field(0.0, ge=0)
    """Standard deviation of the scale."""
    covariance: tuple[tuple[float, float, float, float, float, float], ...] = Field(
        min_length=6, max_length=6
    )
    """Covariance [6, 6] of a motion (translation m, rotation vector rad) in the camera's frame."""


class PinholeSection(_Finite):
    width_px: int = Field(ge=1, le=16384)
    """Width of the calibration images."""
    height_px: int = Field(ge=1, le=16384)
    """Height of the calibration images."""
    fx_px: float = Field(gt=0)
    """Focal length along x."""
    fy_px: float = Field(gt=0)
    """Focal length along y."""
    cx_px: float
    """Principal point from the centre of the leftmost pixel, as OpenCV and ROS give it."""
    cy_px: float
    """Principal point from the centre of the topmost pixel."""
    distortion: Distortion = Distortion()
    """Lens distortion; by default there is none."""
    measured: IntrinsicsMeasured | None = None
    """How these numbers were measured."""

    @field_validator("cx_px", "cy_px")
    @classmethod
    def _inside(cls, centre: float, info: ValidationInfo) -> float:
        side = "width_px" if info.field_name == "cx_px" else "height_px"
        length = info.data.get(side)
        if length is not None and not 0 <= centre < length:
            raise ValueError(f"expected a principal point inside the image, 0 to {side} = {length}")
        return centre


class DepthSection(_Finite):
    scale_m: float | None = Field(None, gt=0)
    """Metres per depth unit: 0.001 for depth in millimetres; without it, the frames' own."""
    aligned: bool = False
    """States that depth is registered to colour, where the frames do not say so."""


class HandEye(_Finite):
    """Mounting of the camera. Exactly one of the two rotations must be given."""

    kind: Literal["eye_in_hand", "eye_to_hand"]
    """eye_in_hand: on the gripper. eye_to_hand: fixed beside the robot."""
    translation_m: tuple[float, float, float]
    """Position of the camera in its parent frame, the gripper's or the robot base's."""
    rotation_quaternion_xyzw: tuple[float, float, float, float] | None = None
    """Orientation of the camera in that frame, as a unit quaternion."""
    rotation_vector_rad: tuple[float, float, float] | None = None
    """Orientation as a rotation vector: axis times angle."""
    measured: HandEyeMeasured | None = None
    """How this pose was measured."""

    @field_validator("rotation_quaternion_xyzw")
    @classmethod
    def _unit(cls, quaternion: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if quaternion is not None and abs(np.linalg.norm(quaternion) - 1) > _UNIT_TOLERANCE:
            raise ValueError(f"expected a unit quaternion, found length {np.linalg.norm(quaternion):.4f}")
        return quaternion

    @model_validator(mode="after")
    def _one_rotation(self) -> HandEye:
        if (self.rotation_quaternion_xyzw is None) == (self.rotation_vector_rad is None):
            raise ValueError("expected one of rotation_quaternion_xyzw and rotation_vector_rad")
        return self

    @property
    def parent_from_camera(self) -> Array:
        """gripper_from_camera [4, 4] for eye_in_hand, base_from_camera [4, 4] for eye_to_hand."""
        if self.rotation_quaternion_xyzw is not None:
            return rigid(rotation_from_quaternion(self.rotation_quaternion_xyzw), self.translation_m)
        assert self.rotation_vector_rad is not None
        return rigid(rotation_from_vector(self.rotation_vector_rad), self.translation_m)


class Calibration(_Finite):
    """One camera's calibration, checked by load_calibration.

    With `hand_eye`, `hand_eye.parent_from_camera` [4, 4] is the camera's pose in metres in the frame `parent`.
    """

    version: Literal[1] = 1
    """Version of the file's form."""
    camera: str = Field("", pattern=r"^[A-Za-z0-9_.-]{0,64}$")
    """Name of the camera, as in its messages; empty if it is not known."""
    intrinsics: PinholeSection
    depth: DepthSection | None = None
    hand_eye: HandEye | None = None

    @property
    def parent(self) -> Literal["gripper", "base"] | None:
        """Frame that `hand_eye.parent_from_camera` is given in: "gripper" (eye_in_hand) or "base" (eye_to_hand)."""
        if self.hand_eye is None:
            return None
        return "gripper" if self.hand_eye.kind == "eye_in_hand" else "base"

    def base_from_camera(self, base_from_gripper: Array | None = None) -> Array:
        """Return the camera's pose [4, 4] in the robot's base. A camera on the gripper needs the pose of the gripper.

        Raises SettingsError if the file has no hand-eye calibration, or if the gripper's pose is needed and absent.
        """
        if self.hand_eye is None:
            raise SettingsError(
                "expected a calibration with [hand_eye], found none; run `sam3-node calibrate hand-eye`"
            )
        if self.hand_eye.kind == "eye_to_hand":
            return self.hand_eye.parent_from_camera
        if base_from_gripper is None:
            raise SettingsError(
                "the camera is on the gripper: expected base_from_gripper at the time of the image, found none"
            )
        return base_from_gripper @ self.hand_eye.parent_from_camera

    def intrinsics_for(self, size: tuple[int, int]) -> Intrinsics:
        """Return the intrinsics for the camera's images of `size` (height, width).

        Raises SettingsError if the aspect ratio differs, because then the images are not scaled calibration images.
        """
        pinhole = self.intrinsics
        calibrated = (pinhole.height_px, pinhole.width_px)
        height, width = size
        aspect = width / height
        calibrated_aspect = pinhole.width_px / pinhole.height_px
        if abs(aspect / calibrated_aspect - 1) > _ASPECT_TOLERANCE:
            raise SettingsError(
                f"expected images of the calibration's aspect ratio, {pinhole.width_px}x{pinhole.height_px}, "
                f"found {width}x{height}; calibrate the camera in the mode that it runs in"
            )
        # the camera may deliver smaller images than it was calibrated with
        model = pinhole.distortion.model
        coeffs = pinhole.distortion.coeffs
        intrinsics = Intrinsics(pinhole.fx_px, pinhole.fy_px, pinhole.cx_px, pinhole.cy_px, model, coeffs)
        return scale_intrinsics(intrinsics, calibrated, size)


def load_calibration(path: Path) -> Calibration:
    """Read and check a calibration file. SettingsError names each wrong field, its expected and its actual value."""
    if stand_in := describe_stand_in(path):
        raise SettingsError(f"expected a calibration file at {path}, found {stand_in}")
    try:
        return Calibration(**read_toml(path))
    except ValidationError as error:
        raise SettingsError(f"{path} does not validate: {describe_faults(error)}") from error


def save_calibration(path: Path, calibration: Calibration) -> None:
    """Write a calibration file, replacing an older one as a whole. Raises OutputError."""
    # defaults stay out of the file, except the version
    fields = calibration.model_dump(exclude_none=True, exclude_defaults=True)
    fields = {"version": calibration.version} | fields
    write_output(path, "\n".join(_format_table(fields, ())).lstrip().encode())


def back_up(path: Path) -> Path:
    """Copy a calibration file to the first free name beside it, and return this name. Raises OutputError."""
    # no earlier copy is ever replaced
    copy = path.with_name(f"{path.name}.old")
    number = 1
    while copy.exists():
        number += 1
        copy = path.with_name(f"{path.name}.old{number}")
    with explain_os_error(OutputError, f"cannot copy {path} to {copy}"):
        data = read_regular(path, MAX_TOML_BYTES)
    write_output(copy, data)
    return copy


def _format_table(fields: Mapping[str, object], place: tuple[str, ...]) -> list[str]:
    """Return the lines of a TOML table: its values first, then its tables."""
    # in TOML a value behind a table would belong to that table
    values = {key: value for key, value in fields.items() if not isinstance(value, dict)}
    tables = {key: value for key, value in fields.items() if isinstance(value, dict) and value}
    lines = []
    if place and values:
        lines.append(f"[{'.'.join(map(_format_key, place))}]")
    lines += [f"{_format_key(key)} = {_format_value(value)}" for key, value in values.items()]
    for key, table in tables.items():
        lines += ["", *_format_table(table, (*place, key))]
    # the file ends with a line feed
    if not place:
        lines.append("")
    return lines


def _format_key(key: str) -> str:
    # TOML's bare keys are ASCII letters, digits, _ and -
    is_bare = key.replace("_", "a").replace("-", "a").isalnum() and key.isascii()
    return key if is_bare else json.dumps(key)


def _format_value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_format_value, value))}]"
    if isinstance(value, datetime):
        return value.isoformat()
    return json.dumps(value)  # numbers, strings and booleans are written alike in TOML and JSON
