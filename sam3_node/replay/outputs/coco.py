"""Writes masks as JSON in the forms of COCO and YouTube-VIS.

Both are written row by row, because all masks of a long recording would not fit into memory.
"""

from __future__ import annotations

import json
import tempfile
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TextIO, TypedDict

from ...types import Instance, MaskFrame
from ...wire import encode_mask
from ..davis_png import MaskSource, NumberTable
from .output import OutputFormat, Progress, Sources

COCO = "masks.json"
"""File in COCO's form."""
YTVIS = "ytvis.json"
"""File in the form of YouTube-VIS."""


class _Runs(TypedDict):
    """A mask in run-length encoding."""

    size: list[int]
    counts: str


class _ImageRow(TypedDict):
    """A frame in COCO's form."""

    id: int
    video_id: int
    file_name: str
    width: int
    height: int
    frame_index: int
    seq: int
    capture_ns: int


class _Region(TypedDict):
    """What an annotation of COCO says of a mask."""

    score: float
    confidence: float | None
    name_confidence: float | None
    doubtful: bool
    iscrowd: int
    area: int
    bbox: list[int]
    segmentation: _Runs


class _AnnotationRow(_Region):
    """An object's mask on a frame, in COCO's form."""

    id: int
    image_id: int
    video_id: int
    track_id: int
    category_id: int
    instance_id: int


class _TrackRow(TypedDict):
    """An object in COCO's form."""

    id: int
    video_id: int
    instance_id: int


class _VideoRow(TypedDict):
    """A video in the form of YouTube-VIS."""

    id: int
    name: str
    width: int
    height: int
    length: int
    file_names: list[str]


class _Cells(TypedDict):
    """What the lists of YouTube-VIS have of a mask."""

    segmentations: _Runs
    bboxes: list[int]
    areas: int
    scores: float
    confidences: float | None
    doubtful: bool


class _Lists(TypedDict):
    """Lists of an annotation of YouTube-VIS, with a value for each frame of the video; None without a mask."""

    segmentations: list[_Runs | None]
    bboxes: list[list[int] | None]
    areas: list[int | None]
    scores: list[float | None]
    confidences: list[float | None]
    doubtful: list[bool | None]


class _TubeRow(_Lists):
    """An object's masks in a video, in the form of YouTube-VIS."""

    id: int
    video_id: int
    category_id: int
    instance_id: int
    iscrowd: int
    width: int
    height: int
    length: int


def write_coco(
    folder: Path,
    masks: MaskSource,
    names: Iterator[str | None],
    recording: str,
    progress: Callable[[int], None],
    prompts: Sequence[str] = (),
) -> None:
    """Write all masks as COCO JSON into masks.json, with run-length encoding, in two passes, row by row.

    The fields that join images to videos follow TAO (Dave et al. 2020). `videos` are cameras. Images and annotations
    have a `video_id`, images a `frame_index`. `tracks` are objects. Additional fields are `seq` and `capture_ns` of a
    frame, `instance_id`, which is the object's id on its camera, and `score` in 0..1. `confidence`, `name_confidence`
    (null where unknown) and `doubtful` say how far the mask and the name can be trusted. `file_name` is the path of the
    frame's image beside the JSON file; without a name it is RECORDING#CAMERA/SEQ. An object without a mask on
    a frame has no annotation there. pycocotools loads each image on its own. Categories are numbered as `number_labels`
    says.
    """
    cameras = NumberTable[str]()
    tracks = NumberTable[tuple[str, int]]()
    found: set[str] = set()
    # the tables of numbers are complete after images and annotations, so what they describe comes last
    with (folder / COCO).open("x", encoding="utf-8") as file:
        file.write("{")
        _write_rows(file, "images", _make_images(masks(), cameras, recording, names, found))
        labels = number_labels(prompts, found)
        rows = _make_annotations(masks(), cameras, tracks, labels, progress)
        _write_rows(file, "annotations", rows, before=",\n")
        videos = ({"id": number, "name": camera} for camera, number in cameras)
        _write_rows(file, "videos", videos, before=",\n")
        _write_rows(file, "tracks", _make_tracks(cameras, tracks), before=",\n")
        categories = ({"id": number, "name": label} for label, number in labels)
        _write_rows(file, "categories", categories, before=",\n")
        file.write("}\n")


def number_labels(prompts: Sequence[str], labels: Collection[str]) -> NumberTable[str]:
    """Return the numbers of categories: the names of the command in their order, then other labels by name.

    So a name has the same number in all recordings of a command that finds by names.
    """
    numbers = NumberTable[str]()
    for label in (*prompts, *sorted(set(labels) - set(prompts))):
        _ = numbers[label]
    return numbers


def _write_rows(file: TextIO, name: str, rows: Iterable[Mapping[str, object]], before: str = "\n") -> None:
    # row by row: all of a long recording would not fit into memory
    file.write(f'{before}"{name}": [')
    separator = "\n"
    for row in rows:
        file.write(separator + json.dumps(row, separators=(",", ":")))
        separator = ",\n"
    file.write("\n]")


def _make_images(
    masks: Iterator[MaskFrame],
    cameras: NumberTable[str],
    recording: str,
    names: Iterable[str | None],
    labels: set[str],
) -> Iterator[_ImageRow]:
    """Yield the rows of all images, and add the labels of their objects to `labels`."""
    last_index: dict[str, int] = {}
    # `names` may be endless
    for number, (frame, name) in enumerate(zip(masks, names, strict=False), start=1):
        labels |= {instance.label for instance in frame.instances if instance.mask.crop.size}
        index = last_index.get(frame.camera, -1) + 1
        last_index[frame.camera] = index
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
) -> Iterator[_AnnotationRow]:
    # `image` is the id that `_make_images` gives the frame: both go through the same masks
    count = 0
    for image, frame in enumerate(masks, start=1):
        for instance in frame.instances:
            if not instance.mask.crop.size:
                continue
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


def _make_region(instance: Instance) -> _Region:
    return {
        "score": instance.score,
        "confidence": instance.confidence,
        "name_confidence": instance.name_confidence,
        "doubtful": instance.doubtful,
        "iscrowd": 0,
        "area": instance.area,
        "bbox": _make_box(instance),
        "segmentation": _encode_runs(instance),
    }


def _make_box(instance: Instance) -> list[int]:
    x0, y0, x1, y1 = instance.box
    return [x0, y0, x1 - x0, y1 - y0]


def _encode_runs(instance: Instance) -> _Runs:
    # COCO's run lengths are text in JSON
    mask = encode_mask(instance.mask, "rle")
    return {"size": mask["size"], "counts": mask["data"].decode("ascii")}


def _make_tracks(cameras: NumberTable[str], tracks: NumberTable[tuple[str, int]]) -> Iterator[_TrackRow]:
    for (camera, object_id), number in tracks:
        yield {"id": number, "video_id": cameras[camera], "instance_id": object_id}


def write_ytvis(
    folder: Path,
    masks: MaskSource,
    names: Iterator[str | None],
    recording: str,
    progress: Callable[[int], None],
    with_doubtful: bool,
    prompts: Sequence[str] = (),
) -> str:
    """Write all masks in the form of YouTube-VIS into ytvis.json, in one pass. Return how many are left out.

    A video is a camera, from its start to the next restart or change of size. An annotation is an object of a video. It
    has `segmentations` (run-length encoding), `bboxes` and `areas` of each frame of the video, None where the object
    has no mask. Additional fields are `instance_id`, and the lists `scores`, `confidences` and `doubtful`. Doubtful
    masks are None unless `with_doubtful`. `names` are the pictures' paths, and categories are numbered, as in COCO's
    form.
    """
    videos: dict[str, list[_Video]] = {}
    total = 0
    left_out = 0
    # what the frames have of an object lies in a file until the object is complete
    with tempfile.TemporaryFile(dir=folder) as spool:
        for count, (frame, name) in enumerate(zip(masks(), names, strict=False), start=1):
            video = _find_video(videos.setdefault(frame.camera, []), frame)
            for instance in frame.instances:
                if not instance.mask.crop.size:
                    continue
                total += 1
                if instance.doubtful and not with_doubtful:
                    left_out += 1
                    continue
                video.add(instance, spool)
            video.file_names.append(name or f"{recording}#{frame.camera}/{frame.seq}")
            video.last_seq = frame.seq
            progress(count)

        # videos are numbered as they are listed
        listed = [video for runs in videos.values() for video in runs]
        labels = number_labels(prompts, {tube.label for video in listed for tube in video.tubes.values()})
        with (folder / YTVIS).open("x", encoding="utf-8") as file:
            file.write("{")
            _write_rows(file, "videos", (_describe_video(*item) for item in enumerate(listed, start=1)))
            _write_rows(file, "annotations", _make_tubes(listed, labels, spool), before=",\n")
            categories = ({"id": number, "name": label} for label, number in labels)
            _write_rows(file, "categories", categories, before=",\n")
            file.write("}\n")
    return (
        f"{YTVIS}: {total - left_out} masks in {len(listed)} videos; {left_out} doubtful masks are left out"
    )


@dataclass(slots=True)
class _Tube:
    """An object's masks in a video: its label, and the frames with the places of their rows in the spool."""

    label: str
    frames: array[int] = field(default_factory=lambda: array("q"))
    places: array[int] = field(default_factory=lambda: array("q"))


@dataclass(slots=True)
class _Video:
    """Frames of a camera in a row, of one size, and the objects on them."""

    camera: str
    width: int
    height: int
    file_names: list[str] = field(default_factory=list)
    last_seq: int = -1
    tubes: dict[int, _Tube] = field(default_factory=dict)
    """Objects by id."""

    def add(self, instance: Instance, spool: IO[bytes]) -> None:
        """Add an object's mask on the next frame."""
        tube = self.tubes.setdefault(instance.id, _Tube(instance.label))
        # a name that was corrected counts for the whole video
        tube.label = instance.label
        tube.frames.append(len(self.file_names))
        tube.places.append(spool.tell())
        row: _Cells = {
            "segmentations": _encode_runs(instance),
            "bboxes": _make_box(instance),
            "areas": instance.area,
            "scores": instance.score,
            "confidences": instance.confidence,
            "doubtful": instance.doubtful,
        }
        spool.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")


def _find_video(runs: list[_Video], frame: MaskFrame) -> _Video:
    """Return the video of a frame among those of its camera. A new one begins after a restart or change of size."""
    last = runs[-1] if runs else None
    if last is None or frame.seq <= last.last_seq or (frame.width, frame.height) != (last.width, last.height):
        last = _Video(frame.camera, frame.width, frame.height)
        runs.append(last)
    return last


def _describe_video(number: int, video: _Video) -> _VideoRow:
    return {
        "id": number,
        "name": video.camera,
        "width": video.width,
        "height": video.height,
        "length": len(video.file_names),
        "file_names": video.file_names,
    }


def _make_tubes(videos: Iterable[_Video], labels: NumberTable[str], spool: IO[bytes]) -> Iterator[_TubeRow]:
    count = 0
    for number, video in enumerate(videos, start=1):
        length = len(video.file_names)
        for object_id, tube in video.tubes.items():
            count += 1
            lists: _Lists = {
                "segmentations": [None] * length,
                "bboxes": [None] * length,
                "areas": [None] * length,
                "scores": [None] * length,
                "confidences": [None] * length,
                "doubtful": [None] * length,
            }
            for index, place in zip(tube.frames, tube.places, strict=True):
                spool.seek(place)
                cells: _Cells = json.loads(spool.readline())
                lists["segmentations"][index] = cells["segmentations"]
                lists["bboxes"][index] = cells["bboxes"]
                lists["areas"][index] = cells["areas"]
                lists["scores"][index] = cells["scores"]
                lists["confidences"][index] = cells["confidences"]
                lists["doubtful"][index] = cells["doubtful"]
            yield {
                "id": count,
                "video_id": number,
                "category_id": labels[tube.label],
                "instance_id": object_id,
                "iscrowd": 0,
                "width": video.width,
                "height": video.height,
                "length": length,
                **lists,
            }


class Coco(OutputFormat):
    """masks.json in COCO format."""

    file = (
        "`masks.json`: COCO with RLE masks, with `videos` and `tracks` beside; each annotation has `confidence` and "
        "`doubtful`"
    )
    is_label = True
    names_images = True
    frame_bytes = 3000

    @classmethod
    def write(cls, folder: Path, sources: Sources, progress: Progress) -> None:
        """Write the file."""
        names = sources.name_images(sources.labels)
        write_coco(folder, sources.labels, names, sources.recording, progress, sources.prompts)


class YouTubeVis(OutputFormat):
    """ytvis.json in the format of YouTube-VIS."""

    file = "`ytvis.json`: YouTube-VIS, with RLE masks of each object over its video"
    hides_doubt = True
    is_label = True
    names_images = True
    frame_bytes = 3000

    @classmethod
    def write(cls, folder: Path, sources: Sources, progress: Progress) -> str:
        """Write the file. Return how many masks are left out."""
        names = sources.name_images(sources.masks)
        return write_ytvis(
            folder, sources.masks, names, sources.recording, progress, sources.with_doubtful, sources.prompts
        )
