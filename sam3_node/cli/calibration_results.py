"""Results of calibrations: as sections of a calibration file, and in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from ..calibration import Calibration
from ..calibration.boards import Board
from ..calibration.camera_file import HandEye
from ..calibration.coverage import measure_coverage
from ..calibration.hand_eye import HandEyeResult, LeaveOneOut
from ..calibration.intrinsics import IntrinsicsResult
from ..geometry import quaternion_from_rotation


def make_intrinsics_file(result: IntrinsicsResult, inputs: dict[str, str], camera: str) -> Calibration:
    """Return the calibration file's content for measured intrinsics."""
    solution = result.solution
    fx, fy, cx, cy = map(float, solution.camera)
    counts = measure_coverage(result.views, result.size)
    record = {
        "date": datetime.now(UTC).replace(microsecond=0),
        "method": f"bundle adjustment, {'flat board' if result.flat else 'shape of the board estimated'}",
        "board": str(result.board),
        "views": len(result.views),
        "rejected": {item.name: item.reason for item in result.rejected},
        "inputs": inputs,
        "rms_px": result.rms_px,
        "held_out_px": result.held_out_px,
        "coverage": float((counts > 0).mean()),
        "board_bend_mm": result.bend_mm,
        "sd_px": result.sd,
    }
    distortion = {
        "model": solution.intrinsics.model,
        "coeffs": solution.intrinsics.coeffs,
    }
    section = {
        "width_px": result.size[1],
        "height_px": result.size[0],
        "fx_px": fx,
        "fy_px": fy,
        "cx_px": cx,
        "cy_px": cy,
    }
    fields = {"camera": camera, "intrinsics": section | {"distortion": distortion, "measured": record}}
    return Calibration.model_validate(fields)


def make_hand_eye_section(result: HandEyeResult, board: Board, inputs: dict[str, str]) -> HandEye:
    """Return the section [hand_eye] of a calibration file for a measured pose."""
    pose = result.parent_from_camera
    record = {
        "date": datetime.now(UTC).replace(microsecond=0),
        "method": "joint refinement of camera and board over all views",
        "board": str(board),
        "views": len(result.views),
        "rejected": {item.name: item.reason for item in result.rejected},
        "inputs": inputs,
        "leave_one_out_mm": result.leave_one_out.rms_mm,
        "leave_one_out_deg": result.leave_one_out.rms_deg,
        "position_95_mm": result.position_95_m * 1e3,
        "rotation_95_deg": float(np.degrees(result.rotation_95_rad)),
        "covariance": result.covariance.tolist(),
    }
    return HandEye.model_validate(
        {
            "kind": result.mounting,
            "translation_m": pose[:3, 3].tolist(),
            "rotation_quaternion_xyzw": quaternion_from_rotation(pose[:3, :3]).tolist(),
            "measured": record,
        }
    )


def describe_calibration(calibration: Calibration) -> list[str]:
    """Return a few lines on what a calibration file holds."""
    lens = calibration.intrinsics
    lines = [
        f"intrinsics: {lens.width_px}x{lens.height_px}, fx {lens.fx_px:.2f} fy {lens.fy_px:.2f} cx {lens.cx_px:.2f} "
        f"cy {lens.cy_px:.2f}, {lens.distortion.model}"
    ]
    if (measured := lens.measured) is not None:
        lines.append(
            f"  {measured.date:%Y-%m-%d}, {measured.views} views of {measured.board}: rms {measured.rms_px:.3f} px, "
            f"held out {measured.held_out_px:.3f} px, coverage {100 * measured.coverage:.0f} %"
        )
    hand_eye = calibration.hand_eye
    if hand_eye is not None:
        x, y, z = (1e3 * value for value in hand_eye.translation_m)
        lines.append(
            f"hand-eye: {hand_eye.kind}, camera in {calibration.parent} at {x:.1f} {y:.1f} {z:.1f} mm"
        )
        if (pose := hand_eye.measured) is not None:
            lines.append(
                f"  {pose.date:%Y-%m-%d}, {pose.views} views: within {pose.position_95_mm:.2f} mm and "
                f"{pose.rotation_95_deg:.3f} degrees (95 %), leave-one-out {pose.leave_one_out_mm:.2f} mm and "
                f"{pose.leave_one_out_deg:.3f} degrees"
            )
    return lines


def print_intrinsics(path: Path, result: IntrinsicsResult) -> None:
    """Print the result, the views left out, and which views would improve it."""
    for item in result.rejected:
        print(f"left out {item.name}: {item.reason}")
    for advice in result.advice:
        print(f"better with: {advice}")
    fx, fy, cx, cy = result.solution.camera
    print(
        f"{path}: fx {fx:.2f} fy {fy:.2f} cx {cx:.2f} cy {cy:.2f}, {len(result.views)} views, "
        f"rms {result.rms_px:.3f} px, held out {result.held_out_px:.3f} px"
    )


def print_hand_eye(path: Path, result: HandEyeResult) -> None:
    """Print the result with its error, and the views left out."""
    for item in result.rejected:
        print(f"left out {item.name}: {item.reason}")
    x, y, z = result.parent_from_camera[:3, 3] * 1e3
    print(
        f"{path}: camera at {x:.2f} {y:.2f} {z:.2f} mm, within {result.position_95_m * 1e3:.2f} mm and "
        f"{np.degrees(result.rotation_95_rad):.3f} degrees (95 %), from {len(result.views)} views"
    )


def print_comparison(rows: Mapping[str, LeaveOneOut]) -> None:
    """Print the leave-one-out errors of methods on the same views as a table."""
    print(f"{'method':<20} {'mm':>8} {'degrees':>8}   leave-one-out error, root mean square")
    for name, errors in rows.items():
        print(f"{name:<20} {errors.rms_mm:8.2f} {errors.rms_deg:8.3f}")
