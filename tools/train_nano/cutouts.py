"""Cut-outs with alpha that are moved over other pictures: public-domain clip-art, or any folder of RGBA PNG files."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt

Sprite = npt.NDArray[np.uint8]  # BGRA [h, w, 4]

LONGEST = 160  # px
OPENCLIPART = Path("/usr/share/openclipart/png")  # Debian's openclipart-png: public domain


def load_cutouts(folder: Path, most: int, cache: Path, seed: int = 0) -> list[Sprite]:
    """Up to `most` sprites, their longer side at most 160 px, from the RGBA PNG files below `folder`.

    Kept in `cache` (.npz) for the next start. An absent folder gives none; files that are no such image are left out.
    """
    if cache.is_file():
        with np.load(cache) as held:
            return [held[name] for name in held.files]
    sprites = read_cutouts(folder, most, seed)
    if sprites:
        cache.parent.mkdir(parents=True, exist_ok=True)
        np.savez(cache, *sprites)
    return sprites


def read_cutouts(folder: Path, most: int, seed: int = 0) -> list[Sprite]:
    """The same without a cache."""
    paths = sorted(folder.rglob("*.png")) if folder.is_dir() else []
    np.random.default_rng(seed).shuffle(paths)
    sprites: list[Sprite] = []
    for path in paths:
        if len(sprites) == most:
            break
        sprite = _read(path)
        if sprite is not None:
            sprites.append(sprite)
    return sprites


def cut_out(image: npt.NDArray[np.uint8], mask: npt.NDArray[np.bool_]) -> Sprite | None:
    """The masked part of BGR image [h, w, 3] as a sprite; None where it is too small."""
    x, y, w, h = cv2.boundingRect(mask.astype(np.uint8))
    if min(w, h) < 12:
        return None
    sprite = np.dstack([image[y : y + h, x : x + w], mask[y : y + h, x : x + w].astype(np.uint8) * 255])
    return _shrink(sprite)


def _read(path: Path) -> Sprite | None:
    image = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    if image is None or image.ndim != 3 or image.shape[2] != 4 or image.dtype != np.uint8:
        return None
    x, y, w, h = cv2.boundingRect((image[..., 3] > 127).astype(np.uint8))
    filled = (image[..., 3] > 127).sum() / max(1, w * h)
    if min(w, h) < 24 or max(w, h) > 6 * min(w, h) or filled < 0.2:
        return None
    return _shrink(image[y : y + h, x : x + w])


def _shrink(sprite: Sprite) -> Sprite:
    scale = LONGEST / max(sprite.shape[:2])
    if scale >= 1:
        return np.ascontiguousarray(sprite)
    size = (max(4, round(sprite.shape[1] * scale)), max(4, round(sprite.shape[0] * scale)))
    return cv2.resize(sprite, size, interpolation=cv2.INTER_AREA)
