"""Keeps the results of a running replay in numbered shards on disk, and stitches the masks of overlapping segments.

A shard is the file `<folder>/<number>.masks`, in a folder for each pass. It has MAGIC, the SHA-256 of the rest, and a
msgpack map: the position in the schedule at its end, the counts until then, and camera and body of its masks messages
in order. `<folder>/<number>.state` is written before it, and deleted when the next shard is complete.

The frames that two segments share tell which objects are the same: those with one label whose masks overlap enough, in
the best assignment of all pairs at once (Kuhn 1955).
"""

import hashlib
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import NamedTuple

import msgpack
import msgspec
import numpy as np
from scipy.optimize import linear_sum_assignment

from ..errors import ReplayError
from ..geometry import mask_intersection
from ..types import Instance, MaskFrame
from ..wire import masks_topic, pack_masks, unpack_masks
from .player import Player
from .store import WORK, ReplayCounts, Store, StoredCounts

FIRST_PASS = f"{WORK}/parts"
"""Folder of the forward pass."""
SECOND_PASS = f"{WORK}/second"
"""Folder of the backward pass."""
MAGIC = b"SAM3PRT1"
"""First bytes of a shard."""
MIN_IOU = 0.5
"""IoU of two segments' masks from which they may be one object."""
CameraObject = tuple[str, int]
"""Camera and id of an object."""
ObjectPair = tuple[CameraObject, CameraObject]

_BODY_START = len(MAGIC) + hashlib.sha256().digest_size


class Cursor(NamedTuple):
    """Position of a replay: the number of completed actions, and the `ReplayCounts` until then."""

    actions: int
    totals: StoredCounts


class _Shard(msgspec.Struct):
    """The map of a shard."""

    actions: int
    tally: StoredCounts
    masks: list[tuple[str, bytes]]


class ShardLimits(NamedTuple):
    """Size at which a shard ends: frames, seconds of work or bytes of masks. A kill loses at most one shard."""

    frames: int = 1000
    seconds: float = 15.0
    bytes: int = 32 << 20


LIMITS = ShardLimits()


class Shards:
    """The shards of one pass in a store: what existed when this was created, and what was added since."""

    def __init__(self, store: Store, folder: str = FIRST_PASS) -> None:
        self._store = store
        self._folder = folder
        # shards are numbered without gaps: the first missing number is the next one
        existing = set(store.names(folder))
        self._count = 0
        while self._masks_name(self._count) in existing:
            self._count += 1

    def __len__(self) -> int:
        return self._count

    def cursor(self) -> Cursor:
        """Read the position at the end of the last complete shard. Raises ReplayError if the shard is damaged."""
        if not self._count:
            return Cursor(0, {})
        shard = self._read(self._count - 1)
        return Cursor(shard.actions, shard.tally)

    def checkpoint(self) -> bytes:
        """Read the state at the end of the last complete shard. Raises ReplayError if it is missing."""
        name = self._state_name(self._count - 1)
        if not self._store.exists(name):
            raise ReplayError(f"expected {name} to continue from, found none; start over with --again")
        return self._store.read(name)

    def add(self, masks: Sequence[tuple[str, bytes]], cursor: Cursor, checkpoint: bytes) -> None:
        """Write a shard: camera and message body of each frame, and the position and the player's state at its end."""
        number = self._count
        # the key `tally` is part of the file format
        body = msgpack.packb({"actions": cursor.actions, "tally": cursor.totals, "masks": masks})
        # the state first: a shard without it could not be continued
        self._store.write(self._state_name(number), checkpoint)
        self._store.write(self._masks_name(number), MAGIC + hashlib.sha256(body).digest() + body)
        self._count += 1
        # a replay is continued from the newest state only
        if number:
            self._store.delete(self._state_name(number - 1))

    def masks(self) -> Iterator[MaskFrame]:
        """Yield the masks of all shards in order, one shard in memory at a time.

        Raises ReplayError if a shard is damaged.
        """
        for number in range(self._count):
            yield from self._read_masks(number)

    def masks_backward(self) -> Iterator[MaskFrame]:
        """Yield the same, the last first, still one shard in memory at a time."""
        for number in reversed(range(self._count)):
            yield from reversed(list(self._read_masks(number)))

    def clear(self) -> None:
        """Delete all shards, the last first, so that at any moment the rest is a valid unfinished replay."""
        for name in reversed(self._store.names(self._folder)):
            self._store.delete(name)
        self._count = 0

    def finish(self) -> None:
        """Delete the last state: a finished replay is not continued."""
        if self._count:
            self._store.delete(self._state_name(self._count - 1))

    def _read_masks(self, number: int) -> Iterator[MaskFrame]:
        for camera, body in self._read(number).masks:
            yield unpack_masks([masks_topic(camera), body])

    def _read(self, number: int) -> _Shard:
        # a disk may lose what it has confirmed: never continue from a damaged shard
        data = self._store.read(self._masks_name(number))
        digest = data[len(MAGIC) : _BODY_START]
        if data[: len(MAGIC)] != MAGIC or hashlib.sha256(data[_BODY_START:]).digest() != digest:
            raise ReplayError(
                f"{self._masks_name(number)}: expected a whole shard of a replay, found {len(data)} bytes that are "
                "damaged; start over with --again"
            )
        try:
            return msgspec.msgpack.decode(data[_BODY_START:], type=_Shard)
        except msgspec.MsgspecError as error:
            raise ReplayError(
                f"{self._masks_name(number)}: expected a shard of this version, found another one: {error}; start over "
                "with --again"
            ) from error

    def _masks_name(self, number: int) -> str:
        return f"{self._folder}/{number:06}.masks"

    def _state_name(self, number: int) -> str:
        return f"{self._folder}/{number:06}.state"


class ShardWriter:
    """Resumes a player at the end of the last complete shard, and writes its further outcomes to shards.

    Raises ReplayError if a shard is damaged, or if the player has another model or other settings.
    """

    def __init__(self, shards: Shards, player: Player, limits: ShardLimits) -> None:
        self.cursor = shards.cursor()
        """Position at the end of the last complete shard."""
        self.totals = ReplayCounts.from_totals(self.cursor.totals)
        # counts and notes go on from those of earlier runs
        if len(shards):
            player.resume(shards.checkpoint(), self.totals.counts)
            player.notes.extend(self.totals.notes)
        self._shards = shards
        self._player = player
        self._limits = limits
        self._actions = self.cursor.actions
        self._open()

    @property
    def frames(self) -> int:
        """Number of frames stepped so far."""
        return self._player.counts["frames"]

    def add(self, masks: MaskFrame | None) -> None:
        """Add the outcome of an action: masks, if it was a step that did not fail. Write the shard if it is full."""
        # actions count, not frames: a resumed replay skips as many of the schedule
        self._actions += 1
        if masks is not None:
            _, body = pack_masks(masks)
            self._masks.append((masks.camera, body))
            self._size += len(body)
            self.totals.add(masks)
        if self._is_full():
            self.flush()

    def flush(self) -> None:
        """Write the open shard if it has any actions."""
        if self._actions > self.cursor.actions:
            self.totals.work_s += time.monotonic() - self._begin_s
            self.totals.counts = self._player.counts
            self.totals.notes = self._player.notes
            self.cursor = Cursor(self._actions, self.totals.to_totals())
            self._shards.add(self._masks, self.cursor, self._player.checkpoint())
            self._open()

    def _open(self) -> None:
        self._masks: list[tuple[str, bytes]] = []
        self._size = 0
        self._begin_s = time.monotonic()
        self._frames_before = self.frames

    def _is_full(self) -> bool:
        limits = self._limits
        seconds = time.monotonic() - self._begin_s
        frames = self.frames - self._frames_before
        return frames >= limits.frames or seconds >= limits.seconds or self._size >= limits.bytes


class Segment(NamedTuple):
    """Frames `start` to `stop` (exclusive) of a recording, counted from 0 over all of its cameras."""

    start: int
    stop: int


def cut_segments(frame_count: int, length: int, overlap: int) -> list[Segment]:
    """Cut a recording into segments of `length` frames. Each begins `overlap` frames before the previous one ends.

    The last segment may be shorter. 0 <= overlap < length.
    """
    starts = range(0, max(frame_count - overlap, min(frame_count, 1)), length - overlap)
    return [Segment(start, min(start + length, frame_count)) for start in starts]


def stitch(segments: Iterable[Iterable[MaskFrame]], overlap: int) -> Iterator[MaskFrame]:
    """Yield the masks of consecutive segments as one stream, each frame once.

    An object gets the id of the previous segment's object with the same label and an IoU of at least MIN_IOU, over
    the frames of the overlap with both in view. Without one, it gets a new id; no id is used twice. Ids of the first
    segment are unchanged, as are ages. Frames up to the middle of an overlap come from the earlier segment. At most
    twice `overlap` frames are in memory.
    """
    tail = deque[MaskFrame]()
    max_ids = Counter[str]()
    for number, segment in enumerate(segments):
        # the overlap: the end of the previous segment, and the beginning of this one
        frames = iter(segment)
        head = list(islice(frames, overlap))
        rename = partial(_rename, ids=match_objects(tail, head), max_ids=max_ids, keep=number == 0)
        earlier, later = _cut_overlap(list(tail), head)
        yield from earlier

        # hold the last frames back: the next segment may replace them
        tail = deque(map(rename, later))
        for masks in frames:
            tail.append(rename(masks))
            if len(tail) > overlap:
                yield tail.popleft()
    yield from tail


def match_objects(earlier: Iterable[MaskFrame], later: Iterable[MaskFrame]) -> dict[CameraObject, int]:
    """Map objects (camera, id) of `later` to ids of `earlier`, by IoU over all pixels of the shared frames."""
    ious = _compute_ious(earlier, later)
    rows = sorted({before for before, _ in ious})
    columns = sorted({after for _, after in ious})
    table = np.zeros((len(rows), len(columns)))
    for row, before in enumerate(rows):
        for column, after in enumerate(columns):
            table[row, column] = ious.get((before, after), 0.0)

    # a pair below the limit is no match, but it may be assigned for the sum of the others
    table[table < MIN_IOU] = 0
    matches = {}
    for row, column in zip(*linear_sum_assignment(table, maximize=True), strict=True):
        if table[row, column] > 0:
            _, earlier_id = rows[row]
            matches[columns[column]] = earlier_id
    return matches


def _rename(masks: MaskFrame, ids: dict[CameraObject, int], max_ids: Counter[str], keep: bool) -> MaskFrame:
    """Return the frame's masks with the ids of the stream. Objects not in `ids` yet `keep` theirs or get a new one."""
    instances = []
    for instance in masks.instances:
        unused = instance.id if keep else max_ids[masks.camera] + 1
        new_id = ids.setdefault((masks.camera, instance.id), unused)
        max_ids[masks.camera] = max(max_ids[masks.camera], new_id)
        instances.append(replace(instance, id=new_id, world_id=None))
    return replace(masks, instances=tuple(instances))


def _compute_ious(earlier: Iterable[MaskFrame], later: Iterable[MaskFrame]) -> dict[ObjectPair, float]:
    """Compute the IoU of pairs of objects of one camera. Pixels are summed over all frames before dividing."""
    # large objects count as much as they have pixels, on all frames together
    frames = {masks.key: masks for masks in earlier}
    shared = Counter[ObjectPair]()
    union = Counter[ObjectPair]()
    for masks in later:
        for a, b in _pair_instances(frames.get(masks.key), masks):
            pair = (masks.camera, a.id), (masks.camera, b.id)
            pixels = mask_intersection(a.mask, b.mask)
            shared[pair] += pixels
            union[pair] += a.area + b.area - pixels
    return {pair: shared[pair] / union[pair] for pair in union}


def _pair_instances(before: MaskFrame | None, masks: MaskFrame) -> Iterator[tuple[Instance, Instance]]:
    """Yield pairs of instances with one label that are both in view."""
    if before is None:
        return
    for a in before.instances:
        for b in masks.instances:
            if a.label == b.label and a.mask.crop.size and b.mask.crop.size:
                yield a, b


def _cut_overlap(tail: list[MaskFrame], head: list[MaskFrame]) -> tuple[list[MaskFrame], list[MaskFrame]]:
    """Return the earlier frames up to the middle of the frames that both segments have, and the later ones from it."""
    # the earlier segment has tracked longer, the later one has detected anew: change over in the middle
    tail_keys = [masks.key for masks in tail]
    head_keys = [masks.key for masks in head]
    shared = [key for key in tail_keys if key in head_keys]
    if not shared:
        return tail, head
    middle = shared[len(shared) // 2]
    return tail[: tail_keys.index(middle)], head[head_keys.index(middle) :]
