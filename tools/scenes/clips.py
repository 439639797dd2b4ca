"""Clip folders in DAVIS' layout: colour, instance labels, depth and metadata.

    ROOT/JPEGImages/<clip>/00000.jpg     colour
    ROOT/Annotations/<clip>/00000.png    8-bit palette PNG: 0 background, 1..N object ids, stable within the clip
    ROOT/Depth/<clip>/00000.png          optional: uint16 millimetres along the optical axis, 0 = none
    ROOT/Clips/<clip>.json               optional: `Clip.meta`

A clip is written to a temporary folder and moved into place, its JSON last. If a folder `Clips` exists, a clip without
JSON is unfinished and is not listed. Folders of the DAVIS benchmark (JPEGImages/480p/<clip>, no JSON) can be read too.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from sam3_node.errors import CameraError, OutputError, WireError
from sam3_node.palette_png import encode_labels
from sam3_node.replay.davis_png import decode_labels
from sam3_node.types import Image

Labels = npt.NDArray[np.uint8]  # [h, w]
Depth = npt.NDArray[np.uint16]  # [h, w]

RESOLUTION = "480p"  # the DAVIS benchmark's own level of folders


@dataclass(frozen=True)
class Clip:
    """Frames of one camera with labels of its objects; each frame is an array, or a file that is read on demand.

    frames: BGR uint8 [h, w, 3]. annotations: uint8 [h, w], None where a frame has none. depths: uint16 [h, w] in
    millimetres, or None. meta may hold fps, width, height, split, seed, scenario, target, intrinsics {fx fy cx cy},
    objects [{id, name, color, kind}], camera_poses [n, 4, 4], camera to world with OpenCV's axes, in metres, urdf, a
    robot's description, and joints [n], the positions of its joints.
    """

    name: str
    frames: Sequence[Path | Image]
    annotations: Sequence[Path | Labels | None]
    depths: Sequence[Path | Depth | None] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.frames)

    def image(self, index: int) -> Image:
        """Read an image, BGR [h, w, 3]; raise CameraError for a file that is no image."""
        frame = self.frames[index]
        return _read(frame, cv2.IMREAD_COLOR) if isinstance(frame, Path) else frame

    def labels(self, index: int) -> Labels:
        """Read the object ids, uint8 [h, w]; raise CameraError if there are none."""
        annotation = self.annotations[index]
        if annotation is None:
            raise CameraError(f"clip {self.name}: expected an annotation of frame {index}, found none")
        return _read_labels(annotation) if isinstance(annotation, Path) else annotation

    def depth(self, index: int) -> Depth | None:
        """Read the depth in millimetres, uint16 [h, w]; None if the clip has no depth."""
        depth = self.depths[index] if index < len(self.depths) else None
        return _read(depth, cv2.IMREAD_UNCHANGED) if isinstance(depth, Path) else depth


def list_clips(root: Path) -> list[str]:
    """List the names of the finished clips in a folder, sorted; raise CameraError if there is no such folder."""
    folder = _level(root, "JPEGImages")
    if not folder.is_dir():
        raise CameraError(f"expected clips in {root}/JPEGImages, found no such folder")
    names = sorted(item.name for item in folder.iterdir() if item.is_dir())
    return [name for name in names if is_written(root, name)] if (root / "Clips").is_dir() else names


def is_written(root: Path, name: str) -> bool:
    """Return True if `write_clip` has finished this clip."""
    return _meta_path(root, name).is_file()


def read_clip(root: Path, name: str) -> Clip:
    """Open a clip whose frames are read on demand; raise CameraError if no clip has this name."""
    frames = sorted((_level(root, "JPEGImages") / name).glob("*.jpg"))
    if not frames:
        raise CameraError(f"expected a clip {name} in {root}, found no frames")
    path = _meta_path(root, name)
    try:
        meta = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise CameraError(f"expected JSON in {path}: {error}") from error
    masks = _matching_files(frames, _level(root, "Annotations") / name)
    return Clip(name, frames, masks, _matching_files(frames, root / "Depth" / name), meta)


def write_clip(root: Path, name: str, clip: Clip, quality: int = 92) -> None:
    """Write a clip completely or not at all; replace one of the same name.

    quality: of the JPEG files, 1..100. Raises OutputError where the folder cannot be written.
    """
    partial = root / f".{name}.{os.getpid()}"
    try:
        _write_frames(partial, clip, quality)
        _meta_path(root, name).unlink(missing_ok=True)
        for kind in ("JPEGImages", "Annotations", "Depth"):
            _move(partial / kind, root / kind / name)
        (partial / "meta.json").write_text(json.dumps(dict(clip.meta)))
        _move(partial / "meta.json", _meta_path(root, name))
    except OSError as error:
        raise OutputError(f"clip {name} cannot be written to {root}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _level(root: Path, kind: str) -> Path:
    nested = root / kind / RESOLUTION
    return nested if nested.is_dir() else root / kind


def _meta_path(root: Path, name: str) -> Path:
    return root / "Clips" / f"{name}.json"


def _matching_files(frames: Sequence[Path], folder: Path) -> list[Path | None]:
    paths = (folder / f"{frame.stem}.png" for frame in frames)
    return [path if path.is_file() else None for path in paths]


def _move(source: Path, destination: Path) -> None:
    if destination.is_dir():
        shutil.rmtree(destination)
    if source.exists():
        destination.parent.mkdir(parents=True, exist_ok=True)
        source.rename(destination)


def _write_frames(folder: Path, clip: Clip, quality: int) -> None:
    has_depth = any(depth is not None for depth in clip.depths)
    for kind in ("JPEGImages", "Annotations", "Depth")[: 2 + has_depth]:
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for index in range(len(clip)):
        name = f"{index:05d}"
        jpeg = cv2.imencode(".jpg", clip.image(index), [cv2.IMWRITE_JPEG_QUALITY, quality])[1]
        (folder / "JPEGImages" / f"{name}.jpg").write_bytes(jpeg.tobytes())
        if index < len(clip.annotations) and clip.annotations[index] is not None:
            (folder / "Annotations" / f"{name}.png").write_bytes(encode_labels(clip.labels(index)))
        depth = clip.depth(index)
        if depth is not None:
            (folder / "Depth" / f"{name}.png").write_bytes(cv2.imencode(".png", depth)[1].tobytes())


def _read_labels(path: Path) -> Labels:
    try:
        labels = decode_labels(path.read_bytes())
    except (OSError, WireError) as error:
        raise CameraError(f"{path}: {error}") from error
    if labels.max(initial=0) > np.iinfo(np.uint8).max:
        raise CameraError(f"{path}: expected ids of 8 bits, found {labels.max()}")
    return labels.astype(np.uint8)


def _read(path: Path, flags: int) -> Any:
    pixels = cv2.imread(str(path), flags)
    if pixels is None:
        raise CameraError(f"expected an image, found something else: {path}")
    return pixels
