"""Writes the outputs of a replay: masks as MCAP, COCO JSON, palette PNGs and in a LeRobot dataset, videos, and images.

Each output is complete or absent. File names from a recording never lead out of the folder of the outputs.
"""

import base64
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

import cv2

from ..bags.native import COLOUR
from ..bags.native.writer import RecordingWriter, compress_colour, describe_compression
from ..errors import BagError, OutputError, ReplayError, WireError
from ..files import child_path, safe_file_name
from ..geometry import mask_iou
from ..types import NANOSECONDS, Frame, Instance, MaskFrame
from ..visualization import PALETTE, VideoWriter, overlay
from ..wire import decode_image, encode_mask, pack_masks
from ..wire.images import CHANNELS
from .davis_png import MaskSource, NumberTable, write_palette_pngs
from .job import Doubtful
from .lerobot_dataset import write_lerobot

T = TypeVar("T", MaskFrame, Frame)
FrameSource = Callable[[], Iterator[Frame]]
"""Each call yields the frames of the recording from the beginning."""

REPORT_PICTURES = 12
"""Number of pictures in a report, evenly chosen."""
REPORT_PICTURE_PX = 480
"""Width of these pictures, at most."""
REPORT_POINTS = 4000
"""Number of frames in a report's graphs, at most. More would slow a browser down."""

_IMAGES = "images"
# endings of image files by the encoding of their frames
_SUFFIXES = {"jpeg": ".jpg", "png": ".png"}
# letters of states in the report; the others have their first letter, which this one shares with `tracked`
_STATE_LETTERS = {"tentative": "n"}


class Dataset(NamedTuple):
    """A dataset that the recording is, and the names to detect, in their order."""

    path: Path
    prompts: Sequence[str] = ()


class Sources(NamedTuple):
    """Masks, frames and name of a recording that outputs are made from, and its recorded masks if there are any.

    `has_images` is True if the images were written before. The kind lerobot needs the `dataset` that was replayed.
    `doubtful` says what the labels do with doubtful objects.
    """

    masks: MaskSource
    frames: FrameSource
    recording: str = "recording"
    has_images: bool = False
    dataset: Dataset | None = None
    recorded: MaskSource | None = None
    doubtful: Doubtful = "marked"

    @property
    def labels(self) -> MaskSource:
        """The masks that become labels."""
        if self.doubtful == "left-out":
            return lambda: (masks.without_doubtful() for masks in self.masks())
        return self.masks


def write_outputs(
    out: Path, kinds: Sequence[str], sources: Sources, progress: Callable[[str, int], None]
) -> list[Path]:
    """Write outputs of these KINDS into the folder `out`. Return the files and folders written.

    An output replaces an older one when it is complete. The same masks and frames give the same bytes. `progress` is
    called with a kind and the number of masks written. COCO names the files of `images` if they are among the kinds or
    were written before, and places in the recording otherwise. The report compares the masks with the recorded ones.
    Raises ReplayError for an unknown kind before anything is written, OutputError if `out` cannot be written, and the
    exceptions of the sources.
    """
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown:
        raise ReplayError(f"unknown output {unknown[0]!r:.60}: expected some of {', '.join(KINDS)}")
    # images may be written in this call or an earlier one: COCO names them either way
    written: list[Path] = []
    sources = sources._replace(has_images=sources.has_images or "images" in kinds)
    for kind in dict.fromkeys(kinds):
        with _replace_when_complete(out, kind, written) as folder:
            _WRITERS[kind](folder, sources, partial(progress, kind))
    return written


@contextmanager
def _replace_when_complete(out: Path, kind: str, written: list[Path]) -> Iterator[Path]:
    """Provide a folder whose content is moved to `out` at the end of the block, unless the block fails."""
    # the folder lies in `out`, so that moving its content is a rename; a link in its place is never followed
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
        # the block also reads the recording: an error outside `out` is not one of writing
        if error.filename and not Path(os.fsdecode(error.filename)).absolute().is_relative_to(out.absolute()):
            raise BagError(f"cannot read {error.filename}: {error.strerror}") from error
        raise OutputError(f"cannot write {kind} into {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)


def _move(item: Path, target: Path, partial_folder: Path) -> Path:
    # a folder cannot be replaced in one step: move the old one away first
    if target.is_dir():
        target.rename(partial_folder / f"old {target.name}")
    return item.replace(target)


def _write_mcap(
    folder: Path, sources: Sources, progress: Callable[[int], None], has_images: bool = False
) -> None:
    """Write masks.mcap. With `has_images`, each masks come after their frame. Raw colour becomes JPEG."""
    is_described = False
    frames = sources.frames
    if not has_images:
        frames = _no_frames
    with RecordingWriter(folder / "masks.mcap") as bag:
        for count, (masks, frame) in enumerate(join_frames(sources.masks, frames), start=1):
            image = compress_frame(frame)
            # say once that the pixels are not those of the camera
            if image is not frame and not is_described:
                is_described = True
                bag.write_metadata(COLOUR, describe_compression("jpeg"))
            if image is not None:
                bag.write_frame(image, masks.age_origin_ns)
            _, body = pack_masks(masks, "rle")
            bag.write_masks(body, masks, masks.age_origin_ns)
            progress(count)


def _no_frames() -> Iterator[Frame]:
    return iter(())


def _no_masks() -> Iterator[MaskFrame]:
    return iter(())


def _write_png(folder: Path, sources: Sources, progress: Callable[[int], None]) -> None:
    (folder / "png").mkdir()
    write_palette_pngs(folder / "png", sources.masks(), progress, sources.doubtful == "drawn")


def _write_overlays(folder: Path, sources: Sources, progress: Callable[[int], None]) -> None:
    """Write overlay-<camera>.mp4 for each camera, in one pass over masks and frames for each.

    Masks whose frame is missing or cannot be decoded are skipped. A camera without any drawn frame has no video.
    """
    # a pass for each camera, so that only one video is open
    count = 0
    for camera in sorted({masks.camera for masks in sources.masks()}):
        with VideoWriter(child_path(folder, f"overlay-{camera}.mp4")) as film:
            masks_of_camera = partial(_select_camera, camera, sources.masks)
            for masks, frame in join_frames(masks_of_camera, sources.frames):
                with suppress(WireError):
                    if frame is not None:
                        film.write(overlay(decode_image(frame), masks), masks.capture_ns)
                progress(count + film.frames)
        count += film.frames


def _write_lerobot(folder: Path, sources: Sources, progress: Callable[[int], None]) -> None:
    if sources.dataset is None:
        raise ReplayError("the output lerobot: expected a LeRobot dataset to add masks to, found none")
    write_lerobot(folder, sources.dataset.path, sources.labels, progress, sources.dataset.prompts)


def _write_report(folder: Path, sources: Sources, progress: Callable[[int], None]) -> None:
    """Write report.html, one page that needs no other file: pictures, tracks, scores, confidences, and IoU.

    It has at most REPORT_POINTS frames, evenly chosen.
    """
    # evenly chosen frames for the graphs and the pictures, which needs the number of all
    count = sum(1 for _ in sources.masks())
    stride = max(1, math.ceil(count / REPORT_POINTS))
    shown = {index * count // REPORT_PICTURES for index in range(REPORT_PICTURES)}
    cameras: dict[str, dict[str, Any]] = {}
    pictures = []
    first_ns = dict[str, int]()
    model = ""
    pairs = join_frames(sources.masks, sources.frames)
    # both passes go through the same masks, so that they stay in step
    recorded = join_frames(sources.masks, sources.recorded or _no_masks)
    for number, ((masks, frame), (_, before)) in enumerate(zip(pairs, recorded, strict=True)):
        model = masks.model
        if number in shown and frame is not None:
            picture = _draw_picture(masks, frame)
            if picture is not None:
                pictures.append((f"{masks.camera} #{masks.seq}", picture))

        # a point for each object, with the time since the camera's first frame
        if number % stride == 0:
            camera = cameras.setdefault(masks.camera, {"frames": [], "objects": {}})
            time_ns = masks.capture_ns - first_ns.setdefault(masks.camera, masks.capture_ns)
            camera["frames"].append((masks.seq, round(time_ns / NANOSECONDS, 3)))
            known: dict[int, Instance] = {}
            if before is not None:
                known = {instance.id: instance for instance in before.instances}
            for instance in masks.instances:
                track = camera["objects"].setdefault(instance.id, {"points": []})
                track["label"] = instance.label
                track["points"].append(_describe_point(len(camera["frames"]) - 1, instance, known))
        progress(number + 1)

    data = {
        "recording": sources.recording,
        "model": model,
        "frames": count,
        "stride": stride,
        "palette": PALETTE,
        "compared": sources.recorded is not None,
        "pictures": pictures,
        "cameras": cameras,
    }
    page = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # a label may hold </script>
    (folder / "report.html").write_text(page.replace("DATA", text, 1), encoding="utf-8")


def _draw_picture(masks: MaskFrame, frame: Frame) -> str | None:
    """Return a frame with its masks as the base64 of a small JPEG; None if it cannot be decoded."""
    # the page holds its pictures itself: keep them small
    with suppress(WireError):
        image = overlay(decode_image(frame), masks)
        scale = min(1.0, REPORT_PICTURE_PX / image.shape[1])
        small = cv2.resize(image, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
        return base64.b64encode(cv2.imencode(".jpg", small)[1].tobytes()).decode()
    return None


def _describe_point(index: int, instance: Instance, recorded: Mapping[int, Instance]) -> tuple[Any, ...]:
    """Return a point of a track: frame, state, score, confidence, doubt, and IoU with the recorded mask of its id."""
    state = _STATE_LETTERS.get(instance.state, instance.state[0])
    confidence = None
    if instance.confidence is not None:
        confidence = round(instance.confidence, 3)
    iou = None
    before = recorded.get(instance.id)
    if before is not None:
        # an object that both results hide is the same in both: its masks agree
        iou = 1.0
        if instance.area or before.area:
            iou = round(mask_iou(instance.mask, before.mask), 3)
    return index, state, round(instance.score, 3), confidence, int(instance.doubtful), iou


def _write_coco(folder: Path, sources: Sources, progress: Callable[[int], None]) -> None:
    """Write all masks as COCO JSON into masks.json, with run-length encoding, in two passes, row by row.

    The fields that join images to videos follow TAO (Dave et al. 2020). `videos` are cameras. Images and annotations
    have a `video_id`, images a `frame_index`. `tracks` are objects. Additional fields are `seq` and `capture_ns` of a
    frame, `instance_id`, which is the object's id on its camera, and `score` in 0..1. `confidence`, `name_confidence`
    (null where unknown) and `doubtful` say how far the mask and the name can be trusted. `file_name` is the path of the
    frame's image beside the JSON file; without images it is the place RECORDING#CAMERA/SEQ. An object without a mask on
    a frame has no annotation there. pycocotools loads each image on its own.
    """
    masks = sources.labels
    names: Iterator[str | None] = repeat(None)
    if sources.has_images:
        names = (name for name, _ in name_images(masks, sources.frames))
    cameras = NumberTable[str]()
    tracks = NumberTable[tuple[str, int]]()
    labels = NumberTable[str]()
    # the tables of numbers are complete after images and annotations, so what they describe comes last
    with (folder / "masks.json").open("w", encoding="utf-8") as file:
        file.write("{")
        _write_rows(file, "images", _make_images(masks(), cameras, sources.recording, names))
        rows = _make_annotations(masks(), cameras, tracks, labels, progress)
        _write_rows(file, "annotations", rows, before=",\n")
        videos = ({"id": number, "name": camera} for camera, number in cameras)
        _write_rows(file, "videos", videos, before=",\n")
        _write_rows(file, "tracks", _make_tracks(cameras, tracks), before=",\n")
        categories = ({"id": number, "name": label} for label, number in labels)
        _write_rows(file, "categories", categories, before=",\n")
        file.write("}\n")


def _write_rows(file: TextIO, name: str, rows: Iterable[dict[str, Any]], before: str = "\n") -> None:
    # row by row: all of a long recording would not fit into memory
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
) -> Iterator[dict[str, Any]]:
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


def _make_region(instance: Instance) -> dict[str, Any]:
    x0, y0, x1, y1 = instance.box
    # COCO's run lengths are text in JSON
    mask = encode_mask(instance.mask, "rle")
    return {
        "score": instance.score,
        "confidence": instance.confidence,
        "name_confidence": instance.name_confidence,
        "doubtful": instance.doubtful,
        "iscrowd": 0,
        "area": instance.area,
        "bbox": [x0, y0, x1 - x0, y1 - y0],
        "segmentation": {"size": mask["size"], "counts": mask["data"].decode("ascii")},
    }


def _make_tracks(cameras: NumberTable[str], tracks: NumberTable[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    for (camera, object_id), number in tracks:
        yield {"id": number, "video_id": cameras[camera], "instance_id": object_id}


def _is_past(masks: MaskFrame, frame: MaskFrame | Frame) -> bool:
    # both are compared: seq starts again when a camera is restarted
    return frame.seq > masks.seq and frame.capture_ns > masks.capture_ns


def join_frames(masks: MaskSource, frames: Callable[[], Iterator[T]]) -> Iterator[tuple[MaskFrame, T | None]]:
    """Yield all masks in their order, each with its frame, or other masks of it, or None where that is missing.

    Each camera has its own pass over the recording, because masks and frames may come in different orders.
    """
    passes: dict[str, Iterator[T]] = {}
    upcoming: dict[str, T | None] = {}
    for frame_masks in masks():
        camera = frame_masks.camera
        key = frame_masks.key
        if camera not in passes:
            passes[camera] = _select_camera(camera, frames)
            upcoming[camera] = next(passes[camera], None)
        # skip frames without masks, but keep the first one that later masks may have
        while (frame := upcoming[camera]) and frame.key != key and not _is_past(frame_masks, frame):
            upcoming[camera] = next(passes[camera], None)
        if frame is not None and frame.key == key:
            yield frame_masks, frame
        else:
            yield frame_masks, None


def compress_frame(frame: Frame | None) -> Frame | None:
    """Return a frame whose colour is JPEG or PNG: as it was, or JPEG of JPEG_QUALITY if it was raw.

    Return None if there is no frame, or if it cannot be decoded.
    """
    if frame is None or frame.encoding not in CHANNELS:
        return frame
    try:
        return compress_colour(frame, "jpeg")
    except WireError:
        return None


def _write_images(folder: Path, sources: Sources, progress: Callable[[int], None]) -> None:
    """Write the image of each frame that has masks, as `compress_frame` makes it."""
    (folder / _IMAGES).mkdir()
    for count, (name, frame) in enumerate(name_images(sources.masks, sources.frames), start=1):
        image = compress_frame(frame)
        if name is not None and image is not None:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(image.colour)
        progress(count)


def name_images(masks: MaskSource, frames: FrameSource) -> Iterator[tuple[str | None, Frame | None]]:
    """Yield the image's path below the folder of the outputs, and the frame, of each masks in their order.

    The path is images/<camera>/<seq>.jpg or .png. After a restart of the camera, numbers that come again get -1, -2
    and so on. Without a frame, both are None.
    """
    last: dict[str, tuple[int, int]] = {}
    for frame_masks, frame in join_frames(masks, frames):
        if frame is None:
            yield None, None
            continue
        camera = frame_masks.camera
        seq = frame_masks.seq
        last_seq, restarts = last.get(camera, (-1, 0))
        if seq <= last_seq:
            restarts += 1
        last[camera] = seq, restarts
        restart = f"-{restarts}" if restarts else ""
        suffix = _SUFFIXES.get(frame.encoding, ".jpg")  # raw colour becomes JPEG
        yield f"{_IMAGES}/{safe_file_name(camera)}/{seq:05d}{restart}{suffix}", frame


def _select_camera(camera: str, source: Callable[[], Iterator[T]]) -> Iterator[T]:
    return (value for value in source() if value.camera == camera)


_WRITERS: dict[str, Callable[[Path, Sources, Callable[[int], None]], None]] = {
    "mcap": _write_mcap,
    "mcap-images": partial(_write_mcap, has_images=True),
    "coco": _write_coco,
    "png": _write_png,
    "overlay": _write_overlays,
    "images": _write_images,
    "lerobot": _write_lerobot,
    "report": _write_report,
}
KINDS = tuple(_WRITERS)
"""Kinds of outputs, which write:

mcap         masks.mcap, a recording of masks alone
mcap-images  masks.mcap with the frames of the masks
coco         masks.json in COCO format
png          png/<camera>/ in DAVIS format
overlay      overlay-<camera>.mp4
images       images/<camera>/, the frames
lerobot      lerobot/, the dataset with masks
report       report.html, a page for people
"""
