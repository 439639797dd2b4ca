"""Measure how far tracked masks depart from their history: size, position and shape, learned on sure frames only.

`measure` takes the signals from low-resolution logits. Two histories use them, with arrays that are allocated once, a
row for each object: `TrackHistory` feeds the confidence of all masks. `SureHistory` judges the masks that models
without memory follow; it needs no fitted weights, because it compares each track with its own past alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import log
from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import torch

from .saved_tables import RowTables

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

MAX_SIDE = 144  # cells of the grid; finer logits are sampled


class LevelSets(NamedTuple):
    """Points of a grid over the image at which the logits of N masks exceed three levels; the signals need no more."""

    inside: Bools
    """[N, h, w], logits > 0"""
    core: Bools
    """[N, h, w], logits > 1"""
    surroundings: Bools
    """[N, h, w], logits > -1"""
    is_empty: Bools
    """[N], no logit is positive, also beside the points of the grid"""


class MaskSignals(NamedTuple):
    """Signals of N masks; lengths are in cells of a grid over the image."""

    inside: Bools
    """[N, h, w], the masks on the grid"""
    area: Floats
    """[N], at least 1"""
    centre: Floats
    """[N, 2] as (x, y)"""
    stability: Floats
    """[N] in 0..1: IoU of the masks at logits -1 and +1"""
    overlap: Floats
    """[N] in 0..1: share of the mask that other visible masks cover"""

    def select(self, chosen: Bools) -> MaskSignals:
        """Return the signals of the masks where `chosen` [N] is True."""
        columns: Iterator[Any] = (column[chosen] for column in self)
        return MaskSignals(*columns)


def grid_side(side: int) -> int:
    """Return the cells of the grid for logits [side, side]."""
    step = _stride(side)
    return len(range(step // 2, side, step))


def _stride(side: int) -> int:
    return -(-side // MAX_SIDE)


def compare_levels(logits: Any) -> tuple[Any, Any, Any]:
    """Return the first three fields of the level sets of logits [N, h, w], an array or a tensor."""
    step = _stride(logits.shape[1])
    grid = logits[:, step // 2 :: step, step // 2 :: step]
    return grid > 0, grid > 1, grid > -1


def find_level_sets(logits: npt.NDArray[np.float32] | torch.Tensor) -> LevelSets:
    """Return the level sets of logits [N, h, w], an array or a tensor of any device, on the host."""
    array = logits if isinstance(logits, np.ndarray) else logits.float().cpu().numpy()
    is_empty: Bools = np.logical_not((array > 0).any(axis=(1, 2)))
    return LevelSets(*compare_levels(array), is_empty)


def measure(levels: LevelSets, visible: Bools) -> MaskSignals:
    """Return the signals of N masks; a mask that is not visible [N] covers no other."""
    count, height, width = levels.inside.shape
    inside, core, surroundings = (level.reshape(count, height * width) for level in levels[:3])
    area = np.maximum(_count(inside), 1)
    # the sums are multiples of 0.5 below 2^22, so float32 is exact in any order of summation
    moments = inside.astype(np.float32) @ _cell_centres(height, width)
    return MaskSignals(
        levels.inside,
        area,
        moments / area[:, None],
        _count(core) / np.maximum(_count(surroundings), 1),
        _overlap(inside, visible) / area if count > 1 else np.zeros(count),
    )


def aligned_iou(mask: Bools, other: Bools, shift: tuple[int, int]) -> float:
    """Return the IoU of masks [h, w], `other` moved by `shift` (x, y) cells; cells moved off the grid do not count."""
    height, width = mask.shape
    x, y = shift
    if abs(x) >= width or abs(y) >= height:
        return 0.0
    here = mask[max(y, 0) : height + min(y, 0), max(x, 0) : width + min(x, 0)]
    there = other[max(-y, 0) : height + min(-y, 0), max(-x, 0) : width + min(-x, 0)]
    either = np.count_nonzero(here | there)
    return np.count_nonzero(here & there) / either if either else 1.0


@cache
def _cell_centres(height: int, width: int) -> npt.NDArray[np.float32]:
    """Return the centres (x, y) of all cells, [h * w, 2]."""
    y, x = np.mgrid[:height, :width].reshape(2, -1)
    return np.stack([x, y], axis=1).astype(np.float32) + np.float32(0.5)


def _count(flat: Bools) -> Floats:
    return np.array([np.count_nonzero(row) for row in flat], np.float64)


def _overlap(flat: Bools, visible: Bools) -> Floats:
    """Return the number of cells of each mask [N, h * w] that other visible masks cover."""
    shown = flat & visible[:, None]
    cover = shown.sum(axis=0, dtype=np.uint16)
    return _count(flat & (cover > shown))


Ints = npt.NDArray[np.int64]

AREAS = 15
"""Sure frames whose areas are kept. Their median is the expected area."""
FREE_STEP = 3.0
"""Distance from the predicted centre, in sizes of the object for each frame, up to which a mask has moved. Beyond it,
the mask has jumped."""
FREE_GROWTH = 0.25
"""Change of the log area for each frame up to which a mask has grown or shrunk gradually. Beyond it, the area has
jumped."""
MAX_HIDDEN = 8
"""Frames without a mask after which the tolerances for position and size grow no further."""
VELOCITY_GAIN = 0.5
"""Weight of the newest displacement in the running mean of the velocity."""
FORGET = 0.8
"""Factor by which a sure frame reduces the offset that a jump has left."""
RECOVERY = 0.003
"""Share of that offset, and change of the log area, by which a frame with good evidence of its own moves the history
toward its mask."""


class Departure(NamedTuple):
    """Differences of N masks from their history; 0 is none."""

    area: Floats
    """[N], absolute log of the area over the median of sure frames; growth of an object that the image's edge cut off
    does not count"""
    jump: Floats
    """[N], unexplained displacement in sizes of the object"""
    growth: Floats
    """[N], unexplained change of log area"""
    previous: Floats
    """[N] in 0..1: 1 - IoU with the last mask"""
    shape: Floats
    """[N] in 0..1: 1 - IoU with the last sure mask, moved so that the centres coincide"""


class TrackHistory(RowTables):
    """Histories of up to `capacity` objects with masks on a grid of `size` (height, width) cells."""

    def __init__(self, capacity: int, size: tuple[int, int]) -> None:
        # logarithms, a ring; at first all have the prompt's area
        self._areas: Floats = np.zeros((capacity, AREAS))
        self._writes: Ints = np.zeros(capacity, np.int64)
        self._last: Floats = np.zeros((capacity, 3))  # log area, centre
        self._velocity: Floats = np.zeros((capacity, 2))
        self._offset: Floats = np.zeros((capacity, 3))  # as `last`
        self._sure_centre: Floats = np.zeros((capacity, 2))
        self._hidden: Ints = np.zeros(capacity, np.int64)
        self._previous: Bools = np.zeros((capacity, *size), np.bool_)
        self._sure: Bools = np.zeros((capacity, *size), np.bool_)
        self._cut: Bools = np.zeros(capacity, np.bool_)  # the last sure mask touches the image's edge

    def start(self, rows: Ints, signals: MaskSignals) -> None:
        """Begin the histories of N rows with their masks on the prompted frame."""
        log_area = np.log(signals.area)
        self._areas[rows] = log_area[:, None]
        self._writes[rows] = 0
        self._last[rows] = np.concatenate([log_area[:, None], signals.centre], axis=1)
        self._velocity[rows] = 0
        self._offset[rows] = 0
        self._hidden[rows] = 0
        self._previous[rows] = self._sure[rows] = signals.inside
        self._sure_centre[rows] = signals.centre
        self._cut[rows] = _touches_edge(signals.inside)

    def observe(self, rows: Ints, signals: MaskSignals) -> Departure:
        """Return how far the masks of N rows depart from their history, and add sudden changes to the offsets."""
        log_area = np.log(signals.area)
        median = _median(self._areas[rows])
        self._add_sudden_changes(rows, log_area, signals.centre, np.exp(median / 2))
        offset = self._offset[rows]
        shifts = np.rint(signals.centre - self._sure_centre[rows]).astype(np.int64).tolist()
        same = []
        aligned = []
        for inside, row, (x, y) in zip(signals.inside, rows.tolist(), shifts, strict=True):
            same.append(aligned_iou(inside, self._previous[row], (0, 0)))
            aligned.append(aligned_iou(inside, self._sure[row], (x, y)))
        grown = log_area - median
        return Departure(
            np.where(self._cut[rows], np.maximum(-grown, 0), np.abs(grown)),
            np.hypot(offset[:, 1], offset[:, 2]) / np.exp(median / 2),
            np.abs(offset[:, 0]),
            1 - np.array(same),
            1 - np.array(aligned),
        )

    def _add_sudden_changes(self, rows: Ints, log_area: Floats, centre: Floats, size: Floats) -> None:
        gap = 1.0 + np.minimum(self._hidden[rows], MAX_HIDDEN)
        last = self._last[rows]
        offset = self._offset[rows]
        moved = centre - (last[:, 1:] + self._velocity[rows] * gap[:, None])
        free = FREE_STEP * size * gap
        offset[:, 1:] += np.where((np.hypot(moved[:, 0], moved[:, 1]) > free)[:, None], moved, 0)
        offset[:, 1:] *= (np.hypot(offset[:, 1], offset[:, 2]) > free)[:, None]
        grown = log_area - last[:, 0]
        offset[:, 0] += np.where(np.abs(grown) > FREE_GROWTH * gap, grown, 0)
        offset[:, 0] *= np.abs(offset[:, 0]) > FREE_GROWTH
        self._offset[rows] = offset

    def learn(self, rows: Ints, signals: MaskSignals, shown: Bools, sure: Bools, recovering: Bools) -> None:
        """Go on to the next frame with the masks of N rows.

        `shown` rows have a mask. `sure` masks become part of the history. The history of `recovering` rows moves slowly
        towards their masks.
        """
        self._hidden[rows] = np.where(shown, 0, self._hidden[rows] + 1)
        self._move(rows[shown], signals.centre[shown], np.log(signals.area[shown]))
        self._previous[rows[shown]] = signals.inside[shown]
        sure = sure & shown
        chosen = rows[sure]
        log_area = np.log(signals.area[sure])
        self._areas[chosen, self._writes[chosen] % AREAS] = log_area
        self._writes[chosen] += 1
        self._sure[chosen] = signals.inside[sure]
        self._sure_centre[chosen] = signals.centre[sure]
        self._cut[chosen] = _touches_edge(signals.inside[sure])
        self._offset[chosen] *= FORGET
        slow = recovering & shown & ~sure
        chosen = rows[slow]
        log_area = np.log(signals.area[slow])
        change = log_area - _median(self._areas[chosen])
        self._areas[chosen] += np.clip(change, -RECOVERY, RECOVERY)[:, None]
        self._offset[chosen] *= 1 - RECOVERY

    def _move(self, rows: Ints, centre: Floats, log_area: Floats) -> None:
        """Record the position of N masks. A jump does not change the velocity."""
        step = centre - self._last[rows, 1:]
        size = np.exp(log_area / 2)
        smooth = np.hypot(step[:, 0], step[:, 1]) <= size
        velocity = self._velocity[rows]
        self._velocity[rows] = np.where(smooth[:, None], velocity + VELOCITY_GAIN * (step - velocity), 0)
        self._last[rows] = np.concatenate([log_area[:, None], centre], axis=1)


RIVAL_BOX_IOU = 0.7
"""Largest IoU between the box of the object's mask and the box around the mask and another region, from which on that
region is a look-alike."""
MIN_RIVAL = 4
"""Cells of the smallest region that can be a look-alike. Smaller ones are noise."""


def has_rival(inside: Bools, around: Bools) -> bool:
    """Return True if a region of `around` lies far from the region that holds most of the mask `inside`, both [h, w].

    `inside` may not be empty, and lies in `around`. The rule is the one of the distractor-resolving memory of SAM2.1++
    (Videnovic, Lukezic, Kristan, "A Distractor-Aware Memory for Visual Object Tracking with SAM2", arXiv 2411.17576),
    with its bounds for areas, boxes and the interval: the mask's box has an IoU of RIVAL_BOX_IOU or less with the box
    around both regions. Three points differ. nano has one mask, so a rival is a region of the mask at logit -1. nano
    predicts lower IoUs, so the usual score of the track says which mask is sure. All recent frames stay in memory,
    because a mask appears for a hidden object if the frames without one are left out.
    """
    _, regions, stats, _ = cv2.connectedComponentsWithStats(around.astype(np.uint8))
    low = stats[:, :2]
    high = stats[:, :2] + stats[:, 2:4]
    own = np.bincount(regions[inside]).argmax()
    joined = np.maximum(high, high[own]) - np.minimum(low, low[own])
    far = stats[own, 2] * stats[own, 3] <= RIVAL_BOX_IOU * joined.prod(axis=1)
    return bool((far & (stats[:, cv2.CC_STAT_AREA] >= MIN_RIVAL))[1:].any())


def _touches_edge(inside: Bools) -> Bools:
    """Return which of the masks [..., h, w] touch the image's edge, [...]."""
    rows = inside[..., [0, -1], :]
    columns = inside[..., [0, -1]]
    return np.asarray(rows.any(axis=(-2, -1)) | columns.any(axis=(-2, -1)), np.bool_)


def _median(values: Floats) -> Floats:
    """Return the median [N] of [N, AREAS], an odd number."""
    return np.asarray(np.sort(values, axis=1)[:, AREAS // 2], np.float64)


BOX_MARGINS = (0.2, 0.1, 0.0)
"""Margins that are added to the last mask's box at each side, as shares of its sides, the widest first. In a tight box
the mask of a moving object shrinks; in a wide one the mask takes in the background."""
STEP_GROWTH = log(1.2)
"""Growth of the log area over the last mask, above which tighter boxes are tried."""
STEP_LOSS = log(3)
"""Loss of log area in one frame, above which the mask has jumped."""
BURST_ALIKE = log(2.5)
"""Log area above the track's bound from which a mask is withheld, if its shape is like the prompt's."""
BURST_OTHER = log(2)
"""The same for a mask of another shape, which has more often taken in the background."""
SURE_GROWTH = log(1.25)
"""Log area above the bound up to which a mask of another shape can be sure."""
RISE_ALIKE = 0.06
"""Largest rise of the bound's log area for each frame, for masks that keep their shape."""
RISE_OTHER = 0.02
"""The same for all other masks, whose growth is more often background that they take in."""
MAX_ENTERING = 0.35
"""The same for an object that the image's edge has cut off since its prompt."""
ENTERING = 1.5
"""Divided by the frames since the prompt, it also limits that rise: at constant speed, the visible area of an object
that enters grows as n to n ** 1.5 in n frames."""
FALL = 0.02
"""Largest fall of the bound's log area for each frame. It is small, because an object that was half covered can appear
again at once."""
MIN_AREA = 16
"""Cells of the smallest mask whose area says anything."""
MIN_MARGIN = 2
"""Smallest tolerance in cells by which a mask's centre may lie outside of the last mask's box."""
MAX_GAP = 8
"""Frames without a mask after which tolerances grow no further."""
ALIKE = 0.8
"""IoU of two masks, brought to one position, area and direction, from which their shapes are alike."""
SAME_AREA = 0.15
"""Change of the log area up to which the newest sure shape becomes the reference shape."""
SHAPE_SIDE = 32
"""Side in cells of a stored shape."""
SHAPE_SPAN = 2.5
"""Side of the region that a stored shape covers, in square roots of the mask's area."""
MIN_QUALITY = 0.7
"""Share of the track's usual mask quality from which a mask is sure."""
QUALITY_GAIN = 0.1
"""Weight of the newest quality in the running mean of the usual one."""


class SureHistory(RowTables):
    """Histories of the sure masks of up to `capacity` objects: a bound of their area, their shape and their quality.

    It needs no fitted weights, because each track is compared with its own past alone. Quality is the predicted IoU
    times the stability. Areas are in cells of a grid over the image.
    """

    def __init__(self, capacity: int) -> None:
        # log area that follows the areas of sure masks, at a limited rate
        self._bound: Floats = np.zeros(capacity)
        self._area: Floats = np.zeros(capacity)  # log area of the prompt's mask, to which `shape` belongs
        self._shape: Bools = np.zeros((capacity, 2, SHAPE_SIDE, SHAPE_SIDE), np.bool_)
        self._entering: Bools = np.zeros(capacity, np.bool_)  # cut off by the image's edge since the prompt
        self._quality: Floats = np.zeros(capacity)  # 0 while no mask was followed
        self._started: Ints = np.zeros(capacity, np.int64)  # frame of the prompt
        self._judged: Ints = np.zeros(capacity, np.int64)  # frame of the last mask
        self._withheld: Ints = np.zeros(capacity, np.int64)  # masks in a row

    def start(self, row: int, frame: int, inside: Bools) -> None:
        """Begin the history of a row with the mask [h, w] of its prompt."""
        self._area[row] = self._bound[row] = _log_area(inside)
        self._shape[row] = _shape_of(inside)
        self._entering[row] = _touches_edge(inside)
        self._quality[row] = self._withheld[row] = 0
        self._started[row] = self._judged[row] = frame

    def judge(self, row: int, frame: int, inside: Bools, last: Bools, quality: float) -> tuple[bool, bool]:
        """Return whether the mask [h, w] of a row is plausible, and whether it is sure, and learn from it.

        `last` is the mask that was the prompt. Only a sure mask changes the bound and the shape.
        """
        gap = float(np.clip(frame - self._judged[row], 1, MAX_GAP))
        shape = _shape_of(inside)
        area = _log_area(inside)
        alike = shape_iou(shape, self._shape[row]) >= ALIKE
        rise = RISE_ALIKE if alike else RISE_OTHER
        if entering := bool(self._entering[row]):
            rise = max(rise, min(MAX_ENTERING, ENTERING / max(frame - self._started[row], 1)))
        grown = area - self._bound[row]
        waited = RISE_OTHER * min(self._withheld[row], MAX_GAP)
        burst = (BURST_ALIKE if alike or entering else BURST_OTHER) + rise * (gap - 1) + waited
        self._judged[row] = frame
        if grown > burst or self._is_lost(inside, last, gap, waited):
            self._withheld[row] += 1
            return False, False
        usual = self._quality[row] or quality
        sure = quality >= MIN_QUALITY * usual and (alike or entering or grown <= SURE_GROWTH)
        self._withheld[row] = 0
        if sure:
            self._quality[row] = usual + QUALITY_GAIN * (quality - usual)
            self._learn(row, shape, area, rise * gap, FALL * gap, bool(_touches_edge(inside)))
        return True, bool(sure)

    def _learn(self, row: int, shape: Bools, area: float, rise: float, fall: float, at_edge: bool) -> None:
        self._bound[row] += np.clip(area - self._bound[row], 0 if at_edge else -fall, rise)
        if self._entering[row]:
            self._area[row] = area
        self._entering[row] &= at_edge
        if abs(area - self._area[row]) <= SAME_AREA:
            self._shape[row] = shape

    @staticmethod
    def _is_lost(inside: Bools, last: Bools, gap: float, waited: float) -> bool:
        """Return True for a mask that lies elsewhere than `last`, or shrank suddenly away from the image's edge."""
        lost = _log_area(last) - _log_area(inside)
        return not _is_near(inside, last, gap) or (
            lost > STEP_LOSS + RISE_ALIKE * (gap - 1) + waited and not _touches_edge(inside)
        )


def shape_iou(shape: Bools, other: Bools) -> float:
    """Return the greatest IoU of two shapes: upright, and turned so that their long axes coincide, either way."""
    pairs = ((shape[0], other[0]), (shape[1], other[1]), (shape[1], other[1, ::-1, ::-1]))
    return max(np.count_nonzero(a & b) / max(int(np.count_nonzero(a | b)), 1) for a, b in pairs)


def _shape_of(inside: Bools) -> Bools:
    """Return the shape of a mask [h, w], its centre in the middle and its area brought to one size, [2, S, S].

    The first is upright, the second is turned so that its long axis is level.
    """
    shapes: Bools = np.zeros((2, SHAPE_SIDE, SHAPE_SIDE), np.bool_)
    y, x = np.nonzero(inside)
    if not len(x):
        return shapes
    centre = np.array([x.mean(), y.mean()])
    scale = SHAPE_SIDE / (SHAPE_SPAN * np.sqrt(len(x)))
    xx = x.var()
    yy = y.var()
    xy = ((x - centre[0]) * (y - centre[1])).mean()
    for shape, angle in zip(shapes, (0.0, np.arctan2(2 * xy, xx - yy) / 2), strict=True):
        turn = scale * np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        move = np.column_stack([turn, (SHAPE_SIDE - 1) / 2 - turn @ centre])
        shape[:] = cv2.warpAffine(inside.astype(np.float32), move, (SHAPE_SIDE, SHAPE_SIDE)) > 0.5
    return shapes


def _log_area(inside: Bools) -> float:
    return log(max(int(np.count_nonzero(inside)), MIN_AREA))


def _is_near(inside: Bools, last: Bools, gap: float) -> bool:
    """Return True if the centre of a mask lies in the box of `last`, with the widest margin a frame of `gap`."""
    for axis in (0, 1):
        occupied, span = (np.flatnonzero(mask.any(axis=axis)) for mask in (inside, last))
        if not span.size:
            return True
        weights = inside.sum(axis=axis)[occupied]
        margin = gap * max(MIN_MARGIN, BOX_MARGINS[0] * (span[-1] - span[0] + 1))
        if not span[0] - margin <= (occupied * weights).sum() / weights.sum() <= span[-1] + margin:
            return False
    return True


def has_jumped(levels: LevelSets, before: LevelSets) -> Bools:
    """Return which of N masks have grown or shrunk suddenly since the masks `before`, [N]."""
    now, then = (masks.inside.sum(axis=(1, 2)).clip(min=1).astype(np.float64) for masks in (levels, before))
    change = np.log(now / then)
    return np.asarray((change > STEP_GROWTH) | (change < -STEP_LOSS), np.bool_)


def resemblance(inside: Bools, other: Bools) -> float:
    """Return the IoU of two masks [h, w], moved so that their centres coincide."""
    if not (inside.any() and other.any()):
        return 0.0
    (y, x), (v, u) = (np.argwhere(mask).mean(axis=0) for mask in (inside, other))
    return aligned_iou(inside, other, (round(x - u), round(y - v)))
