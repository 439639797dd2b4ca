"""Writes masks as polygons in Ultralytics' YOLO layout, with their pictures, and joins such datasets of recordings.

    yolo/data.yaml              the names, and the folders of the pictures
    yolo/images/train, val      pictures
    yolo/labels/train, val      a text file for each picture, a line for each object: class, then x and y of each corner
    yolo/contact.jpg            pictures of both parts with the labels drawn, as read from these files

A picture with a doubtful mask is left out as a whole: without the mask, its object would teach that it is background.

Neighbouring frames look the same, so pictures to train on and to validate on are apart. In one recording, the end of
each camera's time is for validation, and the frames before that are left out. Of several recordings, the last ones are.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from ...errors import OutputError, WireError
from ...files import link_or_copy, read_regular, write_new
from ...types import NANOSECONDS, Frame, Image, Instance, Mask, MaskFrame
from ...visualization import contact_sheet, draw_labels, write_image
from ...wire.images import decode_image, decode_photo
from ..davis_png import MAX_IMAGE_FILE, MaskSource
from .output import OutputFormat, Progress, Sources
from .pairs import FrameSource, compress_frame, name_images

Points = npt.NDArray[np.int32]
"""Pixels (x, y), int32 [n, 2]."""

FOLDER = "yolo"
"""Folder of the dataset, in that of the outputs."""
SPLITS = ("train", "val")
"""Parts of the dataset."""
VALIDATION_SHARE = 0.2
"""Share of a camera's pictures, or of several recordings, that is for validation."""
GAP_S = 1.0
"""Seconds of each camera before the validation that are left out, so that no neighbour of a frame is on either side."""
MAX_GAP_SHARE = 0.1
"""Share of a camera's time that this gap may take. It limits the gap of a short recording."""
MIN_RECORDINGS = 3
"""Number of recordings from which whole recordings are for validation. Fewer are split by time, each."""
PLACE_IN_PIXEL = 0.25
"""Place of a corner in its pixel. Readers that truncate and readers that round then find the same pixel."""
MIN_CORNERS = 3
"""Number of corners of a polygon, at least. Readers take fewer numbers for a box."""
SHEET_PICTURES = {"train": 12, "val": 4}
"""Pictures on the contact sheet, by part."""
SHEET_COLUMNS = 4
SHEET_PICTURE_PX = 480
"""Width of these pictures."""

_CONTACT = "contact.jpg"
_DATA = "data.yaml"


def write_yolo(
    folder: Path,
    masks: MaskSource,
    frames: FrameSource,
    progress: Callable[[int], None],
    names: Sequence[str],
    with_doubtful: bool,
) -> str:
    """Write the dataset of a recording into `folder`/yolo, in two passes. Return what is in it and what is not.

    `names` are the first classes, in their order; other labels follow by name. Pictures with a doubtful mask are in it
    only `with_doubtful`.
    """
    # one pass for the classes and the splits
    labels: set[str] = set()
    times: dict[str, list[int]] = defaultdict(list)
    for frame in masks():
        if with_doubtful or not _count_doubtful(frame):
            labels |= {instance.label for instance in frame.instances if instance.mask.crop.size}
            times[frame.camera].append(frame.capture_ns)
    classes = [*names, *sorted(labels - set(names))]
    split = {camera: _Split.choose(stamps) for camera, stamps in times.items()}

    # another one for the files
    dataset = _Dataset.create(folder / FOLDER, classes)
    seen = Counter[str]()
    counts = _LabelCounts()
    for count, (frame, (name, image)) in enumerate(
        zip(masks(), name_images(masks, frames), strict=True), start=1
    ):
        progress(count)
        doubtful = _count_doubtful(frame)
        if doubtful and not with_doubtful:
            counts.doubtful_masks += doubtful
            counts.doubtful_pictures += 1
            continue
        part = split[frame.camera].part(seen[frame.camera])
        seen[frame.camera] += 1
        picture = _read_picture(image)
        if name is None or picture is None:
            counts.without_picture += 1
        elif part is None:
            counts.gap_pictures += 1
        else:
            picture_path = PurePosixPath(name)
            shown = [item for item in frame.instances if item.mask.crop.size]
            counts.labels[part] |= {item.label for item in shown}
            lines = [dataset.describe(item, counts) for item in shown]
            dataset.add(part, f"{picture_path.parent.name}-{picture_path.name}", picture, lines)
            counts.pictures[part] += 1
    dataset.finish()
    return counts.describe()


def _read_picture(frame: Frame | None) -> bytes | None:
    """Return the bytes of a frame's picture; None without a frame, or for one that a training could not decode."""
    picture = compress_frame(frame)
    if picture is None:
        return None
    try:
        decode_image(picture)
    except WireError:
        return None
    return bytes(picture.colour)


def _count_doubtful(frame: MaskFrame) -> int:
    return sum(instance.doubtful for instance in frame.instances if instance.mask.crop.size)


@dataclass(slots=True)
class _LabelCounts:
    """What a dataset has, and what was left out."""

    pictures: Counter[str] = field(default_factory=Counter)
    """Pictures by part."""
    masks: int = 0
    pixels: int = 0
    bridged_masks: int = 0
    """Masks whose polygon has other pixels: those between their parts."""
    bridge_pixels: int = 0
    doubtful_masks: int = 0
    doubtful_pictures: int = 0
    gap_pictures: int = 0
    without_picture: int = 0
    labels: dict[str, set[str]] = field(default_factory=lambda: {"train": set(), "val": set()})
    """Labels of the objects of each part."""

    def describe(self) -> str:
        """Return one line of text."""
        parts = [
            f"{self.pictures['train']} pictures to train on, {self.pictures['val']} to validate, {self.masks} masks",
            f"left out: {self.doubtful_pictures} pictures with {self.doubtful_masks} doubtful masks, "
            f"{self.gap_pictures} between training and validation",
        ]
        if self.without_picture:
            parts.append(f"{self.without_picture} frames have no picture")
        if unseen := sorted(self.labels["val"] - self.labels["train"]):
            parts.append(
                f"in the validation, but in no picture to train on: {', '.join(unseen)}; replay a longer recording, "
                "or one that has them from its beginning"
            )
        if self.bridged_masks:
            share = 100 * self.bridge_pixels / max(1, self.pixels)
            parts.append(
                f"the polygons of {self.bridged_masks} masks in several parts add {self.bridge_pixels} pixels between "
                f"them, {share:.2g} % of all"
            )
        return f"{FOLDER}: " + "; ".join(parts)


@dataclass(frozen=True, slots=True)
class _Split:
    """Which pictures of a camera, by number, are for which part: train before `gap`, val from `val` on."""

    gap: int
    val: int

    @classmethod
    def choose(cls, stamps: Sequence[int]) -> _Split:
        """Split a camera's pictures, captured at these times in ns, so that the last ones are for validation."""
        val = round(len(stamps) * (1.0 - VALIDATION_SHARE))
        # a single picture is to train on
        val = max(1, min(val, len(stamps) - 1))
        if val >= len(stamps):
            return cls(val, val)
        longest_ns = MAX_GAP_SHARE * (stamps[-1] - stamps[0])
        begin_ns = stamps[val] - min(GAP_S * NANOSECONDS, max(0.0, longest_ns))
        # a restarted camera may have an earlier clock: only frames right before the border count
        gap = val
        while gap > 1 and begin_ns < stamps[gap - 1] < stamps[val]:
            gap -= 1
        return cls(gap, val)

    def part(self, number: int) -> str | None:
        """Return the part of a picture; None for one in the gap."""
        if number < self.gap:
            return "train"
        if number < self.val:
            return None
        return "val"


@dataclass(slots=True)
class _Dataset:
    """A dataset that is being written."""

    folder: Path
    classes: Sequence[str]

    @classmethod
    def create(cls, folder: Path, classes: Sequence[str]) -> _Dataset:
        """Create the folders and data.yaml."""
        for kind in ("images", "labels"):
            for part in SPLITS:
                (folder / kind / part).mkdir(parents=True)
        # text in JSON is also text in YAML; paths count from the folder of the file
        names = json.dumps(list(classes), ensure_ascii=False)
        text = f"train: images/train\nval: images/val\nnc: {len(classes)}\nnames: {names}\n"
        write_new(folder / _DATA, text)
        return cls(folder, classes)

    def describe(self, instance: Instance, counts: _LabelCounts) -> str:
        """Return the line of an object, and count it."""
        polygon = make_polygon(instance.mask)
        changed = np.count_nonzero(fill_polygon(polygon, instance.mask.size) != instance.mask.full())
        counts.masks += 1
        counts.pixels += instance.mask.area
        counts.bridged_masks += bool(changed)
        counts.bridge_pixels += int(changed)
        height, width = instance.mask.size
        corners = (polygon + PLACE_IN_PIXEL) / (width, height)
        numbers = " ".join(f"{number:.6f}" for number in corners.ravel())
        return f"{self.classes.index(instance.label)} {numbers}"

    def add(self, part: str, name: str, picture: bytes, lines: Sequence[str]) -> None:
        """Add a picture and its labels. Without any, it is one of background."""
        write_new(self.folder / "images" / part / name, picture)
        text = "".join(f"{line}\n" for line in lines)
        write_new((self.folder / "labels" / part / name).with_suffix(".txt"), text)

    def finish(self) -> None:
        """Draw the contact sheet."""
        sheet = draw_contact_sheet(self.folder, self.classes)
        if sheet is not None:
            write_image(self.folder / _CONTACT, sheet)


def make_polygon(mask: Mask) -> Points:
    """Return one polygon around a mask that is not empty, in pixels of the image. Corners are the mask's own pixels.

    Parts and holes are connected at their nearest pixels, there and back. The way to a hole is inside the mask, so that
    a mask of one part is exact when `fill_polygon` fills the polygon. Ways between parts add the pixels below them.
    """
    contours, _ = cv2.findContours(mask.crop.view(np.uint8), cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
    rings = sorted((contour[:, 0] for contour in contours), key=len, reverse=True)
    ring = _drop_straight(_connect(rings))
    # a line of pixels, or one pixel
    if len(ring) < MIN_CORNERS:
        ring = np.concatenate([ring, np.repeat(ring[-1:], MIN_CORNERS - len(ring), axis=0)])
    return np.asarray(ring + mask.box[:2], np.int32)


def fill_polygon(polygon: npt.NDArray[Any], size: tuple[int, int]) -> npt.NDArray[np.bool_]:
    """Return the pixels in and on a polygon, bool [height, width], as readers of the format fill it."""
    image = np.zeros(size, np.uint8)
    cv2.fillPoly(image, [np.asarray(polygon, np.int32)], 1)
    return image.view(np.bool_)


def _connect(rings: Sequence[Points]) -> Points:
    """Connect closed lines of pixels to one, the nearest first, by Prim's algorithm."""
    if len(rings) == 1:
        return rings[0]
    from scipy.spatial import cKDTree

    # of each pixel that is not connected yet: its ring, its distance to connected pixels, and the nearest of them
    rest = np.concatenate(rings[1:])
    owner = np.repeat(np.arange(1, len(rings)), [len(ring) for ring in rings[1:]])
    distance = np.full(len(rest), np.inf)
    nearest = np.zeros_like(rest)
    merged = rings[0]
    added = rings[0]
    while len(rest):
        found, at = cKDTree(added).query(rest)
        closer = found < distance
        distance[closer] = found[closer]
        nearest[closer] = added[at[closer]]

        # from the nearest pixel around the nearest ring, and back
        best = int(np.argmin(distance))
        added = rings[owner[best]]
        start = int(np.flatnonzero((added == rest[best]).all(axis=1))[0])
        cut = int(np.flatnonzero((merged == nearest[best]).all(axis=1))[0])
        way = [merged[: cut + 1], np.roll(added, -start, axis=0), added[start : start + 1], merged[cut:]]
        merged = np.concatenate(way)
        left = owner != owner[best]
        rest = rest[left]
        owner = owner[left]
        distance = distance[left]
        nearest = nearest[left]
    return merged


def _drop_straight(ring: Points) -> Points:
    """Drop pixels between two steps of the same direction, which also lie on the straight line between the others."""
    before = ring - np.roll(ring, 1, axis=0)
    after = np.roll(ring, -1, axis=0) - ring
    return ring[(before != after).any(axis=1)] if len(ring) > 1 else ring


def join_yolo(folder: Path, parts: Sequence[Path]) -> str:
    """Write one dataset of the yolo datasets in the folders `parts`, of a recording each. Return what is in it.

    From MIN_RECORDINGS recordings on, the last ones are for validation, as a whole. Pictures are hard links where
    possible, and have the name of their recording's folder before their own. Raises OutputError if there are none.
    """
    parts = [part for part in parts if (part / FOLDER / _DATA).is_file()]
    if not parts:
        raise OutputError("expected a dataset of at least one recording, found none")
    names = {part: _read_names(part / FOLDER) for part in parts}
    classes = list(dict.fromkeys(name for part in parts for name in names[part]))
    dataset = _Dataset.create(folder / FOLDER, classes)
    validation = _choose_validation(parts)
    counts = Counter[str]()
    for part in parts:
        numbers = {str(old): str(classes.index(name)) for old, name in enumerate(names[part])}
        for own_split, path in _list_pictures(part / FOLDER):
            split = own_split
            if validation:
                split = "val" if part in validation else "train"
            target = dataset.folder / "images" / split / f"{part.name}-{path.name}"
            link_or_copy(path, target)
            _copy_labels(_label_path(path), _label_path(target), numbers)
            counts[split] += 1
    dataset.finish()
    how = "each is split by time"
    if validation:
        how = f"to validate: {', '.join(part.name for part in parts if part in validation)}"
    return (
        f"{FOLDER}: {counts['train']} pictures to train on, {counts['val']} to validate, of {len(parts)} recordings; "
        f"{how}"
    )


def _choose_validation(parts: Sequence[Path]) -> set[Path]:
    """Return the recordings for validation; none if each is split by time."""
    if len(parts) < MIN_RECORDINGS:
        return set()
    return set(parts[-max(1, round(len(parts) * VALIDATION_SHARE)) :])


def _label_path(picture: Path) -> Path:
    return picture.parents[2] / "labels" / picture.parent.name / f"{picture.stem}.txt"


def _copy_labels(path: Path, target: Path, numbers: Mapping[str, str]) -> None:
    """Copy a file of labels with other numbers of classes."""
    lines = path.read_text(encoding="utf-8").splitlines()
    pairs = (line.partition(" ") for line in lines)
    write_new(target, "".join(f"{numbers[number]} {rest}\n" for number, _, rest in pairs))


def _read_names(folder: Path) -> list[str]:
    """Return the names in a data.yaml of this module."""
    for line in (folder / _DATA).read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(": ")
        if key == "names":
            names: list[str] = json.loads(value)
            return names
    raise OutputError(f"{folder / _DATA}: expected names, found none; write the output yolo again")


def _list_pictures(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the pictures of a dataset with their part, by part and name."""
    for part in SPLITS:
        for path in sorted((folder / "images" / part).iterdir()):
            yield part, path


def draw_contact_sheet(folder: Path, classes: Sequence[str]) -> Image | None:
    """Draw pictures of a dataset, evenly chosen, with the labels that are read from its files; None without any."""
    pictures = []
    captions = []
    for part in SPLITS:
        paths = sorted((folder / "images" / part).iterdir())
        count = min(SHEET_PICTURES[part], len(paths))
        for index in range(count):
            path = paths[index * len(paths) // count]
            try:
                image = decode_photo(read_regular(path, MAX_IMAGE_FILE))
            except WireError:
                continue
            labels = _read_labels(_label_path(path), image.shape[:2], classes)
            size = (SHEET_PICTURE_PX, max(1, round(image.shape[0] * SHEET_PICTURE_PX / image.shape[1])))
            pictures.append(cv2.resize(draw_labels(image, labels), size, interpolation=cv2.INTER_AREA))
            captions.append(f"{part} {path.stem}")
    if not pictures:
        return None
    return contact_sheet(pictures, captions, SHEET_COLUMNS)


def _read_labels(path: Path, size: tuple[int, int], classes: Sequence[str]) -> list[tuple[str, int, Mask]]:
    """Read a file of labels of a picture of this size (height, width): name, number of the class, and mask."""
    labels = []
    for line in path.read_text(encoding="utf-8").splitlines():
        number, *numbers = line.split()
        corners = np.array(numbers, np.float64).reshape(-1, 2) * size[::-1]
        mask = Mask.from_full(fill_polygon(corners, size))
        labels.append((classes[int(number)], int(number), mask))
    return labels


class Yolo(OutputFormat):
    """yolo/, pictures and labels to train a network on, in Ultralytics' layout."""

    file = (
        "`yolo/`: pictures and polygons in Ultralytics' layout (`images/`, `labels/`, `data.yaml`), split to train and "
        "to validate, and `contact.jpg`, which shows them; [your own classes](own-classes.md)"
    )
    hides_doubt = True
    is_label = True
    is_joined = True
    has_frames = True
    frame_bytes = 3000

    @classmethod
    def write(cls, folder: Path, sources: Sources, progress: Progress) -> str:
        """Write the dataset of a recording. Return what is in it."""
        return write_yolo(
            folder, sources.masks, sources.frames, progress, sources.prompts, sources.with_doubtful
        )

    @classmethod
    def join(cls, folder: Path, parts: Sequence[Path]) -> str:
        """Write one dataset of those of several recordings."""
        return join_yolo(folder, parts)
