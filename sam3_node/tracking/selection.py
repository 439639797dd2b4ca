"""Which memories an object attends to. Pure functions of host numbers, so that no step waits for the device."""

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
class Rule:
    """A selection rule: the newest of the eligible frames are attended to.

    `eligible` takes ages int [N, R] in steps, scores float [N, R] and the limit, and answers bool [N, R].
    A chosen frame's temporal offset is its rank (1 the newest) if `by_rank`, else its age. `by_score`: scores matter.
    """

    eligible: Callable[[Ints, Floats, int], Bools]
    by_rank: bool
    by_score: bool

    def choose(self, ages: Ints, scores: Floats, held: Bools, limit: int) -> tuple[Ints, Ints, Bools]:
        """Indices into the second axis [N, limit], their temporal offsets, and which of them are valid."""
        eligible = held & self.eligible(ages, scores, limit)
        order = np.argsort(np.where(eligible, ages, np.iinfo(np.int64).max), axis=1, kind="stable")[:, :limit]
        valid = np.take_along_axis(eligible, order, axis=1)
        ranks = np.broadcast_to(np.arange(1, order.shape[1] + 1), order.shape)
        return order, ranks if self.by_rank else np.take_along_axis(ages, order, axis=1), valid


def _recent(ages: Ints, scores: Floats, limit: int) -> Bools:
    return ages <= limit


def _confident(ages: Ints, scores: Floats, limit: int) -> Bools:
    return (scores > CONFIDENT_SCORE) | (ages == 1)


RULES = {
    # frames at most `limit` steps old: the reference's rule
    "recent": Rule(_recent, by_rank=False, by_score=False),
    # the newest frames whose mask was sure, however old, and the last frame in any case: SAM 3's memory selection
    # (`frame_filter` in facebookresearch/sam3), which keeps an occlusion from pushing the appearance out of memory
    "confident": Rule(_confident, by_rank=True, by_score=True),
}


def rule(name: str) -> Rule:
    """The selection rule called `name`; SettingsError names those there are."""
    try:
        return RULES[name]
    except KeyError:
        raise SettingsError(f"selection {name!r}: expected one of {', '.join(RULES)}") from None
