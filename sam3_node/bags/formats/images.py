"""Reader of image folders in the layouts that `image_layouts` finds. JPEG and PNG stay encoded, others become bgr8."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from heapq import merge
from itertools import chain
from pathlib import Path

from ...errors import BagError, WireError
from ...files import describe_stand_in
from ...types import Closeable, Depth, Intrinsics
from ...wire.images import compressed_size, is_depth_png
from .. import still_images
from ..messages.ros_images import MessageError
from ..samples import CameraInfo, Colour, Losses, Sample, Topic
from .image_layouts import SUFFIXES, ImageFile, ImageSequence, find_sequences, has_sequences

_MAX_FILE = 1 << 28
_EXIF = re.compile(rb"(?:Exif\0\0|eXIf|EXIF.{4}(?:Exif\0\0)?)(?=II\*\0|MM\0\*)", re.DOTALL)  # JPEG, PNG, WebP
_EXIF_PLACE = 1 << 16  # bytes from the beginning and from the end, where writers put it
_ORIENTATION = 0x0112


class ImagesBag(Closeable):
    """A folder of images: a SampleReader in which each sequence is a camera.

    Depth is PNG or TIFF of 16-bit grey: in mm in a plain folder, where it lies in a folder `depth` (also Depth,
    depth_raw and the like) beside or inside the folder of the images, or beside the images with `depth` in its name; in
    the dataset's unit otherwise. The images of a sequence have the dataset's stamps, and its cameras come together;
    without stamps they come in the natural order of their names, 24 a second from 0, one sequence after the other.
    Images that cannot be decoded, or that differ in size from the first of their sequence, are passed over, and `lost`
    says so. Turns by EXIF orientation are not made; a warning tells of photos that ask for different ones. Raises
    BagError for a folder without images.
    """

    is_sequential = True
    """True if the samples of one topic are read without those of the others: `probe` then reads each alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._losses = Losses()
        self._notes = Losses()
        self._sequences = find_sequences(path)
        if not self._sequences:
            raise BagError(f"expected images ({', '.join(SUFFIXES)}) in {path} or its folders, found none")
        self.topics = tuple(topic for sequence in self._sequences for topic in _topics(sequence))

    @staticmethod
    def recognises(path: Path) -> bool:
        """Return True if this is a folder with images, or with folders of images."""
        return path.is_dir() and has_sequences(path)

    @property
    def lost(self) -> str | None:
        """Description of what could not be read, once `samples` has ended; None if nothing was lost."""
        return self._losses.text()

    @property
    def notes(self) -> tuple[str, ...]:
        """Assumptions about the images up to now."""
        return tuple(filter(None, (self._notes.text(),)))

    def samples(self, topics: Collection[str]) -> Iterator[Sample]:
        """Yield the images of these topics; depth comes before the colour of its time."""
        self._losses = Losses()
        sequences = [
            _Sequence(sequence, topics, self._losses, self._notes).samples() for sequence in self._sequences
        ]
        if all(sequence.has_stamps for sequence in self._sequences):
            yield from merge(*sequences, key=lambda sample: sample.stamp_ns)
        else:
            yield from chain(*sequences)

    def close(self) -> None:
        """Do nothing: no file stays open."""


def _topics(sequence: ImageSequence) -> Iterator[Topic]:
    yield Topic(f"/{sequence.name}/image", "images", "colour")
    if sequence.has_depth:
        yield Topic(f"/{sequence.name}/depth", "images", "depth")
    if sequence.has_intrinsics:
        yield Topic(f"/{sequence.name}/camera_info", "images", "intrinsics")


class _Sequence:
    """Reads the images of one sequence that are on `topics`; all of a kind have the size of the first."""

    def __init__(
        self, sequence: ImageSequence, topics: Collection[str], losses: Losses, notes: Losses
    ) -> None:
        self._sequence, self._topics, self._losses, self._notes = sequence, topics, losses, notes
        self._orientation: tuple[int, str] | None = None
        self._has_mixed_turns = False
        self._sizes: dict[str, tuple[int, int]] = {}
        self._intrinsics: Intrinsics | CameraInfo | None = None

    def samples(self) -> Iterator[Sample]:
        if self._sequence.unmatched and f"/{self._sequence.name}/image" in self._topics:
            for path in self._sequence.unmatched:
                self._losses.skip(
                    f"the depth images of {self._sequence.name}",
                    f"{path.name}: no colour image has this name",
                )
        for file in self._sequence.files:
            topic = f"/{self._sequence.name}/{'image' if file.kind == 'colour' else 'depth'}"
            yield from self._calibration(file)
            if topic not in self._topics:
                continue
            try:
                yield Sample(topic, file.stamp_ns, file.stamp_ns, self._read(file))
            except (MessageError, OSError) as error:
                self._losses.skip(topic, error)

    def _calibration(self, file: ImageFile) -> Iterator[Sample]:
        """Yield the intrinsics of an image that differ from those before."""
        topic = f"/{self._sequence.name}/camera_info"
        if topic in self._topics and file.intrinsics not in (None, self._intrinsics):
            assert file.intrinsics is not None
            self._intrinsics = file.intrinsics
            yield Sample(topic, file.stamp_ns, file.stamp_ns, file.intrinsics)

    def _read(self, file: ImageFile) -> Colour | Depth:
        path = file.path
        if stand_in := describe_stand_in(path):
            raise MessageError(f"{path.name}: expected an image, found {stand_in}")
        status = path.stat()
        if not path.is_file() or status.st_size > _MAX_FILE:
            raise MessageError(f"{path.name}: expected an image, found {status.st_size} bytes")
        data = path.read_bytes()
        image = _colour(path.name, data) if file.kind == "colour" else _depth(file, data)
        size = (image.width, image.height)
        if size != self._sizes.setdefault(file.kind, size):
            raise MessageError(f"{path.name}: expected {self._sizes[file.kind]} pixels, found {size}")
        self._note_alignment()
        if file.kind == "colour":
            self._compare_orientation(path, data)
        return image

    def _note_alignment(self) -> None:
        """Say once that depth in a plain folder is taken as aligned, or that its size forbids it."""
        sequence, colour, depth = self._sequence, self._sizes.get("colour"), self._sizes.get("depth")
        if sequence.has_stamps or sequence.has_intrinsics or colour is None or depth is None:
            return
        if colour == depth:
            reason = "the depth images have the size of the colour images: they are taken as aligned to them"
        else:
            reason = (
                f"the depth images are {depth[0]} x {depth[1]}, the colour images {colour[0]} x {colour[1]}: they are "
                "not taken as aligned; if they are, state it by --depth-aligned or in the calibration file"
            )
        self._notes.add(f"{sequence.name}: {reason}")

    def _compare_orientation(self, path: Path, data: bytes) -> None:
        """Note once that the photos of a sequence have different EXIF orientations."""
        orientation = _find_orientation(data)
        if self._orientation is None:
            self._orientation = (orientation, path.name)
        first, name = self._orientation
        if orientation != first and not self._has_mixed_turns:
            self._has_mixed_turns = True
            self._notes.add(
                f"{path.parent}: its photos have different EXIF orientations ({first} of {name}, {orientation} of "
                f"{path.name}); these turns are not made, so some pictures lie on their side: turn the files "
                "themselves, with exiftran -ai for example"
            )


def _find_orientation(data: bytes) -> int:
    """Return the EXIF orientation (1 to 8) of a JPEG, PNG, WebP or TIFF; 1, which is upright, without one."""
    begins = [match.end() for match in _EXIF.finditer(data, 0, _EXIF_PLACE)]
    begins += [match.end() for match in _EXIF.finditer(data, max(len(data) - _EXIF_PLACE, _EXIF_PLACE))]
    exif = memoryview(data)[0 if still_images.recognise(data) == "tiff" else (*begins, len(data))[0] :]
    value, *_ = (*still_images.read_tags(exif).get(_ORIENTATION, ()), 1)
    return value if 1 <= value <= 8 else 1


def _colour(name: str, data: bytes) -> Colour:
    if still_images.recognise(data) is not None:
        try:
            return still_images.decode_colour(data)
        except ValueError as error:
            raise MessageError(f"{name}: {error}") from error
    try:
        return Colour.from_compressed(data)
    except BagError as error:
        raise MessageError(f"{name}: {error}") from error


def _depth(file: ImageFile, data: bytes) -> Depth:
    name = file.path.name
    if is_depth_png(data):
        return Depth(*_png_size(name, data), "png16", file.scale_m, file.aligned, data)
    try:
        return still_images.decode_depth(data, file.scale_m, file.aligned)
    except ValueError as error:
        raise MessageError(
            f"{name}: expected a PNG or TIFF of 16-bit grey, found another file ({error})"
        ) from error


def _png_size(name: str, data: bytes) -> tuple[int, int]:
    try:
        return compressed_size(data, "png")
    except WireError as error:
        raise MessageError(f"{name}: {error}") from error
