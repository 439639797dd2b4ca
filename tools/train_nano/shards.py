"""Pictures with their masks in files of some dozens, that are written one after the other and read as they come.

A shard is an .npz file: `names` [n], `jpegs` and `masks` (zlib of packed bits), each as bytes one after the other with
their ends, and the masks' `scores` with theirs. A run that is killed leaves whole shards.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt

from sam3_node.errors import CameraError

Image = npt.NDArray[np.uint8]  # BGR [h, w, 3]
Bools = npt.NDArray[np.bool_]

SIDE = 256  # of masks
QUALITY = 92


class Taught(NamedTuple):
    """A picture as JPEG bytes, its N masks packed and compressed, and their scores float16 [N]."""

    name: str
    jpeg: bytes
    packed: bytes
    scores: npt.NDArray[np.float16]

    @property
    def collection(self) -> str:
        """The folder that it came from, "" for a picture beside the folders."""
        return self.name.rpartition("/")[0].partition("/")[0]

    def image(self) -> Image:
        """BGR uint8 [h, w, 3]."""
        image = cv2.imdecode(np.frombuffer(self.jpeg, np.uint8), cv2.IMREAD_COLOR)
        if image is None:
            raise CameraError(f"expected a JPEG file in the shard, found damage: {self.name}")
        return np.asarray(image, np.uint8)

    def masks(self) -> Bools:
        """Bool [N, 256, 256], stretched to a square."""
        bits = np.frombuffer(zlib.decompress(self.packed), np.uint8)
        return np.unpackbits(bits).reshape(len(self.scores), SIDE, SIDE).astype(np.bool_)


def pack_taught(name: str, image: Image, masks: Bools, scores: npt.NDArray[np.float32]) -> Taught:
    """Compress a BGR picture and its masks bool [N, 256, 256]."""
    jpeg = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])[1].tobytes()
    return Taught(name, jpeg, zlib.compress(np.packbits(masks).tobytes(), 6), scores.astype(np.float16))


def write_shard(path: Path, pictures: list[Taught]) -> None:
    """Write a shard, whole or not at all."""
    aside = path.with_suffix(".part")
    parts: dict[str, Any] = {"names": np.array([picture.name for picture in pictures])}
    parts |= _joined("jpegs", [picture.jpeg for picture in pictures])
    parts |= _joined("masks", [picture.packed for picture in pictures])
    parts |= _joined("scores", [picture.scores.tobytes() for picture in pictures])
    with aside.open("wb") as file:
        np.savez(file, **parts)
    os.replace(aside, path)


def read_shard(path: Path) -> list[Taught]:
    """The pictures of a shard; raises CameraError where it is none."""
    try:
        with np.load(path) as held:
            names = held["names"].tolist()
            parts = [_parts(held, key) for key in ("jpegs", "masks", "scores")]
    except (OSError, ValueError, KeyError, zlib.error) as error:
        raise CameraError(f"expected a shard of taught pictures in {path}, found {error}") from error
    rows = zip(names, *parts, strict=True)
    return [
        Taught(name, jpeg, masks, np.frombuffer(scores, np.float16)) for name, jpeg, masks, scores in rows
    ]


def list_shards(folder: Path) -> list[Path]:
    """Return the shards of a folder in the order of writing."""
    return sorted(folder.glob("shard-*.npz"))


def shard_path(folder: Path, number: int) -> Path:
    """Return the path of a shard by its number."""
    return folder / f"shard-{number:05d}.npz"


def read_all(paths: Iterable[Path]) -> Iterator[Taught]:
    """The pictures of some shards, those without masks left out."""
    for path in paths:
        yield from (picture for picture in read_shard(path) if len(picture.scores))


def known_names(folder: Path) -> set[str]:
    """The names of all pictures in the shards of a folder, with masks or without."""
    names: set[str] = set()
    for path in list_shards(folder):
        names.update(picture.name for picture in read_shard(path))
    return names


def _joined(key: str, parts: list[bytes]) -> dict[str, Any]:
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    return {key: np.frombuffer(b"".join(parts), np.uint8), f"{key}_ends": ends}


def _parts(held: np.lib.npyio.NpzFile, key: str) -> list[bytes]:
    joined, ends = held[key].tobytes(), [0, *held[f"{key}_ends"].tolist()]
    return [joined[begin:end] for begin, end in pairwise(ends)]
