"""Rules that select the memories an object attends to. Pure functions of host arrays: no step waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import SettingsError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

CONFIDENT_SCORE = 0.01


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """A rule that attends to the newest of the eligible frames."""

    eligible: Callable[[Ints, Floats, int], Bools]
    """Takes ages int [N, R] in steps, scores float [N, R] and the limit; returns bool [N, R]."""
    by_rank: bool
    """True if a frame's temporal offset is its rank (1 is the newest), False if it is its age."""
    by_score: bool
    """True if the rule uses scores."""

    def choose(self, ages: Ints, scores: Floats, held: Bools, limit: int) -> tuple[Ints, Ints, Bools]:
        """Choose up to `limit` frames for each row.

        ages, scores and held are [N, R]; only frames where `held` is True can be chosen. Return three arrays
        [N, limit]: the indices into the second axis, their temporal offsets, and True where the index is valid.
        """
        eligible = held & self.eligible(ages, scores, limit)
        order = np.argsort(np.where(eligible, ages, np.iinfo(np.int64).max), axis=1, kind="stable")[:, :limit]
        valid = np.take_along_axis(eligible, order, axis=1)
        ranks = np.broadcast_to(np.arange(1, order.shape[1] + 1), order.shape)
        return order, ranks if self.by_rank else np.take_along_axis(ages, order, axis=1), valid


def _recent(ages: Ints, scores: Floats, limit: int) -> Bools:
    recent: Bools = ages <= limit
    return recent


def _confident(ages: Ints, scores: Floats, limit: int) -> Bools:
    confident: Bools = (scores > CONFIDENT_SCORE) | (ages == 1)
    return confident


RULES = {
    # frames at most `limit` steps old: the reference's rule
    "recent": SelectionRule(_recent, by_rank=False, by_score=False),
    # the newest frames with a confident mask, of any age, and always the last frame: SAM 3's memory selection
    # (`frame_filter` in facebookresearch/sam3), which keeps an occlusion from pushing the appearance out of memory
    "confident": SelectionRule(_confident, by_rank=True, by_score=True),
}


def get_rule(name: str) -> SelectionRule:
    """Return the selection rule called `name`; SettingsError lists the valid names."""
    try:
        return RULES[name]
    except KeyError:
        raise SettingsError(f"selection {name!r}: expected one of {', '.join(RULES)}") from None
