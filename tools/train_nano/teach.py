"""Have a teacher label real pictures, for training on their masks.

    python -m tools.train_nano teach PICTURES... --teacher WEIGHTS -o out/taught

PICTURES are folders or tar files of videos and JPEG files (see tools/train_nano/pictures.py). The masks lie as shards
in `train`, those of the videos that are held aside in `held`. It can be killed at any time: the same command goes on,
and with more --rounds it adds frames.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

import cv2
import torch

from sam3_node.errors import CameraError, Sam3NodeError

from .pictures import Picture, list_pictures, unpack_all
from .shards import Taught, known_names, list_shards, pack_taught, shard_path, write_shard
from .teacher import Teacher

PER_SHARD = 32
SPLITS = ("held", "train")


def main(words: list[str]) -> None:
    """Run the command line `teach`."""
    args = _arguments(words)
    if args.threads:
        torch.set_num_threads(args.threads)
        cv2.setNumThreads(args.threads)
    torch.set_flush_denormal(True)
    try:
        folders = [path for path in args.pictures if path.is_dir()]
        archives = [path for path in args.pictures if not path.is_dir()]
        unpack_all(archives, args.output / "pictures")
        if archives:
            folders.append(args.output / "pictures")
        pictures = [picture for folder in folders for picture in list_pictures(folder, args.rounds)]
        teach(Teacher(args.teacher, args.size, args.grid, args.dtype), pictures, args.output)
    except Sam3NodeError as error:
        raise SystemExit(f"error: {error}") from error


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
    begun, spent, done, masks = time.monotonic(), os.times(), 0, 0
    for shard in _shards(_labelled(teacher, pictures)):
        write_shard(shard_path(folder, number), shard)
        number, done = number + 1, done + len(shard)
        masks += sum(len(picture.scores) for picture in shard)
        used = os.times()
        minutes, busy = (time.monotonic() - begun) / 60, (used.user - spent.user) / 60
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
    parser = argparse.ArgumentParser(
        prog="python -m tools.train_nano teach",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("pictures", nargs="+", type=Path, help="folders or tar files")
    parser.add_argument("--teacher", required=True, help="weights as load_tracker takes them")
    parser.add_argument("--size", type=int, default=512, help="px of the teacher's image")
    parser.add_argument("--grid", type=int, default=8, help="points along each side")
    parser.add_argument("--rounds", type=int, default=3, help="the most frames of a video or sequence")
    parser.add_argument("--dtype", default="bfloat16", help="of the teacher: float32 where bfloat16 is slow")
    parser.add_argument("--threads", type=int, help="CPU threads; default: as torch chooses")
    parser.add_argument("-o", "--output", type=Path, default=Path("out/taught"))
    return parser.parse_args(words)
