"""Photographs as textures of tables, floors and walls: crops of the pictures in a folder."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import cv2
import numpy as np

from sam3_node.errors import CameraError
from tools.scenes.objects import ENDINGS, Split
from tools.scenes.textures import SURFACE_SIZE, Texture

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
SHARE = 0.5  # of the surfaces


@cache
def pictures(folder: Path) -> tuple[Path, ...]:
    """List the pictures in a folder, sorted; raise CameraError if there are none."""
    paths = tuple(sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES))
    if not paths:
        raise CameraError(f"expected pictures ({', '.join(SUFFIXES)}) in {folder}, found none")
    return paths


def photo(rng: np.random.Generator, split: Split, folder: Path) -> Texture | None:
    """Return a crop of one of the pictures that belong to a split; None if the split has none."""
    mine = [path for index, path in enumerate(pictures(folder)) if index % 10 in ENDINGS[split]]
    if not mine or rng.random() > SHARE:
        return None
    picture = cv2.imread(str(mine[rng.integers(len(mine))]), cv2.IMREAD_COLOR)
    if picture is None:
        return None
    height, width = picture.shape[:2]
    side = int(min(height, width) * rng.uniform(0.5, 1.0))
    y = rng.integers(height - side + 1)
    x = rng.integers(width - side + 1)
    crop = cv2.resize(
        picture[y : y + side, x : x + side], (SURFACE_SIZE, SURFACE_SIZE), interpolation=cv2.INTER_AREA
    )
    return np.ascontiguousarray(crop[..., ::-1]).astype(np.uint8)
