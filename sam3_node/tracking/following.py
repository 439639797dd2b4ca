"""Choose, once for a tracker, the way in which a model's objects are followed. No other code asks how they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..models import TrackerModel
from ..models.capabilities import Following
from .groups import GroupMemory, GroupSlots, GroupsState, count_groups
from .last_masks import LastMasks, LastMasksState
from .memory import MemoryBank, MemoryState, SelectionRule
from .propagation import MemoryPropagation, Propagation
from .tracks import ObjectRows

BankState = MemoryState | LastMasksState | GroupsState
"""What the bank of a tracker keeps."""


class FollowingLimits(NamedTuple):
    """How much a tracker remembers; see `Tracker`."""

    max_objects: int
    corrections: int
    bank_size: int
    rule: SelectionRule
    history: int


class FollowingParts(NamedTuple):
    """The parts of a tracker that differ between models."""

    rows: ObjectRows
    bank: MemoryBank | LastMasks | GroupMemory
    """what is remembered of the objects, in rows"""
    propagation: Propagation


def choose_following(model: TrackerModel, limits: FollowingLimits) -> FollowingParts:
    """Build what follows the objects of a model, by what it declares."""
    return _BUILDERS[model.capabilities.following](model, limits)


def _build_memories(model: TrackerModel, limits: FollowingLimits) -> FollowingParts:
    rows = limits.max_objects + limits.corrections
    bank = MemoryBank(model, rows, limits.bank_size, limits.rule, limits.history)
    return FollowingParts(_make_rows(limits), bank, MemoryPropagation(model, bank))


def _build_groups(model: TrackerModel, limits: FollowingLimits) -> FollowingParts:
    slots = model.capabilities.slots
    groups = count_groups(limits.max_objects, limits.corrections, slots)
    group_slots = GroupSlots(limits.max_objects, limits.corrections, slots, groups)
    memory = GroupMemory(model, group_slots, limits.bank_size, limits.rule, limits.history)
    return FollowingParts(group_slots, memory, memory)


def _build_last_masks(model: TrackerModel, limits: FollowingLimits) -> FollowingParts:
    masks = LastMasks(model, limits.max_objects + limits.corrections)
    return FollowingParts(_make_rows(limits), masks, masks)


def _make_rows(limits: FollowingLimits) -> ObjectRows:
    return ObjectRows(limits.max_objects, limits.corrections)


_BUILDERS: Mapping[Following, Callable[[TrackerModel, FollowingLimits], FollowingParts]] = {
    "memories": _build_memories,
    "group memories": _build_groups,
    "last masks": _build_last_masks,
}
