"""Have a teacher label real pictures, for training on their masks.

    python -m training.nano teach PICTURES... --teacher WEIGHTS -o out/taught

PICTURES are folders or tar files of videos (mp4), sequences (folders of JPEG files named by number) and photos (other
JPEG files). Round 0 takes the middle frame of each and every photo, round 1 a frame at a quarter, and so on: more
rounds add frames and change none. Within a round the order follows from a hash of the name, so every beginning is a
varied sample. Videos of one day look alike; whole days are held aside (`is_held`).

The teacher is a trained SAM model. Each point of a grid gives three masks: a part, a larger part, the whole. Confident
masks that do not depend on the threshold are kept, duplicates removed. Then the box of each mask is the prompt, because
a box gives better outlines than a point; a mask that its box does not give again is dropped. Parts and wholes stay.

The masks lie as shards in `train` and `held`. A run can be killed at any time; the same command continues it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import tarfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from sam3_node.errors import CameraError
from sam3_node.models import Features, TrackerModel, load_tracker
from sam3_node.types import Image
from tools.command import errors_in_one_line, new_parser, set_up_cpu

from .steps import CORNERS, INSIDE, corners_of
from .taught import Taught, known_names, list_shards, pack_taught, shard_path, write_shard

PER_SHARD = 32
SPLITS = ("held", "train")
HELD_OF = 20  # one day of so many is held aside
LONGEST = 512  # px of a picture as it is kept: what the teacher sees
DAY = re.compile(r".*?\d{4}_\d{2}_\d{2}")
Bools = npt.NDArray[np.bool_]
SIDE = 256  # of masks as they are kept
CHUNK = 4  # prompts at once: more fall out of the cache


def main(words: list[str]) -> None:
    """Run the command line `teach`."""
    args = _arguments(words)
    set_up_cpu(args.threads)
    if args.threads:
        cv2.setNumThreads(args.threads)
    with errors_in_one_line():
        folders = [path for path in args.pictures if path.is_dir()]
        archives = [path for path in args.pictures if not path.is_dir()]
        unpack_all(archives, args.output / "pictures")
        if archives:
            folders.append(args.output / "pictures")
        pictures = [picture for folder in folders for picture in list_pictures(folder, args.rounds)]
        teach(Teacher(args.teacher, args.size, args.grid, args.dtype), pictures, args.output)


def teach(teacher: Teacher, pictures: list[Picture], folder: Path) -> None:
    """Label the pictures that are not labelled yet; those held aside go into `held`, the others into `train`."""
    for split in SPLITS:
        (folder / split).mkdir(parents=True, exist_ok=True)
        known = known_names(folder / split)
        todo = [p for p in pictures if p.held == (split == "held") and p.name not in known]
        print(f"{split}: {len(known)} pictures done, {len(todo)} to do", flush=True)
        _teach_split(teacher, todo, folder / split)


def _teach_split(teacher: Teacher, pictures: list[Picture], folder: Path) -> None:
    number = len(list_shards(folder))
    begun = time.monotonic()
    spent = os.times()
    done = 0
    masks = 0
    for shard in _shards(_labelled(teacher, pictures)):
        write_shard(shard_path(folder, number), shard)
        number = number + 1
        done = done + len(shard)
        masks += sum(len(picture.scores) for picture in shard)
        used = os.times()
        minutes = (time.monotonic() - begun) / 60
        busy = (used.user - spent.user) / 60
        print(
            f"{folder.name}: {done} of {len(pictures)} pictures, {masks / done:.1f} masks each, "
            f"{done / max(minutes, 1e-9):.0f} a minute, {minutes:.1f} min, {busy:.1f} core-min",
            flush=True,
        )


def _labelled(teacher: Teacher, pictures: list[Picture]) -> Iterator[Taught]:
    for picture in pictures:
        try:
            image = picture.read()
        except CameraError as error:
            print(f"left out: {error}", flush=True)
            continue
        yield pack_taught(picture.name, image, *teacher.find(image))


def _shards(pictures: Iterator[Taught]) -> Iterator[list[Taught]]:
    shard: list[Taught] = []
    for picture in pictures:
        shard.append(picture)
        if len(shard) == PER_SHARD:
            yield shard
            shard = []
    if shard:
        yield shard


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = new_parser(__doc__, "python -m training.nano teach")
    parser.add_argument("pictures", nargs="+", type=Path, help="folders or tar files")
    parser.add_argument("--teacher", required=True, help="weights as load_tracker takes them")
    parser.add_argument("--size", type=int, default=512, help="px of the teacher's image")
    parser.add_argument("--grid", type=int, default=8, help="points along each side")
    parser.add_argument("--rounds", type=int, default=3, help="the most frames of a video or sequence")
    parser.add_argument("--dtype", default="bfloat16", help="of the teacher: float32 where bfloat16 is slow")
    parser.add_argument("--threads", type=int, help="CPU threads; default: as torch chooses")
    parser.add_argument("-o", "--output", type=Path, default=Path("out/taught"))
    return parser.parse_args(words)


@dataclass(frozen=True)
class Picture:
    """One picture to be read: a file, or a frame of a video at `share` 0..1 of its length.

    name: unique, and the same on every machine. held: never to be trained on.
    """

    name: str
    path: Path
    share: float | None
    held: bool

    def read(self) -> Image:
        """BGR uint8 [h, w, 3], at most 512 px on its longer side; raises CameraError where it cannot be read."""
        image = cv2.imread(str(self.path)) if self.share is None else _frame(self.path, self.share)
        if image is None:
            raise CameraError(f"expected a picture in {self.path}, found none that OpenCV reads")
        return shrink(image)


def list_pictures(folder: Path, rounds: int = 3) -> list[Picture]:
    """All pictures below a folder: those held aside first, then by round, each in the order of a hash.

    rounds: the most frames of one video or sequence. Raises CameraError where there are none.
    """
    found = [(number, picture) for number, picture in _walk(folder, rounds)]
    if not found:
        raise CameraError(f"expected videos or JPEG files below {folder}, found none")
    found.sort(key=lambda item: (not item[1].held, item[0], _hash(item[1].name)))
    return [picture for _, picture in found]


def is_held(name: str) -> bool:
    """Return True if a video is held aside, by the hash of its name up to the date, so that whole days are held.

    A name without a date is hashed completely.
    """
    day = DAY.match(name)
    return _hash(day[0] if day else name) % HELD_OF == 0


def unpack_all(archives: Iterable[Path], folder: Path) -> None:
    """Extract tar files into `folder`, each once; raises CameraError for one that is damaged."""
    folder.mkdir(parents=True, exist_ok=True)
    for archive in archives:
        mark = folder / f".{archive.name}.unpacked"
        if mark.is_file():
            continue
        try:
            with tarfile.open(archive) as held:
                held.extractall(folder, filter="data")
        except (OSError, tarfile.TarError) as error:
            raise CameraError(f"expected a tar file of pictures, found {archive}: {error}") from error
        mark.touch()


def shrink(image: Image) -> Image:
    """At most 512 px on the longer side."""
    scale = LONGEST / max(image.shape[:2])
    if scale >= 1:
        return image
    size = (round(image.shape[1] * scale), round(image.shape[0] * scale))
    return np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_AREA), np.uint8)


def spread(number: int) -> float:
    """The number-th place in 0..1 of a sequence that spreads: 1/2, 1/4, 3/4, 1/8, 5/8, ..."""
    place = 0.0
    unit = 0.5
    number = number + 1
    while number:
        place += unit * (number & 1)
        number = number >> 1
        unit = unit / 2
    return place


def _walk(folder: Path, rounds: int) -> Iterator[tuple[int, Picture]]:
    for path in sorted(folder.rglob("*.mp4")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        held = is_held(path.stem)
        for number in range(rounds):
            yield number, Picture(f"{name}@{number}", path, spread(number), held)
    for parent in sorted({path.parent for path in folder.rglob("*.jpg")}):
        yield from _stills(folder, parent, rounds)


def _stills(folder: Path, parent: Path, rounds: int) -> Iterator[tuple[int, Picture]]:
    """Yield pictures of one folder of JPEG files: a sequence if all names are numbers, otherwise single photos."""
    paths = sorted(parent.glob("*.jpg"))
    if all(path.stem.isdecimal() for path in paths):
        places = dict.fromkeys(int(spread(number) * len(paths)) for number in range(rounds))
        chosen = [(number, paths[place]) for number, place in enumerate(places)]
    else:
        chosen = [(0, path) for path in paths]
    for number, path in chosen:
        yield number, Picture(path.relative_to(folder).with_suffix("").as_posix(), path, None, False)


def _frame(path: Path, share: float) -> Image | None:
    """The frame at `share` of a video's length; the frames before it are skipped without decoding where that works."""
    capture = cv2.VideoCapture(str(path))
    wanted = int(share * max(1, int(capture.get(cv2.CAP_PROP_FRAME_COUNT))))
    last: Image | None = None
    for _ in range(wanted + 1):
        if not capture.grab():
            break
    else:
        _, last = capture.retrieve()
    capture.release()
    return last


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


@dataclass(frozen=True)
class Choice:
    """Thresholds for the masks to keep.

    iou, stable: lowest IoU that the teacher predicts, and lowest share of a mask that stays when the threshold moves by
    a logit to both sides. again: lowest IoU with the mask that the box gives. alike: lowest IoU of
    duplicates. smallest, largest: shares of the picture. most: masks of a picture.
    """

    iou: float = 0.70
    stable: float = 0.80
    again: float = 0.70
    alike: float = 0.75
    smallest: float = 0.0015
    largest: float = 0.7
    most: int = 32


class Found(NamedTuple):
    """Masks bool [N, 256, 256] over the whole picture, as a square, and how good the teacher says they are."""

    masks: Bools
    scores: npt.NDArray[np.float32]


class Teacher:
    """A tracker as a finder of masks; `weights` as `load_tracker` takes them, `size` px a multiple of its step."""

    def __init__(
        self, weights: str | Path, size: int, grid: int = 8, dtype: str = "auto", choice: Choice | None = None
    ) -> None:
        self.model: TrackerModel = load_tracker(weights, dtype=dtype, image_size=size)
        self.choice = choice or Choice()
        self._grid = _grid(grid, size)

    @torch.inference_mode()
    def find(self, image: Image, points: Tensor | None = None) -> Found:
        """The masks of a BGR picture, the surest first: at `points` [N, 1, 2] in px of the model, or at the grid's."""
        model = self.model
        choice = self.choice
        places = self._grid if points is None else points
        if not len(places):
            return _nothing()
        features = model.encode(model.preprocess(image))
        labels = torch.full((len(places), 1), INSIDE, dtype=torch.int32)
        logits, iou = self._decode(features, places, labels, multimask=True)
        logits = logits.flatten(0, 1)
        iou = iou.flatten()
        first, kept = self._sure(logits, iou)
        if not len(kept):
            return _nothing()
        corners, labels = _boxes(first, model.image_size)
        logits, iou = (x[:, 0] for x in self._decode(features, corners, labels, multimask=False))
        again = paired_iou(first, logits > 0) >= choice.again
        _, kept = self._sure(logits[again], iou[again])
        if not len(kept):
            return _nothing()
        return _tidy(logits[again][kept], iou[again][kept])

    def _decode(
        self, features: Features, points: Tensor, labels: Tensor, multimask: bool
    ) -> tuple[Tensor, Tensor]:
        """Points [N, n, 2] in model pixels, labels [N, n] -> logits [N, M, 4h, 4w] and predicted IoU [N, M]."""
        decode = self.model.decode_stage
        image = features.top + decode.no_memory.reshape(1, -1, 1, 1)
        found = []
        for begin in range(0, len(points), CHUNK):
            some = points[begin : begin + CHUNK]
            told = labels[begin : begin + CHUNK]
            sparse, dense = decode.prompt(some, told)
            top = image.expand(len(some), -1, -1, -1) + dense
            found.append(decode.mask_decoder(top, features.fine, features.middle, sparse, multimask)[:2])
        logits, iou = (torch.cat(parts).float() for parts in zip(*found, strict=True))
        return logits, iou

    def _sure(self, logits: Tensor, iou: Tensor) -> tuple[Tensor, Tensor]:
        """Masks [K, h, w] that are kept of logits [N, h, w] with predicted iou [N], the surest first, and which."""
        choice = self.choice
        masks = logits > 0
        area = masks.flatten(1).float().mean(dim=1)
        stable = stability(logits)
        good = (iou >= choice.iou) & (stable >= choice.stable)
        good &= (area >= choice.smallest) & (area <= choice.largest)
        ranked = torch.nonzero(good)[:, 0]
        ranked = ranked[(iou * stable)[ranked].argsort(descending=True)]
        kept = ranked[without_doubles(masks[ranked], choice.alike)][: choice.most]
        return masks[kept], kept


def stability(logits: Tensor) -> Tensor:
    """Logits [N, h, w] -> the share [N] of each mask at -1 that is left at +1."""
    inner, outer = ((logits > level).flatten(1).float().sum(dim=1) for level in (1.0, -1.0))
    return inner / outer.clamp(min=1)


def without_doubles(masks: Tensor, alike: float) -> Tensor:
    """Indices of masks [N, h, w], in order of merit, that are not like a better one."""
    overlaps = pairwise_iou(masks)
    kept: list[int] = []
    for index in range(len(masks)):
        if not kept or float(overlaps[index, kept].max()) < alike:
            kept.append(index)
    return torch.tensor(kept, dtype=torch.long)


def pairwise_iou(masks: Tensor) -> Tensor:
    """Masks [N, h, w] -> IoU [N, N]."""
    flat = masks.flatten(1).float()
    shared = flat @ flat.T
    area = flat.sum(dim=1)
    return shared / (area[:, None] + area - shared).clamp(min=1)


def paired_iou(one: Tensor, other: Tensor) -> Tensor:
    """Return the IoU [N] of each of masks [N, h, w] with the other at its place."""
    shared, either = ((x.flatten(1).float().sum(dim=1)) for x in (one & other, one | other))
    return shared / either.clamp(min=1)


def _grid(side: int, size: int) -> Tensor:
    """Points [side * side, 1, 2] in the middle of the cells of a square of `size` px."""
    line = (torch.arange(side) + 0.5) * (size / side)
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([x, y], dim=-1).reshape(-1, 1, 2)


def _boxes(masks: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Masks [N, h, h], none of them empty -> corners [N, 2, 2] in pixels of `size`, and their labels [N, 2]."""
    corners = corners_of(masks) * (size / masks.shape[-1])
    return corners, torch.tensor(CORNERS, dtype=torch.int32).expand(len(masks), 2)


def _tidy(logits: Tensor, iou: Tensor) -> Found:
    """Masks of full size, without specks; logits [N, h, w]."""
    large = F.interpolate(logits[:, None], size=(SIDE, SIDE), mode="bilinear", align_corners=False)[:, 0]
    masks = np.stack([without_specks(mask) for mask in (large > 0).numpy()])
    return Found(masks, iou.numpy().astype(np.float32))


def without_specks(mask: Bools, share: float = 0.1) -> Bools:
    """Without the pieces of a mask [h, w] that are smaller than `share` of its largest."""
    count, pieces, stats, _ = cv2.connectedComponentsWithStats(mask.astype(np.uint8), connectivity=8)
    if count <= 2:
        return mask
    area = stats[:, cv2.CC_STAT_AREA].copy()
    area[0] = 0
    return np.asarray((area >= share * area.max())[pieces] & mask)


def _nothing() -> Found:
    return Found(np.zeros((0, SIDE, SIDE), np.bool_), np.zeros(0, np.float32))
