"""Long recordings cut into overlapping segments, and the masks of the segments stitched to one stream.

The frames that two segments share tell which of their objects are the same: objects with one label whose masks overlap
enough, in the best assignment of all pairs at once (Kuhn 1955).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from ..geometry import mask_intersection
from ..types import FrameKey, Instance, MaskFrame

MIN_IOU = 0.5

CameraObject = tuple[str, int]
"""Camera and id of an object."""


class Segment(NamedTuple):
    """Frames `start` to `stop` (exclusive) of a recording, counted from 0 over all of its cameras."""

    start: int
    stop: int


def cut_segments(frame_count: int, length: int, overlap: int) -> list[Segment]:
    """Cut a recording into segments of `length` frames. Each begins `overlap` frames before the previous one ends.

    The last segment may be shorter. Raises ValueError unless 0 <= overlap < length.
    """
    if not 0 <= overlap < length:
        raise ValueError(f"expected an overlap of 0 to {length - 1} frames (length - 1), found {overlap}")
    starts = range(0, max(frame_count - overlap, min(frame_count, 1)), length - overlap)
    return [Segment(start, min(start + length, frame_count)) for start in starts]


def stitch(
    segments: Iterable[Iterable[MaskFrame]], overlap: int, min_iou: float = MIN_IOU
) -> Iterator[MaskFrame]:
    """Yield the masks of consecutive segments as one stream, each frame once.

    An object gets the id of the previous segment's object with the same label and an IoU of at least `min_iou`, over
    the frames of the overlap with both in view. Without one, it gets a new id; no id is used twice. Ids of the first
    segment are unchanged, as are ages. Frames up to the middle of an overlap come from the earlier segment. At most
    twice `overlap` frames are in memory.
    """
    ids = _StitchedIds()
    tail: deque[MaskFrame] = deque()
    for number, segment in enumerate(segments):
        frames = iter(segment)
        head = list(islice(frames, overlap))
        ids.begin(match_objects(tail, head, min_iou), keep=number == 0)
        middle = _find_middle(tail, head)
        yield from _take_before(tail, middle)
        tail = deque(ids.rename(masks) for masks in _skip_to(head, middle))
        for masks in frames:
            tail.append(ids.rename(masks))
            if len(tail) > overlap:
                yield tail.popleft()
    yield from tail


def match_objects(
    earlier: Iterable[MaskFrame], later: Iterable[MaskFrame], min_iou: float = MIN_IOU
) -> dict[CameraObject, int]:
    """Map objects (camera, id) of `later` to ids of `earlier`, by IoU over all pixels of the shared frames."""
    overlaps = _compute_ious(earlier, later)
    matches: dict[CameraObject, int] = {}
    for camera, ious in overlaps.items():
        rows, columns = sorted({a for a, _ in ious}), sorted({b for _, b in ious})
        table = np.array([[ious.get((a, b), 0.0) for b in columns] for a in rows])
        table[table < min_iou] = 0
        for row, column in zip(*linear_sum_assignment(table, maximize=True), strict=True):
            if table[row, column] > 0:
                matches[camera, columns[column]] = rows[row]
    return matches


class _StitchedIds:
    """Maps the ids of the current segment to ids of the stitched stream."""

    def __init__(self) -> None:
        self._ids: dict[CameraObject, int] = {}
        self._max_id: dict[str, int] = {}
        self._keep = True

    def begin(self, matched: Mapping[CameraObject, int], keep: bool) -> None:
        """Start a segment. `matched` objects have these ids; all others `keep` their id or get a new one."""
        self._ids, self._keep = dict(matched), keep

    def rename(self, masks: MaskFrame) -> MaskFrame:
        """Return the frame's masks with the ids of the stream."""
        instances = (
            replace(item, id=self._get_id(masks.camera, item.id), world_id=None) for item in masks.instances
        )
        return replace(masks, instances=tuple(instances))

    def _get_id(self, camera: str, object_id: int) -> int:
        max_id = self._max_id.get(camera, 0)
        new_id = self._ids.setdefault((camera, object_id), object_id if self._keep else max_id + 1)
        self._max_id[camera] = max(max_id, new_id)
        return new_id


def _compute_ious(
    earlier: Iterable[MaskFrame], later: Iterable[MaskFrame]
) -> dict[str, dict[tuple[int, int], float]]:
    """Compute the IoU of pairs of ids, by camera. Pixels are summed over all frames before dividing."""
    frames = {masks.key: masks for masks in earlier}
    sums: dict[tuple[str, int, int], list[int]] = defaultdict(lambda: [0, 0])
    for masks in later:
        before = frames.get(masks.key)
        for a, b in _pair_instances(before, masks):
            shared = mask_intersection(a.mask, b.mask)
            total = sums[masks.camera, a.id, b.id]
            total[0] += shared
            total[1] += a.area + b.area - shared
    ious: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)
    for (camera, a_id, b_id), (shared, union) in sums.items():
        ious[camera][a_id, b_id] = shared / union
    return ious


def _pair_instances(before: MaskFrame | None, masks: MaskFrame) -> Iterator[tuple[Instance, Instance]]:
    """Yield pairs of instances with one label that are both in view."""
    for a in before.instances if before else ():
        for b in masks.instances:
            if a.label == b.label and a.mask.crop.size and b.mask.crop.size:
                yield a, b


def _find_middle(tail: Sequence[MaskFrame], head: Sequence[MaskFrame]) -> FrameKey | None:
    """Return the first frame to take from the later segment, None if the segments share no frame."""
    head_keys = {masks.key for masks in head}
    shared = [masks.key for masks in tail if masks.key in head_keys]
    return shared[len(shared) // 2] if shared else None


def _take_before(tail: Sequence[MaskFrame], middle: FrameKey | None) -> Iterator[MaskFrame]:
    for masks in tail:
        if masks.key == middle:
            return
        yield masks


def _skip_to(head: Sequence[MaskFrame], middle: FrameKey | None) -> Iterator[MaskFrame]:
    keys = [masks.key for masks in head]
    return islice(head, keys.index(middle) if middle else 0, None)
