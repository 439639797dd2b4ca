"""The split of objects and surfaces, by the integers that determine their shape and texture.

An object model and a surface texture are functions of one integer each. Integers that end in 0..7 are for training, in
8 for validation, in 9 for testing, so that the splits share no object and no surface. Some whole kinds of
objects (`objects.TEST_KINDS`) are drawn for testing only.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Split = Literal["train", "val", "test"]

SPLITS: tuple[Split, ...] = ("train", "val", "test")
ENDINGS: dict[Split, tuple[int, ...]] = {"train": tuple(range(8)), "val": (8,), "test": (9,)}
POOL = 100_000  # tens of integers to draw from
OBJECT_SALT, SURFACE_SALT = 71, 72


def get_split(identity: int) -> Split:
    """Return the split of an object's or surface's integer."""
    return next(split for split, endings in ENDINGS.items() if identity % 10 in endings)


def draw_identity(rng: np.random.Generator, split: Split) -> int:
    """Draw an integer of a split."""
    return int(10 * rng.integers(POOL) + rng.choice(ENDINGS[split]))


def object_rng(identity: int) -> np.random.Generator:
    """Return the generator of all random choices of an object model."""
    return np.random.default_rng([OBJECT_SALT, identity])


def surface_rng(identity: int) -> np.random.Generator:
    """Return the generator of all random choices of a surface's texture."""
    return np.random.default_rng([SURFACE_SALT, identity])
