"""Keep the memories of objects, and choose those that a step attends to.

`MemoryBank` holds the memories of all objects in two preallocated tensors, written by index. Each object has a row: a
ring of the newest frames, then slots for conditioning frames, which are the prompted frames. Tables on the host record
which frame each slot holds, and `SelectionRule` chooses among them, so reading the bank never waits for the device.

With selection distractor, the last of these slots keeps the anchor: the newest frame with a sure mask on which a rival
of the object was in view (`has_rival`). Like a conditioning frame, it is attended to at any age.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import SettingsError
from ..models import TrackerModel
from ..models.sam.stages import Decoded, ReadLimits
from ..schema.state import Count, SavedState
from . import track_history
from .host_copy import HostCopy, copy_to_device
from .saved_tables import SavedTables
from .tracks import confidence, pad_to_batch

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

CONFIDENT_SCORE = 0.01
"""Score above which a frame's memory may be attended to with `tracker.selection` confident, as in SAM 3's memory
selection. The score is max(0, 2 * presence - 1) times the predicted IoU."""


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """A rule that attends to the newest of the eligible frames."""

    eligible: Callable[[Ints, Floats, int], Bools]
    """Takes ages int [N, R] in steps, scores float [N, R] and the limit; returns bool [N, R]."""
    by_score: bool = False
    """True if the rule uses scores. A frame's temporal offset is its rank then (1 is the newest), else its age."""
    keeps_anchor: bool = False
    """True if an anchor is attended to, too. It takes the place of one conditioning frame."""

    def choose(self, ages: Ints, scores: Floats, held: Bools, limit: int) -> tuple[Ints, Ints, Bools]:
        """Choose up to `limit` frames for each row.

        ages, scores and held are [N, R]; only frames where `held` is True can be chosen. Return three arrays
        [N, limit]: the indices into the second axis, their temporal offsets, and True where the index is valid.
        """
        eligible = held & self.eligible(ages, scores, limit)
        order = np.argsort(np.where(eligible, ages, np.iinfo(np.int64).max), axis=1, kind="stable")[:, :limit]
        valid = np.take_along_axis(eligible, order, axis=1)
        ranks = np.broadcast_to(np.arange(1, order.shape[1] + 1), order.shape)
        return order, ranks if self.by_score else np.take_along_axis(ages, order, axis=1), valid


# frames at most `limit` steps old: the reference's rule
RECENT = SelectionRule(lambda ages, scores, limit: ages <= limit)
RULES = {
    "recent": RECENT,
    # the newest frames with a confident mask, of any age, and always the last frame: SAM 3's memory selection
    # (`frame_filter` in facebookresearch/sam3), which keeps an occlusion from pushing the appearance out of memory
    "confident": SelectionRule(lambda ages, scores, limit: (scores > CONFIDENT_SCORE) | (ages == 1), True),
    "distractor": replace(RECENT, keeps_anchor=True),
}


def get_rule(name: str) -> SelectionRule:
    """Return the selection rule called `name`; SettingsError lists the valid names."""
    try:
        return RULES[name]
    except KeyError:
        raise SettingsError(f"selection {name!r}: expected one of {', '.join(RULES)}") from None


NO_FRAME = -1
"""Frame number of a slot that holds no memory."""
CONDITIONING_SLOTS = 8
"""Conditioning frames that are kept for weights whose configuration sets no limit. The reference would keep all."""
CONDITIONING_POINTERS = 16
"""Object pointers of conditioning frames that are kept for weights that attend to them longer than to the frames'
memories."""
ANCHOR_GAP = 5  # frames between two anchors, at least
SURE_AREA = (0.8, 1.2)  # bounds of a sure mask's area over the median of its track
SURE_SCORE = 0.8  # share of the median score of a track from which a mask is sure


class Memories(NamedTuple):
    """The memories that N objects attend to, in the order of the arguments of `MemoryAttention`."""

    memory: Tensor
    """[N, S, T, 64]; the first is the memory of the newest conditioning frame"""
    offset: Tensor
    """int64 [N, S]"""
    pointers: Tensor
    """[N, P, C]"""
    pointer_age: Tensor
    """float32 [N, P], in frames"""
    valid: Tensor | None
    """bool [N, S + P]; [N, P] if all memories are valid; None if all are valid"""


FindBuffer = Callable[[int, tuple[int, ...], torch.dtype], Tensor | None]
"""Returns where a read takes its input of this number, shape and dtype; None if nowhere yet."""
Gather = Callable[[FindBuffer | None], Memories]


class ReadGroup(NamedTuple):
    """Objects that are read together because they have equally many memories."""

    positions: Ints
    """int64 [n], positions in the rows that were asked for"""
    gather: Gather
    """Returns the memories of the objects at `positions`; with static shapes, more rows follow to be ignored. Those of
    frames are where the read takes them, if it says where."""


class _Slots(NamedTuple):
    """Selected slots of each row: slot int64 [N, K], time int64 [N, K], valid bool [N, K].

    slot: of a row; in a selection, among the slots of all rows.
    """

    slot: Ints
    time: Ints
    valid: Bools

    def take(self, rows: Ints, width: int | None = None) -> _Slots:
        """Take some rows, and the first `width` columns. The default is those that any of the rows uses.

        The valid columns of a row come first.
        """
        used = max(1, int(self.valid[rows].sum(axis=1).max())) if width is None else width
        return _Slots(self.slot[rows, :used], self.time[rows, :used], self.valid[rows, :used])

    def all_have(self, count: int) -> bool:
        """Return True if each row has this number of valid slots."""
        return bool((self.valid.sum(axis=1) == count).all())

    def reorder(self, order: Ints) -> _Slots:
        """Return the slots of each row in another order: int64 [N, K]."""
        reordered: Iterator[Any] = (np.take_along_axis(array, order, axis=1) for array in self)
        return _Slots(*reordered)


class _Selection(NamedTuple):
    """The slots that n rows attend to, and `Memories.valid`."""

    memory: _Slots
    pointer: _Slots
    mask: Bools | None


class MemoryState(SavedState, tag="memories"):
    """What `MemoryBank` keeps: the tables of all slots, and the memories of the rows in use."""

    slot_tables: list[Tensor]
    used: list[Count]
    features: Tensor
    pointers: Tensor


class MemoryBank(SavedTables):
    """Memories of up to `max_objects` objects, with `bank_size` frames each.

    The tensors are allocated once. `bank_size` counts the frames that a step may attend to and one conditioning frame,
    so 7 is the reference. The ring keeps `history` more frames, so that each of the last `history` frames can be read
    again as it was read when it was the newest.
    """

    STATE = MemoryState

    def __init__(
        self, model: TrackerModel, max_objects: int, bank_size: int, rule: SelectionRule, history: int = 0
    ) -> None:
        self._rule = rule
        self._num_maskmem = model.num_maskmem
        self._max_pointers = model.max_pointers
        self._window = bank_size - 1
        self._ring = self._window + history
        self._conditioning = model.max_conditioning if model.max_conditioning > 0 else CONDITIONING_SLOTS
        self._keeps_anchor = rule.keeps_anchor and self._conditioning > 1
        # columns of the conditioning memories: the last one may be the anchor's
        prompts = self._conditioning - self._keeps_anchor
        self._prompts = slice(prompts)
        self._anchor = slice(prompts, None)
        self._pointer_slots = self._conditioning
        if model.capabilities.keeps_old_pointers:
            self._pointer_slots = CONDITIONING_POINTERS
        self._ages_conditioning = model.capabilities.ages_conditioning
        self._pointer_window = max(self._window, model.max_pointers - 1)
        self._pointer_ring = self._pointer_window + history
        self.features = (
            torch.zeros(  # [objects, ring + conditioning, T, 64], or of groups of objects that share a memory
                (max_objects, self._ring + self._conditioning, model.memory_tokens, model.memory_channels),
                dtype=model.memory_dtype,
                device=model.device,
            )
        )
        self.pointers = torch.zeros(  # [objects, ring + conditioning, C]
            (max_objects, self._pointer_ring + self._pointer_slots, model.pointer_width),
            dtype=model.dtype,
            device=model.device,
        )
        table = (max_objects, self._pointer_ring)
        self._frame: Ints = np.full(table, NO_FRAME, dtype=np.int64)
        self._prompted: Bools = np.zeros(table, dtype=np.bool_)
        self._score: Floats = np.zeros(table, dtype=np.float32)
        self._area: Ints = np.zeros(table, dtype=np.int64)  # of tracked masks, with selection distractor
        self._conditioning_frame: Ints = np.full((max_objects, self._conditioning), NO_FRAME, dtype=np.int64)
        self._conditioning_pointer: Ints = np.full(
            (max_objects, self._pointer_slots), NO_FRAME, dtype=np.int64
        )
        self._slot_tables = (
            self._frame,
            self._prompted,
            self._score,
            self._area,
            self._conditioning_frame,
            self._conditioning_pointer,
        )
        self._unread: list[tuple[Ints, int, list[HostCopy]]] = []

    @property
    def nbytes(self) -> int:
        """Device memory of the bank in bytes. It never changes."""
        return self.features.nbytes + self.pointers.nbytes

    @property
    def conditioning(self) -> int:
        """Number of conditioning frames of a row."""
        return self._conditioning

    @property
    def layout(self) -> list[Any]:
        """Shapes and dtype. A state fits any bank with the same layout."""
        return [list(self.features.shape), list(self.pointers.shape), str(self.pointers.dtype)]

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers of memories and pointers in a row that is read with static shapes."""
        memories = self._num_maskmem - 1 + self._conditioning
        return memories, self._max_pointers - 1 + self._pointer_slots

    @torch.inference_mode()
    def clear(self, row: int) -> None:
        """Erase the object in `row`."""
        for table in (self._frame, self._conditioning_frame, self._conditioning_pointer):
            table[row] = NO_FRAME
        self.features[row] = 0  # attention multiplies masked values by 0, but 0 * NaN is NaN
        self.pointers[row] = 0

    def forget_recent(self, row: int) -> None:
        """Forget all frames of the object in `row`, except its conditioning frames."""
        self._frame[row] = self._conditioning_frame[row, self._anchor] = NO_FRAME

    @torch.inference_mode()
    def copy_conditioning(self, source: int, target: int) -> None:
        """Copy the conditioning frames of one row to another, which is clear."""
        self.features[target, self._ring :] = self.features[source, self._ring :]
        self.pointers[target, self._pointer_ring :] = self.pointers[source, self._pointer_ring :]
        for table in (self._conditioning_frame, self._conditioning_pointer):
            table[target] = table[source]

    def is_conditioning(self, row: int, frame: int) -> bool:
        """Return True if `frame` is a conditioning frame of the object in `row`."""
        return bool((self._conditioning_pointer[row] == frame).any())

    def conditioning_slot(self, row: int, frame: int) -> int | None:
        """Return which of the conditioning frames of a row `frame` is; None if it is none, or is no longer kept."""
        slots = np.flatnonzero(self._conditioning_frame[row] == frame)
        return int(slots[0]) if slots.size else None

    def memory_at(self, row: int, frame: int) -> Tensor:
        """Return the memory [T, 64] of a frame that the row holds."""
        slot = self.conditioning_slot(row, frame)
        return self.features[row, frame % self._ring if slot is None else self._ring + slot]

    def pointer_at(self, row: int, frame: int) -> Tensor:
        """Return the pointer [C] of a frame that the row holds."""
        slot = self.conditioning_slot(row, frame)
        return self.pointers[row, frame % self._pointer_ring if slot is None else self._pointer_ring + slot]

    def write(self, rows: Ints, frame: int, memory: Tensor, decoded: Decoded) -> None:
        """Store a tracked frame for N rows: memory [N, T, 64], and the decoder's output, of N objects or more."""
        index = copy_to_device(rows, self.features.device)
        slot = frame % self._pointer_ring
        self.features[index, frame % self._ring] = memory
        self.pointers[index, slot] = decoded.pointer[: len(rows)]
        self._frame[rows, slot] = frame
        self._prompted[rows, slot] = False
        if self._rule.by_score or self._keeps_anchor:
            levels = track_history.compare_levels(decoded.logits)[::2] if self._keeps_anchor else ()
            score = confidence(decoded.presence, decoded.iou).float()
            self._unread.append((rows, frame, [HostCopy(values) for values in (score, *levels)]))

    def write_conditioning(self, row: int, frame: int, now: int, memory: Tensor, pointer: Tensor) -> None:
        """Store a prompted frame for one row: memory [1, T, 64], pointer [1, C]. `frame` is at most step `now`.

        A conditioning frame outlives the ring. When the conditioning slots are full, it replaces the oldest. The anchor
        goes, because a prompt can mean that the object was followed wrongly.
        """
        self._settle()  # otherwise a tracked mask's score would overwrite this one later, or be an anchor again
        self._conditioning_frame[row, self._anchor] = NO_FRAME
        if (slot := _take_slot(self._conditioning_frame[row, self._prompts], frame)) is not None:
            self.features[row, self._ring + slot] = memory[0]
        if (slot := _take_slot(self._conditioning_pointer[row], frame)) is not None:
            self.pointers[row, self._pointer_ring + slot] = pointer[0]
        if now - frame < self._ring:  # an evicted conditioning frame still counts while it is recent
            self.features[row, frame % self._ring] = memory[0]
        if now - frame < self._pointer_ring:
            at = row, frame % self._pointer_ring
            self._frame[at] = frame
            self._prompted[at] = True
            self._score[at] = 1.0
            self._area[at] = 0

    def has_tracked(self, row: int, frame: int) -> bool:
        """Return True if the object in `row` was tracked on `frame` without a prompt, as far as the ring goes back."""
        slot = frame % self._pointer_ring
        return bool(self._frame[row, slot] == frame and not self._prompted[row, slot])

    def correct(self, row: int, frame: int, now: int, memory: Tensor, pointer: Tensor) -> None:
        """Replace a tracked frame of one row: memory [1, T, 64], pointer [1, C]. It stays a tracked frame.

        `frame` is before step `now`, and `has_tracked` is True for it.
        """
        slot = frame % self._pointer_ring
        if now - frame <= self._ring:
            self.features[row, frame % self._ring] = memory[0]
        self.pointers[row, slot] = pointer[0]
        self._settle()  # otherwise the tracked mask's score would overwrite this one later
        self._score[row, slot] = 1.0
        self._conditioning_frame[row, self._anchor] = NO_FRAME

    def read(
        self,
        rows: Ints,
        frame: int,
        static: bool,
        find_buffer: FindBuffer | None = None,
        full_apart: bool = False,
    ) -> Memories:
        """Return the memories that `rows` attend to on step `frame`; with `static`, of equal shapes on every step.

        full_apart: rows that are all full have a shape of their own, without a mask. find_buffer: see
        `ReadGroup.gather`. On a step in the past, tracked frames and pointers of later frames are left out, as in the
        reference.
        """
        self._settle()
        memory = self._memory_slots(rows, frame)
        pointer = self._select_pointers(rows, frame)
        memories, pointers = self.full_widths
        mask: Bools | None
        if full_apart and memory.all_have(memories) and pointer.all_have(pointers):
            every = np.arange(len(rows))
            memory = memory.take(every, memories)
            pointer = pointer.take(every, pointers)
            mask = None
        elif static:
            mask = np.concatenate([memory.valid, pointer.valid], axis=1)
        else:
            every = np.arange(len(rows))
            memory = memory.take(every)
            pointer = pointer.take(every)
            mask = _join_masks(memory.valid, pointer.valid)
        [gather] = self._send([_Selection(memory, pointer, mask)])
        return gather(find_buffer)

    def read_groups(
        self, rows: Ints, frame: int, static: bool, engine_objects: int | None = None, padded: bool = False
    ) -> list[ReadGroup]:
        """Return what `read` does, in groups with equally many memories, so that no memory is masked.

        With `static`, there are few different shapes: numbers of memories are in `read_widths`, numbers of
        objects are batch sizes, and numbers of pointers are equal. Objects with another number of memories read the
        whole bank with a mask. An engine takes up to `engine_objects` objects at once, always with a mask; it reads as
        many memories as the next of these widths. `padded`: numbers of pointers are equal, with a mask of them.
        """
        self._settle()
        memory = self._memory_slots(rows, frame)
        pointer = self._select_pointers(rows, frame)
        counts = memory.valid.sum(axis=1)
        widths = np.array(self.read_widths)
        if engine_objects:
            keys = widths[np.searchsorted(widths, counts)]
        else:
            keys = np.where(np.isin(counts, widths), counts, 0) if static else counts
        placed = []
        selections = []
        for count in np.unique(keys).tolist():
            positions = np.flatnonzero(keys == count)
            chosen = pad_to_batch(positions) if static else positions
            size = engine_objects or len(chosen)
            for start in range(0, len(positions), size):
                part = chosen[start : start + size]
                held = memory.take(part, (count or self.widths[0]) if static else None)
                seen = pointer.take(part, self.widths[1] if static or padded else None)
                mask: Bools | None = seen.valid
                if static and (engine_objects or not count):
                    mask = np.concatenate([held.valid, seen.valid], axis=1)
                elif not (static or padded):
                    mask = _join_masks(held.valid, seen.valid)
                placed.append(positions[start : start + size])
                selections.append(_Selection(held, seen, mask))
        return list(map(ReadGroup, placed, self._send(selections)))

    @property
    def full_widths(self) -> tuple[int, int]:
        """Numbers of memories and pointers of an object that was prompted once and followed long enough."""
        return min(self._window, self._num_maskmem - 1) + 1, self._max_pointers

    @property
    def read_widths(self) -> list[int]:
        """The numbers of memories of one object that are read without a mask where shapes are static.

        These are a full ring with one, with two and with all conditioning frames.
        """
        recent = min(self._window, self._num_maskmem - 1)
        counts = {1, 2, self._conditioning}
        return sorted(recent + count for count in counts if count <= self._conditioning)

    def examples(self, objects: int, limits: ReadLimits) -> Iterator[Memories]:
        """Yield empty memories in every shape that a read of these limits gets with static shapes.

        objects: a batch size.
        """
        slots, pointers = self.widths
        if limits.any_width:
            for width in self.read_widths:
                yield self._make_example(objects, width, pointers, pointers)
            yield self._make_example(objects, slots, pointers, slots + pointers)
        elif limits.max_objects is not None:
            for width in self.read_widths:
                yield self._make_example(objects, width, pointers, width + pointers)
        else:
            if limits.full_from is not None and objects >= limits.full_from:
                yield self._make_example(objects, *self.full_widths, None)
            yield self._make_example(objects, slots, pointers, slots + pointers)

    def _make_example(self, objects: int, slots: int, pointers: int, masked: int | None) -> Memories:
        """Make memories whose values are zero, with a mask of this width that leaves out nothing."""
        device = self.features.device
        valid = None if masked is None else torch.ones(objects, masked, dtype=torch.bool, device=device)
        return Memories(
            self.features.new_zeros(objects, slots, *self.features.shape[2:]),
            torch.zeros(objects, slots, dtype=torch.int64, device=device),
            self.pointers.new_zeros(objects, pointers, self.pointers.shape[-1]),
            torch.zeros(objects, pointers, device=device),
            valid,
        )

    def _send(self, selections: list[_Selection]) -> list[Gather]:
        """Send the indices of all selections to the device in one block; return what gathers each one's memories."""
        none = np.empty(0, np.bool_)
        indices = [
            [*memory[:2], *pointer[:2], none if mask is None else mask]
            for memory, pointer, mask in selections
        ]
        arrays = list(chain(*indices))
        # one dtype for all, so that a single copy carries them
        flat = np.concatenate([array.ravel() for array in arrays], dtype=np.int64)
        block = copy_to_device(flat, self.features.device).split([array.size for array in arrays])
        views = (part.view(array.shape) for part, array in zip(block, arrays, strict=True))
        return [
            partial(self._gather, selection.mask is not None, list(islice(views, len(group))))
            for selection, group in zip(selections, indices, strict=True)
        ]

    def _gather(self, has_mask: bool, indices: list[Tensor], find_buffer: FindBuffer | None) -> Memories:
        index, offset, pointer_index, age, valid = indices
        frames = self.features.flatten(0, 1)
        pointers = self.pointers.flatten(0, 1)
        shape = *index.shape, *frames.shape[1:]
        memory = find_buffer(1, shape, frames.dtype) if find_buffer else None
        if memory is None:
            memory = frames[index]
        else:
            # the read takes its input from this buffer, so a second copy is saved
            torch.index_select(frames, 0, index.flatten(), out=memory.view(-1, *shape[2:]))
        mask = valid.bool() if has_mask else None
        return Memories(memory, offset, pointers[pointer_index], age.float(), mask)

    def conditioning_pointers(self, rows: Ints) -> tuple[Tensor, Tensor]:
        """Return the pointers of N rows' prompted frames, [N, P, C] in no order, and bool [N, P]: True if valid."""
        held = torch.from_numpy(self._conditioning_pointer[rows] != NO_FRAME).to(self.pointers.device)
        index = torch.from_numpy(rows).to(self.pointers.device)
        return self.pointers[index, self._pointer_ring :], held

    @property
    @torch.inference_mode()
    def used(self) -> list[int]:
        """The rows in use: an object has a conditioning frame."""
        # scores that are on their way to the host belong to what is saved, and to nothing that is restored
        self._settle()
        rows: list[int] = np.flatnonzero((self._conditioning_frame != NO_FRAME).any(axis=1)).tolist()
        return rows

    def _memory_slots(self, rows: Ints, frame: int) -> _Slots:
        frames = self._frame[rows]
        ages = frame - self._frame[rows]
        conditioning = self._conditioning_frame[rows]
        conditioning[conditioning == frame] = NO_FRAME  # the anchor, if its own frame is corrected
        # a frame that is also a conditioning frame must not be attended to twice
        attended = (frames[:, :, None] == conditioning[:, None, :]).any(axis=2)
        held = (frames != NO_FRAME) & (ages > 0) & (ages <= self._window) & ~attended
        chosen, offset, valid = self._rule.choose(ages, self._score[rows], held, self._num_maskmem - 1)
        index = np.take_along_axis(frames, chosen, axis=1) % self._ring
        prompted = self._conditioning_slots(
            conditioning, self._ring, self._conditioning_offset(frame, conditioning)
        )
        # it comes last, since the first is the newest prompted frame
        conditioning[:, self._anchor] = NO_FRAME
        newest_first = np.argsort(-conditioning, axis=1, kind="stable")
        return _join(
            rows * self.features.shape[1],
            prompted.reorder(newest_first),
            _Slots(np.where(valid, index, 0), np.where(valid, offset - 1, 0), valid),
        )

    def _conditioning_offset(self, frame: int, conditioning: Ints) -> Ints:
        """Return the rows of the temporal table for conditioning frames: the last one, or SAM 3.1's, by their age."""
        last = self._num_maskmem - 1
        if not self._ages_conditioning:
            return np.full_like(conditioning, last)
        # the table runs the other way for these: the reference counts from the oldest frame
        ages = frame - conditioning
        return np.where((ages > 0) & (ages <= last), last - ages, last)

    def _select_pointers(self, rows: Ints, frame: int) -> _Slots:
        ages = frame - self._frame[rows]
        held = (self._frame[rows] != NO_FRAME) & (ages > 0) & (ages <= self._pointer_window)
        held &= ~self._prompted[rows]
        chosen, age, valid = self._rule.choose(ages, self._score[rows], held, self._max_pointers - 1)
        conditioning = self._conditioning_pointer[rows]
        # on a step in the past, the prompts of later frames are not known yet
        conditioning = np.where(conditioning <= frame, conditioning, NO_FRAME)
        return _join(
            rows * self.pointers.shape[1],
            _Slots(np.where(valid, chosen, 0), np.where(valid, age, 0), valid),
            self._conditioning_slots(conditioning, self._pointer_ring, frame - conditioning),
        )

    @staticmethod
    def _conditioning_slots(frames: Ints, offset: int, time: Ints) -> _Slots:
        valid = frames != NO_FRAME
        index = np.broadcast_to(offset + np.arange(frames.shape[1]), frames.shape)
        return _Slots(np.where(valid, index, 0), np.where(valid, time, 0), valid)

    def _settle(self) -> None:
        """Take the last frame's scores and anchors.

        Their copy began when they were written, so this waits for no later work.
        """
        for rows, frame, copies in self._unread:
            score, *levels = (copy.read() for copy in copies)
            self._score[rows, frame % self._pointer_ring] = score[: len(rows)]
            if levels:
                for row, inside, around in zip(rows.tolist(), *levels, strict=False):
                    self._judge(row, frame, inside, around)
        self._unread.clear()

    def _judge(self, row: int, frame: int, inside: Bools, around: Bools) -> None:
        """Make a tracked frame the anchor of one row if its mask [h, w] is sure and a rival is in view.

        `around` is the mask at logit -1.
        """
        slot = frame % self._pointer_ring
        last = self._conditioning_frame[row, -1]
        self._area[row, slot] = area = np.count_nonzero(inside)
        is_held = self._frame[row, slot] == frame  # False if the row was cleared since
        if not area or not is_held or (last != NO_FRAME and frame - last <= ANCHOR_GAP):
            return
        seen = (self._frame[row] != NO_FRAME) & (self._area[row] > 0)
        usual_area, usual_score = (np.median(table[row, seen]) for table in (self._area, self._score))
        is_sure = SURE_AREA[0] <= area / usual_area <= SURE_AREA[1]
        if (
            is_sure
            and self._score[row, slot] >= SURE_SCORE * usual_score
            and track_history.has_rival(inside, around)
        ):
            self._conditioning_frame[row, -1] = frame
            self.features[row, -1] = self.features[row, frame % self._ring]


def _take_slot(frames: Ints, frame: int) -> int | None:
    """Put a frame into the slot that holds it, or else the oldest one; return the slot, None if all are newer."""
    same = np.flatnonzero(frames == frame)
    slot = int(same[0]) if same.size else int(frames.argmin())
    if frame < frames[slot]:
        return None
    frames[slot] = frame
    return slot


def _join_masks(memory: Bools, pointer: Bools) -> Bools | None:
    """Return the shortest `valid` of `Memories` that says the same as both masks."""
    if not memory.all():
        return np.concatenate([memory, pointer], axis=1)
    return None if pointer.all() else pointer


def _join(start: Ints, first: _Slots, second: _Slots) -> _Slots:
    """Concatenate both along axis 1, and move the valid slots of each row to the front.

    start: int64 [N], number of the first slot of each row among those of all rows.
    """
    joined = _Slots(*(np.concatenate(pair, axis=1) for pair in zip(first, second, strict=True)))
    joined = joined._replace(slot=joined.slot + start[:, None])
    # a stable sort keeps the order of the valid slots
    return joined.reorder(np.argsort(~joined.valid, axis=1, kind="stable"))
