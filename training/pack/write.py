"""Pack clips, cut-outs and background videos, reduced in size, into one zip file for training on another machine.

Below `train` and `tracks` lie clip folders to train on, below `parts` a clip folder for each part of the validation,
below `cutouts` RGBA PNG files, below `videos` a folder of JPEG files for each video, below `taught` shards of labelled
pictures, below `weights` those that mixtures are made with. The same input gives the same bytes.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

import cv2
import numpy as np

from sam3_node.errors import CameraError, OutputError
from tools.scenes.clips import Clip, list_clips, read_clip, write_clip
from tools.vos.sequences import UNKNOWN
from training.nano.augment import read_cutouts
from training.nano.data import video_frames
from training.nano.taught import list_shards, read_shard, write_shard

KEPT = ("fps", "split", "seed", "scenario", "target", "objects")  # of a clip's meta
PART_SIZE = (320, 240)
PART_FRAMES = 24
"""Largest size and number of frames of the clips of a part."""
PART_QUALITY = 80
TAUGHT_LONGEST = 384
"""Longer side in pixels of a labelled picture. nano sees 256, and sometimes a part of the picture alone."""
TAUGHT_QUALITY = 80
FRAMING = (
    30 + 46 + 16
)  # bytes of zip around a file: local header, central entry, deflate of what does not deflate
END = 22

Files = Mapping[str, bytes]


class Part(NamedTuple):
    """A part of the validation: a folder of clips, of which every `every`-th frame is packed."""

    name: str
    folder: Path
    every: int = 1


@dataclass(frozen=True)
class Pack:
    """Folders to pack (all but `train` may be absent) and the limits of size.

    max_bytes: of the zip file. size: largest width and height of a frame. quality: of JPEG, 1..100. tracks: clips of
    `training.doubt.pseudo`. taught: shards of `training.nano teach`. weights: files by name.
    """

    train: Path
    max_bytes: int
    size: tuple[int, int] = (256, 192)
    quality: int = 60
    parts: tuple[Part, ...] = ()
    tracks: Path | None = None
    taught: Path | None = None
    weights: tuple[tuple[str, Path], ...] = ()
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
    named: dict[str, Path | None] = {f"clips of part {part.name}": part.folder for part in plan.parts}
    named |= {"tracks": plan.tracks, "shards": plan.taught, "cut-outs": plan.cutouts, "videos": plan.videos}
    for kind, folder in named.items():
        if folder and kind not in counts:
            raise CameraError(f"expected {kind} in {folder}, found none")
    names = _shuffled(plan.train)
    fitting = 0
    while fitting < len(names) and archive.add(_train_files(plan, names[fitting])):
        fitting += 1
    if not fitting:
        raise OutputError(
            f"no clip of {plan.train} fits into {plan.max_bytes} bytes: allow more, or pack less of the rest"
        )
    counts = {kind: count for kind, count in counts.items() if kind != "of unknown truth"}
    return [f"{fitting} of {len(names)} training clips", *(f"{n} {kind}" for kind, n in counts.items())]


def _required_files(plan: Pack) -> Iterator[tuple[str, Files]]:
    """Yield the files that are packed in any case, by kind."""
    for part in plan.parts:
        target = f"parts/{part.name}"
        for name in list_clips(part.folder):
            clip = shrink(thin(read_clip(part.folder, name), part.every), PART_SIZE)
            yield f"clips of part {part.name}", _clip_files(clip, PART_QUALITY, target)
        yield "of unknown truth", {f"{target}/{UNKNOWN}": _unknown(part.folder, part.every)}
    for name, path in plan.weights:
        yield "weights", {f"weights/{name}.safetensors": path.read_bytes()}
    if plan.tracks:
        for name in list_clips(plan.tracks):
            clip = shrink(read_clip(plan.tracks, name), plan.size)
            yield "tracks", _clip_files(clip, plan.quality, "tracks")
        yield "of unknown truth", {f"tracks/{UNKNOWN}": _unknown(plan.tracks, 1)}
    if plan.taught:
        for path in list_shards(plan.taught):
            yield "shards", {f"taught/{path.name}": _smaller_shard(path)}
    if plan.cutouts:
        for number, sprite in enumerate(read_cutouts(plan.cutouts, plan.sprites)):
            yield "cut-outs", {f"cutouts/{number:05d}.png": _bytes(cv2.imencode(".png", sprite)[1])}
    if plan.videos:
        for path in sorted(plan.videos.glob("*.mp4")):
            frames = enumerate(video_frames(path))
            yield "videos", {f"videos/{path.stem}/{i:05d}.jpg": _bytes(jpeg) for i, jpeg in frames}


def _unknown(folder: Path, every: int) -> bytes:
    """Return the pairs of unknown truth of a folder of clips, as `thin` numbers the frames."""
    path = folder / UNKNOWN
    held = json.loads(path.read_text()) if path.is_file() else {}
    kept = {
        name: [[at // every, i] for at, i in pairs if at % every == 0 and at // every < PART_FRAMES]
        for name, pairs in held.items()
    }
    return json.dumps(kept).encode()


def _shuffled(root: Path) -> list[str]:
    names = list_clips(root)
    if not names:
        raise CameraError(f"expected clips in {root}, found none: render some, python -m tools.scenes")
    np.random.default_rng(0).shuffle(names)
    return names


def _train_files(plan: Pack, name: str) -> Files:
    return _clip_files(shrink(read_clip(plan.train, name), plan.size), plan.quality, "train")


def _clip_files(clip: Clip, quality: int, target: str) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        write_clip(Path(folder), clip.name, clip, quality)
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {f"{target}/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in paths}


def thin(clip: Clip, every: int) -> Clip:
    """Return every `every`-th frame of a clip, at most PART_FRAMES."""
    chosen = range(0, len(clip), every)[:PART_FRAMES]
    images = [clip.image(index) for index in chosen]
    labels = [clip.labels(index) if clip.annotations else None for index in chosen]
    return Clip(clip.name, images, labels, meta=clip.meta)


def _smaller_shard(path: Path) -> bytes:
    """Return a shard whose pictures are as large as nano needs them; masks stay as they are."""
    pictures = []
    for picture in read_shard(path):
        image = _fit(picture.image(), (TAUGHT_LONGEST, TAUGHT_LONGEST), cv2.INTER_AREA)
        jpeg = _bytes(cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, TAUGHT_QUALITY])[1])
        pictures.append(picture._replace(jpeg=jpeg))
    with tempfile.TemporaryDirectory() as folder:
        return write_shard(Path(folder) / path.name, pictures).read_bytes()


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
