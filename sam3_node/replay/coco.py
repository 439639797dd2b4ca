"""Writes masks as COCO JSON with run-length encoding. pycocotools loads each image on its own.

The fields that join images to videos are those of TAO (Dave et al. 2020): `videos` are cameras, images and annotations
have a `video_id`, images a `frame_index`, and `tracks` are objects. Additional fields are `seq` and `capture_ns` of a
frame, `instance_id`, which is the object's id on its camera, and `score` in 0..1. `file_name` is the path of the
frame's image beside the JSON file, or without images its place RECORDING#CAMERA/SEQ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar

from ..types import Instance, MaskFrame
from ..wire import encode_mask

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
