"""Following objects with weights that have no memory modules: the last mask's box and logits are the next prompt.

This is the interface of SAM for single images (arXiv 2304.02643, 2408.00714): a box and the logits of an earlier mask.
The box has a margin, because the object may have moved. An object that is out of view, or whose mask is empty, keeps
its last mask as the prompt of each later frame.

Without memory, nothing but the last mask says what the object is: a mask that takes in a part of the background would
pass it on, and grow from frame to frame. Two things stop this. A mask that grew at once is searched again in tighter
boxes. A mask whose size or place departs from the track's history (`SureHistory`) is withheld: the object counts as out
of view, and the next frame is searched with its last sure mask.
"""

from __future__ import annotations

from math import log
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..models import Features, TrackerModel
from ..models.pixels import mask_boxes
from ..models.sam.algebra import resize_matrix
from ..models.sam.memory_write import MASK_BIAS, MASK_SCALE
from ..models.sam.stages import ABSENT_LOGIT, Decoded
from ..types import State
from .memory import NO_FRAME, Ints
from .slots import BOX_LABELS
from .track_history import Bools, LevelSets, RowTables, aligned_iou, compare_levels, measure

Floats = npt.NDArray[np.float64]

# shares of the box's sides, at each side: in a tight box, the mask of an object that moves shrinks away, and in a wide
# one, a mask takes in what lies around it. The widest is tried first.
BOX_MARGINS = (0.2, 0.1, 0.0)
PRESENT_LOGIT = 10.0  # presence logit of an object whose prompt is a mask
MAX_LOGIT = 32.0  # larger ones are beyond what the prompt encoder has learnt

# growth of the log area over the last mask from which tighter boxes are tried, and loss in a frame that is a jump
STEP_GROWTH, STEP_LOSS = log(1.2), log(3)
# log area above the track's bound from which a mask is withheld: of a shape like that of the prompt, and of another
BURST_ALIKE, BURST_OTHER = log(2.5), log(2)
SURE_GROWTH = log(1.25)  # log area above the bound up to which a mask of another shape can be sure
# rise of the bound's log area for each frame, at most: of masks that keep their shape, and of all others, which grow
# rather because they take in the background
RISE_ALIKE, RISE_OTHER = 0.06, 0.02
# the same of an object that the image's edge has cut off since its prompt, n frames ago: MAX_ENTERING, and ENTERING
# over n, because the area of what comes in at a constant speed grows as n to n ** 1.5
MAX_ENTERING, ENTERING = 0.35, 1.5
FALL = 0.02  # fall of the bound for each frame, at most: an object that was half hidden appears again at once
MIN_AREA = 16  # cells; the areas of smaller masks say nothing
MIN_MARGIN = 2  # cells that the centre of a mask may lie outside of the last mask's box, at least
MAX_GAP = 8  # frames without a mask after which tolerances grow no more
ALIKE = 0.8  # IoU of two masks brought to one place, area and direction from which their shapes are alike
SAME_AREA = (
    0.15  # departure of the log area up to which the newest sure shape becomes the one to compare with
)
SHAPE_SIDE = 32  # cells of a stored shape
SHAPE_SPAN = 2.5  # extent of a stored shape, in square roots of the mask's area
MIN_QUALITY = 0.7  # share of the usual quality of the track's masks from which a mask is sure
QUALITY_GAIN = 0.1  # share of the newest quality in the usual one


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
        self._shape[row], self._entering[row] = _shape_of(inside), _touches_edge(inside)
        self._quality[row] = self._withheld[row] = 0
        self._started[row] = self._judged[row] = frame

    def judge(self, row: int, frame: int, inside: Bools, last: Bools, quality: float) -> tuple[bool, bool]:
        """Return whether the mask [h, w] of a row is plausible, and whether it is sure, and learn from it.

        `last` is the mask that was the prompt. Only a sure mask changes the bound and the shape.
        """
        gap = float(np.clip(frame - self._judged[row], 1, MAX_GAP))
        shape, area = _shape_of(inside), _log_area(inside)
        alike = shape_iou(shape, self._shape[row]) >= ALIKE
        rise = RISE_ALIKE if alike else RISE_OTHER
        if entering := bool(self._entering[row]):
            rise = max(rise, min(MAX_ENTERING, ENTERING / max(frame - self._started[row], 1)))
        grown, waited = area - self._bound[row], RISE_OTHER * min(self._withheld[row], MAX_GAP)
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
            self._learn(row, shape, area, rise * gap, FALL * gap, _touches_edge(inside))
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


class LastMasks:
    """The last mask of up to `max_objects` objects, in tensors that are allocated once.

    It takes the place of the memory bank for weights without memory modules.
    """

    def __init__(self, model: TrackerModel, max_objects: int) -> None:
        self._model = model
        self._logits = torch.zeros((max_objects, *model.mask_size), device=model.device)
        self._sure = torch.zeros_like(self._logits)  # of the last sure mask
        self._pointers = torch.zeros((max_objects, model.hidden), device=model.device, dtype=model.dtype)
        self._labels = torch.tensor([BOX_LABELS], dtype=torch.int32, device=model.device)
        self._to_logits = resize_matrix((model.image_size, model.mask_size[0])).to(model.device)
        self._prompted: Ints = np.full(max_objects, NO_FRAME, dtype=np.int64)
        self._history = SureHistory(max_objects)

    @property
    def nbytes(self) -> int:
        """Device memory in bytes. It never changes."""
        return self._logits.nbytes + self._sure.nbytes + self._pointers.nbytes

    @property
    def layout(self) -> list[Any]:
        """Shapes and dtype. A state fits any object with the same layout."""
        return [list(self._logits.shape), list(self._pointers.shape), str(self._pointers.dtype)]

    @torch.inference_mode()
    def clear(self, row: int) -> None:
        """Erase the object in `row`."""
        self._prompted[row] = NO_FRAME
        self._logits[row] = 0
        self._pointers[row] = 0

    def start(self, row: int, frame: int, decoded: Decoded) -> None:
        """Store the mask of a prompt or a detection on one row; its pointer stands for the object's appearance."""
        self._prompted[row] = frame
        self._logits[row] = self._sure[row] = decoded.logits[0].float()
        self._pointers[row] = decoded.pointer[0]
        self._history.start(row, frame, _levels(decoded.logits).inside[0])

    def is_conditioning(self, row: int, frame: int) -> bool:
        """Return True if the last prompt of the object in `row` was on this frame."""
        return bool(self._prompted[row] == frame)

    def forget_recent(self, row: int) -> None:
        """Do nothing: a prompt has replaced the last mask already."""

    def copy_conditioning(self, row: int, target: int) -> None:
        """Do nothing: only the newest prompt counts."""

    def follow(self, features: Features, rows: Ints, frame: int) -> Decoded:
        """Decode the objects of N rows on frame number `frame`, and keep the masks of those in view.

        A mask that departs from its track's history is withheld: its object is out of view in the result.
        """
        index = torch.from_numpy(rows).to(self._logits.device)
        last = self._logits[index]
        decoded, levels = self._search(features, last)
        present = decoded.presence.cpu().numpy() > 0
        signals = measure(levels, present)
        quality = decoded.iou.float().cpu().numpy() * signals.stability
        before = _levels(last).inside
        judged = [
            self._history.judge(row, frame, signals.inside[n], before[n], float(quality[n]))
            if present[n] and signals.inside[n].any()
            else None
            for n, row in enumerate(rows.tolist())
        ]
        kept, sure, withheld = (
            torch.tensor([one in wanted for one in judged], device=last.device)[:, None, None]
            for wanted in ([(True, True), (True, False)], [(True, True)], [(False, False)])
        )
        logits, surest = decoded.logits.float(), self._sure[index]
        self._sure[index] = torch.where(sure, logits, surest)
        self._logits[index] = torch.where(kept, logits, torch.where(withheld, surest, last))
        return decoded._replace(
            logits=decoded.logits.masked_fill(withheld, ABSENT_LOGIT),
            presence=decoded.presence.masked_fill(withheld[:, 0, 0], -PRESENT_LOGIT),
        )

    def _search(self, features: Features, last: Tensor) -> tuple[Decoded, LevelSets]:
        """Decode N objects from their last masks in the widest box; in tighter ones, too, if an area has jumped.

        The mask that resembles the last one most is taken then. Return also the level sets.
        """
        before = _levels(last)
        decoded = self._decode(features, last, BOX_MARGINS[0])
        levels = _levels(decoded.logits)
        again = np.flatnonzero(_has_jumped(levels, before))
        if not again.size:
            return decoded, levels
        chosen = torch.from_numpy(again).to(last.device)
        tried = [Decoded(*(column[chosen] for column in decoded))]
        tried += [self._decode(features, last[chosen], margin) for margin in BOX_MARGINS[1:]]
        found = [_levels(one.logits) for one in tried]
        for position, row in enumerate(again.tolist()):
            wanted = before.inside[row]
            best = int(np.argmax([_resemblance(one.inside[position], wanted) for one in found]))
            for column, better in zip(decoded, tried[best], strict=True):
                column[row] = better[position]
        return decoded, _levels(decoded.logits)

    def decode_mask(self, features: Features, mask: Tensor) -> Decoded:
        """Return a mask prompt [1, 1, S, S] in 0..1 as the result of its frame, with the pointer of its object."""
        high = mask[0].float() * MASK_SCALE + MASK_BIAS
        logits = self._to_logits @ high @ self._to_logits.T
        pointer = self._decode(features, logits, BOX_MARGINS[0]).pointer
        presence = torch.where(mask.any(), PRESENT_LOGIT, -PRESENT_LOGIT).reshape(1)
        return Decoded(logits.to(self._model.dtype), torch.ones_like(presence), presence, pointer)

    def _decode(self, features: Features, last: Tensor, share: float) -> Decoded:
        """Decode N objects from the boxes, with a margin of `share`, and logits of their last masks, [N, 4h, 4w]."""
        decoder, scale = self._model.decode_stage, self._model.image_size / last.shape[-1]
        boxes = mask_boxes(last > 0)
        margin = share * (boxes[:, 2:] - boxes[:, :2])
        corners = (
            torch.stack([boxes[:, :2] - margin, boxes[:, 2:] + margin], dim=1).clamp(0, last.shape[-1])
            * scale
        )
        labels = self._labels.expand(len(last), -1)
        sparse, dense = decoder.prompt(corners, labels, last.clamp(-MAX_LOGIT, MAX_LOGIT))
        top = (features.top + decoder.no_memory.reshape(1, -1, 1, 1)).expand(len(last), -1, -1, -1)
        competes = self._model.competes(len(BOX_LABELS), True)
        decoded: Decoded = decoder(top, features.fine, features.middle, sparse, dense, competes)
        return decoded

    def conditioning_pointers(self, rows: Ints) -> tuple[Tensor, Tensor]:
        """Return the pointers of N rows' prompts, [N, 1, C], and bool [N, 1]: True if valid."""
        index = torch.from_numpy(rows).to(self._pointers.device)
        return self._pointers[index, None], torch.from_numpy(self._prompted[rows, None] != NO_FRAME).to(
            index.device
        )

    @torch.inference_mode()
    def state(self) -> State:
        """Return the state that `restore` takes: the rows in use."""
        rows = np.flatnonzero(self._prompted != NO_FRAME)
        index = torch.from_numpy(rows).to(self._logits.device)
        return {
            "used": rows.tolist(),
            "prompted": self._prompted[rows].tolist(),
            "logits": self._logits[index].cpu(),
            "sure": self._sure[index].cpu(),
            "history": self._history.state(rows),
            "pointers": self._pointers[index].cpu(),
        }

    @torch.inference_mode()
    def restore(self, state: State) -> None:
        """Replace everything by what `state` returned, with the same `layout`."""
        rows = np.array(state["used"], np.int64)
        self._prompted[:] = NO_FRAME
        self._prompted[rows] = state["prompted"]
        index = torch.from_numpy(rows).to(self._logits.device)
        self._logits[index] = state["logits"].to(self._logits.device)
        self._sure[index] = state["sure"].to(self._sure.device)
        self._history.restore(rows, state["history"])
        self._pointers[index] = state["pointers"].to(self._pointers.device)


def _levels(logits: Tensor) -> LevelSets:
    """Return the level sets of logits [N, h, w], on the host."""
    inside, core, around = (level.cpu().numpy() for level in compare_levels(logits))
    return LevelSets(inside, core, around, ~inside.any(axis=(1, 2)))


def _has_jumped(levels: LevelSets, before: LevelSets) -> Bools:
    """Return which of N masks have grown or shrunk suddenly since the masks `before`, [N]."""
    now, then = (one.inside.sum(axis=(1, 2)).clip(min=1).astype(np.float64) for one in (levels, before))
    change = np.log(now / then)
    jumped: Bools = (change > STEP_GROWTH) | (change < -STEP_LOSS)
    return jumped


def _resemblance(inside: Bools, other: Bools) -> float:
    """Return the IoU of two masks [h, w], moved so that their centres coincide."""
    if not (inside.any() and other.any()):
        return 0.0
    (y, x), (v, u) = (np.argwhere(mask).mean(axis=0) for mask in (inside, other))
    return aligned_iou(inside, other, (round(x - u), round(y - v)))


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
    xx, yy, xy = x.var(), y.var(), ((x - centre[0]) * (y - centre[1])).mean()
    for shape, angle in zip(shapes, (0.0, np.arctan2(2 * xy, xx - yy) / 2), strict=True):
        turn = scale * np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        move = np.column_stack([turn, (SHAPE_SIDE - 1) / 2 - turn @ centre])
        shape[:] = cv2.warpAffine(inside.astype(np.float32), move, (SHAPE_SIDE, SHAPE_SIDE)) > 0.5
    return shapes


def _log_area(inside: Bools) -> float:
    return log(max(int(np.count_nonzero(inside)), MIN_AREA))


def _touches_edge(inside: Bools) -> bool:
    return bool(inside[[0, -1]].any() or inside[:, [0, -1]].any())


def _is_near(inside: Bools, last: Bools, gap: float) -> bool:
    """Return True if the centre of a mask lies in the box of `last`, with the widest margin a frame of `gap`."""
    for axis in (0, 1):
        place, span = (np.flatnonzero(mask.any(axis=axis)) for mask in (inside, last))
        if not span.size:
            return True
        weights = inside.sum(axis=axis)[place]
        margin = gap * max(MIN_MARGIN, BOX_MARGINS[0] * (span[-1] - span[0] + 1))
        if not span[0] - margin <= (place * weights).sum() / weights.sum() <= span[-1] + margin:
            return False
    return True
