"""Masks as COCO JSON with run lengths, of which pycocotools loads each image on its own.

What makes videos of the images is spelled as in TAO (Dave et al. 2020): `videos` are cameras, images and annotations
have a `video_id`, images a `frame_index`, and `tracks` are objects. Besides: `seq` and `capture_ns` of a frame,
`instance_id`, an object's id on its camera, and `score` in 0..1.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar

from ..types import Instance, MaskFrame
from ..wire import encode_mask
from .actions import Masks, Progress

K = TypeVar("K", bound=Hashable)


class Numbers(Generic[K]):
    """Numbers from 1 for whatever is asked for, by order of first asking."""

    def __init__(self) -> None:
        self._of: dict[K, int] = {}

    def __getitem__(self, key: K) -> int:
        return self._of.setdefault(key, len(self._of) + 1)

    def __iter__(self) -> Iterator[tuple[K, int]]:
        return iter(self._of.items())


def write_coco(path: Path, masks: Masks, progress: Progress) -> None:
    """Write all masks in two passes, row by row; objects without a mask on a frame have no annotation there."""
    cameras = Numbers[str]()
    tracks = Numbers[tuple[str, int]]()
    labels = Numbers[str]()
    with path.open("w", encoding="utf-8") as file:
        file.write("{")
        _write_rows(file, "images", _images(masks(), cameras))
        rows = _annotations(masks(), cameras, tracks, labels, progress)
        _write_rows(file, "annotations", rows, before=",\n")
        videos = ({"id": number, "name": camera} for camera, number in cameras)
        _write_rows(file, "videos", videos, before=",\n")
        _write_rows(file, "tracks", _tracks(cameras, tracks), before=",\n")
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


def _images(masks: Iterator[MaskFrame], cameras: Numbers[str]) -> Iterator[dict[str, Any]]:
    seen: dict[str, int] = {}
    for number, found in enumerate(masks, start=1):
        index = seen[found.camera] = seen.get(found.camera, -1) + 1
        yield {
            "id": number,
            "video_id": cameras[found.camera],
            "file_name": f"{found.camera}/{found.seq:05d}.jpg",
            "width": found.width,
            "height": found.height,
            "frame_index": index,
            "seq": found.seq,
            "capture_ns": found.capture_ns,
        }


def _annotations(
    masks: Iterator[MaskFrame],
    cameras: Numbers[str],
    tracks: Numbers[tuple[str, int]],
    labels: Numbers[str],
    progress: Progress,
) -> Iterator[dict[str, Any]]:
    count = 0
    for image, found in enumerate(masks, start=1):
        for instance in filter(lambda instance: instance.mask.crop.size, found.instances):
            count += 1
            yield {
                "id": count,
                "image_id": image,
                "video_id": cameras[found.camera],
                "track_id": tracks[found.camera, instance.id],
                "category_id": labels[instance.label],
                "instance_id": instance.id,
                **_region(instance),
            }
        progress(image)


def _region(instance: Instance) -> dict[str, Any]:
    x0, y0, x1, y1 = instance.box
    mask = encode_mask(instance.mask, "rle")
    return {
        "score": instance.score,
        "iscrowd": 0,
        "area": instance.area,
        "bbox": [x0, y0, x1 - x0, y1 - y0],
        "segmentation": {"size": mask["size"], "counts": mask["data"].decode("ascii")},
    }


def _tracks(cameras: Numbers[str], tracks: Numbers[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    for (camera, object_id), number in tracks:
        yield {"id": number, "video_id": cameras[camera], "instance_id": object_id}
