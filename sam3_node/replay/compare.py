"""Whether a replay's masks are those that were recorded, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np

from ..types import Instance, MaskFrame


@dataclass(frozen=True, slots=True)
class Comparison:
    """Frames with recorded masks, how many of them were replayed with the same, and what the first difference is."""

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


def compare(replayed: Iterable[MaskFrame], recorded: Iterable[MaskFrame]) -> Comparison:
    """Hold masks against recorded ones; both are in the order in which they were found.

    All must be equal but for the times that the stages took and that of publishing.
    """
    ours, count, identical, first = iter(replayed), 0, 0, None
    found = next(ours, None)
    for expected in recorded:
        count += 1
        if found is None or _frame(found) != _frame(expected):
            first = first or _say(expected, "was not replayed")
            continue
        difference = _difference(_lasting(found), _lasting(expected))
        identical += difference is None
        first = first or (difference and _say(expected, difference))
        found = next(ours, None)
    if found is not None:
        first = first or _say(found, "was not recorded")
    return Comparison(count, identical, first)


def _frame(masks: MaskFrame) -> tuple[str, int, int]:
    return masks.camera, masks.seq, masks.capture_ns


def _say(masks: MaskFrame, what: str) -> str:
    return f"camera {masks.camera}, frame {masks.seq} {what}"


def _lasting(masks: MaskFrame) -> MaskFrame:
    return replace(masks, stages_us={}, published_ns=0)


def _difference(found: MaskFrame, expected: MaskFrame) -> str | None:
    for one in fields(MaskFrame):
        here, there = getattr(found, one.name), getattr(expected, one.name)
        if one.name != "instances" and here != there:
            return f"had {one.name} {there!r}, has {here!r}"
    ids, recorded = ([instance.id for instance in one.instances] for one in (found, expected))
    if ids != recorded:
        return f"had the objects {recorded}, has {ids}"
    pairs = zip(found.instances, expected.instances, strict=True)
    return next((text for pair in pairs if (text := _unlike(*pair))), None)


def _unlike(found: Instance, expected: Instance) -> str | None:
    for one in fields(Instance):
        here, there = getattr(found, one.name), getattr(expected, one.name)
        if one.name != "mask" and here != there:
            return f"had {one.name} {there!r} of object {found.id}, has {here!r}"
    if found.mask.box == expected.mask.box and np.array_equal(found.mask.crop, expected.mask.crop):
        return None
    pixels = np.count_nonzero(found.mask.full() != expected.mask.full())
    return f"has another mask of object {found.id}: {pixels} pixels differ"
