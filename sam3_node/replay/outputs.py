"""Videos of masks drawn on the recorded frames that they were found on, one for each camera.

What a replay leaves: masks as MCAP, COCO JSON, palette PNGs and overlay videos, each whole or not there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from ..bags.native.writer import RecordingWriter
from ..errors import OutputError, ReplayError, WireError
from ..types import Frame, MaskFrame
from ..visualization import TimedVideoWriter, overlay
from ..wire import decode_image, pack_masks
from .actions import Frames, Masks, Progress
from .coco import write_coco
from .davis_png import write_palette

T = TypeVar("T", MaskFrame, Frame)


def write_overlays(folder: Path, masks: Masks, frames: Frames, progress: Progress) -> None:
    """Write overlay-<camera>.mp4 for each camera, in a pass over both for each of them.

    Masks whose frame is not there, or does not decode, are passed over; where there is none at all, so is the video.
    """
    count = 0
    for camera in sorted({found.camera for found in masks()}):
        with TimedVideoWriter(folder / f"overlay-{camera}.mp4") as film:
            for found, frame in pair(_of(camera, masks()), _of(camera, frames())):
                _draw(film, found, frame)
                progress(count + film.frames)
        count += film.frames


def pair(masks: Iterator[MaskFrame], frames: Iterator[Frame]) -> Iterator[tuple[MaskFrame, Frame]]:
    """Masks of one camera with their frames, which are in the same order; those without one are left out.

    A frame is known by seq and time of capture, as seq begins again where a camera was started again.
    """
    frame = next(frames, None)
    for found in masks:
        while frame is not None and not _is_of(found, frame) and not _is_past(found, frame):
            frame = next(frames, None)
        if frame is None:
            return
        if _is_of(found, frame):
            yield found, frame


def _of(camera: str, values: Iterator[T]) -> Iterator[T]:
    return (value for value in values if value.camera == camera)


def _is_of(found: MaskFrame, frame: Frame) -> bool:
    return (frame.seq, frame.capture_ns) == (found.seq, found.capture_ns)


def _is_past(found: MaskFrame, frame: Frame) -> bool:
    return frame.seq > found.seq and frame.capture_ns > found.capture_ns


def _draw(film: TimedVideoWriter, found: MaskFrame, frame: Frame) -> None:
    try:
        image = decode_image(frame)
    except WireError:
        return
    film.write(overlay(image, found), found.capture_ns)


class _Sources(NamedTuple):
    masks: Masks
    frames: Frames


def _write_bag(folder: Path, sources: _Sources, progress: Progress) -> None:
    with RecordingWriter(folder / "masks.mcap") as bag:
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
