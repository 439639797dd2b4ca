"""Follow objects in groups that share a memory, its attention and a run of the decoder: the "multiplex" of SAM 3.1.

A group is a row of a `MemoryBank`, and has `TrackerModel.slots` slots. The tracker's row of the object in slot s of
group g is g * slots + s. A memory holds the masks of all objects of its group on one frame, so a prompt for one object,
a correction or a removal concerns the others:

- Add: the frame is encoded anew with the masks that the others have on it, and becomes a conditioning frame of the
  group. In older memories the slot is empty, as it was.
- Correct: the frame is encoded anew with the corrected mask in place of the tracked one.
- Remove: the slot is empty from the next frame on. Older memories show the object, so its slot is not given again.
- Build anew: where no slot is left, or where two groups have become small enough to be one, the conditioning frames of
  the group are encoded again from their saved masks, without the objects that left. Of the frames between, only the
  newest is kept.

An object that begins on a frame too old for its group, and one that catches up, has a group of its own until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from ..errors import CapacityError, SettingsError
from ..models import Features, TrackerModel
from ..models.sam.stages import Decoded, find_limits
from ..schema.state import Count, SavedState, Time
from .host_copy import copy_to_device
from .memory import NO_FRAME, Bools, Ints, MemoryBank, MemoryState, SelectionRule
from .propagation import PRESENT_LOGIT, MemoryPropagation, Prompted, Propagation, WarmUp
from .saved_tables import SavedTables
from .tracks import Cover, ObjectRows, PromptTensors, RowsState, confidence

FREE_LOGIT = 0.0
"""Logit of the pixels of a slot that holds no object. The memory encoder sees it as neither inside nor outside."""
FREE_PRESENCE = -10.0
"""Presence logit of a slot that holds no object."""
MAX_LOGIT = 32.0
"""Largest logit of a mask that a correction begins with. Larger ones are beyond what the prompt encoder has learnt."""
MERGE_GAP = 30
"""Frames between two times that a group is built anew to be merged. Fewer would forget the frames between too often."""


class GroupSlots(ObjectRows):
    """The row of each object. One that was given back is given again once its group is empty or built anew."""

    def __init__(self, capacity: int, spare: int, slots: int, groups: int) -> None:
        super().__init__(capacity, spare)
        self.slots = slots
        self.groups = groups
        # the rows that may be given: those of each group that were not since it was empty or built anew
        self._free = list(range(groups * slots))

    def members(self, group: int) -> list[int]:
        """Return the keys of a group's objects, in the order of their slots."""
        rows = {row: key for key, row in self._rows.items() if row // self.slots == group}
        return [rows[row] for row in sorted(rows)]

    def key_of(self, row: int) -> int:
        """Return the key that holds a row."""
        return next(key for key, held in self._rows.items() if held == row)

    def shared_groups(self) -> list[int]:
        """Return the groups that hold objects, without those of objects that catch up."""
        apart = {row // self.slots for key, row in self._rows.items() if key < 0}
        return sorted({row // self.slots for row in self._rows.values()} - apart)

    def empty_groups(self) -> list[int]:
        """Return the groups without objects."""
        held = {row // self.slots for row in self._rows.values()}
        return [group for group in range(self.groups) if group not in held]

    def open_groups(self) -> list[int]:
        """Return the groups in which a slot can be given, the first to fill first."""
        return [group for group in self.shared_groups() if self._free_rows(group)]

    def rebuild(self, keys: Sequence[int], group: int) -> None:
        """Move objects to the first slots of a group. All its objects are among them."""
        for slot, key in enumerate(keys):
            self._rows[key] = group * self.slots + slot
        self._begin(group, len(keys))
        for empty in self.empty_groups():
            self._begin(empty, 0)

    def before_restore(self, state: RowsState) -> None:
        """Raise ValueError if the rows do not fit these groups."""
        rows = [*state.rows.values(), *state.free]
        if len(set(rows)) != len(rows) or not set(rows) <= set(range(self.groups * self.slots)):
            raise ValueError(
                f"expected each of {self.groups * self.slots} rows at most once, found {state.rows}, {state.free}"
            )

    def _free_rows(self, group: int) -> list[int]:
        """Return the rows of a group that may be given, the first to give first."""
        return [row for row in self._free if row // self.slots == group]

    def _begin(self, group: int, given: int) -> None:
        """Let all rows of a group be given but the first ones, which are."""
        others = [row for row in self._free if row // self.slots != group]
        begin = group * self.slots
        self._free = sorted([*others, *range(begin + given, begin + self.slots)])

    def _take(self, key: int, apart: bool) -> int:
        """Return a row in a group that has room. An object that catches up, or is `apart`, has an empty group."""
        groups = self.empty_groups() if key < 0 or apart else [*self.open_groups(), *self.empty_groups()]
        if not groups:
            raise CapacityError(
                "expected a group of objects for one that begins on a past frame, found all "
                f"{self.groups} in use; try again in a second, or prompt the newest frame"
            )
        row = self._free_rows(groups[0])[0]
        self._free.remove(row)
        return row

    def _give_back(self, row: int) -> None:
        """Note that no key holds this row any more."""
        group = row // self.slots
        if not self.members(group):
            self._begin(group, 0)


@dataclass(frozen=True, slots=True, eq=False)
class GroupFrame:
    """The objects of a group on one frame: what its memory is encoded from."""

    frame: int
    top: Tensor
    """[1, C, h, w], the frame's image tokens"""
    logits: Tensor
    """[slots, 4h, 4w]"""
    presence: Tensor
    """logit [slots]"""
    pointers: Tensor
    """[slots, C]"""
    used: Bools
    """bool [slots]: slots that held an object"""
    prompted: Bools
    """bool [slots]: slots whose mask is of a prompt"""
    masks: dict[int, Tensor] = field(default_factory=dict)
    """by slot, the memory encoder's masks [16h, 16w] that prompts gave; they are finer than `logits`"""

    def put(self, slot: int, prompted: Prompted) -> GroupFrame:
        """Return the group frame with the result of a prompt, of one object, in one slot."""
        decoded = prompted.decoded
        logits = self.logits.clone()
        logits[slot] = decoded.logits[0]
        presence = self.presence.clone()
        presence[slot] = decoded.presence[0]
        pointers = self.pointers.clone()
        pointers[slot] = decoded.pointer[0]
        used = self.used.copy()
        used[slot] = True
        flags = self.prompted.copy()
        flags[slot] = True
        masks = {held: mask for held, mask in self.masks.items() if held != slot}
        if prompted.masks is not None:
            masks[slot] = prompted.masks[0, 0]
        return replace(
            self,
            logits=logits,
            presence=presence,
            pointers=pointers,
            used=used,
            prompted=flags,
            masks=masks,
        )


class FineMasks(NamedTuple):
    """The masks that prompts gave for objects of a group on one frame."""

    group: Count
    frame: Time
    slots: list[Count]
    masks: Tensor
    """[slots, 16h, 16w]"""


class GroupsState(SavedState, tag="groups"):
    """What `GroupMemory` keeps: the memories, the tables of all group frames, and the masks of the groups in use."""

    used: list[Count]
    bank: MemoryState = msgspec.field(name="groups")
    frame_tables: list[Tensor]
    logits: Tensor
    presence: Tensor
    fine: list[FineMasks]


class GroupMemory(Propagation, SavedTables):
    """Follows objects in groups by the memories of a bank, in tensors that are allocated once.

    It also serves as the memory bank: its rows are those of `group_slots`, the tracker's.
    """

    STATE = GroupsState

    def __init__(
        self, model: TrackerModel, group_slots: GroupSlots, bank_size: int, rule: SelectionRule, history: int
    ) -> None:
        if rule.keeps_anchor:
            raise SettingsError(
                "tracker.selection: expected recent or confident for weights whose objects share a memory, found "
                "distractor, which is decided for each object"
            )
        self._model = model
        self._group_slots = group_slots
        self._slots = model.slots
        groups = group_slots.groups
        self.bank = MemoryBank(model, groups, bank_size, rule, history)
        self._reader = MemoryPropagation(model, self.bank)
        self._recent = history + 1
        """Newest frames that are kept for each group, so that they can be encoded anew"""
        # first the newest frames, then the conditioning frames in the order of the bank's slots
        kept_frames = self._recent + self.bank.conditioning
        table = (groups, kept_frames)
        self._logits = torch.zeros(
            (*table, self._slots, *model.mask_size), device=model.device, dtype=model.dtype
        )
        self._presence = torch.zeros((*table, self._slots), device=model.device)
        self._frame: Ints = np.full(table, NO_FRAME, dtype=np.int64)
        self._used: Bools = np.zeros((*table, self._slots), dtype=np.bool_)
        self._prompted: Bools = np.zeros((*table, self._slots), dtype=np.bool_)
        self._active: Bools = np.zeros((groups, self._slots), dtype=np.bool_)
        """Slots whose objects are followed"""
        self._built: Ints = np.zeros(groups, dtype=np.int64)
        """Frame on which each group was begun or built anew"""
        self._moved: list[int] = []
        self._frame_tables = (self._frame, self._used, self._prompted, self._active, self._built)
        self._fine: list[FineMasks] = []
        """Of each group at most, the newest masks of prompts, while their frame may be encoded anew for another one"""

    @property
    def nbytes(self) -> int:
        """Device memory in bytes, without the masks of prompts on the newest frames. It never changes."""
        return self.bank.nbytes + self._logits.nbytes + self._presence.nbytes

    @property
    def layout(self) -> list[Any]:
        """Shapes and dtype. A state fits any object with the same layout."""
        return [*self.bank.layout, list(self._logits.shape), str(self._logits.dtype)]

    # the objects of the tracker

    def take_batch(self, rows: Ints, most: int) -> Ints:
        """Return the positions in `rows` of all objects of the first `most` groups."""
        # an engine may take fewer; the read splits its groups itself
        most = min(most, find_limits(self._model.stages.decode).max_objects or most)
        groups = rows // self._slots
        first = list(dict.fromkeys(groups.tolist()))[:most]
        return np.flatnonzero(np.isin(groups, first))

    def count_reads(self, rows: Ints) -> int:
        """Return the number of groups of the objects in `rows`."""
        return len(np.unique(rows // self._slots))

    def begins_apart(self, frame: int, now: int) -> bool:
        """Return True for a frame that is not kept any more."""
        return now - frame >= self._recent

    def make_room(self, key: int, now: int) -> None:
        """Build groups anew, if no slot is left for one more object."""
        if key < 0:
            if not self._group_slots.empty_groups():
                self._merge_smallest(now)
            return
        if self._group_slots.open_groups() or self._group_slots.empty_groups():
            return
        # the shared groups have slots for all objects, so one of them has fewer objects than slots
        group = min(
            self._group_slots.shared_groups(), key=lambda group: len(self._group_slots.members(group))
        )
        self._rebuild(self._group_slots.members(group), group, now)

    def take_moved(self) -> list[int]:
        """Return the ids of objects whose group changed, since the last call."""
        moved = self._moved
        self._moved = []
        return moved

    def end_step(self, frame: int) -> None:
        """Merge two groups whose objects fit into one, unless either was built anew a short time ago."""
        self._fine = [fine for fine in self._fine if frame - fine.frame < self._recent]
        groups = self._group_slots.shared_groups()
        if len(groups) > 1 and all(frame - self._built[group] >= MERGE_GAP for group in groups):
            self._merge_smallest(frame)

    def _merge_smallest(self, now: int) -> None:
        """Merge the two groups with the fewest objects, if they fit into one."""
        groups = sorted(
            self._group_slots.shared_groups(), key=lambda group: len(self._group_slots.members(group))
        )
        if len(groups) < 2:
            return
        fewer, more = groups[:2]
        keys = [*self._group_slots.members(more), *self._group_slots.members(fewer)]
        if len(keys) <= self._slots:
            self._rebuild(keys, more, now)

    @torch.inference_mode()
    def clear(self, row: int) -> None:
        """Erase the object in a row. Older memories of its group still show it, until the group has no objects."""
        group, slot = divmod(row, self._slots)
        self._active[group, slot] = False
        held = [self._group_slots[key] for key in self._group_slots.members(group)]
        if set(held) <= {row}:
            self._clear_group(group)

    def _clear_group(self, group: int) -> None:
        self.bank.clear(group)
        self._frame[group] = NO_FRAME
        self._active[group] = False
        self._forget_fine(group)

    # frames

    def follow(
        self, features: Features, rows: Ints, frame: int, hidden: Bools, cover: Cover | None
    ) -> Decoded:
        """Attend to the bank, decode, and encode the memories of the groups of N rows.

        All objects of these groups are followed, whether their rows are asked for or not. Hidden objects count as
        absent in the memory. A group whose objects are all hidden remembers nothing of the frame.
        """
        groups, position = np.unique(rows // self._slots, return_inverse=True)
        slots = rows % self._slots
        veiled = np.zeros((len(groups), self._slots), dtype=np.bool_)
        veiled[position, slots] = hidden
        decoded = self._decode(features, groups, frame, cover)
        self._encode_memory(features, groups, frame, decoded, self._active[groups] & ~veiled)
        index = copy_to_device(np.stack([position, slots]), decoded.logits.device)
        return Decoded(*(part[index[0], index[1]] for part in decoded))

    def _decode(self, features: Features, groups: Ints, frame: int, cover: Cover | None) -> Decoded:
        """Decode all slots of G groups: logits [N, slots, 4h, 4w], the others [N, slots, ...]. N is G or more."""
        model = self._model
        top = self._reader.read_to_decode(features.top, groups, frame)
        # with static shapes, the rows after those of the groups are padding
        used = copy_to_device(self._active[self._reader.pad(groups)], top.device)
        decoded = Decoded(*model.stages.decode(top, features.fine, features.middle, used))
        return decoded if cover is None else cover.cut(decoded)

    def _encode_memory(
        self, features: Features, groups: Ints, frame: int, decoded: Decoded, seen: Bools
    ) -> None:
        """Encode the memory of a tracked frame, from the slots that are `seen`, bool [G, slots], and keep the frame.

        decoded: what `_decode` returned, of G groups or more; those after G are padding.
        """
        model = self._model
        # the decoder leaves free slots empty already, and nearly always nothing is hidden
        if not np.array_equal(seen, self._active[groups]):
            kept = np.flatnonzero(seen.any(axis=1))
            if not kept.size:
                return
            decoded = self._leave_out(decoded, kept, seen)
            groups = groups[kept]
            seen = seen[kept]
        count = len(groups)
        prompted = torch.zeros_like(decoded.presence, dtype=torch.bool)
        memory = model.stages.remember(features.top, decoded.logits, decoded.presence, prompted)
        score = score_groups(decoded, seen)
        pointers = decoded.pointer.flatten(1)[:count]
        whole = Decoded(decoded.logits, score, torch.full_like(score, PRESENT_LOGIT), pointers)
        self.bank.write(groups, frame, memory[:count], whole)
        at = copy_to_device(groups, decoded.logits.device)
        entry = frame % self._recent
        self._logits[at, entry] = decoded.logits[:count].to(self._logits.dtype)
        self._presence[at, entry] = decoded.presence[:count].float()
        self._frame[groups, entry] = frame
        self._used[groups, entry] = seen
        self._prompted[groups, entry] = False

    def _leave_out(self, decoded: Decoded, kept: Ints, seen: Bools) -> Decoded:
        """Return the groups `kept`, in whose results the slots that are not `seen` are as free ones."""
        padded = self._reader.pad(kept)
        index = copy_to_device(padded, decoded.logits.device)
        mask = copy_to_device(seen[padded], decoded.logits.device)
        logits, iou, presence, pointer = (part[index] for part in decoded)
        return Decoded(
            torch.where(mask[..., None, None], logits, FREE_LOGIT),
            torch.where(mask, iou, 0),
            torch.where(mask, presence, FREE_PRESENCE),
            torch.where(mask[..., None], pointer, 0),
        )

    def decode_mask(self, features: Features, mask: Tensor) -> Prompted:
        """Return a mask prompt [1, 1, S, S] in 0..1 itself as the result, with the pointer of its object."""
        model = self._model
        logits, masks = model.memory_encoder.from_mask(mask)
        pointer = model.decode_stage.encode_mask_pointer(features, mask.to(model.dtype))
        # decided on the device, so that the host does not wait for it
        presence = torch.where(mask.any(), PRESENT_LOGIT, -PRESENT_LOGIT).reshape(1)
        decoded = Decoded(logits.to(model.dtype), torch.ones_like(presence), presence, pointer)
        return Prompted(decoded, masks.to(model.dtype))

    def start(self, features: Features, row: int, frame: int, now: int, prompted: Prompted) -> None:
        """Encode the frame anew with the prompted object, as a conditioning frame of its group."""
        group, slot = divmod(row, self._slots)
        others = self._active[group].copy()
        others[slot] = False
        if others.any() and self._entry(group, frame) is None:
            if frame == now:
                # none of the others was asked for on this frame; without them, the memory would say that they are gone
                decoded = self._decode(features, np.array([group]), frame, None)
                self._encode_memory(features, np.array([group]), frame, decoded, others[None])
            elif self._group_slots.empty_groups():
                group = self._group_slots.empty_groups()[0]
                slot = 0
                self._rebuild([self._group_slots.key_of(row)], group, now)
        if not self._active[group].any():
            self._built[group] = now
        group_frame = self._group_frame(group, frame, features.top).put(slot, prompted)
        self._active[group, slot] = True
        self._store(group, group_frame, now, conditioning=True)

    def has_tracked(self, row: int, frame: int) -> bool:
        """Return True if the object in a row was tracked on `frame`, as far as frames are kept."""
        group, slot = divmod(row, self._slots)
        entry = frame % self._recent
        held = self._frame[group, entry] == frame and self._used[group, entry, slot]
        return bool(held and not self.is_conditioning(row, frame))

    def prepare_correction(
        self, features: Features, row: int, frame: int, prompt: PromptTensors
    ) -> tuple[Tensor | None, PromptTensors]:
        """Return no image tokens, and the prompt with the mask that was tracked: prompts are decoded without memory."""
        group, slot = divmod(row, self._slots)
        entry = frame % self._recent
        if prompt.logits is None and bool(self._presence[group, entry, slot] > 0):
            tracked = self._logits[group, entry, slot].clamp(-MAX_LOGIT, MAX_LOGIT)
            prompt = prompt._replace(logits=tracked)
        return None, prompt

    def correct(self, features: Features, row: int, frame: int, now: int, prompted: Prompted) -> None:
        """Encode a tracked frame anew with the corrected object. It stays what it is for the others."""
        group, slot = divmod(row, self._slots)
        group_frame = self._group_frame(group, frame, features.top).put(slot, prompted)
        conditioning = self.bank.conditioning_slot(group, frame) is not None
        self._store(group, group_frame, now, conditioning)

    def is_conditioning(self, row: int, frame: int) -> bool:
        """Return True if the object in a row was prompted on `frame`, a conditioning frame of its group."""
        group, slot = divmod(row, self._slots)
        entry = self.bank.conditioning_slot(group, frame)
        return entry is not None and bool(self._prompted[group, self._recent + entry, slot])

    def forget_recent(self, row: int) -> None:
        """Forget all frames of the group of a row, except its conditioning frames. The object is alone in it."""
        group = row // self._slots
        self.bank.forget_recent(group)
        self._frame[group, : self._recent] = NO_FRAME

    @torch.inference_mode()
    def copy_conditioning(self, row: int, target: int) -> None:
        """Encode the conditioning frames of one row's object for the group of another, in which it is alone."""
        group, slot = divmod(target, self._slots)
        for group_frame in self._conditioning_frames([row], [slot]):
            self._active[group, slot] = True
            self._store(group, group_frame, group_frame.frame, conditioning=True)

    def conditioning_pointers(self, rows: Ints) -> tuple[Tensor, Tensor]:
        """Return the pointers of the prompted frames of N rows' objects, [N, P, C], and bool [N, P]: True if valid."""
        groups = rows // self._slots
        slots = rows % self._slots
        entries = np.arange(self._recent, self._frame.shape[1])
        held = self._frame[groups][:, entries] != NO_FRAME
        held &= self._prompted[groups[:, None], entries[None], slots[:, None]]
        pointers = self.bank.conditioning_pointers(groups)[0].unflatten(-1, (self._slots, -1))
        device = pointers.device
        index = torch.from_numpy(slots).to(device)
        return pointers[torch.arange(len(rows), device=device), :, index], torch.from_numpy(held).to(device)

    def plan_warm_up(self, most: int) -> WarmUp:
        """See `Propagation`; groups stand for objects."""
        return self._reader.plan_rows_warm_up(most, self._slots)

    def warm_up_reads(self, capacity: int) -> None:
        """Run the read in every shape that needs a compiler, a plan or a graph, so that no frame waits for it."""
        self._reader.warm_up_reads(-(-capacity // self._slots))

    # group frames

    def _entry(self, group: int, frame: int) -> int | None:
        """Return where the group frame of a frame is: among the newest, or among the conditioning frames."""
        entries = np.flatnonzero(self._frame[group] == frame)
        return int(entries[0]) if entries.size else None

    def _group_frame(self, group: int, frame: int, top: Tensor) -> GroupFrame:
        """Return a group's frame, an empty one if there is none. Objects that have left are not on it."""
        entry = self._entry(group, frame)
        if entry is None:
            return self._empty_frame(frame, top)
        used = self._used[group, entry] & self._active[group]
        slots = np.flatnonzero(used)
        group_frame = self._pick(self._empty_frame(frame, top), group, entry, slots, slots)
        for fine in self._fine:
            if (fine.group, fine.frame) == (group, frame):
                masks = zip(fine.slots, fine.masks, strict=True)
                return replace(group_frame, masks={slot: mask for slot, mask in masks if used[slot]})
        return group_frame

    def _forget_fine(self, group: int, frame: int | None = None) -> None:
        """Forget the newest masks of prompts of a group, on one frame or on any."""
        self._fine = [each for each in self._fine if each.group != group or frame not in (None, each.frame)]

    def _empty_frame(self, frame: int, top: Tensor) -> GroupFrame:
        slots = self._slots
        return GroupFrame(
            frame,
            top,
            torch.full_like(self._logits[0, 0], FREE_LOGIT),
            torch.full_like(self._presence[0, 0], FREE_PRESENCE),
            self.bank.pointers.new_zeros(slots, self._model.hidden),
            np.zeros(slots, dtype=np.bool_),
            np.zeros(slots, dtype=np.bool_),
        )

    def _pick(
        self, group_frame: GroupFrame, group: int, entry: int, slots: Ints, targets: Ints
    ) -> GroupFrame:
        """Return a group frame with the objects in some slots of a group's kept frame, in the slots `targets`."""
        if not slots.size:
            return group_frame
        device = self._logits.device
        source = torch.from_numpy(slots).to(device)
        target = torch.from_numpy(targets).to(device)
        pointers = self.bank.pointer_at(group, group_frame.frame).unflatten(0, (self._slots, -1))
        used = group_frame.used.copy()
        used[targets] = True
        prompted = group_frame.prompted.copy()
        prompted[targets] = self._prompted[group, entry, slots]
        return replace(
            group_frame,
            logits=group_frame.logits.index_copy(0, target, self._logits[group, entry, source]),
            presence=group_frame.presence.index_copy(0, target, self._presence[group, entry, source]),
            pointers=group_frame.pointers.index_copy(0, target, pointers[source]),
            used=used,
            prompted=prompted,
        )

    def _store(self, group: int, group_frame: GroupFrame, now: int, conditioning: bool) -> None:
        """Encode the memory of a group frame, and keep both."""
        device = self._logits.device
        memory = self._encode(group_frame)
        pointer = group_frame.pointers.flatten()[None]
        frame = group_frame.frame
        entries = []
        if conditioning:
            self.bank.write_conditioning(group, frame, now, memory, pointer)
            slot = self.bank.conditioning_slot(group, frame)
            # None if all that are kept are newer
            if slot is not None:
                entries.append(self._recent + slot)
        elif self.bank.has_tracked(group, frame):
            self.bank.correct(group, frame, now, memory, pointer)
        else:
            one = torch.ones(1, device=device)
            self.bank.write(
                np.array([group]),
                frame,
                memory,
                Decoded(group_frame.logits[None], one, one * PRESENT_LOGIT, pointer),
            )
        if now - frame < self._recent:
            entries.append(frame % self._recent)
        for entry in entries:
            self._logits[group, entry] = group_frame.logits
            self._presence[group, entry] = group_frame.presence
            self._frame[group, entry] = frame
            self._used[group, entry] = group_frame.used
            self._prompted[group, entry] = group_frame.prompted
        self._forget_fine(group, None if group_frame.masks else frame)
        if group_frame.masks:
            masks = torch.stack(list(group_frame.masks.values()))
            self._fine.append(FineMasks(group, frame, list(group_frame.masks), masks))

    def _encode(self, group_frame: GroupFrame) -> Tensor:
        """Encode the memory [1, T, 2C] of a group frame."""
        write = self._model.memory_encoder
        flags = torch.from_numpy(group_frame.prompted)[None].to(self._logits.device)
        logits = group_frame.logits[None].to(group_frame.top.dtype)
        presence = group_frame.presence[None]
        if not group_frame.masks:
            return write(group_frame.top, logits, presence, flags)
        masks = write.weigh(logits)
        for slot, mask in group_frame.masks.items():
            masks[0, slot] = mask
        return write.encode(group_frame.top, masks, presence, flags)

    # groups that are built anew

    @torch.inference_mode()
    def _rebuild(self, keys: list[int], group: int, now: int) -> None:
        """Build a group from objects of any groups; all its own objects are among them."""
        rows = [self._group_slots[key] for key in keys]
        slots = list(range(len(keys)))
        conditioning = self._conditioning_frames(rows, slots)
        newest = self._newest_frame(rows, slots)
        sources = {row // self._slots for row in rows}
        self._moved += [key for key, row in zip(keys, rows, strict=True) if row // self._slots != group]
        for row in rows:
            self._active[row // self._slots, row % self._slots] = False
        self._group_slots.rebuild(keys, group)
        for source in {*sources, group}:
            if source == group or not self._group_slots.members(source):
                self._clear_group(source)
        self._active[group, slots] = True
        self._built[group] = now
        for group_frame in conditioning:
            self._store(group, group_frame, now, conditioning=True)
        if newest is not None and self.bank.conditioning_slot(group, newest.frame) is None:
            self._store(group, newest, now, conditioning=False)

    def _conditioning_frames(self, rows: Sequence[int], slots: Sequence[int]) -> list[GroupFrame]:
        """Return the conditioning frames of the objects in some rows, the oldest first, for them in other slots.

        There are no more than a group keeps. Those on which none of the objects was prompted are left out.
        """
        group_frames: dict[int, GroupFrame] = {}
        moves = zip(*_by_group(rows, slots, self._slots), strict=True)
        for group, sources, targets in moves:
            for entry in range(self._recent, self._frame.shape[1]):
                frame = int(self._frame[group, entry])
                used = self._used[group, entry, sources]
                if frame == NO_FRAME or not self._prompted[group, entry, sources].any():
                    continue
                blank = group_frames.get(frame) or self._empty_frame(frame, self._top_at(group, frame))
                group_frames[frame] = self._pick(blank, group, entry, sources[used], targets[used])
        newest = sorted(group_frames)[-self.bank.conditioning :]
        return [group_frames[frame] for frame in newest]

    def _newest_frame(self, rows: Sequence[int], slots: Sequence[int]) -> GroupFrame | None:
        """Return the newest frame of the objects in some rows, for them in other slots; None without frames."""
        newest: GroupFrame | None = None
        groups = sorted({row // self._slots for row in rows})
        frame = int(self._frame[groups, : self._recent].max())
        if frame == NO_FRAME:
            return None
        entry = frame % self._recent
        for group, sources, targets in zip(*_by_group(rows, slots, self._slots), strict=True):
            if self._frame[group, entry] != frame:
                continue
            used = self._used[group, entry, sources]
            blank = newest or self._empty_frame(frame, self._top_at(group, frame))
            newest = self._pick(blank, group, entry, sources[used], targets[used])
        return newest

    def _top_at(self, group: int, frame: int) -> Tensor:
        """Return the image tokens [1, C, h, w] of a frame that the bank holds: the last channels of its memory."""
        memory = self.bank.memory_at(group, frame)
        image = memory[:, -self._model.hidden :]
        return image.T.reshape(1, -1, *self._model.grid)

    @property
    def used(self) -> list[int]:
        """The groups in use."""
        groups: list[int] = np.flatnonzero(self._active.any(axis=1)).tolist()
        return groups

    def after_restore(self, state: GroupsState) -> None:
        """Move the masks of prompts to the device."""
        self._fine = [fine._replace(masks=fine.masks.to(self._logits.device)) for fine in self._fine]


def score_groups(decoded: Decoded, seen: Bools) -> Tensor:
    """Return the scores [G] of the memories of G groups: the means over the objects that are `seen`, bool [G, slots].

    SAM 3.1's memory selection (`cal_mem_score` in facebookresearch/sam3) takes the mean of these scores, too. A group
    without objects scores 0.
    """
    mask = copy_to_device(seen, decoded.presence.device)
    scores = confidence(decoded.presence[: len(seen)], decoded.iou[: len(seen)]).float() * mask
    return scores.sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def count_groups(max_objects: int, corrections: int, slots: int) -> int:
    """Return the number of groups for `max_objects` objects, and for those that catch up apart from the others."""
    return -(-max_objects // slots) + max(1, corrections)


def _by_group(
    rows: Sequence[int], slots: Sequence[int], size: int
) -> tuple[list[int], list[Ints], list[Ints]]:
    """Sort moves from rows to slots by the group they leave: the groups, and for each its slots and the new ones."""
    numbers = np.array(rows, dtype=np.int64)
    targets = np.array(slots, dtype=np.int64)
    groups = sorted(set((numbers // size).tolist()))
    at = [np.flatnonzero(numbers // size == group) for group in groups]
    return groups, [numbers[entries] % size for entries in at], [targets[entries] for entries in at]
