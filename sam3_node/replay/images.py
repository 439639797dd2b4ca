"""Writes masks as COCO JSON with run-length encoding. pycocotools loads each image on its own.

The fields that join images to videos are those of TAO (Dave et al. 2020): `videos` are cameras, images and annotations
have a `video_id`, images a `frame_index`, and `tracks` are objects. Additional fields are `seq` and `capture_ns` of a
frame, `instance_id`, which is the object's id on its camera, and `score` in 0..1. `file_name` is the path of the
frame's image beside the JSON file, or without images its place RECORDING#CAMERA/SEQ.

Frames of a recording as images beside their masks, and the names under which COCO finds them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar

from ..bags.native.writer import compress_colour
from ..errors import WireError
from ..files import safe_file_name
from ..types import Frame, Instance, MaskFrame
from ..wire import encode_mask
from ..wire.images import CHANNELS

MaskSource = Callable[[], Iterator[MaskFrame]]
"""Each call yields all masks from the beginning, those of one camera in the order of its frames."""

K = TypeVar("K", bound=Hashable)


class NumberTable(Generic[K]):
    """Assigns numbers from 1 to keys, in the order in which they are first looked up."""

    def __init__(self) -> None:
        self._numbers: dict[K, int] = {}

    def __getitem__(self, key: K) -> int:
        return self._numbers.setdefault(key, len(self._numbers) + 1)

    def __iter__(self) -> Iterator[tuple[K, int]]:
        return iter(self._numbers.items())


def write_coco(
    path: Path,
    masks: MaskSource,
    progress: Callable[[int], None],
    recording: str,
    image_names: Iterator[str | None] | None = None,
) -> None:
    """Write all masks in two passes, row by row. An object without a mask on a frame has no annotation there.

    `image_names` are the files of all frames in the order of the masks, None for a frame without one.
    """
    cameras = NumberTable[str]()
    tracks = NumberTable[tuple[str, int]]()
    labels = NumberTable[str]()
    with path.open("w", encoding="utf-8") as file:
        file.write("{")
        _write_rows(file, "images", _make_images(masks(), cameras, recording, image_names or repeat(None)))
        rows = _make_annotations(masks(), cameras, tracks, labels, progress)
        _write_rows(file, "annotations", rows, before=",\n")
        videos = ({"id": number, "name": camera} for camera, number in cameras)
        _write_rows(file, "videos", videos, before=",\n")
        _write_rows(file, "tracks", _make_tracks(cameras, tracks), before=",\n")
        categories = ({"id": number, "name": label} for label, number in labels)
        _write_rows(file, "categories", categories, before=",\n")
        file.write("}\n")


def _write_rows(file: TextIO, name: str, rows: Iterable[dict[str, Any]], before: str = "\n") -> None:
    file.write(f'{before}"{name}": [')
    separator = "\n"
    for row in rows:
        file.write(separator + json.dumps(row, separators=(",", ":")))
        separator = ",\n"
    file.write("\n]")


def _make_images(
    masks: Iterator[MaskFrame], cameras: NumberTable[str], recording: str, names: Iterable[str | None]
) -> Iterator[dict[str, Any]]:
    last_index: dict[str, int] = {}
    # `names` may be endless
    for number, (frame, name) in enumerate(zip(masks, names, strict=False), start=1):
        index = last_index[frame.camera] = last_index.get(frame.camera, -1) + 1
        yield {
            "id": number,
            "video_id": cameras[frame.camera],
            "file_name": name or f"{recording}#{frame.camera}/{frame.seq}",
            "width": frame.width,
            "height": frame.height,
            "frame_index": index,
            "seq": frame.seq,
            "capture_ns": frame.capture_ns,
        }


def _make_annotations(
    masks: Iterator[MaskFrame],
    cameras: NumberTable[str],
    tracks: NumberTable[tuple[str, int]],
    labels: NumberTable[str],
    progress: Callable[[int], None],
) -> Iterator[dict[str, Any]]:
    count = 0
    for image, frame in enumerate(masks, start=1):
        for instance in filter(lambda instance: instance.mask.crop.size, frame.instances):
            count += 1
            yield {
                "id": count,
                "image_id": image,
                "video_id": cameras[frame.camera],
                "track_id": tracks[frame.camera, instance.id],
                "category_id": labels[instance.label],
                "instance_id": instance.id,
                **_make_region(instance),
            }
        progress(image)


def _make_region(instance: Instance) -> dict[str, Any]:
    x0, y0, x1, y1 = instance.box
    mask = encode_mask(instance.mask, "rle")
    return {
        "score": instance.score,
        "iscrowd": 0,
        "area": instance.area,
        "bbox": [x0, y0, x1 - x0, y1 - y0],
        "segmentation": {"size": mask["size"], "counts": mask["data"].decode("ascii")},
    }


def _make_tracks(cameras: NumberTable[str], tracks: NumberTable[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    for (camera, object_id), number in tracks:
        yield {"id": number, "video_id": cameras[camera], "instance_id": object_id}


FrameSource = Callable[[], Iterator[Frame]]
"""Each call yields the frames of the recording from the beginning."""

FOLDER = "images"
QUALITY = 95
SUFFIXES, RAW_SUFFIX = {"jpeg": ".jpg", "png": ".png"}, ".jpg"


class CameraFrames:
    """Finds the frames of one camera's masks, both in the same order."""

    def __init__(self, frames: Iterator[Frame]) -> None:
        self._frames = frames
        self._frame = next(frames, None)

    @property
    def ended(self) -> bool:
        """True if no frame is left."""
        return self._frame is None

    def find(self, masks: MaskFrame) -> Frame | None:
        """Return the frame of the next masks, None if it is missing."""
        while self._frame is not None and self._frame.key != masks.key and not _is_past(masks, self._frame):
            self._frame = next(self._frames, None)
        return self._frame if self._frame is not None and self._frame.key == masks.key else None


def _is_past(masks: MaskFrame, frame: Frame) -> bool:
    # both are compared: seq starts again when a camera is restarted
    return frame.seq > masks.seq and frame.capture_ns > masks.capture_ns


def join_frames(masks: MaskSource, frames: FrameSource) -> Iterator[tuple[MaskFrame, Frame | None]]:
    """Yield all masks in their order, each with its frame, or None where that is missing.

    Each camera has its own pass over the recording, because the order of masks may differ from that of frames.
    """
    cameras: dict[str, CameraFrames] = {}
    for frame_masks in masks():
        camera = frame_masks.camera
        if camera not in cameras:
            cameras[camera] = CameraFrames(_select(camera, frames()))
        yield frame_masks, cameras[camera].find(frame_masks)


def _select(camera: str, frames: Iterator[Frame]) -> Iterator[Frame]:
    return (frame for frame in frames if frame.camera == camera)


def compress_frame(frame: Frame | None) -> Frame | None:
    """Return a frame whose colour is JPEG or PNG: as it was, or JPEG of QUALITY if it was raw.

    Return None if there is no frame, or if it cannot be decoded.
    """
    if frame is None or frame.encoding not in CHANNELS:
        return frame
    try:
        return compress_colour(frame, "jpeg", QUALITY)
    except WireError:
        return None


class ImageNames:
    """Names the image files of masks, which come in the order of each camera's frames.

    The name is images/<camera>/<seq>.jpg or .png. After a restart of the camera, numbers that come again get -1, -2
    and so on.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int]] = {}

    def name(self, masks: MaskFrame, frame: Frame) -> str:
        """Return the path of the next image below the folder of the outputs."""
        last_seq, restarts = self._last.get(masks.camera, (-1, 0))
        restarts += masks.seq <= last_seq
        self._last[masks.camera] = masks.seq, restarts
        restart = f"-{restarts}" if restarts else ""
        folder = f"{FOLDER}/{safe_file_name(masks.camera)}"
        return f"{folder}/{masks.seq:05d}{restart}{SUFFIXES.get(frame.encoding, RAW_SUFFIX)}"


def write_images(
    folder: Path, masks: MaskSource, frames: FrameSource, progress: Callable[[int], None]
) -> None:
    """Write the image of each frame that has masks, as `compress_frame` makes it."""
    names = ImageNames()
    (folder / FOLDER).mkdir()
    for count, (frame_masks, frame) in enumerate(join_frames(masks, frames), start=1):
        image = compress_frame(frame)
        if image is not None:
            path = folder / names.name(frame_masks, image)  # raw colour has become JPEG
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(image.colour)
        progress(count)


def name_images(masks: MaskSource, frames: FrameSource) -> Iterator[str | None]:
    """Yield for each masks in their order the name that `write_images` gives its image, None without an image."""
    names = ImageNames()
    for frame_masks, frame in join_frames(masks, frames):
        yield names.name(frame_masks, frame) if frame is not None else None
