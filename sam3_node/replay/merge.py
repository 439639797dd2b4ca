"""Masks of two passes over the same frames, forward and backward in time, as one stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from ..errors import ReplayError
from ..types import Instance, MaskFrame
from .second_pass import is_sure
from .shards import SECOND, Shards
from .stitch import intersection
from .store import Store

AGREE = 0.5
"""IoU from which on both passes have the same thing on the first frame of a span."""


def results(store: Store, doubt: float) -> Iterator[MaskFrame]:
    """The masks of a replay whose parts are all there, of both passes where there are two; `doubt` is `merge`'s."""
    first, second = Shards(store), Shards(store, SECOND)
    return merge(first.masks(), turned(second.each()), doubt) if len(second) else first.masks()


def merge(forward: Iterable[MaskFrame], backward: Iterable[MaskFrame], doubt: float) -> Iterator[MaskFrame]:
    """The frames of the forward pass; of an object that both have there, what scored higher, of equals the forward one.

    `backward` has some of these frames, in the same order: that of the recording, over all cameras. An id means the
    same object in both. Where the forward pass was sure (`doubt`) on the first frame of a span of the backward one, and
    they do not AGREE there, the span shows another thing and is left out.

    A frame keeps the forward pass's times; its objects come in the forward pass's order, then those that backward alone
    has. `age` and `frames_since_seen` are counted anew, by the order of the frames. Two frames in memory. Raises
    ReplayError at the end where `backward` has a frame that is not among `forward`'s.
    """
    ages, judge, behind = _Ages(), _Judge(doubt), iter(backward)
    waiting = next(behind, None)
    for found in forward:
        if waiting is not None and _frame(waiting) == _frame(found):
            found, waiting = judge.better(found, waiting), next(behind, None)
        yield ages.count(found)
    if waiting is not None:
        raise ReplayError(
            f"camera {waiting.camera}: expected the second pass's frame {waiting.seq} among those of the first, found "
            "that it is not; begin the replay anew with --again"
        )


def turned(parts: Sequence[Callable[[], Iterable[MaskFrame]]]) -> Iterator[MaskFrame]:
    """What a backward pass left, in the order of the frames: `parts` in the order in which it wrote them.

    The frames within each part are in that order, too, which is the latest first. One part is in memory at a time.
    """
    for part in reversed(parts):
        yield from reversed(list(part()))


class _Ages:
    """Counts on how many frames each object was tracked so far, and since when it is not seen."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[int, int]] = {}

    def count(self, found: MaskFrame) -> MaskFrame:
        """The same frame, with both."""
        instances = tuple(self._counted((found.camera, one.id), one) for one in found.instances)
        return replace(found, instances=instances)

    def _counted(self, key: tuple[str, int], one: Instance) -> Instance:
        # an object is 0 frames old only where it is shown on its first frame
        age, since = self._known.get(key, (min(one.age, 1) - 1, 0))
        age, since = age + 1, since + 1 if one.frames_since_seen else 0
        self._known[key] = age, since
        return replace(one, age=age, frames_since_seen=since)


class _Judge:
    """Chooses between both passes, whose frames come in order. On the last frame of a span an object is 1 frame old."""

    def __init__(self, doubt: float) -> None:
        self._doubt = doubt
        self._spans: dict[tuple[str, int], tuple[int, bool]] = {}

    def better(self, forward: MaskFrame, backward: MaskFrame) -> MaskFrame:
        """One frame as `merge` gives it."""
        chosen: dict[int, Instance] = {one.id: one for one in forward.instances}
        for one in backward.instances:
            before = chosen.get(one.id)
            if self._is_same(forward.camera, before, one) and (before is None or one.score > before.score):
                chosen[one.id] = one
        return replace(forward, instances=tuple(chosen.values()))

    def _is_same(self, camera: str, before: Instance | None, one: Instance) -> bool:
        """Whether the span that this is of is to be believed."""
        age, same = self._spans.get((camera, one.id), (1, True))
        if age <= 1:
            same = before is None or not is_sure(before, self._doubt) or _iou(before, one) >= AGREE
        self._spans[camera, one.id] = one.age, same
        return same


def _iou(a: Instance, b: Instance) -> float:
    shared = intersection(a.mask, b.mask)
    return shared / (a.area + b.area - shared)


def _frame(masks: MaskFrame) -> tuple[str, int, int]:
    return masks.camera, masks.seq, masks.capture_ns
