"""Compares replayed masks with recorded ones, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, replace

import numpy as np

from ..types import Instance, MaskFrame


@dataclass(frozen=True, slots=True)
class MaskComparison:
    """Number of frames with recorded masks, number of these with identical replayed masks, and the first difference."""

    frames: int
    identical: int
    first: str | None

    @property
    def is_identical(self) -> bool:
        return self.first is None

    def __str__(self) -> str:
        if self.first is None:
            return f"identical: the masks of all {self.frames} recorded frames, bit for bit"
        return f"different: the masks of {self.frames - self.identical} of {self.frames} recorded frames; {self.first}"


def compare_masks(replayed: Iterable[MaskFrame], recorded: Iterable[MaskFrame]) -> MaskComparison:
    """Compare replayed masks with recorded ones, both in the order of the steps.

    All fields must be equal, except the times of the stages and of publishing, and the node's session.
    """
    remaining, count, identical, first = iter(replayed), 0, 0, None
    masks = next(remaining, None)
    for expected in recorded:
        count += 1
        if masks is None or masks.key != expected.key:
            first = first or _describe(expected, "was not replayed")
            continue
        difference = _find_difference(_without_session(masks), _without_session(expected))
        identical += difference is None
        first = first or (difference and _describe(expected, difference))
        masks = next(remaining, None)
    if masks is not None:
        first = first or _describe(masks, "was not recorded")
    return MaskComparison(count, identical, first)


def _describe(masks: MaskFrame, difference: str) -> str:
    return f"camera {masks.camera}, frame {masks.seq} {difference}"


def _without_session(masks: MaskFrame) -> MaskFrame:
    return replace(masks, stages_us={}, published_ns=0, node=None, epoch=None)


def _find_difference(masks: MaskFrame, expected: MaskFrame) -> str | None:
    for item in fields(MaskFrame):
        here, there = getattr(masks, item.name), getattr(expected, item.name)
        if item.name != "instances" and here != there:
            return f"had {item.name} {there!r}, has {here!r}"
    ids, recorded = ([instance.id for instance in side.instances] for side in (masks, expected))
    if ids != recorded:
        return f"had the objects {recorded}, has {ids}"
    pairs = zip(masks.instances, expected.instances, strict=True)
    return next((text for pair in pairs if (text := _find_instance_difference(*pair))), None)


def _find_instance_difference(instance: Instance, expected: Instance) -> str | None:
    # a node gives each mask its confidence: without one, the recording is older than all optional fields
    is_older = expected.confidence is None and expected.mask.crop.any()
    # without that of a name, it is older than the doubt about names, on which other optional fields depend
    lacks_name = expected.name_confidence is None and instance.name_confidence is not None
    for item in fields(Instance):
        is_optional = item.default is not MISSING
        if is_optional and (is_older or (lacks_name and item.name != "confidence")):
            continue
        here, there = getattr(instance, item.name), getattr(expected, item.name)
        if item.name != "mask" and here != there:
            return f"had {item.name} {there!r} of object {instance.id}, has {here!r}"
    if instance.mask.box == expected.mask.box and np.array_equal(instance.mask.crop, expected.mask.crop):
        return None
    pixels = np.count_nonzero(instance.mask.full() != expected.mask.full())
    return f"has another mask of object {instance.id}: {pixels} pixels differ"
