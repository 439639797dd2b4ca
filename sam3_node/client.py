"""What a policy imports: the newest masks, and live control of the node.

Needs pyzmq, msgpack, numpy and zstandard only. Points, boxes and masks are in pixels of the camera's frame.
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
    """One line of the node's list of objects. `score` is in 0..1; `age` and `frames_since_seen` count frames."""

    id: int
    camera: str
    label: str
    state: TrackState
    score: float
    age: int
    frames_since_seen: int


@dataclass(frozen=True, slots=True)
class Segmentation:
    """The mask that a prompt gives on frame `seq`. `score` is in 0..1."""

    seq: int
    score: float
    mask: Mask


@dataclass(frozen=True, slots=True)
class AddedObject:
    """A new object: its `id` among those of `camera`, and its mask where it was prompted on a frame's `seq`."""

    id: int
    camera: str
    segmentation: Segmentation | None


class PerceptionClient(Closeable):
    """Reads the node's masks at endpoint `masks` and controls it at `control`. A context manager.

    The node need not be running yet, and may be restarted. With `cameras`, masks of others are left out.
    Operations raise RequestError and its kin (UnknownObjectError, UnknownFrameError, CapacityError) when the
    node refuses, and TransportError when it does not answer within `timeout_ms`. `camera` may be left out
    where the node serves one.
    """

    def __init__(
        self,
        masks: str = MASKS_ENDPOINT,
        control: str = CONTROL_ENDPOINT,
        *,
        delivery: Delivery = "newest",
        cameras: Sequence[str] = (),
        timeout_ms: int = 2000,
    ) -> None:
        self._control = ControlClient(control, timeout_ms)
        try:
            self._masks = MaskSubscriber(masks, delivery, cameras)
        except BaseException:
            self._control.close()
            raise

    def latest(self, timeout_ms: int | None = None) -> MaskFrame | None:
        """The newest masks not returned before, cameras in turn.

        None when none came within `timeout_ms` (None: no limit), or after `close`.
        """
        return self._masks.take(timeout_ms)

    def __iter__(self) -> Iterator[MaskFrame]:
        """Each newest masks as it comes, until `close`."""
        while (masks := self.latest()) is not None:
            yield masks

    @property
    def connected(self) -> bool:
        """Whether the node's masks endpoint has a living peer now."""
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
        """Track a new object; its id is that of the result.

        Prompts: `points` [n, 2] with `labels` [n] (1 inside, 0 outside; all 1 when left out), `box` (x0, y0,
        x1, y1) or `mask` bool [height, width]. On the recent frame `seq` they take effect at once, and the
        result has the mask; without `seq` they are on the next frame that comes.
        """
        args = _prompt(points, labels, box, mask) | _present(label=label, seq=seq, camera=camera)
        result = self._ask("add_object", args)
        found = _segmentation(result) if result.has("mask") else None
        return AddedObject(result.integer("id"), result.text("camera"), found)

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
        """Correct a tracked object at once; prompts as for `add_object`, on the latest frame without `seq`.

        Points correct the mask that it has on that frame. RequestError for an object without a frame so far.
        """
        args = _prompt(points, labels, box, mask) | _present(id=id, seq=seq, camera=camera)
        return _segmentation(self._ask("refine_object", args))

    def remove_object(self, id: int, *, camera: str | None = None) -> None:
        """Stop tracking an object."""
        self._control.call("remove_object", **_present(id=id, camera=camera))

    def list_objects(self, *, camera: str | None = None) -> list[TrackedObject]:
        """The objects tracked now."""
        objects = self._ask("list_objects", _present(camera=camera)).sequence("objects")
        return [_tracked(Fields(value, "list_objects: object")) for value in objects]

    def segment(
        self,
        *,
        points: Points | None = None,
        labels: Sequence[int] | None = None,
        box: PixelBox | None = None,
        seq: int | None = None,
        camera: str | None = None,
    ) -> Segmentation:
        """Segment once, without tracking, on the recent frame `seq` (the latest when left out)."""
        args = _prompt(points, labels, box, None) | _present(seq=seq, camera=camera)
        return _segmentation(self._ask("segment", args))

    def set_prompts(
        self,
        prompts: Sequence[str],
        *,
        scores: Mapping[str, float] | None = None,
        most: Mapping[str, int] | None = None,
    ) -> None:
        """Name what the node shall look for, in place of what it looked for before; nothing for an empty list.

        Objects whose name stays keep their ids. `scores` and `most`: for some of the prompts, the score from which on
        a detection begins an object, and how many objects there may be.
        """
        limits = _present(scores=dict(scores) if scores else None, most=dict(most) if most else None)
        self._control.call("set_prompts", prompts=list(prompts), **limits)

    def reset(self, *, camera: str | None = None) -> None:
        """Forget all objects, of one camera or of all."""
        self._control.call("reset", **_present(camera=camera))

    def pause(self) -> None:
        """Stop processing frames until `resume`."""
        self._control.call("pause")

    def resume(self) -> None:
        """Process frames again."""
        self._control.call("resume")

    def status(self) -> dict[str, Any]:
        """What the node tells about itself."""
        return cast(dict[str, Any], self._control.call("status"))

    def close(self) -> None:
        """Close both connections. Idempotent."""
        self._masks.close()
        self._control.close()

    def _ask(self, op: str, args: dict[str, Any]) -> Fields:
        return Fields(self._control.call(op, **args), op)


def _prompt(
    points: Points | None, labels: Sequence[int] | None, box: PixelBox | None, mask: MaskLike | None
) -> dict[str, Any]:
    return _present(
        points=None if points is None else _floats(points, "points", (-1, 2)),
        labels=None if labels is None else [int(label) for label in labels],
        box=None if box is None else _floats(box, "box", (4,)),
        mask=None if mask is None else encode_mask(mask if isinstance(mask, Mask) else _mask(mask)),
    )


def _present(**args: Any) -> dict[str, Any]:
    return {name: value for name, value in args.items() if value is not None}


def _floats(values: Any, name: str, shape: tuple[int, ...]) -> list[Any]:
    expected = "[[x, y], ...]" if len(shape) == 2 else "[x0, y0, x1, y1]"
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{name}: expected numbers {expected}, found {values!r:.80}") from error
    if array.ndim != len(shape) or array.shape[-1] != shape[-1]:
        raise RequestError(f"{name}: expected {expected}, found the shape {list(array.shape)}")
    return cast(list[Any], array.tolist())


def _mask(full: npt.NDArray[np.bool_]) -> Mask:
    full = np.asarray(full)
    if full.ndim != 2 or full.dtype != np.bool_:
        raise RequestError(f"mask: expected bool [height, width], found {full.dtype} {list(full.shape)}")
    return Mask.from_full(full)


def _segmentation(fields: Fields) -> Segmentation:
    mask = decode_mask(fields.any("mask"), f"{fields.what}: mask")
    return Segmentation(fields.integer("seq"), fields.number("score"), mask)


def _tracked(fields: Fields) -> TrackedObject:
    return TrackedObject(
        id=fields.integer("id"),
        camera=fields.text("camera"),
        label=fields.text("label"),
        state=fields.choice("state", get_args(TrackState)),
        score=fields.number("score"),
        age=fields.integer("age"),
        frames_since_seen=fields.integer("frames_since_seen"),
    )
