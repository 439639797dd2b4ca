"""Reads folders of images: plain ones, DAVIS, and datasets with stamps, scales or intrinsics.

JPEG and PNG stay encoded, other images become bgr8. The datasets are:

TUM RGB-D  rgb.txt and depth.txt list files with Unix seconds; depth is in 1/5000 m
EuRoC      mav0/camN/data.csv with nanoseconds, and sensor.yaml
KITTI      image_NN with timestamps.txt (raw), or times.txt and calib.txt beside it (odometry)
BOP        rgb or gray, depth, and scene_camera.json with the intrinsics and the depth scale of each image
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from heapq import merge
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from ...errors import BagError
from ...files import IrregularFileError, describe_stand_in, read_regular
from ...types import NANOSECONDS, Depth, Intrinsics
from ...wire.orientation import find_orientation
from ..decompression import STILL_SUFFIXES
from ..messages.ros_images import MILLIMETRE, MessageError, read_colour, read_depth
from ..samples import CameraInfo, Colour, ReadReport, Sample, SampleReader, Topic, natural_order, reading

FPS = 24
"""Images per second of a folder without stamps, as in DAVIS."""

SUFFIXES = (".jpg", ".jpeg", ".png", *STILL_SUFFIXES)
"""Endings, in lower case, of the files that are images."""

_DAVIS = "JPEGImages"
# folders from JPEGImages down to images: JPEGImages/480p/SEQUENCE
_MAX_DEPTH = 3
# bytes of the longest list of files or scene_camera.json
_MAX_TEXT = 1 << 26
# bytes of the largest image
_MAX_FILE = 1 << 28
# limit of the numbers in lists, so that stamps fit into 64 bits
_MAX_NUMBER = 1 << 63
# metres per unit of TUM's depth
_TUM_SCALE_M = 1 / 5000
# names of folders whose images no camera took
_NO_PICTURES = ("annotations", "masks", "mask", "mask_visib", "depth")
_ROLES = re.compile(r"(?<![a-z])(colou?r|rgb|depth|image)(?![a-z])", re.IGNORECASE)
_DEPTH = re.compile(r"(?<![a-z])depth(?![a-z])", re.IGNORECASE)
_DEPTH_FOLDER = re.compile(
    r"((raw|aligned|registered)[_-])?depths?([_-]?(raw|images?|frames?|maps?|png|mm|aligned|registered|to[_-](colou?r|rgb)))*",
    re.IGNORECASE,
)


class ImageFile(NamedTuple):
    """An image of a sequence. `stamp_ns` counts from 0 or is Unix time. `scale_m` and `aligned` describe depth."""

    stamp_ns: int
    kind: Literal["depth", "colour"]
    path: Path
    scale_m: float = MILLIMETRE
    aligned: bool = False
    intrinsics: CameraInfo | None = None


@dataclass(frozen=True, slots=True)
class ImageSequence:
    """The images of one camera in the order of their stamps, depth before the colour of its time.

    `has_stamps` is True if the stamps are the dataset's own. Otherwise the images come FPS a second, from 0.
    `unmatched` lists depth images that belong to no colour image.
    """

    name: str
    files: tuple[ImageFile, ...]
    has_stamps: bool = False
    unmatched: tuple[Path, ...] = ()

    @property
    def has_intrinsics(self) -> bool:
        return any(file.intrinsics for file in self.files)


class ImagesBag(SampleReader):
    """A folder of images in which each sequence is a camera.

    Depth is PNG or TIFF of 16-bit grey. In a plain folder it is in mm; it lies in a folder `depth` (also Depth,
    depth_raw and the like) beside or inside the folder of the images, or beside the images with `depth` in its name. A
    dataset has its own unit and places.

    The images have the dataset's stamps, and its cameras come together. Images without stamps come in the natural order
    of their names, 24 a second from 0, one sequence after the other. Images that cannot be decoded, or that differ in
    size from the first of their sequence, are skipped, and `lost` says so; they keep their number. EXIF orientations
    are ignored; a note names photos with different ones. Raises BagError for a folder without images.
    """

    is_sequential = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._notes = ReadReport()
        self._sequences = find_sequences(path)
        if not self._sequences:
            raise BagError(f"expected images ({', '.join(SUFFIXES)}) in {path} or its folders, found none")
        self.topics = tuple(topic for sequence in self._sequences for topic in _topics(sequence))

    @staticmethod
    def recognises(path: Path) -> bool:
        """Return True if this is a folder with images, or with folders of images."""
        return path.is_dir() and bool(_folders(path) or find_sequences(path))

    @property
    def notes(self) -> tuple[str, ...]:
        text = self._notes.text()
        return () if text is None else (text,)

    def frame_names(self, topic: str) -> tuple[str, ...]:
        """Return the names of the colour images of a topic, without their suffix, each at its image's number."""
        for sequence in self._sequences:
            if topic == f"/{sequence.name}/image":
                return tuple(file.path.stem for file in sequence.files if file.kind == "colour")
        return ()

    def _read(self, topics: Collection[str], begin_ns: int) -> Iterator[Sample]:
        """Yield the images of these topics. Depth comes before the colour of its time."""
        sequences = [
            _Sequence(sequence, topics, self.report, self._notes).samples() for sequence in self._sequences
        ]
        # stamps from 0 of different sequences are not on one clock: no merging
        if all(sequence.has_stamps for sequence in self._sequences):
            yield from merge(*sequences, key=lambda sample: sample.stamp_ns)
        else:
            yield from chain(*sequences)


def _topics(sequence: ImageSequence) -> Iterator[Topic]:
    yield Topic(f"/{sequence.name}/image", "images", "colour")
    if any(file.kind == "depth" for file in sequence.files):
        yield Topic(f"/{sequence.name}/depth", "images", "depth")
    if sequence.has_intrinsics:
        yield Topic(f"/{sequence.name}/camera_info", "images", "intrinsics")


class _Sequence:
    """Reads the images of one sequence that are on `topics`. All images of a kind have the size of the first."""

    def __init__(
        self, sequence: ImageSequence, topics: Collection[str], report: ReadReport, notes: ReadReport
    ) -> None:
        self._sequence = sequence
        self._topics = topics
        self._report = report
        self._notes = notes
        # EXIF orientations so far, with the name of the first photo of each
        self._orientations: dict[int, str] = {}
        self._is_plain = not sequence.has_stamps and not sequence.has_intrinsics
        self._sizes: dict[str, tuple[int, int]] = {}
        self._intrinsics: CameraInfo | None = None

    def samples(self) -> Iterator[Sample]:
        name = self._sequence.name
        topics = {"colour": f"/{name}/image", "depth": f"/{name}/depth"}

        # report lost depth once, with the colour images, not again where depth alone is read
        if topics["colour"] in self._topics:
            for path in self._sequence.unmatched:
                self._report.skip(
                    f"the depth images of {name}", f"{path.name}: no colour image has this name"
                )

        # a colour image is numbered by its place among the files, so that `frame_names` fits beside damaged ones
        colour_count = 0
        for file in self._sequence.files:
            number = None
            if file.kind == "colour":
                number = colour_count
                colour_count += 1
            topic = topics[file.kind]
            yield from self._calibration(file)
            if topic not in self._topics:
                continue
            try:
                yield Sample(topic, file.stamp_ns, file.stamp_ns, self._read(file), number)
            except (MessageError, OSError) as error:
                self._report.skip(topic, error)

    def _calibration(self, file: ImageFile) -> Iterator[Sample]:
        """Yield the intrinsics of an image that differ from those before."""
        topic = f"/{self._sequence.name}/camera_info"
        if topic in self._topics and file.intrinsics and file.intrinsics != self._intrinsics:
            self._intrinsics = file.intrinsics
            yield Sample(topic, file.stamp_ns, file.stamp_ns, file.intrinsics)

    def _read(self, file: ImageFile) -> Colour | Depth:
        path = file.path
        if stand_in := describe_stand_in(path):
            raise MessageError(f"{path.name}: expected an image, found {stand_in}")
        try:
            data = read_regular(path, _MAX_FILE)
        except IrregularFileError as error:
            raise MessageError(f"{path.name}: {error.strerror}") from error
        image: Colour | Depth
        if file.kind == "colour":
            image = read_colour(data, path.name)
        else:
            image = read_depth(data, path.name, file.scale_m, file.aligned)

        # a camera's frames have one size
        size = (image.width, image.height)
        if size != self._sizes.setdefault(file.kind, size):
            raise MessageError(f"{path.name}: expected {self._sizes[file.kind]} pixels, found {size}")
        self._note_alignment()
        if file.kind == "colour":
            self._compare_orientation(path, data)
        return image

    def _note_alignment(self) -> None:
        """Say once that depth in a plain folder is taken as aligned, or that its size forbids it."""
        colour = self._sizes.get("colour")
        depth = self._sizes.get("depth")
        if not self._is_plain or colour is None or depth is None:
            return
        reason = "the depth images have the size of the colour images: they are taken as aligned to them"
        if colour != depth:
            reason = (
                f"the depth images are {depth[0]} x {depth[1]}, the colour images {colour[0]} x {colour[1]}: they are "
                "not taken as aligned; if they are, state it by --depth-aligned or in the calibration file"
            )
        self._notes.add(f"{self._sequence.name}: {reason}")

    def _compare_orientation(self, path: Path, data: bytes) -> None:
        """Note once that the photos of a sequence have different EXIF orientations."""
        orientation = find_orientation(data)
        is_new = orientation not in self._orientations
        self._orientations.setdefault(orientation, path.name)
        if is_new and len(self._orientations) == 2:
            first, name = next(iter(self._orientations.items()))
            self._notes.add(
                f"{path.parent}: its photos have different EXIF orientations ({first} of {name}, {orientation} of "
                f"{path.name}); these turns are not made, so some pictures lie on their side: turn the files "
                "themselves, with exiftran -ai for example"
            )


def find_sequences(path: Path) -> tuple[ImageSequence, ...]:
    """Return the sequences with colour images in a folder and the folders below it, in their natural order.

    Raises BagError for a folder or list that cannot be read.
    """
    # a dataset, one of its sequences, or the folder of one camera
    places = (path, path / "mav0", *_subfolders(path), *_subfolders(path / "mav0"))
    found: list[ImageSequence] = []
    # the first dataset whose files are there counts; a folder with none of them is plain
    for find in (_tum, _euroc, _kitti, _bop):
        for place in dict.fromkeys(places):
            found += find(place)
        if found:
            return tuple(sequence for sequence in found if sequence.files)
    return tuple(sequence for sequence in _plain_sequences(path) if sequence.files)


def _sorted(files: Iterable[ImageFile]) -> tuple[ImageFile, ...]:
    return tuple(sorted(files, key=lambda file: (file.stamp_ns, file.kind == "colour")))


# TUM RGB-D


def _tum(folder: Path) -> Iterator[ImageSequence]:
    if not (folder / "rgb.txt").is_file():
        return
    files = [ImageFile(stamp_ns, "colour", path) for path, stamp_ns in _listed(folder / "rgb.txt", folder)]
    files += [
        ImageFile(stamp_ns, "depth", path, _TUM_SCALE_M, aligned=True)
        for path, stamp_ns in _listed(folder / "depth.txt", folder)
    ]
    yield ImageSequence(_name(folder), _sorted(files), has_stamps=True)


def _listed(table: Path, folder: Path, unit_ns: int = NANOSECONDS) -> Iterator[tuple[Path, int]]:
    """Yield the files of a list of `STAMP FILE`, each once, and the first of its stamps in ns."""
    if not table.is_file():
        return
    rows = [re.split(r"\s*[,\s]\s*", line) for line in _lines(table)]
    named = {row[1]: row[0] for row in reversed(rows) if len(row) >= 2}
    for name, stamp in named.items():
        # the list is input from outside: it must not lead to other files
        if _is_below(name):
            yield folder / name, int(_number(stamp, table) * unit_ns)


def _is_below(name: str) -> bool:
    """Return True for the relative path of an image that does not leave its folder."""
    path = Path(name)
    is_image = path.suffix.lower() in SUFFIXES and "\0" not in name
    return is_image and not path.is_absolute() and ".." not in path.parts


# EuRoC MAV


def _euroc(folder: Path) -> Iterator[ImageSequence]:
    if not (folder / "data.csv").is_file() or not (folder / "data").is_dir():
        return
    intrinsics = _sensor_intrinsics(folder / "sensor.yaml")
    files = [
        ImageFile(stamp_ns, "colour", path, intrinsics=intrinsics)
        for path, stamp_ns in _listed(folder / "data.csv", folder / "data", unit_ns=1)
    ]
    if files:
        yield ImageSequence(_name(folder), _sorted(files), has_stamps=True)


def _sensor_intrinsics(path: Path) -> CameraInfo | None:
    """Return the intrinsics of EuRoC's sensor.yaml; None without one or with another model."""
    if not path.is_file():
        return None
    text = "\n".join(_lines(path))
    # two lists of numbers need no YAML library
    found = re.findall(r"^(intrinsics|distortion_coefficients):\s*\[([-+.,e\d\s]+)\]", text, re.M)
    lists = {key: [float(number) for number in values.split(",")] for key, values in found}
    if len(lists.get("intrinsics", ())) != 4 or "radial-tangential" not in text:
        return None
    fx, fy, cx, cy = lists["intrinsics"]
    coeffs = tuple(lists.get("distortion_coefficients", [0.0] * 4))
    size = (0, 0)
    resolution = re.search(r"^resolution:\s*\[\s*(\d{1,5})\s*,\s*(\d{1,5})\s*\]", text, re.M)
    if resolution is not None:
        size = (int(resolution[1]), int(resolution[2]))
    return CameraInfo(Intrinsics(fx, fy, cx, cy, "brown_conrady", coeffs), size=size)


# KITTI


def _kitti(folder: Path) -> Iterator[ImageSequence]:
    """Yield the camera in a folder image_NN: of a raw drive, or of a sequence of the odometry set."""
    if not re.fullmatch(r"image_\d{1,2}", folder.name):
        return
    # a raw drive
    if (folder / "timestamps.txt").is_file():
        pictures = _pictures(folder / "data")
        intrinsics = None
        stamps = _dates(folder / "timestamps.txt")
    # a sequence of the odometry set, with the calibration of its rectified images
    elif (folder.parent / "times.txt").is_file():
        times = folder.parent / "times.txt"
        pictures = _pictures(folder)
        stamps = [_nanoseconds(line, times) for line in _lines(times)]
        intrinsics = _projection(folder.parent / "calib.txt", int(folder.name[6:]))
    else:
        return
    files = (
        ImageFile(stamp, "colour", path, intrinsics=intrinsics)
        for stamp, path in zip(stamps, pictures, strict=False)  # a set may end before its list
    )
    yield ImageSequence(_name(folder), _sorted(files), has_stamps=True)


def _dates(path: Path) -> list[int]:
    """Return the Unix ns of dates in UTC with nine digits of a second."""
    try:
        stamps: list[int] = np.array(_lines(path), "datetime64[ns]").astype(np.int64).tolist()
    except ValueError as error:
        raise BagError(f"{path}: expected dates, found others ({str(error)[:80]})") from error
    return stamps


def _projection(path: Path, camera: int) -> CameraInfo | None:
    """Return the intrinsics of a rectified camera from the line `P<camera>:` of calib.txt."""
    if not path.is_file():
        return None
    for line in _lines(path):
        head, _, rest = line.partition(":")
        numbers = rest.split()
        if head == f"P{camera}" and len(numbers) == 12:
            fx, _, cx, _, _, fy, cy = (float(_number(number, path)) for number in numbers[:7])
            return CameraInfo(Intrinsics(fx, fy, cx, cy))
    return None


# BOP


def _bop(folder: Path) -> Iterator[ImageSequence]:
    # some sets have grey images
    table = folder / "scene_camera.json"
    colour = next((folder / name for name in ("rgb", "gray") if (folder / name).is_dir()), None)
    if colour is None or not table.is_file():
        return
    files: list[ImageFile] = []
    try:
        cameras = {int(key): value for key, value in json.loads(_text(table)).items()}
        # the number of an image is its key in the table
        for path in _pictures(colour):
            if path.stem.isdecimal():
                files += _bop_images(path, cameras.get(int(path.stem)))
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise BagError(f"{table}: expected the cameras of BOP, found another table ({error})") from error
    yield ImageSequence(_name(folder), tuple(files))


def _bop_images(path: Path, camera: dict[str, object] | None) -> Iterator[ImageFile]:
    """Yield the depth, if there is one, and the colour of one image. The number in the file's name gives its time."""
    intrinsics = None
    scale_m = MILLIMETRE
    if camera is not None:
        fx, _, cx, _, fy, cy = (float(value) for value in camera["cam_K"][:6])  # type: ignore[index]
        intrinsics = CameraInfo(Intrinsics(fx, fy, cx, cy))
        scale_m = MILLIMETRE * float(camera.get("depth_scale", 1.0))  # type: ignore[arg-type]
    stamp_ns = int(path.stem) * NANOSECONDS // FPS
    for suffix in (".png", ".tif"):  # some of its sets have colour and depth in TIFF
        depth = path.parent.parent / "depth" / f"{path.stem}{suffix}"
        if depth.is_file():
            yield ImageFile(stamp_ns, "depth", depth, scale_m, aligned=True)
            break
    yield ImageFile(stamp_ns, "colour", path, intrinsics=intrinsics)


# plain folders and DAVIS


def _plain_sequences(path: Path) -> Iterator[ImageSequence]:
    folders = _folders(path)
    names = [_name(folder) for folder in folders]
    for folder, name in zip(folders, names, strict=True):
        colour, depth = _plain_images(folder)
        matches = _match_depth(colour, depth)
        # two resolutions of one sequence have one name: JPEGImages/480p/dog and JPEGImages/1080p/dog
        if names.count(name) > 1:
            name = f"{folder.parent.name}_{name}"
        files = []
        for index, path in enumerate(colour):
            stamp_ns = index * NANOSECONDS // FPS
            if path in matches:
                files.append(ImageFile(stamp_ns, "depth", matches[path], aligned=True))
            files.append(ImageFile(stamp_ns, "colour", path))
        yield ImageSequence(name, tuple(files), unmatched=() if matches else tuple(depth))


def _name(folder: Path) -> str:
    """Return the name of a sequence; a folder that is named for its role, such as rgb, has its parent's."""
    resolved = folder.resolve()
    if _ROLES.fullmatch(resolved.name):
        return resolved.parent.name
    return resolved.name


def _folders(path: Path) -> list[Path]:
    """Return the folders of colour images, in their natural order."""
    root = path / _DAVIS if (path / _DAVIS).is_dir() else path
    if _pictures(root):
        return [root]

    # DAVIS has folders of resolutions, and in these folders of sequences
    levels = _MAX_DEPTH if _DAVIS in root.parts else 1
    found = list(_below(root, levels))
    # a folder named for depth is a sequence only if there is no other
    return [folder for folder in found if not _DEPTH_FOLDER.fullmatch(folder.name)] or found


def _below(root: Path, levels: int) -> Iterator[Path]:
    for folder in _subfolders(root):
        if folder.name.lower() in _NO_PICTURES:
            continue
        if _pictures(folder):
            yield folder
        elif levels > 1:
            yield from _below(folder, levels - 1)


def _plain_images(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the colour images of a folder, and the depth images in or beside it."""
    pictures = _pictures(folder)
    colour = [path for path in pictures if not _DEPTH.search(path.stem)]
    depth = [path for path in pictures if _DEPTH.search(path.stem)]

    # the first place with depth counts: this folder, a folder in it, depth/SEQUENCE beside it, depth beside it
    beside = [place for place in _depth_folders(folder.parent) if place != folder]
    for place in (*_depth_folders(folder), *(place / folder.name for place in beside), *beside):
        depth = depth or _pictures(place)
    return colour, depth


def _depth_folders(folder: Path) -> list[Path]:
    """Return the folders of depth images in a folder, the one named `depth` first; none if it cannot be read."""
    try:
        found = [place for place in _subfolders(folder) if _DEPTH_FOLDER.fullmatch(place.name)]
    except BagError:
        return []
    return sorted(found, key=lambda place: place.name != "depth")


def _match_depth(colour: Sequence[Path], depth: Sequence[Path]) -> dict[Path, Path]:
    """Map colour to depth files of the same name, ignoring the words depth, color and image; else in order."""
    named = {_ROLES.sub("", path.stem): path for path in depth}
    matches = {}
    for path in colour:
        key = _ROLES.sub("", path.stem)
        if key in named:
            matches[path] = named[key]
    if not matches and len(colour) == len(depth):
        return dict(zip(colour, depth, strict=True))
    return matches


# files


def _pictures(folder: Path) -> list[Path]:
    """Return the files of a folder that are named as images, in their natural order; also links to absent files."""
    files = _entries(folder, lambda path: path.is_file() or (path.is_symlink() and not path.exists()))
    return [path for path in files if path.suffix.lower() in SUFFIXES]


def _subfolders(folder: Path) -> list[Path]:
    return _entries(folder, Path.is_dir)


def _entries(folder: Path, wanted: Callable[[Path], bool]) -> list[Path]:
    """Return the entries of a folder in their natural order; none if it is absent."""
    with reading(folder), suppress(FileNotFoundError, NotADirectoryError):
        return sorted(filter(wanted, folder.iterdir()), key=natural_order)
    return []


def _text(path: Path) -> str:
    with reading(path):
        return read_regular(path, _MAX_TEXT).decode(errors="replace")


def _lines(path: Path) -> list[str]:
    """Return the lines of a text without comments and empty ones."""
    lines = (line.strip() for line in _text(path).splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _nanoseconds(text: str, path: Path) -> int:
    """Return seconds of a decimal number as ns, exactly; KITTI writes 1.036224e-01."""
    return int(_number(text, path) * NANOSECONDS)


def _number(text: str, path: Path) -> Decimal:
    try:
        number = Decimal(text)
    except InvalidOperation as error:
        raise BagError(f"{path}: expected numbers, found {text[:40]!r}") from error
    if not (number.is_finite() and abs(number) < _MAX_NUMBER):
        raise BagError(f"{path}: expected numbers below 2^63, found {text[:40]!r}")
    return number
