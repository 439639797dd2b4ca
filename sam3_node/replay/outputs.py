"""Writes the outputs of a replay: masks as MCAP, labels in the forms of datasets, videos, images and a report.

Each output is complete or absent. File names from a recording never lead out of the folder of the outputs.
"""

import base64
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import cv2

from ..bags.native import COLOUR
from ..bags.native.writer import RecordingWriter, describe_compression
from ..errors import BagError, OutputError, ReplayError, WireError
from ..files import child_path
from ..geometry import mask_iou
from ..types import NANOSECONDS, Frame, Instance, MaskFrame
from ..visualization import PALETTE, VideoWriter, overlay
from ..wire import decode_image, pack_masks
from .coco import write_coco, write_ytvis
from .davis_png import MaskSource, write_palette_pngs
from .job import Doubtful
from .lerobot_dataset import write_lerobot
from .pictures import IMAGES, FrameSource, compress_frame, join_frames, name_images, select_camera
from .yolo import FOLDER as YOLO
from .yolo import join_yolo, write_yolo

REPORT_PICTURES = 12
"""Number of pictures in a report, evenly chosen."""
REPORT_PICTURE_PX = 480
"""Width of these pictures, at most."""
REPORT_POINTS = 4000
"""Number of frames in a report's graphs, at most. More would slow a browser down."""

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
    def prompts(self) -> Sequence[str]:
        """The names to detect, which number the labels first."""
        if self.dataset is None:
            return ()
        return self.dataset.prompts

    @property
    def with_doubtful(self) -> bool:
        """True if outputs that cannot mark doubtful objects have them."""
        return self.doubtful == "drawn"

    @property
    def labels(self) -> MaskSource:
        """The masks that become labels."""
        if self.doubtful == "left-out":
            return lambda: (masks.without_doubtful() for masks in self.masks())
        return self.masks

    def name_images(self, masks: MaskSource) -> Iterator[str | None]:
        """Yield the path of the image of each of these masks; None for each without images. May be endless."""
        if not self.has_images:
            return repeat(None)
        return (name for name, _ in name_images(masks, self.frames))


class Written(NamedTuple):
    """The files and folders that were written, and what there is to say about each kind of output."""

    paths: list[Path]
    notes: dict[str, str]


def write_outputs(
    out: Path, kinds: Sequence[str], sources: Sources, progress: Callable[[str, int], None]
) -> Written:
    """Write outputs of these KINDS into the folder `out`.

    An output replaces an older one when it is complete. The same masks and frames give the same bytes. `progress` is
    called with a kind and the number of masks written. COCO and YouTube-VIS name the files of `images` if they are
    among the kinds or were written before, and places in the recording otherwise. The report compares the masks with
    the recorded ones. Raises ReplayError for an unknown kind before anything is written, OutputError if `out` cannot be
    written, and the exceptions of the sources.
    """
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown:
        raise ReplayError(f"unknown output {unknown[0]!r:.60}: expected some of {', '.join(KINDS)}")
    # images may be written in this call or an earlier one: COCO names them either way
    written = Written([], {})
    sources = sources._replace(has_images=sources.has_images or "images" in kinds)
    for kind in dict.fromkeys(kinds):
        with _replace_when_complete(out, kind, written.paths) as folder:
            note = _WRITERS[kind](folder, sources, partial(progress, kind))
        if note is not None:
            written.notes[kind] = note
    return written


def join_datasets(out: Path, parts: Sequence[Path]) -> str:
    """Join the YOLO datasets in the folders `parts`, of one recording each, in `out`. Return what there is to say.

    Raises OutputError if `out` cannot be written, or has no dataset to join.
    """
    with _replace_when_complete(out, YOLO, []) as folder:
        return join_yolo(folder, parts)


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
    write_palette_pngs(folder / "png", sources.masks(), progress, sources.with_doubtful)


def _write_overlays(folder: Path, sources: Sources, progress: Callable[[int], None]) -> None:
    """Write overlay-<camera>.mp4 for each camera, in one pass over masks and frames for each.

    Masks whose frame is missing or cannot be decoded are skipped. A camera without any drawn frame has no video.
    """
    # a pass for each camera, so that only one video is open
    count = 0
    for camera in sorted({masks.camera for masks in sources.masks()}):
        with VideoWriter(child_path(folder, f"overlay-{camera}.mp4")) as film:
            masks_of_camera = partial(select_camera, camera, sources.masks)
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
    names = sources.name_images(sources.labels)
    write_coco(folder, sources.labels, names, sources.recording, progress)


def _write_ytvis(folder: Path, sources: Sources, progress: Callable[[int], None]) -> str:
    names = sources.name_images(sources.masks)
    return write_ytvis(folder, sources.masks, names, sources.recording, progress, sources.with_doubtful)


def _write_yolo(folder: Path, sources: Sources, progress: Callable[[int], None]) -> str:
    return write_yolo(folder, sources.masks, sources.frames, progress, sources.prompts, sources.with_doubtful)


def _write_images(folder: Path, sources: Sources, progress: Callable[[int], None]) -> None:
    """Write the image of each frame that has masks, as `compress_frame` makes it."""
    (folder / IMAGES).mkdir()
    for count, (name, frame) in enumerate(name_images(sources.masks, sources.frames), start=1):
        image = compress_frame(frame)
        if name is not None and image is not None:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(image.colour)
        progress(count)


_WRITERS: dict[str, Callable[[Path, Sources, Callable[[int], None]], str | None]] = {
    "mcap": _write_mcap,
    "mcap-images": partial(_write_mcap, has_images=True),
    "coco": _write_coco,
    "yolo": _write_yolo,
    "ytvis": _write_ytvis,
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
yolo         yolo/, pictures and labels to train a network on, in Ultralytics' layout
ytvis        ytvis.json in the format of YouTube-VIS
png          png/<camera>/ in DAVIS format
overlay      overlay-<camera>.mp4
images       images/<camera>/, the frames
lerobot      lerobot/, the dataset with masks
report       report.html, a page for people
"""
