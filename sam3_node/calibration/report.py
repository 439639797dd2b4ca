"""Draws pictures of a calibration: coverage of the image, residual arrows of each view, and errors by view."""

from collections.abc import Iterable, Sequence

import cv2
import numpy as np
import numpy.typing as npt

from ..geometry import Array
from ..types import Image
from ..visualization import contact_sheet
from .hand_eye import HandEyeResult
from .intrinsics import GRID, IntrinsicsResult, measure_coverage

# width of a report
_WIDTH_PX = 1280
# pictures of single views in a row
_COLUMNS = 4
# margin that a sheet has around each picture
_MARGIN_PX = 4
# widths of the two panels and of the pictures of single views
_PANEL_PX = _WIDTH_PX // 2 - _MARGIN_PX
_THUMB_PX = _WIDTH_PX // _COLUMNS - _MARGIN_PX
# pictures of single views, at most
_MAX_THUMBS = 40
# length of the arrow of a typical error, as a share of a panel's width
_ARROW_LENGTH = 0.06
# colours, BGR
_INK = (40, 40, 40)
_GREY = (150, 150, 150)
_RED = (40, 40, 200)
_BLUE = (190, 120, 30)
_FONT = cv2.FONT_HERSHEY_SIMPLEX


def draw_intrinsics(result: IntrinsicsResult) -> Image:
    """Draw coverage, all residuals, the error of each view, and the residual arrows of each view."""
    height = round(_PANEL_PX * result.size[0] / result.size[1])
    solution = result.solution
    fx, fy, cx, cy = solution.camera

    shape = "flat board" if result.flat else f"board bent by {result.bend_mm:.2f} mm"
    numbers = [
        f"{result.size[1]}x{result.size[0]}  {solution.lens.model}  {len(result.views)} views  "
        f"board {result.board}",
        f"fx {fx:.2f}  fy {fy:.2f}  cx {cx:.2f}  cy {cy:.2f}  "
        f"(sd {result.sd[0]:.2f} {result.sd[1]:.2f} {result.sd[2]:.2f} {result.sd[3]:.2f})",
        f"rms {result.rms_px:.3f} px  held out {result.held_out_px:.3f} px  {shape}",
        *[f"rejected {item.name}: {item.reason}" for item in result.rejected[:4]],
    ]

    # two panels of all views together, in one scale
    typical = max(float(np.median(np.linalg.norm(np.concatenate(result.residuals), axis=1))), 1e-3)
    scale = _ARROW_LENGTH * result.size[1] / typical / 2
    every = range(len(result.views))
    panels = [_draw_coverage(result, height), _draw_arrows(result, every, _PANEL_PX, scale)]
    titles = ["corners in each cell", f"all residuals, {scale:.0f} times as long"]

    # then each view, as a bar and as a picture
    errors = dict(zip((view.name for view in result.views), result.errors_px, strict=True))
    thumbs = [_draw_arrows(result, [number], _THUMB_PX, scale) for number in every[:_MAX_THUMBS]]
    names = [
        f"{view.name}  {error:.3f} px" for view, error in zip(result.views, result.errors_px, strict=True)
    ]
    return np.vstack(
        [
            _draw_text(numbers),
            contact_sheet(panels, titles, 2),
            _draw_bars(errors, "px"),
            contact_sheet(thumbs, names[:_MAX_THUMBS], _COLUMNS),
        ]
    )


def draw_hand_eye(result: HandEyeResult) -> Image:
    """Draw the result in numbers, and the leave-one-out errors of each view."""
    x, y, z = result.parent_from_camera[:3, 3] * 1e3
    parent = "gripper" if result.mounting == "eye_in_hand" else "base"
    errors = result.leave_one_out
    text = [
        f"{result.mounting}  {len(result.views)} views  camera in {parent} at {x:.2f} {y:.2f} {z:.2f} mm",
        f"95 % bounds: {result.position_95_m * 1e3:.2f} mm, {np.degrees(result.rotation_95_rad):.3f} degrees",
        f"leave one out: rms {errors.rms_mm:.2f} mm, {errors.rms_deg:.3f} degrees, scale of the board "
        f"{1 + result.scale[0]:.4f} +- {2 * result.scale[1]:.4f}",
        *[f"rejected {item.name}: {item.reason}" for item in result.rejected[:6]],
    ]
    lengths_mm = dict(zip(result.views, errors.lengths_m * 1e3, strict=True))
    angles_deg = dict(zip(result.views, np.degrees(errors.angles_rad), strict=True))
    return np.vstack([_draw_text(text), _draw_bars(lengths_mm, "mm"), _draw_bars(angles_deg, "degrees")])


def _blank(height: int, width: int) -> Image:
    return np.full((height, width, 3), 255, np.uint8)


def _write(image: npt.NDArray[np.uint8], text: str, place: tuple[int, int], size: float = 0.45) -> None:
    plain = text.encode("ascii", "replace").decode()
    cv2.putText(image, plain, place, _FONT, size, _INK, 1, cv2.LINE_AA)


def _draw_text(lines: Sequence[str]) -> Image:
    image = _blank(22 * len(lines) + 14, _WIDTH_PX)
    for number, line in enumerate(lines):
        _write(image, line, (10, 24 + 22 * number), 0.5)
    return image


def _draw_coverage(result: IntrinsicsResult, height: int) -> Image:
    counts = measure_coverage(result.views, result.size)
    heat = np.clip(255 - counts / max(counts.max(), 1) * 200, 0, 255).astype(np.uint8)
    colours = np.stack([heat, np.full_like(heat, 235), heat], axis=-1)
    colours[counts == 0] = (190, 190, 250)
    image = cv2.resize(colours, (_PANEL_PX, height), interpolation=cv2.INTER_NEAREST)
    for row in range(GRID[0]):
        for column in range(GRID[1]):
            place = (column * _PANEL_PX // GRID[1] + 6, (row + 1) * height // GRID[0] - 8)
            _write(image, str(counts[row, column]), place, 0.4)
    return np.asarray(image, np.uint8)


def _draw_arrows(result: IntrinsicsResult, numbers: Iterable[int], width: int, scale: float) -> Image:
    """Draw the residuals of views, from the projected corner towards the measured one."""
    ratio = width / result.size[1]
    image = _blank(round(width * result.size[0] / result.size[1]), width)
    for number in numbers:
        view = result.views[number]
        residuals = result.residuals[number]
        for measured, residual in zip(view.pixels, residuals, strict=True):
            start = (measured - residual + 0.5) * ratio
            cv2.circle(image, _to_place(start), 1, _BLUE, -1, cv2.LINE_AA)
            end = start + residual * scale * ratio
            cv2.arrowedLine(image, _to_place(start), _to_place(end), _RED, 1, cv2.LINE_AA, 0, 0.25)
    return image


def _to_place(point: Array) -> tuple[int, int]:
    return round(float(point[0])), round(float(point[1]))


def _draw_bars(values: dict[str, float], unit: str) -> Image:
    """Draw one bar for each view, with its name below."""
    image = _blank(190, _WIDTH_PX)
    highest = max([*values.values(), 1e-9])
    step = (_WIDTH_PX - 80) / max(len(values), 1)
    _write(image, f"{highest:.3g} {unit}", (6, 16))
    for number, (name, value) in enumerate(values.items()):
        left = round(70 + number * step)
        right = round(70 + (number + 0.8) * step)
        cv2.rectangle(image, (left, 140 - round(125 * value / highest)), (right, 140), _BLUE, cv2.FILLED)
        letters = max(int(step / 7), 2)
        _write(image, name[-letters:], (left, 156), 0.33)
    cv2.line(image, (70, 140), (_WIDTH_PX - 10, 140), _GREY, 1)
    return image
