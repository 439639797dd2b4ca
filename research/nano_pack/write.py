"""Pack clips, cut-outs and background videos, reduced in size, into one zip file for training on another machine.

Below `train` and `val` lie clip folders, below `cutouts` RGBA PNG files, below `videos` a folder of JPEG files for each
video. The same input gives the same bytes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

import cv2
import numpy as np

from sam3_node.errors import CameraError, OutputError
from tools.scenes.clips import Clip, list_clips, read_clip, write_clip
from training.nano.augment import read_cutouts
from training.nano.data import video_frames

KEPT = ("fps", "split", "seed", "scenario", "target", "objects")  # of a clip's meta
FRAMING = (
    30 + 46 + 16
)  # bytes of zip around a file: local header, central entry, deflate of what does not deflate
END = 22

Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Pack:
    """Folders to pack (all but `train` may be None) and the limits of size.

    max_bytes: of the zip file. size: largest width and height of a frame. quality: of JPEG, 1..100.
    """

    train: Path
    max_bytes: int
    size: tuple[int, int] = (256, 192)
    quality: int = 60
    val: Path | None = None
    cutouts: Path | None = None
    sprites: int = 1500
    videos: Path | None = None


class Archive:
    """A zip file of at most `max_bytes` bytes; compressed files are stored as they are."""

    def __init__(self, stream: IO[bytes], max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._central = END
        self._zip = ZipFile(stream, "w")

    def add(self, files: Files) -> bool:
        """Add all of these files, or none if they do not fit; return True if added."""
        growth = sum(len(data) + 2 * len(name) + FRAMING for name, data in files.items())
        if self._stream.tell() + self._central + growth > self._max_bytes:
            return False
        for name, data in files.items():
            self._zip.writestr(
                ZipInfo(name), data, ZIP_DEFLATED if "Annotations" in name or "Clips" in name else ZIP_STORED
            )
            self._central += 46 + len(name)
        return True

    def close(self) -> None:
        self._zip.close()


def pack(plan: Pack, path: Path) -> list[str]:
    """Write a pack completely or not at all; return a description of its content.

    All held-out clips, cut-outs and videos come first. Training clips fill the rest, in a random order that is always
    the same. Raises CameraError for clips that cannot be read, and OutputError if the file cannot be written or
    max_bytes is too small for the required files.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as stream, closing(Archive(stream, plan.max_bytes)) as archive:
            summary = _write(plan, archive)
        partial.replace(path)
    except OSError as error:
        raise OutputError(f"a pack cannot be written to {path}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return summary


def _write(plan: Pack, archive: Archive) -> list[str]:
    counts: dict[str, int] = {}
    for kind, files in _required_files(plan):
        if not archive.add(files):
            raise OutputError(f"{kind} take more than {plan.max_bytes} bytes: allow more, or pack fewer")
        counts[kind] = counts.get(kind, 0) + 1
    for kind, folder in {"held-out clips": plan.val, "cut-outs": plan.cutouts, "videos": plan.videos}.items():
        if folder and kind not in counts:
            raise CameraError(f"expected {kind} in {folder}, found none")
    names = _shuffled(plan.train)
    fitting = 0
    while fitting < len(names) and archive.add(_clip_files(plan, plan.train, names[fitting], "train")):
        fitting += 1
    if not fitting:
        raise OutputError(
            f"no clip of {plan.train} fits into {plan.max_bytes} bytes: allow more, or pack less of the rest"
        )
    return [f"{fitting} of {len(names)} training clips", *(f"{n} {kind}" for kind, n in counts.items())]


def _required_files(plan: Pack) -> Iterator[tuple[str, Files]]:
    """Yield the files that are packed in any case, by kind."""
    if plan.val:
        for name in list_clips(plan.val):
            yield "held-out clips", _clip_files(plan, plan.val, name, "val")
    if plan.cutouts:
        for number, sprite in enumerate(read_cutouts(plan.cutouts, plan.sprites)):
            yield "cut-outs", {f"cutouts/{number:05d}.png": _bytes(cv2.imencode(".png", sprite)[1])}
    if plan.videos:
        for path in sorted(plan.videos.glob("*.mp4")):
            frames = enumerate(video_frames(path))
            yield "videos", {f"videos/{path.stem}/{i:05d}.jpg": _bytes(jpeg) for i, jpeg in frames}


def _shuffled(root: Path) -> list[str]:
    names = list_clips(root)
    if not names:
        raise CameraError(f"expected clips in {root}, found none: render some, python -m tools.scenes")
    np.random.default_rng(0).shuffle(names)
    return names


def _clip_files(plan: Pack, root: Path, name: str, split: str) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        write_clip(Path(folder), name, shrink(read_clip(root, name), plan.size), plan.quality)
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {f"{split}/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in paths}


def shrink(clip: Clip, size: tuple[int, int]) -> Clip:
    """Return a clip without depth and geometry whose frames fit in `size` = (width, height) and keep their shape."""
    images = [_fit(clip.image(i), size, cv2.INTER_AREA) for i in range(len(clip))]
    labels = [
        None if held is None else _fit(clip.labels(i), size, cv2.INTER_NEAREST)
        for i, held in enumerate(clip.annotations)
    ]
    height, width = images[0].shape[:2]
    kept = {key: clip.meta[key] for key in KEPT if key in clip.meta}
    return Clip(clip.name, images, labels, meta={**kept, "width": width, "height": height})


def _fit(pixels: Any, size: tuple[int, int], interpolation: int) -> Any:
    height, width = pixels.shape[:2]
    scale = min(size[0] / width, size[1] / height)
    if scale >= 1:
        return pixels
    target = max(1, round(width * scale)), max(1, round(height * scale))
    return cv2.resize(pixels, target, interpolation=interpolation)


def _bytes(encoded: Any) -> bytes:
    return bytes(encoded.tobytes())
