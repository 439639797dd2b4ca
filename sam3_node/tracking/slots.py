"""Identity apart from storage: stable object ids outside, rows of the bank inside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CapacityError, RequestError, UnknownObjectError
from ..types import State

MAX_POINTS = 64
BOX_LABELS = (2, 3)  # SAM's labels of a box's top-left and bottom-right corner


@dataclass(frozen=True, slots=True, eq=False)
class ObjectPrompt:
    """Where an object is on one frame, in model pixels (0..S, origin at the top-left pixel's corner).

    points float [n, 2] as (x, y) with labels int [n] (1 inside, 0 outside), and/or box (x0, y0, x1, y1); or mask,
    bool or float [S, S], alone. `logits` [4h, 4w] of the object's mask so far make points a correction of it.
    """

    object_id: int
    points: object = None
    labels: object = None
    box: object = None
    mask: object = None
    logits: Tensor | None = None

    def state(self) -> State:
        """What `of` takes: all but `logits`, which the prompt of a new object does not have."""
        arrays = {name: getattr(self, name) for name in ("points", "labels", "box", "mask")}
        return {
            "object_id": self.object_id,
            **{name: None if value is None else torch.as_tensor(value) for name, value in arrays.items()},
        }

    @classmethod
    def of(cls, state: State) -> ObjectPrompt:
        """The prompt that `state` was asked of."""
        return cls(**state)

    def as_points(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Box corners and points as coordinates float32 [n, 2] and labels int32 [n]; RequestError if malformed."""
        corners = self._box()
        points, labels = self._points()
        coordinates = torch.cat([corners, points])
        if coordinates.shape[0] == 0:
            raise RequestError(
                f"prompt for object {self.object_id}: expected points, a box or a mask, found none"
            )
        if not bool(torch.isfinite(coordinates).all()):
            raise RequestError(
                f"prompt for object {self.object_id}: expected finite coordinates, found NaN or inf"
            )
        tags = torch.cat([torch.tensor(BOX_LABELS[: corners.shape[0]], dtype=torch.int32), labels])
        return coordinates.to(device), tags.to(device)

    def _box(self) -> Tensor:
        if self.box is None:
            return torch.zeros(0, 2)
        box = _tensor(self.box, "box")
        if box.shape != (4,) or not (box[0] < box[2] and box[1] < box[3]):
            raise RequestError(f"box: expected x0 < x1 and y0 < y1 as (x0, y0, x1, y1), found {box.tolist()}")
        return box.reshape(2, 2)

    def _points(self) -> tuple[Tensor, Tensor]:
        if self.points is None:
            return torch.zeros(0, 2), torch.zeros(0, dtype=torch.int32)
        points = _tensor(self.points, "points")
        if points.ndim != 2 or points.shape[1] != 2 or not 1 <= points.shape[0] <= MAX_POINTS:
            raise RequestError(
                f"points: expected 1 to {MAX_POINTS} rows (x, y), found shape {list(points.shape)}"
            )
        labels = torch.ones(len(points)) if self.labels is None else _tensor(self.labels, "labels")
        if labels.shape != (len(points),) or not bool(((labels == 0) | (labels == 1)).all()):
            raise RequestError(f"labels: expected {len(points)} values of 0 or 1, found {labels.tolist()}")
        return points, labels.to(torch.int32)

    def as_mask(self, size: int, device: torch.device) -> Tensor:
        """The mask as float32 [1, 1, S, S]; RequestError on another size or beside points or a box."""
        if self.points is not None or self.box is not None:
            raise RequestError(
                f"prompt for object {self.object_id}: a mask goes alone, found points or a box too"
            )
        mask = _tensor(self.mask, "mask")
        if mask.shape != (size, size):
            raise RequestError(f"mask: expected [{size}, {size}] model pixels, found {list(mask.shape)}")
        return mask[None, None].to(device)


def _tensor(value: object, name: str) -> Tensor:
    try:
        return torch.as_tensor(value, dtype=torch.float32, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(f"{name}: expected numbers, found {value!r:.80}") from error


class ObjectRows:
    """Which row of the bank each object id holds."""

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

    def check_room(self, count: int) -> None:
        """Raise CapacityError unless `count` more objects fit."""
        if count > len(self._free):
            raise CapacityError(
                f"expected room for {count} more, found {len(self._free)} of {self.capacity} object slots free; "
                "remove objects or raise tracker.max_objects"
            )

    def add(self, object_id: int) -> int:
        """Give the id a row; CapacityError when all are taken."""
        self.check_room(1)
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
        """What `restore` takes: the rows, and in which order the free ones are given."""
        return {"rows": [list(pair) for pair in self._rows.items()], "free": list(self._free)}

    def restore(self, state: State) -> None:
        """Hold the rows that were held when `state` was asked for."""
        self._rows, self._free = dict(state["rows"]), list(state["free"])
