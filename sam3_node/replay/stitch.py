"""Long recordings cut into segments that overlap, and the masks of the segments joined again.

What two segments found on the frames that both have says which of their objects are one: those of one label whose masks
overlap enough, in the best assignment of all at once (Kuhn 1955).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from ..types import Instance, Mask, MaskFrame

SAME = 0.5

Object = tuple[str, int]  # camera and id
Key = tuple[str, int, int]


class Segment(NamedTuple):
    """Frames `start` to `stop` (exclusive) of a recording, counted from 0 over all of its cameras."""

    start: int
    stop: int


def cut(frame_count: int, length: int, overlap: int) -> list[Segment]:
    """Segments of `length` frames, the last one shorter, each beginning `overlap` frames before the former ends.

    Raises ValueError unless 0 <= overlap < length.
    """
    if not 0 <= overlap < length:
        raise ValueError(f"expected an overlap of 0 to {length - 1} frames (length - 1), found {overlap}")
    starts = range(0, max(frame_count - overlap, min(frame_count, 1)), length - overlap)
    return [Segment(start, min(start + length, frame_count)) for start in starts]


def stitch(segments: Iterable[Iterable[MaskFrame]], overlap: int, same: float = SAME) -> Iterator[MaskFrame]:
    """The masks of consecutive segments as one stream, each frame once, twice `overlap` frames in memory at most.

    An object of a segment gets the id of the one before it that has its label and, over the frames of the overlap on
    which both are in view, an IoU of at least `same` with it; any other one gets a new id, so that none is used again.
    Those of the first segment stay. Frames up to the middle of an overlap are the earlier segment's. Ages stay.
    """
    ids = _Ids()
    held: deque[MaskFrame] = deque()
    for number, segment in enumerate(segments):
        frames = iter(segment)
        head = list(islice(frames, overlap))
        ids.begin(match(held, head, same), keep=number == 0)
        middle = _middle(held, head)
        yield from _before(held, middle)
        held = deque(ids.rename(found) for found in _since(head, middle))
        for found in frames:
            held.append(ids.rename(found))
            if len(held) > overlap:
                yield held.popleft()
    yield from held


def match(earlier: Iterable[MaskFrame], later: Iterable[MaskFrame], same: float = SAME) -> dict[Object, int]:
    """Objects (camera, id) of `later` -> ids in `earlier`, by IoU over all pixels of the frames that show both."""
    overlaps = _overlaps(earlier, later)
    found: dict[Object, int] = {}
    for camera, ious in overlaps.items():
        rows, columns = sorted({a for a, _ in ious}), sorted({b for _, b in ious})
        table = np.array([[ious.get((a, b), 0.0) for b in columns] for a in rows])
        table[table < same] = 0
        for row, column in zip(*linear_sum_assignment(table, maximize=True), strict=True):
            if table[row, column] > 0:
                found[camera, columns[column]] = rows[row]
    return found


class _Ids:
    """What the objects of the segment at hand are called in the whole."""

    def __init__(self) -> None:
        self._names: dict[Object, int] = {}
        self._greatest: dict[str, int] = {}
        self._keep = True

    def begin(self, joined: Mapping[Object, int], keep: bool) -> None:
        """The next segment; `joined` are the ids of those known, and others `keep` their own or get new ones."""
        self._names, self._keep = dict(joined), keep

    def rename(self, found: MaskFrame) -> MaskFrame:
        instances = (replace(one, id=self._name(found.camera, one.id)) for one in found.instances)
        return replace(found, instances=tuple(instances))

    def _name(self, camera: str, object_id: int) -> int:
        greatest = self._greatest.get(camera, 0)
        name = self._names.setdefault((camera, object_id), object_id if self._keep else greatest + 1)
        self._greatest[camera] = max(greatest, name)
        return name


def _overlaps(
    earlier: Iterable[MaskFrame], later: Iterable[MaskFrame]
) -> dict[str, dict[tuple[int, int], float]]:
    """For each camera the IoU of pairs of ids, summed over frames before dividing."""
    frames = {_key(found): found for found in earlier}
    sums: dict[tuple[str, int, int], list[int]] = defaultdict(lambda: [0, 0])
    for found in later:
        before = frames.get(_key(found))
        for a, b in _pairs(before, found):
            shared = intersection(a.mask, b.mask)
            total = sums[found.camera, a.id, b.id]
            total[0] += shared
            total[1] += a.area + b.area - shared
    ious: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)
    for (camera, a_id, b_id), (shared, union) in sums.items():
        ious[camera][a_id, b_id] = shared / union
    return ious


def _pairs(before: MaskFrame | None, found: MaskFrame) -> Iterator[tuple[Instance, Instance]]:
    """Those of one label that are both in view."""
    for a in before.instances if before else ():
        for b in found.instances:
            if a.label == b.label and a.mask.crop.size and b.mask.crop.size:
                yield a, b


def intersection(a: Mask, b: Mask) -> int:
    """Pixels inside both masks, which are of images of one size."""
    x0, y0 = max(a.box[0], b.box[0]), max(a.box[1], b.box[1])
    x1, y1 = min(a.box[2], b.box[2]), min(a.box[3], b.box[3])
    if x0 >= x1 or y0 >= y1:
        return 0
    crops = (m.crop[y0 - m.box[1] : y1 - m.box[1], x0 - m.box[0] : x1 - m.box[0]] for m in (a, b))
    return int(np.count_nonzero(np.logical_and(*crops)))


def _key(found: MaskFrame) -> Key:
    return found.camera, found.seq, found.capture_ns


def _middle(held: Sequence[MaskFrame], head: Sequence[MaskFrame]) -> Key | None:
    """The first frame that is the later segment's, None where no frame is common."""
    known = {_key(found) for found in head}
    common = [_key(found) for found in held if _key(found) in known]
    return common[len(common) // 2] if common else None


def _before(held: Sequence[MaskFrame], middle: Key | None) -> Iterator[MaskFrame]:
    for found in held:
        if _key(found) == middle:
            return
        yield found


def _since(head: Sequence[MaskFrame], middle: Key | None) -> Iterator[MaskFrame]:
    keys = [_key(found) for found in head]
    return islice(head, keys.index(middle) if middle else 0, None)
