"""Following objects with weights that have no memory modules: the last mask's box and logits are the next prompt.

This is the interface of SAM for single images (arXiv 2304.02643, 2408.00714): a box and the logits of an earlier mask.
The box has a margin, because the object may have moved. An object that is out of view, or whose mask is empty, keeps
its last mask as the prompt of each later frame.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..models import Features, TrackerModel
from ..models.boxes import mask_boxes
from ..models.sam.algebra import resize_matrix
from ..models.sam.memory_write import MASK_BIAS, MASK_SCALE
from ..models.sam.stages import Decoded
from ..types import State
from .memory import NO_FRAME
from .selection import Ints
from .slots import BOX_LABELS

# share of the box's sides, at each side: in a tight box, the mask of an object that moves shrinks away
BOX_MARGIN = 0.2
PRESENT_LOGIT = 10.0  # presence logit of an object whose prompt is a mask
MAX_LOGIT = 32.0  # larger ones are beyond what the prompt encoder has learnt


class LastMasks:
    """The last mask of up to `max_objects` objects, in tensors that are allocated once.

    It takes the place of the memory bank for weights without memory modules.
    """

    def __init__(self, model: TrackerModel, max_objects: int) -> None:
        self._model = model
        self._logits = torch.zeros((max_objects, *model.mask_size), device=model.device)
        self._pointers = torch.zeros((max_objects, model.hidden), device=model.device, dtype=model.dtype)
        self._labels = torch.tensor([BOX_LABELS], dtype=torch.int32, device=model.device)
        self._to_logits = resize_matrix((model.image_size, model.mask_size[0])).to(model.device)
        self._prompted: Ints = np.full(max_objects, NO_FRAME, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Device memory in bytes. It never changes."""
        return self._logits.nbytes + self._pointers.nbytes

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
        self._logits[row] = decoded.logits[0].float()
        self._pointers[row] = decoded.pointer[0]

    def is_conditioning(self, row: int, frame: int) -> bool:
        """Return True if the last prompt of the object in `row` was on this frame."""
        return bool(self._prompted[row] == frame)

    def forget_recent(self, row: int) -> None:
        """Do nothing: a prompt has replaced the last mask already."""

    def copy_conditioning(self, row: int, target: int) -> None:
        """Do nothing: only the newest prompt counts."""

    def follow(self, features: Features, rows: Ints) -> Decoded:
        """Decode the objects of N rows on the next frame, and keep the masks of those in view."""
        index = torch.from_numpy(rows).to(self._logits.device)
        last = self._logits[index]
        decoded = self._decode(features, last)
        seen = (decoded.presence > 0) & (decoded.logits > 0).flatten(1).any(dim=1)
        self._logits[index] = torch.where(seen[:, None, None], decoded.logits.float(), last)
        return decoded

    def decode_mask(self, features: Features, mask: Tensor) -> Decoded:
        """Return a mask prompt [1, 1, S, S] in 0..1 as the result of its frame, with the pointer of its object."""
        high = mask[0].float() * MASK_SCALE + MASK_BIAS
        logits = self._to_logits @ high @ self._to_logits.T
        pointer = self._decode(features, logits).pointer
        presence = torch.where(mask.any(), PRESENT_LOGIT, -PRESENT_LOGIT).reshape(1)
        return Decoded(logits.to(self._model.dtype), torch.ones_like(presence), presence, pointer)

    def _decode(self, features: Features, last: Tensor) -> Decoded:
        """Decode N objects from the boxes and logits of their last masks, [N, 4h, 4w]."""
        decoder, scale = self._model.decode_stage, self._model.image_size / last.shape[-1]
        boxes = mask_boxes(last > 0)
        margin = BOX_MARGIN * (boxes[:, 2:] - boxes[:, :2])
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
            "pointers": self._pointers[index].cpu(),
        }

    @torch.inference_mode()
    def restore(self, state: State) -> None:
        """Replace everything by what `state` returned, with the same `layout`."""
        self._prompted[:] = NO_FRAME
        self._prompted[state["used"]] = state["prompted"]
        index = torch.tensor(state["used"], dtype=torch.int64, device=self._logits.device)
        self._logits[index] = state["logits"].to(self._logits.device)
        self._pointers[index] = state["pointers"].to(self._pointers.device)
