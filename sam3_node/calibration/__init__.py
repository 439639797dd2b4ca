"""Calibration of cameras: files, intrinsics from views of a board, and hand-eye. Only the files load without scipy."""

from .camera_file import Calibration, load_calibration, save_calibration

__all__ = ["Calibration", "load_calibration", "save_calibration"]
