"""Hold prompts in model pixels, the rows of objects (ids outside, rows of the memory bank inside), and tracks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import CapacityError, RequestError, UnknownObjectError
from ..models import Features, TrackerModel
from ..models.sam.stages import Decoded
from ..schema.state import Count, SavedPart, SavedState, Time
from ..wire.frame_prompt import FramePrompt, check_parts
from .track_history import Ints

BOX_LABELS = (2, 3)  # SAM's labels of a box's top-left and bottom-right corner
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of objects that run at once where shapes are static. Each needs graphs of its own; between them, at most a
third of the work is padding."""


class PromptTensors(NamedTuple):
    """A checked prompt in model pixels: points with labels, or a mask. The tracker takes it to the model's device."""

    points: Tensor
    """float32 [n, 2]: the box corners, then the points, as (x, y) in model pixels"""
    labels: Tensor
    """int32 [n], as SAM's prompt encoder takes them"""
    object_id: int = 0
    logits: Tensor | None = None
    """[4h, 4w] of the object's current mask, which the points correct"""
    mask: Tensor | None = None
    """float32 [1, 1, S, S]; points is empty then"""
    choice: int | None = None
    """Which of the masks that compete for a new object it begins with, by falling score; None: by the model's rule"""

    @classmethod
    def from_points(
        cls, object_id: int, points: Any, labels: Any, box: Any, logits: Tensor | None = None
    ) -> PromptTensors:
        """Build it from checked points, whose labels are 1 by default, a box, or both: arrays, or None."""
        marks = np.ones(0 if points is None else len(points)) if labels is None else labels
        coordinates = np.zeros((0, 2)) if points is None else points
        if box is not None:
            coordinates = np.concatenate([np.reshape(box, (2, 2)), coordinates])
            marks = np.concatenate([BOX_LABELS, marks])
        return cls(torch.from_numpy(coordinates).float(), torch.from_numpy(marks).int(), object_id, logits)

    @classmethod
    def from_mask(cls, object_id: int, mask: Tensor) -> PromptTensors:
        """Build it from a mask [S, S]."""
        empty = torch.zeros(0, 2)
        return cls(empty, empty[:, 0].int(), object_id, mask=mask.to(torch.float32)[None, None])

    def to_tensors(self, image_size: int, device: torch.device) -> PromptTensors:
        """Return the prompt on the model's device."""
        mask = None if self.mask is None else self.mask.to(device)
        return self._replace(points=self.points.to(device), labels=self.labels.to(device), mask=mask)


@dataclass(frozen=True, slots=True, eq=False)
class ObjectPrompt:
    """A prompt for an object on one frame, in model pixels (0..S, origin at the corner of the top-left pixel)."""

    object_id: int
    points: object = None
    """float [n, 2] as (x, y)"""
    labels: object = None
    """int [n]: 1 inside, 0 outside; all 1 if None"""
    box: object = None
    """(x0, y0, x1, y1), alone or with points"""
    mask: object = None
    """bool or float [S, S], without points and box"""
    logits: Tensor | None = None
    """[4h, 4w] of the object's current mask; points then correct this mask"""

    def to_tensors(self, image_size: int, device: torch.device) -> PromptTensors:
        """Check the prompt for a model with `image_size` pixels a side; RequestError if it is malformed."""
        check_parts(self.points, self.box, self.mask)
        if self.mask is None:
            checked = FramePrompt(self.points, self.labels, self.box)
            columns = checked.points, checked.labels, checked.box, self.logits
            return PromptTensors.from_points(self.object_id, *columns).to_tensors(image_size, device)
        mask = torch.as_tensor(self.mask, dtype=torch.float32)
        if mask.shape != (image_size, image_size):
            raise RequestError(
                f"mask: expected [{image_size}, {image_size}] model pixels, found {list(mask.shape)}"
            )
        return PromptTensors.from_mask(self.object_id, mask).to_tensors(image_size, device)


class RowsState(SavedState):
    """The rows that keys hold, and what is free: rows in their order, or of each group the slots that are given."""

    rows: dict[Time, Count]
    free: list[Count]


class ObjectRows(SavedPart[RowsState]):
    """The row of the memory bank that each object id holds. Ids are 0 or greater.

    While an object catches up, the key `catching_key` of its id holds a row, too. For a new object this is one of the
    `capacity` rows; for an object that is also tracked, it is one of `spare` more rows.
    """

    STATE = RowsState

    def __init__(self, capacity: int, spare: int = 0) -> None:
        self._rows: dict[int, int] = {}
        # `pop` takes from the end, so the lowest rows are used first
        self._free = list(range(capacity + spare - 1, -1, -1))
        self.capacity = capacity
        self._spare = spare

    def __contains__(self, key: int) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[int]:
        """Yield the ids of all objects that do not catch up, and the keys of those that do."""
        return iter(self._rows)

    def __getitem__(self, key: int) -> int:
        try:
            return self._rows[key]
        except KeyError:
            tracked = sorted(other for other in self._rows if other >= 0)
            raise UnknownObjectError(f"no object {key}; tracked are {tracked or 'none'}") from None

    def check_capacity(self, count: int) -> None:
        """Raise CapacityError unless `count` more objects fit."""
        free = self.capacity - len(self._rows) + self._spare_rows()
        if count > free:
            raise CapacityError(
                f"expected slots for {count} more, found {free} of {self.capacity} object slots free; "
                "remove objects or raise tracker.max_objects"
            )

    def check_spare(self, key: int) -> None:
        """Raise CapacityError unless `key` has a row, or could get one of the spare rows."""
        if key not in self._rows and self._spare_rows() >= self._spare:
            raise CapacityError(
                f"expected at most {self._spare} corrections of past frames that catch up at a time, found "
                f"{self._spare} already; try again in a second, or correct the newest frame"
            )

    def add(self, key: int, apart: bool = False) -> int:
        """Give the key a free row and return it; CapacityError if all rows are taken.

        apart: the object must not share a group with others. A row is of one object, so this counts for `GroupSlots`.
        """
        if catching_key(key) in self._rows:
            self.check_spare(key)
        else:
            self.check_capacity(1)
        row = self._take(key, apart)
        self._rows[key] = row
        return row

    def remove(self, key: int) -> int:
        """Free the key's row and return it; UnknownObjectError if there is none."""
        row = self[key]
        del self._rows[key]
        self._give_back(row)
        return row

    def rename(self, key: int, new_key: int) -> int | None:
        """Give the row of `key` to `new_key`. Return the row that `new_key` had before, which is free now."""
        freed = self._rows.get(new_key)
        self._rows[new_key] = self._rows.pop(key)
        if freed is not None:
            self._give_back(freed)
        return freed

    def _take(self, key: int, apart: bool) -> int:
        """Return a free row for a key, which is not free then."""
        return self._free.pop()

    def _give_back(self, row: int) -> None:
        """Note that no key holds this row any more."""
        self._free.append(row)

    def before_restore(self, state: RowsState) -> None:
        """Raise ValueError if the rows do not fit this capacity."""
        if sorted([*state.rows.values(), *state.free]) != list(range(self.capacity + self._spare)):
            raise ValueError(
                f"expected each of {self.capacity + self._spare} rows once, found {state.rows}, {state.free}"
            )

    def _spare_rows(self) -> int:
        """Return the number of rows of corrections: of objects that are tracked and catch up at the same time."""
        return sum(key < 0 and catching_key(key) in self._rows for key in self._rows)


def catching_key(object_id: int) -> int:
    """Return the key of an object's row while it catches up, which is negative; and the id for such a key."""
    return ~object_id


class Cover(NamedTuple):
    """The pixels in front of the objects on a frame, and the objects behind them."""

    pixels: Tensor
    """bool [h, w] at the size of low-resolution masks, on the model's device"""
    ids: frozenset[int]
    """the objects that are hidden"""

    def cut(self, decoded: Decoded) -> Decoded:
        """Return masks that leave out these pixels; their edge lies between two pixels, as others do."""
        logits = decoded.logits
        return decoded._replace(logits=torch.where(self.pixels, -logits.abs(), logits))


@dataclass(frozen=True, slots=True, eq=False)
class Tracks:
    """All N objects on one frame, in the order in which they were added. Tensors are on the model's device."""

    ids: list[int]
    logits: Tensor
    """[N, h, w] at low resolution, 4 times the feature grid; the object is where logits > 0"""
    scores: Tensor
    """[N] in 0..1: presence probability times predicted IoU"""
    visible: Tensor
    """bool [N]"""
    presence: Tensor
    """[N], the logit that the object is in view"""
    pointers: Tensor
    """[N, C], the object pointers: the decoder's description of each object's appearance"""

    def row(self, object_id: int) -> Track:
        """Return one object."""
        row = self.ids.index(object_id)
        columns = self.logits, self.scores, self.visible, self.presence, self.pointers
        return Track(*(values[row] for values in columns))


class Track(NamedTuple):
    """One object on one frame: logits [h, w], score [], visible [], presence [] and pointer [C]."""

    logits: Tensor
    score: Tensor
    visible: Tensor
    presence: Tensor
    pointer: Tensor


def decode_boxes(
    model: TrackerModel, features: Features, corners: Tensor, logits: Tensor | None = None
) -> Decoded:
    """Decode N objects of one image without memory, from boxes, float [N, 2, 2], and logits [N, 4h, 4w], if given.

    The corners are the top-left and the bottom-right one, as (x, y) in model pixels.
    """
    labels = torch.tensor([BOX_LABELS], dtype=torch.int32, device=model.device).expand(len(corners), -1)
    inputs = model.decode_stage.embed(features, corners, labels, logits)
    return model.decode_stage(*inputs, model.competes(len(BOX_LABELS), True))


def decode_clicks(model: TrackerModel, features: Features, points: Tensor) -> Decoded:
    """Decode N prompts of one point each on one image without memory, to `model.candidates` masks for each.

    points: float [N, 1, 2] in model pixels.
    """
    labels = torch.ones(points.shape[:2], dtype=torch.int32, device=points.device)
    return model.decode_candidates(features, points, labels, None)


def confidence(presence: Tensor, iou: Tensor) -> Tensor:
    """Combine presence logit and predicted IoU into a confidence in 0..1 (SAM 3's `cal_mem_score`)."""
    return (2 * presence.sigmoid() - 1).clamp(min=0) * iou


def batch_size(count: int) -> int:
    """Return the batch size for a number of objects: the next of BATCHES, beyond them the next power of two."""
    return next((size for size in BATCHES if size >= count), 1 << (count - 1).bit_length())


def pad_to_batch(rows: Ints) -> Ints:
    """Repeat the first row up to the next batch size."""
    return np.concatenate([rows, np.repeat(rows[:1], batch_size(len(rows)) - len(rows))])


def combine_scores(presence: Tensor, iou: Tensor) -> Tensor:
    """Return scores [N] in 0..1 from presence logits [N] and predicted IoUs [N]."""
    return presence.float().sigmoid() * iou.float()


def split_tracks(decoded: Decoded, count: int) -> list[Track]:
    """Return the tracks of the first `count` objects of a decoder's output."""
    scores = combine_scores(decoded.presence, decoded.iou)
    visible = decoded.presence > 0
    columns = (decoded.logits, scores, visible, decoded.presence, decoded.pointer)
    return [Track(*(column[i] for column in columns)) for i in range(count)]
