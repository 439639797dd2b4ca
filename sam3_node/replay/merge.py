"""Merges the masks of a forward and a backward pass over the same frames to one stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from ..errors import ReplayError
from ..geometry import mask_iou
from ..types import Instance, MaskFrame
from .second_pass import is_confident
from .shards import SECOND_PASS, Shards
from .store import Store

MIN_AGREEMENT_IOU = 0.5
"""Minimum IoU of both passes on the first frame of a span for them to agree."""


def read_results(store: Store, min_score: float) -> Iterator[MaskFrame]:
    """Yield the masks of a replay whose shards are complete, merged if there are two passes.

    `min_score` is the parameter of `merge`.
    """
    first, second = Shards(store), Shards(store, SECOND_PASS)
    if not len(second):
        return first.masks()
    return merge(first.masks(), reverse_shards(second.readers()), min_score)


def reverse_shards(readers: Sequence[Callable[[], Iterable[MaskFrame]]]) -> Iterator[MaskFrame]:
    """Yield the masks of a backward pass in the order of the frames, one shard in memory at a time.

    `readers` are those of `Shards.readers`. The shards, and the frames in them, are stored latest first.
    """
    for read in reversed(readers):
        yield from reversed(list(read()))


def merge(
    forward: Iterable[MaskFrame], backward: Iterable[MaskFrame], min_score: float
) -> Iterator[MaskFrame]:
    """Yield the forward pass's frames. An object in both passes has the mask with the higher score, forward on a tie.

    `backward` has some of these frames in the same order, which is the recording's over all cameras. Ids mean the same
    objects in both. A backward span is left out if the forward pass was confident (`min_score`) on the span's first
    frame and both masks there have an IoU below MIN_AGREEMENT_IOU: then the span follows another object.

    A frame keeps the forward pass's times. Its objects are in the forward pass's order, then those of the backward pass
    alone. `age` and `frames_since_seen` are counted again in frame order. Two frames are in memory. Raises ReplayError
    at the end if a frame of `backward` is not in `forward`.
    """
    ages, selector, remaining = _AgeCounter(), _PassSelector(min_score), iter(backward)
    behind = next(remaining, None)
    for masks in forward:
        if behind is not None and behind.key == masks.key:
            masks, behind = selector.select(masks, behind), next(remaining, None)
        yield ages.count(masks)
    if behind is not None:
        raise ReplayError(
            f"camera {behind.camera}: expected the second pass's frame {behind.seq} among those of the first, found "
            "that it is not; start over with --again"
        )


class _AgeCounter:
    """Counts for each object the frames that it was tracked on, and the frames since it was seen."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], tuple[int, int]] = {}

    def count(self, masks: MaskFrame) -> MaskFrame:
        """Return the frame with both counts updated."""
        instances = tuple(self._count_instance((masks.camera, item.id), item) for item in masks.instances)
        return replace(masks, instances=instances)

    def _count_instance(self, key: tuple[str, int], instance: Instance) -> Instance:
        # the age is 0 only on a first frame that the object was marked on
        age, since = self._counts.get(key, (min(instance.age, 1) - 1, 0))
        age, since = age + 1, since + 1 if instance.frames_since_seen else 0
        self._counts[key] = age, since
        return replace(instance, age=age, frames_since_seen=since)


class _PassSelector:
    """Selects masks of both passes, whose frames come in order. On the last frame of a span, an object has age 1."""

    def __init__(self, min_score: float) -> None:
        self._min_score = min_score
        self._spans: dict[tuple[str, int], tuple[int, bool]] = {}

    def select(self, forward: MaskFrame, backward: MaskFrame) -> MaskFrame:
        """Return one frame as `merge` describes it."""
        selected: dict[int, Instance] = {instance.id: instance for instance in forward.instances}
        for instance in backward.instances:
            before = selected.get(instance.id)
            agrees = self._check_span(forward.camera, before, instance)
            if agrees and (before is None or instance.score > before.score):
                selected[instance.id] = replace(instance, world_id=before.world_id if before else None)
        return replace(forward, instances=tuple(selected.values()))

    def _check_span(self, camera: str, before: Instance | None, instance: Instance) -> bool:
        """Return True if the instance belongs to a span that agrees with the forward pass on its first frame."""
        age, agrees = self._spans.get((camera, instance.id), (1, True))
        if age <= 1:
            agrees = (
                before is None
                or not is_confident(before, self._min_score)
                or mask_iou(before.mask, instance.mask) >= MIN_AGREEMENT_IOU
            )
        self._spans[camera, instance.id] = instance.age, agrees
        return agrees
