"""Reader of image folders: one sequence, several side by side, or the layout of DAVIS; JPEG and PNG stay encoded."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import BagError, WireError
from ...types import NANOSECONDS, Closeable, ColourEncoding, Depth
from ...wire.images import compressed_size, is_depth_png
from ..messages.ros_images import MILLIMETRE, MessageError
from ..samples import Colour, Losses, Sample, Topic, natural_order

FPS = 24
"""Images per second, as in DAVIS."""

_DAVIS = "JPEGImages"
_MAX_DEPTH = 3  # folders from JPEGImages to images: JPEGImages/480p/SEQUENCE
_SUFFIXES = (".jpg", ".jpeg", ".png")
_MAX_FILE = 1 << 28
_NO_PICTURES = ("annotations", "masks", "depth")
_ROLES = re.compile(r"(?<![a-z])(colou?r|rgb|depth|image)(?![a-z])", re.IGNORECASE)
_DEPTH = re.compile(r"(?<![a-z])depth(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Sequence:
    """The images of one camera; `depth` maps colour images to their depth images, as far as these exist."""

    name: str
    colour: tuple[Path, ...]
    depth: dict[Path, Path]

    @property
    def colour_topic(self) -> str:
        return f"/{self.name}/image"

    @property
    def depth_topic(self) -> str:
        return f"/{self.name}/depth"

    @property
    def topics(self) -> Iterator[Topic]:
        yield Topic(self.colour_topic, "images", "colour")
        if self.depth:
            yield Topic(self.depth_topic, "images", "depth")


class ImagesBag(Closeable):
    """A folder of images: a SampleReader in which each sequence is a camera.

    Depth is PNG of 16-bit grey, in mm. It lies in a folder `depth` beside or inside the folder of the images, or beside
    the images with `depth` in its name. The images of a sequence come in the natural order of their names, 24 a second
    from 0, one sequence after the other. Images that are no whole JPEG or PNG, or that differ in size from the first of
    their sequence, are passed over, and `lost` says so. Raises BagError for a folder without images.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._losses = Losses()
        self._sequences = _sequences(path)
        if not self._sequences:
            raise BagError(f"expected images ({', '.join(_SUFFIXES)}) in {path} or its folders, found none")
        self.topics = tuple(topic for sequence in self._sequences for topic in sequence.topics)

    @staticmethod
    def recognises(path: Path) -> bool:
        """Return True if this is a folder with images, or with folders of images."""
        return path.is_dir() and bool(_folders(path))

    @property
    def lost(self) -> str | None:
        """Description of what could not be read, once `samples` has ended; None if nothing was lost."""
        return self._losses.text()

    def samples(self, topics: Collection[str]) -> Iterator[Sample]:
        """Yield the images of these topics, sequence after sequence; depth comes before the colour of its time."""
        self._losses = Losses()
        for sequence in self._sequences:
            yield from self._images(sequence, topics)

    def _images(self, sequence: _Sequence, topics: Collection[str]) -> Iterator[Sample]:
        readers = {sequence.depth_topic: _Images(_depth), sequence.colour_topic: _Images(_colour)}
        for index, path in enumerate(sequence.colour):
            stamp_ns = index * NANOSECONDS // FPS
            for topic, file in (
                (sequence.depth_topic, sequence.depth.get(path)),
                (sequence.colour_topic, path),
            ):
                if file is None or topic not in topics:
                    continue
                try:
                    payload = readers[topic].read(file)
                except (MessageError, OSError) as error:
                    self._losses.skip(topic, error)
                    continue
                yield Sample(topic, stamp_ns, stamp_ns, payload)

    def close(self) -> None:
        """Do nothing: no file stays open."""


class _Images:
    """Reads image files that all have the size of the first."""

    def __init__(self, make: Callable[[str, bytes], Colour | Depth]) -> None:
        self._make = make
        self._size: tuple[int, int] | None = None

    def read(self, path: Path) -> Colour | Depth:
        if path.stat().st_size > _MAX_FILE:
            raise MessageError(f"{path.name}: expected an image, found {path.stat().st_size} bytes")
        image = self._make(path.name, path.read_bytes())
        size = (image.width, image.height)
        if size != (self._size or size):
            raise MessageError(f"{path.name}: expected {self._size} pixels, found {size}")
        self._size = size
        return image


def _colour(name: str, data: bytes) -> Colour:
    encoding: ColourEncoding = "png" if data.startswith(b"\x89PNG") else "jpeg"
    return Colour(*_size(name, data, encoding), encoding, data)


def _depth(name: str, data: bytes) -> Depth:
    if not is_depth_png(data):
        raise MessageError(f"{name}: expected a PNG of 16-bit grey, found another file")
    return Depth(*_size(name, data, "png"), "png16", MILLIMETRE, False, data)


def _size(name: str, data: bytes, encoding: str) -> tuple[int, int]:
    try:
        return compressed_size(data, encoding)
    except WireError as error:
        raise MessageError(f"{name}: {error}") from error


def _sequences(path: Path) -> tuple[_Sequence, ...]:
    folders = _folders(path)
    names = [_name(folder) for folder in folders]
    # two resolutions of one sequence: JPEGImages/480p/dog and JPEGImages/1080p/dog
    names = [
        f"{folder.parent.name}_{name}" if names.count(name) > 1 else name
        for folder, name in zip(folders, names, strict=True)
    ]
    sequences = (_make_sequence(folder, name) for folder, name in zip(folders, names, strict=True))
    return tuple(sequence for sequence in sequences if sequence.colour)


def _name(folder: Path) -> str:
    resolved = folder.resolve()
    return resolved.parent.name if _ROLES.fullmatch(resolved.name) else resolved.name


def _folders(path: Path) -> list[Path]:
    """Return the folders of colour images, in their natural order."""
    root = path / _DAVIS if (path / _DAVIS).is_dir() else path
    if _pictures(root):
        return [root]
    levels = _MAX_DEPTH if _DAVIS in root.parts else 1
    return list(_below(root, levels))


def _below(root: Path, levels: int) -> Iterator[Path]:
    for folder in sorted(filter(Path.is_dir, _entries(root)), key=natural_order):
        if folder.name.lower() in _NO_PICTURES:
            continue
        if _pictures(folder):
            yield folder
        elif levels > 1:
            yield from _below(folder, levels - 1)


def _pictures(folder: Path) -> list[Path]:
    """Return the files of a folder that are named as images, in their natural order."""
    files = (path for path in _entries(folder) if path.suffix.lower() in _SUFFIXES)
    return sorted(files, key=natural_order)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise BagError(f"cannot read {folder}: {error.strerror}") from error


def _make_sequence(folder: Path, name: str) -> _Sequence:
    pictures = _pictures(folder)
    colour = tuple(path for path in pictures if not _DEPTH.search(path.stem))
    depth = [path for path in pictures if _DEPTH.search(path.stem)]
    for place in (folder / "depth", folder.parent / "depth" / folder.name, folder.parent / "depth"):
        if not depth and place.is_dir():
            depth = _pictures(place)
    return _Sequence(name, colour, _match_depth(colour, depth))


def _match_depth(colour: Sequence[Path], depth: Sequence[Path]) -> dict[Path, Path]:
    """Map colour to depth files of the same name, ignoring the words depth, color and image; else in order."""
    named = {_key(path): path for path in depth}
    matches = {path: named[_key(path)] for path in colour if _key(path) in named}
    if not matches and len(colour) == len(depth):
        return dict(zip(colour, depth, strict=True))
    return matches


def _key(path: Path) -> str:
    return _ROLES.sub("", path.stem)
