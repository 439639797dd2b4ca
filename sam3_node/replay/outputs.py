"""Writes the outputs of a replay: masks as MCAP, COCO JSON, palette PNGs and in a LeRobot dataset, videos, and images.

Each output is complete or absent. File names from a recording never lead out of the folder of the outputs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from ..bags.native import COLOUR
from ..bags.native.writer import RecordingWriter, describe_compression
from ..errors import BagError, OutputError, ReplayError, WireError
from ..files import child_path
from ..types import Frame, MaskFrame
from ..visualization import TimedVideoWriter, overlay
from ..wire import decode_image, pack_masks
from .davis_png import write_palette_pngs
from .images import (
    QUALITY,
    CameraFrames,
    FrameSource,
    MaskSource,
    compress_frame,
    join_frames,
    name_images,
    write_coco,
    write_images,
)
from .lerobot_dataset import write_lerobot

T = TypeVar("T", MaskFrame, Frame)


class Dataset(NamedTuple):
    """A dataset that the recording is, and the names to detect, in their order."""

    path: Path
    prompts: Sequence[str] = ()


class _Sources(NamedTuple):
    masks: MaskSource
    frames: FrameSource
    recording: str
    has_images: bool
    dataset: Dataset | None


def write_outputs(
    out: Path,
    kinds: Sequence[str],
    masks: MaskSource,
    frames: FrameSource,
    progress: Callable[[str, int], None],
    recording: str = "recording",
    has_images: bool = False,
    dataset: Dataset | None = None,
) -> list[Path]:
    """Write outputs of these KINDS into the folder `out`. Returns the files and folders written.

    An output replaces an older one when it is complete. The same masks and frames give the same bytes. `progress` is
    called with a kind and the number of masks written. COCO names the files of `images` if they are among the kinds or
    were written before (`has_images`), and otherwise places in the `recording`. The kind lerobot needs the `dataset`
    that was replayed. Raises ReplayError for an unknown kind before anything is written, OutputError if `out` cannot be
    written, and the exceptions of `masks` and `frames`.
    """
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown:
        raise ReplayError(f"unknown output {unknown[0]!r:.60}: expected some of {', '.join(KINDS)}")
    written: list[Path] = []
    sources = _Sources(masks, frames, recording, has_images or "images" in kinds, dataset)
    for kind in dict.fromkeys(kinds):
        with _replace_when_complete(out, kind, written) as folder:
            _WRITERS[kind](folder, sources, partial(progress, kind))
    return written


@contextmanager
def _replace_when_complete(out: Path, kind: str, written: list[Path]) -> Iterator[Path]:
    """Provide a folder whose content is moved to `out` at the end of the block, unless the block fails."""
    partial_folder = out / f".{kind}.partial"
    try:
        if partial_folder.is_symlink():
            partial_folder.unlink()
        shutil.rmtree(partial_folder, ignore_errors=True)  # left by a killed run
        (partial_folder / "new").mkdir(parents=True)
        yield partial_folder / "new"
        items = sorted((partial_folder / "new").iterdir())
        written += [_move(item, out / item.name, partial_folder) for item in items]
    except OSError as error:
        if error.filename and not Path(os.fsdecode(error.filename)).absolute().is_relative_to(out.absolute()):
            raise BagError(f"cannot read {error.filename}: {error.strerror}") from error
        raise OutputError(f"cannot write {kind} into {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)


def _move(item: Path, target: Path, partial_folder: Path) -> Path:
    if target.is_dir():
        target.rename(partial_folder / f"old {target.name}")
    return item.replace(target)


def _write_mcap(folder: Path, sources: _Sources, progress: Callable[[int], None]) -> None:
    with RecordingWriter(folder / "masks.mcap") as bag:
        for count, masks in enumerate(sources.masks(), start=1):
            _, body = pack_masks(masks, "rle")
            bag.write_masks(body, masks, masks.age_origin_ns)
            progress(count)


def _write_mcap_with_images(folder: Path, sources: _Sources, progress: Callable[[int], None]) -> None:
    """Write masks.mcap as `_write_mcap` does, each masks after their frame. Raw colour becomes JPEG."""
    is_described = False
    with RecordingWriter(folder / "masks.mcap") as bag:
        for count, (masks, frame) in enumerate(join_frames(sources.masks, sources.frames), start=1):
            image = compress_frame(frame)
            if image is not frame and not is_described:
                is_described = True
                bag.write_metadata(COLOUR, describe_compression("jpeg", QUALITY))
            if image is not None:
                bag.write_frame(image, masks.age_origin_ns)
            _, body = pack_masks(masks, "rle")
            bag.write_masks(body, masks, masks.age_origin_ns)
            progress(count)


def _write_json(folder: Path, sources: _Sources, progress: Callable[[int], None]) -> None:
    names = name_images(sources.masks, sources.frames) if sources.has_images else None
    write_coco(folder / "masks.json", sources.masks, progress, sources.recording, names)


def _write_images(folder: Path, sources: _Sources, progress: Callable[[int], None]) -> None:
    write_images(folder, sources.masks, sources.frames, progress)


def _write_png(folder: Path, sources: _Sources, progress: Callable[[int], None]) -> None:
    (folder / "png").mkdir()
    write_palette_pngs(folder / "png", sources.masks(), progress)


def _write_overlays(folder: Path, sources: _Sources, progress: Callable[[int], None]) -> None:
    """Write overlay-<camera>.mp4 for each camera, in one pass over masks and frames for each.

    Masks whose frame is missing or cannot be decoded are skipped. A camera without any drawn frame has no video.
    """
    count = 0
    for camera in sorted({masks.camera for masks in sources.masks()}):
        with TimedVideoWriter(child_path(folder, f"overlay-{camera}.mp4")) as film:
            pairs = pair_frames(
                _select_camera(camera, sources.masks()), _select_camera(camera, sources.frames())
            )
            for masks, frame in pairs:
                _draw(film, masks, frame)
                progress(count + film.frames)
        count += film.frames


def _write_lerobot(folder: Path, sources: _Sources, progress: Callable[[int], None]) -> None:
    if sources.dataset is None:
        raise ReplayError("the output lerobot: expected a LeRobot dataset to add masks to, found none")
    write_lerobot(folder, sources.dataset.path, sources.masks, progress, sources.dataset.prompts)


_WRITERS: dict[str, Callable[[Path, _Sources, Callable[[int], None]], None]] = {
    "mcap": _write_mcap,
    "mcap-images": _write_mcap_with_images,
    "coco": _write_json,
    "png": _write_png,
    "overlay": _write_overlays,
    "images": _write_images,
    "lerobot": _write_lerobot,
}
KINDS = tuple(_WRITERS)
"""masks.mcap, a recording of masks alone, or (mcap-images) with their frames; masks.json in COCO format; png/<camera>/
in DAVIS format; overlay-<camera>.mp4; images/<camera>/, the frames; lerobot/, the dataset with masks."""


def pair_frames(masks: Iterator[MaskFrame], frames: Iterator[Frame]) -> Iterator[tuple[MaskFrame, Frame]]:
    """Yield the masks of one camera with their frames, both in the same order. Masks without a frame are left out."""
    finder = CameraFrames(frames)
    for frame_masks in masks:
        frame = finder.find(frame_masks)
        if frame is not None:
            yield frame_masks, frame
        elif finder.ended:
            return


def _select_camera(camera: str, values: Iterator[T]) -> Iterator[T]:
    return (value for value in values if value.camera == camera)


def _draw(film: TimedVideoWriter, masks: MaskFrame, frame: Frame) -> None:
    try:
        image = decode_image(frame)
    except WireError:
        return
    film.write(overlay(image, masks), masks.capture_ns)
