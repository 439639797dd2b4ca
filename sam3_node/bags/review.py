"""Chooses the frames of a recording that a person should look at, by doubt and by jumps of shape.

Each object is looked at by itself. Consecutive frames on which its mask is doubtful are one run, and so are those on
which it has no mask, and those on which its shape jumps. A run is offered once: where it begins, because a correction
there also reaches the rest; one of jumps where it ends, because the shape stays as it is then. What people have said of
its frames splits a run, and what remains is offered in the middle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Literal

import msgspec

from ..geometry import mask_iou
from ..schema.marks import Mark
from ..types import Instance, Mask, MaskFrame

MIN_JUMP = 0.15
"""Smallest jump of a shape that is offered."""
SETTLED_FRAMES = 10
"""Frames before and after a run whose areas are compared: what an arm hides for a moment is as large again after it."""
MAX_GAP = 5
"""Frames of an object between two runs that are one."""
MIN_LEFT = 10
"""Frames from which on a part of a run is offered beside which people have looked: the next ones are much the same."""
MIN_HIDDEN = 3
"""Frames without a mask from which on it is asked whether the object is really gone."""
MAX_ENTRIES = 500
"""Largest number of entries of a queue."""

Reason = Literal["doubtful", "jump", "gone"]
ObjectKey = tuple[str, int]
"""Camera and id of an object."""


class Look(msgspec.Struct, frozen=True):
    """What there is to see of one object on one frame."""

    index: int
    """number of the frame in the recording, over all cameras"""
    seq: int
    doubtful: bool
    gone: bool
    """True: it has no mask, and had one before"""
    jump: float
    """1 less the IoU with its mask on the frame before, moved with its centre; 0 without one, or without a mask"""
    area: int
    """of its mask, in pixels"""


class QueueEntry(msgspec.Struct, frozen=True):
    """A frame to look at, for one object."""

    index: int
    camera: str
    seq: int
    id: int
    reason: Reason
    doubt: float
    """share 0..1 of the object's masks that are doubtful here: those of the run, of all its frames"""
    change: float
    """0..1: how much larger or smaller the object is after the run than before, 1 less the ratio of the median areas"""
    jump: float
    """0..1, the largest of its shape from one frame of the run to the next"""
    frames: int
    """of the run"""


class Reviewer:
    """Looks at the masks of a recording one after the other, and queues what a person should look at."""

    def __init__(self) -> None:
        self._looks: dict[ObjectKey, list[Look]] = defaultdict(list)
        self._last: dict[ObjectKey, Mask] = {}

    def add(self, index: int, masks: MaskFrame) -> None:
        """Look at the masks of the next frame, the `index`-th of the recording."""
        for instance in masks.instances:
            key = masks.camera, instance.id
            before = self._last.get(key)
            is_seen = instance.area > 0
            jump = compute_jump(before, instance) if is_seen and before is not None else 0.0
            gone = not is_seen and key in self._looks and instance.state == "occluded"
            if is_seen or gone:
                self._looks[key].append(
                    Look(index, masks.seq, instance.doubtful, gone, round(jump, 3), instance.area)
                )
            self._last.pop(key, None)
            if is_seen:
                self._last[key] = instance.mask

    def queue(self, marks: Sequence[Mark]) -> list[QueueEntry]:
        """Return the frames to look at, by the share of doubtful masks plus the change of the area, falling."""
        said: dict[tuple[str, int, int | None], bool] = {}
        for mark in marks:
            if mark.state == "open":
                said.pop(mark.place, None)
            # a prompt for a new object says nothing of the others
            elif mark.id is not None or not mark.is_edit:
                said[mark.place] = mark.is_edit
        entries = []
        for (camera, object_id), looks in list(self._looks.items()):
            # True: corrected, False: only an opinion
            own = [
                said.get((camera, look.seq, object_id), said.get((camera, look.seq, None))) for look in looks
            ]
            entries += list(_queue_object(camera, object_id, looks, own))
        entries.sort(key=lambda entry: (-entry.doubt - entry.change, -entry.jump, entry.index))
        return entries[:MAX_ENTRIES]


def compute_jump(before: Mask, instance: Instance) -> float:
    """Return 1 less the IoU of a mask with the one before, moved so that their centres agree: 0 alike, 1 different."""
    mask = instance.mask
    if before.size != mask.size:
        return 1.0
    x0, y0 = _find_centre(before)
    x1, y1 = _find_centre(mask)
    return 1.0 - mask_iou(before.shifted(round(x1 - x0), round(y1 - y0)), mask)


def _find_centre(mask: Mask) -> tuple[float, float]:
    """Return the mean (x, y) of the pixels of a mask that has some."""
    area = max(1, mask.area)
    rows = mask.crop.sum(axis=1)
    columns = mask.crop.sum(axis=0)
    x = float((columns * range(len(columns))).sum() / area)
    y = float((rows * range(len(rows))).sum() / area)
    return mask.box[0] + x, mask.box[1] + y


def _queue_object(
    camera: str, object_id: int, looks: Sequence[Look], said: Sequence[bool | None]
) -> Iterator[QueueEntry]:
    """Yield what is to be looked at of one object. `said` tells of each look whether somebody corrected it or spoke."""
    covered: set[int] = set()
    for reason, first, last in _find_runs(looks):
        # a jump at the edge of another run is that run's own
        if reason == "jump" and not covered.isdisjoint(range(first, last + 1)):
            continue
        covered.update(range(first - MAX_GAP, last + MAX_GAP + 1))
        change = _compute_change(looks, first, last)
        for begin, end, at in _split_run(looks, reason, first, last, said):
            part = looks[begin : end + 1]
            share = sum(look.doubtful for look in part) / len(looks)
            # a run may begin with the jump that ends the frames before it
            jump = max(look.jump for look in part)
            yield QueueEntry(
                looks[at].index,
                camera,
                looks[at].seq,
                object_id,
                reason,
                round(share, 4),
                change,
                jump,
                len(part),
            )


def _compute_change(looks: Sequence[Look], first: int, last: int) -> float:
    """Return 1 less the ratio of the median areas before and after a run; 0 if the object is not seen on one side."""
    before = [look.area for look in looks[max(0, first - SETTLED_FRAMES) : first] if look.area]
    after = [look.area for look in looks[last + 1 : last + 1 + SETTLED_FRAMES] if look.area]
    if not before or not after:
        return 0.0
    small, large = sorted((median(before), median(after)))
    return round(1.0 - small / large, 3)


def _find_runs(looks: Sequence[Look]) -> Iterator[tuple[Reason, int, int]]:
    """Yield reason, first and last of each run, those of jumps at the end."""
    numbers: dict[Reason, list[int]] = {"doubtful": [], "gone": [], "jump": []}
    for number, look in enumerate(looks):
        if look.doubtful:
            numbers["doubtful"].append(number)
        if look.gone:
            numbers["gone"].append(number)
        if look.jump >= MIN_JUMP:
            numbers["jump"].append(number)
    for reason, found in numbers.items():
        for first, last in _join_runs(found):
            if reason != "gone" or last - first + 1 >= MIN_HIDDEN:
                yield reason, first, last


def _join_runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return first and last of each run of numbers with small gaps."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number - runs[-1][1] <= MAX_GAP:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return runs


def _split_run(
    looks: Sequence[Look], reason: Reason, first: int, last: int, said: Sequence[bool | None]
) -> Iterator[tuple[int, int, int]]:
    """Yield first, last and the place to look at of each part of a run that nobody has spoken of.

    A correction also speaks of what follows, until it is carried out: then its own frame is no longer in doubt. What
    anybody says of a run of jumps speaks of all of it.
    """
    spoken = [number for number in range(first, last + 1) if said[number] is not None]
    if reason == "jump":
        if not spoken:
            yield first, last, last
        return
    is_new = all(one is None for one in said[max(0, first - MAX_GAP) : first])
    begin = first
    for number in [*spoken, last + 1]:
        if is_new and not spoken:
            yield first, last, first
        elif number - begin >= MIN_LEFT:
            yield begin, number - 1, (begin + number - 1) // 2
        if number <= last and said[number] and (looks[number].doubtful or looks[number].gone):
            return
        begin = number + 1
