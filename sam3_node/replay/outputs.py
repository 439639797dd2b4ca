"""What a replay leaves: masks as MCAP, COCO JSON, palette PNGs and overlay videos, each whole or not there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..bags.record_writer import RecordWriter
from ..errors import OutputError, ReplayError
from ..wire import pack_masks
from .coco import write_coco
from .overlay import write_overlays
from .palette import write_palette
from .sources import Frames, Masks, Progress


class _Sources(NamedTuple):
    masks: Masks
    frames: Frames


def _write_bag(folder: Path, sources: _Sources, progress: Progress) -> None:
    with RecordWriter(folder / "masks.mcap") as bag:
        for count, found in enumerate(sources.masks(), start=1):
            _, body = pack_masks(found, "rle")
            bag.write_masks(body, found, found.age_origin_ns)
            progress(count)


def _write_json(folder: Path, sources: _Sources, progress: Progress) -> None:
    write_coco(folder / "masks.json", sources.masks, progress)


def _write_png(folder: Path, sources: _Sources, progress: Progress) -> None:
    (folder / "png").mkdir()
    write_palette(folder / "png", sources.masks, progress)


def _write_overlay(folder: Path, sources: _Sources, progress: Progress) -> None:
    write_overlays(folder, *sources, progress)


_WRITERS: dict[str, Callable[[Path, _Sources, Progress], None]] = {
    "mcap": _write_bag,
    "coco": _write_json,
    "png": _write_png,
    "overlay": _write_overlay,
}
KINDS = tuple(_WRITERS)
"""masks.mcap, a recording of masks alone; masks.json in COCO's form; png/<camera>/ in DAVIS'; overlay-<camera>.mp4."""


def write_outputs(
    out: Path, kinds: Sequence[str], masks: Masks, frames: Frames, progress: Callable[[str, int], None]
) -> list[Path]:
    """Write these of KINDS into the folder `out` -> the files and folders that are there now.

    Each takes its place when it is whole; the same masks and frames give the same bytes. `progress` gets a kind and how
    many masks of it are written. Raises ReplayError for an unknown kind, before anything is written, OutputError
    where `out` cannot be written, and what `masks` and `frames` raise.
    """
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown:
        raise ReplayError(f"unknown output {unknown[0]!r:.60}: expected some of {', '.join(KINDS)}")
    written: list[Path] = []
    for kind in dict.fromkeys(kinds):
        with _whole(out, kind, written) as folder:
            _WRITERS[kind](folder, _Sources(masks, frames), partial(progress, kind))
    return written


@contextmanager
def _whole(out: Path, kind: str, written: list[Path]) -> Iterator[Path]:
    """A folder to write into, beside the place where what is in it goes at the end; nothing goes where it fails."""
    aside = out / f".{kind}.partial"
    try:
        shutil.rmtree(aside, ignore_errors=True)  # of a run that was killed
        (aside / "new").mkdir(parents=True)
        yield aside / "new"
        written += [_move(item, out / item.name, aside) for item in sorted((aside / "new").iterdir())]
    except OSError as error:
        raise OutputError(f"cannot write {kind} into {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _move(item: Path, place: Path, aside: Path) -> Path:
    if place.is_dir():
        place.rename(aside / f"old {place.name}")
    return item.replace(place)
