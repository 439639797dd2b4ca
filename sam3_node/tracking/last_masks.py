"""Follow objects by their last masks, with weights that have no memory modules.

It uses the interface of SAM for single images (arXiv 2304.02643, 2408.00714): the next prompt is a box and the
logits of an earlier mask. The box has a margin, because the object may have moved. An object that is out of view, or
whose mask is empty, keeps its last mask as the prompt of each later frame. Nothing but that mask says what the object
is, so a mask that takes in a part of the background would grow from frame to frame. Two things stop this. A mask that
grew at once is searched again in tighter boxes. A mask whose size or position departs from the track's history
(`SureHistory`) is withheld: the object counts as out of view, and the next frame is searched with its last sure mask.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..models import Features, TrackerModel
from ..models.pixels import mask_boxes
from ..models.sam.algebra import resize_matrix
from ..models.sam.memory_encoder import MASK_BIAS, MASK_SCALE
from ..models.sam.stages import ABSENT_LOGIT, Decoded
from ..schema.state import Count, SavedState, Time
from . import track_history
from .memory import Bools, Ints
from .propagation import PRESENT_LOGIT, Prompted, Propagation
from .saved_tables import SavedTables
from .tracks import Cover, decode_boxes

MAX_LOGIT = 32.0
"""Largest logit of a mask that is a prompt. Larger ones are beyond what the prompt encoder has learnt."""


class LastMasksState(SavedState, tag="last masks"):
    """What `LastMasks` keeps of the rows in use."""

    used: list[Count]
    prompted: list[Time]
    logits: Tensor
    sure: Tensor
    history: dict[str, Tensor]
    pointers: Tensor


class LastMasks(Propagation, SavedTables):
    """The last mask of up to `max_objects` objects, in tensors that are allocated once.

    It takes the place of the memory bank, too, for weights without memory modules.
    """

    STATE = LastMasksState

    def __init__(self, model: TrackerModel, max_objects: int) -> None:
        self._model = model
        self._logits = torch.zeros((max_objects, *model.mask_size), device=model.device)
        self._sure = torch.zeros_like(self._logits)  # of the last sure mask
        self._pointers = torch.zeros((max_objects, model.hidden), device=model.device, dtype=model.dtype)
        self._to_logits = resize_matrix((model.image_size, model.mask_size[0])).to(model.device)
        self._prompted: dict[int, int] = {}
        """The frame of the newest prompt of each row in use"""
        self._history = track_history.SureHistory(max_objects)

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
        self._prompted.pop(row, None)
        self._logits[row] = 0
        self._pointers[row] = 0

    def start(self, features: Features, row: int, frame: int, now: int, prompted: Prompted) -> None:
        """Store the mask of a prompt or a detection on one row; its pointer stands for the object's appearance."""
        decoded = prompted.decoded
        self._prompted[row] = frame
        self._logits[row] = self._sure[row] = decoded.logits[0].float()
        self._pointers[row] = decoded.pointer[0]
        self._history.start(row, frame, track_history.find_level_sets(decoded.logits).inside[0])

    def is_conditioning(self, row: int, frame: int) -> bool:
        """Return True if the last prompt of the object in `row` was on this frame."""
        return self._prompted.get(row) == frame

    def forget_recent(self, row: int) -> None:
        """Do nothing: a prompt has replaced the last mask already."""

    def copy_conditioning(self, row: int, target: int) -> None:
        """Do nothing: only the newest prompt counts."""

    def follow(
        self, features: Features, rows: Ints, frame: int, hidden: Bools, cover: Cover | None
    ) -> Decoded:
        """Decode the objects of N rows, and keep the masks of those in view.

        A mask that departs from its track's history is withheld: its object is out of view in the result. The masks
        that are kept have the pixels of `cover`; the result has not.
        """
        index = torch.from_numpy(rows).to(self._logits.device)
        last = self._logits[index]
        decoded, levels = self._search(features, last)
        present = (decoded.presence > 0).cpu().numpy() & ~hidden
        signals = track_history.measure(levels, present)
        quality = decoded.iou.float().cpu().numpy() * signals.stability
        before = track_history.find_level_sets(last).inside
        judged = [
            self._history.judge(row, frame, signals.inside[n], before[n], float(quality[n]))
            if present[n] and signals.inside[n].any()
            else None
            for n, row in enumerate(rows.tolist())
        ]
        kept, sure, withheld = (
            torch.tensor([verdict in wanted for verdict in judged], device=last.device)[:, None, None]
            for wanted in ([(True, True), (True, False)], [(True, True)], [(False, False)])
        )
        logits = decoded.logits.float()
        surest = self._sure[index]
        self._sure[index] = torch.where(sure, logits, surest)
        self._logits[index] = torch.where(kept, logits, torch.where(withheld, surest, last))
        shown = decoded._replace(
            logits=decoded.logits.masked_fill(withheld, ABSENT_LOGIT),
            presence=decoded.presence.masked_fill(withheld[:, 0, 0], -PRESENT_LOGIT),
        )
        return shown if cover is None else cover.cut(shown)

    def _search(self, features: Features, last: Tensor) -> tuple[Decoded, track_history.LevelSets]:
        """Decode N objects from their last masks in the widest box; in tighter ones, too, if an area has jumped.

        The mask that resembles the last one most is taken then. Return also the level sets.
        """
        before = track_history.find_level_sets(last)
        decoded = self._decode(features, last, track_history.BOX_MARGINS[0])
        levels = track_history.find_level_sets(decoded.logits)
        again = np.flatnonzero(track_history.has_jumped(levels, before))
        if not again.size:
            return decoded, levels
        chosen = torch.from_numpy(again).to(last.device)
        tried = [Decoded(*(column[chosen] for column in decoded))]
        tried += [self._decode(features, last[chosen], margin) for margin in track_history.BOX_MARGINS[1:]]
        candidates = [track_history.find_level_sets(attempt.logits) for attempt in tried]
        for position, row in enumerate(again.tolist()):
            wanted = before.inside[row]
            best = int(
                np.argmax([track_history.resemblance(masks.inside[position], wanted) for masks in candidates])
            )
            for column, better in zip(decoded, tried[best], strict=True):
                column[row] = better[position]
        return decoded, track_history.find_level_sets(decoded.logits)

    def decode_mask(self, features: Features, mask: Tensor) -> Prompted:
        """Return a mask prompt [1, 1, S, S] in 0..1 itself as the result, with the pointer of its object."""
        high = mask[0].float() * MASK_SCALE + MASK_BIAS
        logits = self._to_logits @ high @ self._to_logits.T
        pointer = self._decode(features, logits, track_history.BOX_MARGINS[0]).pointer
        presence = torch.where(mask.any(), PRESENT_LOGIT, -PRESENT_LOGIT).reshape(1)
        return Prompted(Decoded(logits.to(self._model.dtype), torch.ones_like(presence), presence, pointer))

    def _decode(self, features: Features, last: Tensor, share: float) -> Decoded:
        """Decode N objects from the boxes, with a margin of `share`, and logits of their last masks, [N, 4h, 4w]."""
        scale = self._model.image_size / last.shape[-1]
        boxes = mask_boxes(last > 0)
        margin = share * (boxes[:, 2:] - boxes[:, :2])
        corners = (
            torch.stack([boxes[:, :2] - margin, boxes[:, 2:] + margin], dim=1).clamp(0, last.shape[-1])
            * scale
        )
        return decode_boxes(self._model, features, corners, last.clamp(-MAX_LOGIT, MAX_LOGIT))

    def conditioning_pointers(self, rows: Ints) -> tuple[Tensor, Tensor]:
        """Return the pointers of N rows' prompts, [N, 1, C], and bool [N, 1]: True if valid."""
        index = torch.from_numpy(rows).to(self._pointers.device)
        held = torch.tensor([row in self._prompted for row in rows.tolist()], dtype=torch.bool)
        return self._pointers[index, None], held[:, None].to(index.device)

    @property
    def used(self) -> list[int]:
        """The rows that hold an object."""
        return sorted(self._prompted)

    @property
    def prompted(self) -> list[int]:
        """The frames of the newest prompts of the rows in use."""
        # by hand, as is the way back: snapshots have a list of numbers, which is no table
        return [self._prompted[row] for row in self.used]

    def before_restore(self, state: LastMasksState) -> None:
        """Replace the frames of the newest prompts, which say what rows of the tables are in use."""
        self._prompted = dict(zip(state.used, state.prompted, strict=True))
