"""Results of calibrations: as sections of a calibration file, and in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from ..calibration import Calibration, load_calibration, save_calibration
from ..calibration.boards import Board
from ..calibration.camera_file import HandEye, HandEyeMeasured, back_up
from ..calibration.coverage import measure_coverage
from ..calibration.hand_eye import HandEyeResult, LeaveOneOut
from ..calibration.intrinsics import IntrinsicsResult
from ..calibration.rigid_motion import to_motions
from ..errors import SettingsError
from ..geometry import invert, quaternion_from_rotation

MAX_LEAVE_ONE_OUT_MM, MAX_LEAVE_ONE_OUT_DEG = 10.0, 2.0
"""Largest leave-one-out errors of a hand-eye calibration that passes a check."""


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
        "scale": 1 + result.scale[0],
        "scale_sd": result.scale[1],
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
                + (
                    ""
                    if pose.scale is None
                    else f", scale of the board {pose.scale:.4f} ± {2 * pose.scale_sd:.4f}"
                )
            )
    return lines


def judge_hand_eye(measured: HandEyeMeasured, limit_mm: float = MAX_LEAVE_ONE_OUT_MM) -> tuple[bool, str]:
    """Return if the record of a hand-eye calibration passes, and a line that says why."""
    passed = measured.leave_one_out_mm <= limit_mm and measured.leave_one_out_deg <= MAX_LEAVE_ONE_OUT_DEG
    return passed, (
        f"{'passed' if passed else 'FAILED'}: leave-one-out error of the hand-eye calibration "
        f"{measured.leave_one_out_mm:.2f} mm and {measured.leave_one_out_deg:.3f} degrees; the limits are "
        f"{limit_mm:g} mm and {MAX_LEAVE_ONE_OUT_DEG:g} degrees"
    )


def replace_calibration(path: Path, calibration: Calibration) -> None:
    """Write a calibration file, keep an older one whose hand-eye calibration it replaces, and print the difference.

    Raises OutputError.
    """
    if path.exists():
        try:
            before: Calibration | None = load_calibration(path)
        except SettingsError:
            before = None
        lost = f"{path} was no calibration file" if before is None else _describe_change(before, calibration)
        if lost:
            print(f"{lost}; the old file is kept as {back_up(path)}")
    save_calibration(path, calibration)


def _describe_change(before: Calibration, after: Calibration) -> str:
    """Return what is lost of the hand-eye calibration and the depth scale in a file, "" for nothing."""
    old, new = before.hand_eye, after.hand_eye
    if old is None or new is None:
        lost = [name for name in ("hand_eye", "depth") if getattr(before, name) and not getattr(after, name)]
        return (
            f"{' and '.join(lost)} of the file before are not in the new one: measure them again"
            if lost
            else ""
        )
    if old.kind != new.kind:
        return f"the hand-eye calibration is replaced: it was {old.kind}, and is {new.kind}"
    motion = to_motions((invert(old.parent_from_camera) @ new.parent_from_camera)[None])[0]
    moved_mm, moved_deg = 1e3 * np.linalg.norm(motion[:3]), np.degrees(np.linalg.norm(motion[3:]))
    if moved_mm < 1e-3 and moved_deg < 1e-4:
        return ""
    date = f" of {old.measured.date:%Y-%m-%d}" if old.measured is not None else ""
    moved = f"the camera moved by {moved_mm:.2f} mm and {moved_deg:.3f} degrees"
    return f"the hand-eye calibration{date} is replaced: {moved}"


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
    share, deviation = result.scale
    print(f"scale of the board by the robot's motion: {1 + share:.4f} ± {2 * deviation:.4f}")
    for warning in result.warnings:
        print(f"sam3-node: warning: {warning}", file=sys.stderr)


def print_comparison(rows: Mapping[str, LeaveOneOut]) -> None:
    """Print the leave-one-out errors of methods on the same views as a table."""
    print(f"{'method':<20} {'mm':>8} {'degrees':>8}   leave-one-out error, root mean square")
    for name, errors in rows.items():
        print(f"{name:<20} {errors.rms_mm:8.2f} {errors.rms_deg:8.3f}")
