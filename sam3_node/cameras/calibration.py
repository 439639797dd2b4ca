"""Calibration file of one camera: intrinsics, depth scale and hand-eye. See calibration/example.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from ..errors import SettingsError
from ..geometry import Array, rigid, rotation_from_quaternion, rotation_from_vector, scale_intrinsics
from ..settings import Section, read_toml
from ..types import Intrinsics

_COEFFS = {"none": (0,), "brown_conrady": (5, 8), "fisheye": (4,)}
_UNIT_TOLERANCE = 1e-3
_ASPECT_TOLERANCE = 0.01


class _Finite(Section):
    model_config = ConfigDict(allow_inf_nan=False)


class Distortion(_Finite):
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

    @field_validator("cx_px", "cy_px")
    @classmethod
    def _inside(cls, centre: float, info: ValidationInfo) -> float:
        side = "width_px" if info.field_name == "cx_px" else "height_px"
        length = info.data.get(side)
        if length is not None and not 0 <= centre < length:
            raise ValueError(f"expected a principal point inside the image, 0 to {side} = {length}")
        return centre


class DepthSection(_Finite):
    scale_m: float = Field(gt=0)
    """Metres per depth unit: 0.001 for depth in millimetres."""


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
    """One camera's calibration, checked by load_calibration."""

    intrinsics: PinholeSection
    depth: DepthSection | None = None
    hand_eye: HandEye | None = None

    def intrinsics_for(self, size: tuple[int, int]) -> Intrinsics:
        """Return the intrinsics for the camera's images of `size` (height, width).

        Raises SettingsError if the aspect ratio differs, because then the images are not scaled calibration images.
        """
        pinhole = self.intrinsics
        calibrated = (pinhole.height_px, pinhole.width_px)
        aspects = (size[1] / size[0], calibrated[1] / calibrated[0])
        if abs(aspects[0] / aspects[1] - 1) > _ASPECT_TOLERANCE:
            raise SettingsError(
                f"expected images of the calibration's aspect ratio, {calibrated[1]}x{calibrated[0]}, "
                f"found {size[1]}x{size[0]}; calibrate the camera in the mode that it runs in"
            )
        model, coeffs = pinhole.distortion.model, pinhole.distortion.coeffs
        intrinsics = Intrinsics(pinhole.fx_px, pinhole.fy_px, pinhole.cx_px, pinhole.cy_px, model, coeffs)
        return scale_intrinsics(intrinsics, calibrated, size)


def load_calibration(path: Path) -> Calibration:
    """Read and check a calibration file; SettingsError names each wrong field, its expected and its actual value."""
    try:
        return Calibration(**read_toml(path))
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, item['loc']))}: {item['msg']} (found {item['input']!r})"
            for item in error.errors()
        )
        raise SettingsError(f"{path} does not validate: {wrong}") from error
