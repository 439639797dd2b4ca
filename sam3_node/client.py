"""The client for robot policies: it reads the newest masks and controls the node while it runs.

It needs pyzmq, msgpack, numpy and zstandard only. Points, boxes and masks are in pixels of the camera's frame.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt

from .errors import RequestError
from .transport import ControlClient, MaskSubscriber
from .types import Closeable, Delivery, Mask, MaskFrame, TrackState
from .wire import Fields, decode_mask, encode_mask

MASKS_ENDPOINT = "tcp://127.0.0.1:5551"
CONTROL_ENDPOINT = "tcp://127.0.0.1:5552"

MaskLike = Mask | npt.NDArray[np.bool_]
Points = Sequence[tuple[float, float]] | npt.NDArray[np.floating[Any]]
PixelBox = Sequence[float] | npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class TrackedObject:
    """One entry of the node's list of objects. `score` is in 0..1. `age` and `frames_since_seen` count frames."""

    id: int
    camera: str
    label: str
    state: TrackState
    score: float
    age: int
    frames_since_seen: int


@dataclass(frozen=True, slots=True)
class Segmentation:
    """The mask of a prompt on frame `seq`. `score` is in 0..1."""

    seq: int
    score: float
    mask: Mask


@dataclass(frozen=True, slots=True)
class AddedObject:
    """A new object. `id` is unique for each `camera`. `segmentation` is set if the prompt named a frame by `seq`."""

    id: int
    camera: str
    segmentation: Segmentation | None


class PerceptionClient(Closeable):
    """A client of one node: it reads masks at endpoint `masks` and sends requests to `control`.

    It is a context manager. The node may start later, and may restart. With `cameras`, masks of other cameras are
    ignored. With `sure_only`, doubtful instances are left out. Requests raise RequestError or a subclass
    (UnknownObjectError, UnknownFrameError, CapacityError) when the node refuses them, and TransportError when it does
    not answer within `timeout_ms`. The argument `camera` is optional if the node serves one camera.
    """

    def __init__(
        self,
        masks: str = MASKS_ENDPOINT,
        control: str = CONTROL_ENDPOINT,
        *,
        delivery: Delivery = "newest",
        cameras: Sequence[str] = (),
        timeout_ms: int = 2000,
        sure_only: bool = False,
    ) -> None:
        self._sure_only = sure_only
        self._control = ControlClient(control, timeout_ms)
        try:
            self._masks = MaskSubscriber(masks, delivery, cameras)
        except BaseException:
            self._control.close()
            raise

    def latest(self, timeout_ms: int | None = None) -> MaskFrame | None:
        """Return the newest masks that were not returned before; cameras take turns.

        Returns None when no masks arrive within `timeout_ms` (None: no limit), and after `close`.
        """
        masks = self._masks.take(timeout_ms)
        return masks.without_doubtful() if masks is not None and self._sure_only else masks

    def __iter__(self) -> Iterator[MaskFrame]:
        """Yield the newest masks as they arrive, until `close`."""
        while (masks := self.latest()) is not None:
            yield masks

    @property
    def connected(self) -> bool:
        """True while a peer is connected at the masks endpoint of the node."""
        return bool(self._masks.connected)

    def add_object(
        self,
        *,
        points: Points | None = None,
        labels: Sequence[int] | None = None,
        box: PixelBox | None = None,
        mask: MaskLike | None = None,
        label: str | None = None,
        seq: int | None = None,
        camera: str | None = None,
    ) -> AddedObject:
        """Track a new object. The result holds its id.

        Prompts are `points` [n, 2] with `labels` [n] (1 inside, 0 outside; default all 1), `box` (x0, y0, x1, y1) or
        `mask` bool [height, width]. With `seq`, the prompt applies at once to that recent frame, and the result holds
        the mask. Without `seq`, it applies to the next frame that arrives.
        """
        args = _pack_prompt(points, labels, box, mask) | _drop_none(label=label, seq=seq, camera=camera)
        result = self._call("add_object", args)
        segmentation = _read_segmentation(result) if result.has("mask") else None
        return AddedObject(result.integer("id"), result.text("camera"), segmentation)

    def refine_object(
        self,
        id: int,
        *,
        points: Points | None = None,
        labels: Sequence[int] | None = None,
        box: PixelBox | None = None,
        mask: MaskLike | None = None,
        seq: int | None = None,
        camera: str | None = None,
    ) -> Segmentation:
        """Correct a tracked object at once. The prompts are those of `add_object`.

        They apply to the recent frame `seq` (default: the latest). Points correct the mask of the object on that
        frame. Raises RequestError for an object that has not been on a frame yet.
        """
        args = _pack_prompt(points, labels, box, mask) | _drop_none(id=id, seq=seq, camera=camera)
        return _read_segmentation(self._call("refine_object", args))

    def remove_object(self, id: int, *, camera: str | None = None) -> None:
        """Stop tracking an object."""
        self._control.call("remove_object", **_drop_none(id=id, camera=camera))

    def list_objects(self, *, camera: str | None = None) -> list[TrackedObject]:
        """Return the objects that are tracked now."""
        objects = self._call("list_objects", _drop_none(camera=camera)).sequence("objects")
        return [_read_object(Fields(value, "list_objects: object")) for value in objects]

    def segment(
        self,
        *,
        points: Points | None = None,
        labels: Sequence[int] | None = None,
        box: PixelBox | None = None,
        seq: int | None = None,
        camera: str | None = None,
    ) -> Segmentation:
        """Segment once, without tracking, on the recent frame `seq` (default: the latest)."""
        args = _pack_prompt(points, labels, box, None) | _drop_none(seq=seq, camera=camera)
        return _read_segmentation(self._call("segment", args))

    def set_prompts(
        self,
        prompts: Sequence[str],
        *,
        scores: Mapping[str, float] | None = None,
        most: Mapping[str, int] | None = None,
    ) -> None:
        """Replace the names of the objects to look for. An empty list stops the search.

        Objects whose name stays in the list keep their ids. For each name, `scores` may set the minimum score of a
        detection to start an object, and `most` the maximum number of objects.
        """
        limits = _drop_none(scores=dict(scores) if scores else None, most=dict(most) if most else None)
        self._control.call("set_prompts", prompts=list(prompts), **limits)

    def reset(self, *, camera: str | None = None) -> None:
        """Remove all objects, of one camera or of all."""
        self._control.call("reset", **_drop_none(camera=camera))

    def pause(self) -> None:
        """Stop processing frames until `resume`."""
        self._control.call("pause")

    def resume(self) -> None:
        """Process frames again."""
        self._control.call("resume")

    def status(self) -> dict[str, Any]:
        """Return the status of the node."""
        return cast(dict[str, Any], self._control.call("status"))

    def close(self) -> None:
        """Close both connections. Idempotent."""
        self._masks.close()
        self._control.close()

    def _call(self, op: str, args: dict[str, Any]) -> Fields:
        return Fields(self._control.call(op, **args), op)


def _pack_prompt(
    points: Points | None, labels: Sequence[int] | None, box: PixelBox | None, mask: MaskLike | None
) -> dict[str, Any]:
    return _drop_none(
        points=None if points is None else _to_floats(points, "points", (-1, 2)),
        labels=None if labels is None else [int(label) for label in labels],
        box=None if box is None else _to_floats(box, "box", (4,)),
        mask=None if mask is None else encode_mask(mask if isinstance(mask, Mask) else _to_mask(mask)),
    )


def _drop_none(**args: Any) -> dict[str, Any]:
    return {name: value for name, value in args.items() if value is not None}


def _to_floats(values: Any, name: str, shape: tuple[int, ...]) -> list[Any]:
    expected = "[[x, y], ...]" if len(shape) == 2 else "[x0, y0, x1, y1]"
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{name}: expected numbers {expected}, found {values!r:.80}") from error
    if array.ndim != len(shape) or array.shape[-1] != shape[-1]:
        raise RequestError(f"{name}: expected {expected}, found shape {list(array.shape)}")
    return cast(list[Any], array.tolist())


def _to_mask(full: npt.NDArray[np.bool_]) -> Mask:
    full = np.asarray(full)
    if full.ndim != 2 or full.dtype != np.bool_:
        raise RequestError(f"mask: expected bool [height, width], found {full.dtype} {list(full.shape)}")
    return Mask.from_full(full)


def _read_segmentation(fields: Fields) -> Segmentation:
    mask = decode_mask(fields.any("mask"), f"{fields.what}: mask")
    return Segmentation(fields.integer("seq"), fields.number("score"), mask)


def _read_object(fields: Fields) -> TrackedObject:
    return TrackedObject(
        id=fields.integer("id"),
        camera=fields.text("camera"),
        label=fields.text("label"),
        state=fields.choice("state", get_args(TrackState)),
        score=fields.number("score"),
        age=fields.integer("age"),
        frames_since_seen=fields.integer("frames_since_seen"),
    )
