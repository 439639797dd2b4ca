"""Prompts for objects, and the slots that objects hold: stable object ids outside, rows of the memory bank inside.

All checks of prompts are in this module. Prompts in frame pixels (`perception.prompts`) use them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import CapacityError, RequestError, UnknownObjectError
from ..types import State

MAX_POINTS = 64
BOX_LABELS = (2, 3)  # SAM's labels of a box's top-left and bottom-right corner

Array = npt.NDArray[Any]


class PromptTensors(NamedTuple):
    """A checked prompt on the model's device: points with labels, or a mask."""

    points: Tensor
    """float32 [n, 2]: the box corners, then the points, as (x, y) in model pixels"""
    labels: Tensor
    """int32 [n], as SAM's prompt encoder takes them"""
    logits: Tensor | None = None
    """[4h, 4w] of the object's current mask, which the points correct"""
    mask: Tensor | None = None
    """float32 [1, 1, S, S]; points is empty then"""


@dataclass(frozen=True, slots=True, eq=False)
class ObjectPrompt:
    """The place of an object on one frame, in model pixels (0..S, origin at the corner of the top-left pixel)."""

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

    def state(self) -> State:
        """Return the state that `from_state` takes: all but `logits`, which the prompt of a new object lacks."""
        arrays = {name: getattr(self, name) for name in ("points", "labels", "box", "mask")}
        return {
            "object_id": self.object_id,
            **{name: None if value is None else torch.as_tensor(value) for name, value in arrays.items()},
        }

    @classmethod
    def from_state(cls, state: State) -> ObjectPrompt:
        """Build a prompt from what `state` returned."""
        return cls(**state)

    def to_tensors(self, image_size: int, device: torch.device) -> PromptTensors:
        """Check the prompt for a model with `image_size` pixels a side; RequestError if it is malformed."""
        check_parts(self.points, self.box, self.mask)
        if self.mask is not None:
            mask = _to_tensor(self.mask, "mask")
            if mask.shape != (image_size, image_size):
                raise RequestError(
                    f"mask: expected [{image_size}, {image_size}] model pixels, found {list(mask.shape)}"
                )
            empty = torch.zeros(0, 2, device=device)
            return PromptTensors(empty, empty[:, 0].int(), mask=mask[None, None].to(device))
        corners, corner_labels = self._box_corners()
        points, labels = self._labelled_points()
        coordinates, all_labels = torch.cat([corners, points]), torch.cat([corner_labels, labels])
        return PromptTensors(coordinates.to(device), all_labels.to(device), self.logits)

    def _box_corners(self) -> tuple[Tensor, Tensor]:
        if self.box is None:
            return torch.zeros(0, 2), torch.zeros(0, dtype=torch.int32)
        box = _to_tensor(self.box, "box")
        check_box(box.numpy())
        return box.reshape(2, 2), torch.tensor(BOX_LABELS, dtype=torch.int32)

    def _labelled_points(self) -> tuple[Tensor, Tensor]:
        if self.points is None:
            return torch.zeros(0, 2), torch.zeros(0, dtype=torch.int32)
        points = _to_tensor(self.points, "points")
        check_points(points.numpy())
        labels = torch.ones(len(points)) if self.labels is None else _to_tensor(self.labels, "labels")
        check_labels(labels.numpy(), len(points))
        return points, labels.to(torch.int32)


def check_parts(points: object, box: object, mask: object) -> None:
    """Raise RequestError unless there are points, a box or both, or a mask alone."""
    if mask is not None and (points is not None or box is not None):
        raise RequestError("prompt: expected a mask alone, found points or a box beside it")
    if points is None and box is None and mask is None:
        raise RequestError("prompt: expected points, a box or a mask, found none of them")


def check_points(points: Array) -> None:
    """Raise RequestError unless the shape is [n, 2] with 1 to MAX_POINTS points and all numbers are finite."""
    if points.ndim != 2 or points.shape[1] != 2 or not 1 <= len(points) <= MAX_POINTS:
        raise RequestError(
            f"points: expected 1 to {MAX_POINTS} pairs (x, y), found shape {list(points.shape)}"
        )
    _check_finite(points, "points")


def check_labels(labels: Array, count: int) -> None:
    """Raise RequestError unless there are `count` labels, each 1 (inside) or 0 (outside)."""
    if labels.shape != (count,) or not np.isin(labels, (0, 1)).all():
        raise RequestError(
            f"labels: expected {count} of 1 (inside) or 0 (outside), one for each point, "
            f"found {labels.tolist()}"
        )


def check_box(box: Array) -> None:
    """Raise RequestError unless the box is four finite numbers (x0, y0, x1, y1) with x0 < x1 and y0 < y1."""
    if box.shape != (4,):
        raise RequestError(f"box: expected (x0, y0, x1, y1), found shape {list(box.shape)}")
    _check_finite(box, "box")
    if not (box[:2] < box[2:]).all():
        raise RequestError(f"box: expected x0 < x1 and y0 < y1, found {box.tolist()}")


def _check_finite(values: Array, name: str) -> None:
    if not np.isfinite(values).all():
        raise RequestError(f"{name}: expected finite numbers, found {values.tolist()!r:.80}")


def _to_tensor(value: object, name: str) -> Tensor:
    try:
        return torch.as_tensor(value, dtype=torch.float32, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(f"{name}: expected numbers, found {value!r:.80}") from error


class ObjectRows:
    """The row of the memory bank that each object id holds."""

    def __init__(self, capacity: int) -> None:
        self._rows: dict[int, int] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self.capacity = capacity

    def __contains__(self, object_id: int) -> bool:
        return object_id in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __getitem__(self, object_id: int) -> int:
        try:
            return self._rows[object_id]
        except KeyError:
            raise UnknownObjectError(
                f"no object {object_id}; tracked are {sorted(self._rows) or 'none'}"
            ) from None

    def check_capacity(self, count: int) -> None:
        """Raise CapacityError unless `count` more objects fit."""
        if count > len(self._free):
            raise CapacityError(
                f"expected slots for {count} more, found {len(self._free)} of {self.capacity} object slots free; "
                "remove objects or raise tracker.max_objects"
            )

    def add(self, object_id: int) -> int:
        """Give the id a free row and return it; CapacityError if all rows are taken."""
        self.check_capacity(1)
        row = self._free.pop()
        self._rows[object_id] = row
        return row

    def remove(self, object_id: int) -> int:
        """Free the id's row and return it; UnknownObjectError if there is none."""
        row = self[object_id]
        del self._rows[object_id]
        self._free.append(row)
        return row

    def state(self) -> State:
        """Return the state that `restore` takes: the rows in use, and the free rows in their order."""
        return {"rows": [list(pair) for pair in self._rows.items()], "free": list(self._free)}

    def restore(self, state: State) -> None:
        """Replace the rows by those that `state` returned."""
        self._rows, self._free = dict(state["rows"]), list(state["free"])
