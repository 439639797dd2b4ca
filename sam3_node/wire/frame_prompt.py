"""Check prompts once: points, a box or a mask of an object, in pixels of a frame."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from ..errors import RequestError
from ..schema.operations import MAX_POINTS
from ..types import Mask
from ..types import lazy_numpy as np

Floats: TypeAlias = "np.typing.NDArray[np.float64]"
Array: TypeAlias = "np.typing.NDArray[Any]"


@dataclass(slots=True, eq=False)
class FramePrompt:
    """The place of an object on a frame, in pixels of the frame.

    Raises RequestError for values that no frame can have; `within` checks the rest.
    """

    points: Any = None
    """[n, 2] as (x, y)"""
    labels: Any = None
    """[n]: 1 inside, 0 outside; all 1 if None"""
    box: Any = None
    """(x0, y0, x1, y1), alone or with points"""
    mask: Mask | None = None
    """of the frame's size, without points and box"""

    def __post_init__(self) -> None:
        # from the whole to its parts; each error names the part that is wrong
        check_parts(self.points, self.box, self.mask)
        if self.points is not None:
            self.points = _to_floats(self.points, "points")
            check_points(self.points)
        if self.labels is not None:
            if self.points is None:
                raise RequestError("labels need points; none were given")
            self.labels = _to_floats(self.labels, "labels")
            check_labels(self.labels, len(self.points))
        if self.box is not None:
            self.box = _to_floats(self.box, "box")
            check_box(self.box)

    def within(self, size: tuple[int, int]) -> tuple[Floats | None, Floats | None]:
        """Return the points, and the box clipped to a frame of `size` (height, width).

        Raises RequestError if the prompt does not lie on the frame.
        """
        frame = f"the frame of {size[1]} x {size[0]} pixels"
        # a mask covers the whole frame, so its size must agree
        if self.mask is not None:
            if self.mask.size != size:
                raise RequestError(f"mask: expected the frame's size {size} (h, w), found {self.mask.size}")
            if not self.mask.area:
                raise RequestError("mask: expected at least one pixel, found an empty mask")
            return None, None
        # a point outside is a mistake; a box may reach beyond the frame, whose part inside is meant
        if self.points is not None:
            outside = ((self.points < 0) | (self.points >= size[::-1])).any(axis=1)
            if outside.any():
                raise RequestError(
                    f"points: expected inside {frame}, found {self.points[outside][0].tolist()}"
                )
        if self.box is None:
            return self.points, None
        box = np.clip(self.box, 0, (size[1], size[0]) * 2)
        if not (box[:2] < box[2:]).all():
            raise RequestError(f"box: expected a part inside {frame}, found {self.box.tolist()}")
        return self.points, box


def describe_clipping(box: Any, size: tuple[int, int] | None) -> str:
    """Say what `within` leaves of a box that reaches beyond a frame of `size` (height, width).

    Return "" for no box, for one that lies on the frame, and without a size.
    """
    if box is None or size is None:
        return ""
    # the same clipping as in `within`
    asked = np.asarray(box, np.float64).tolist()
    kept = np.clip(asked, 0, (size[1], size[0]) * 2).tolist()
    if kept == asked:
        return ""
    return (
        f"box: {asked} reaches beyond the frame of {size[1]} x {size[0]} pixels; used the part inside, {kept}"
    )


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


def _holds_text(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_text, value))
    return isinstance(value, str | bytes)


def _to_floats(value: object, name: str) -> Floats:
    # numpy gives every element the length of the longest text: a message of 200 KB would take gigabytes
    if _holds_text(value):
        raise RequestError(f"{name}: expected numbers, found {value!r:.80}")
    try:
        # text and flags also become arrays, but are no coordinates
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise RequestError(f"{name}: expected numbers, found {value!r:.80}") from error
    if array.dtype.kind not in "iuf":
        raise RequestError(f"{name}: expected numbers, found {value!r:.80}")
    return array.astype(np.float64)
