"""Reader of ROS recordings: ROS 1 `.bag`, ROS 2 folders with `.db3` or `.mcap` files, and single `.db3` files.

ROS 2 may compress its files as a whole, then they are unpacked into a temporary folder. A part that stands there packed
and unpacked is read once, from the copy that is whole. A single packed file is read, too.

This package reads the files itself, because rosbags refuses bags without an index or metadata: bags whose recorder was
killed, or whose end is missing. rosbags only deserialises single messages.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from ...errors import BagError, require
from ...files import describe_stand_in
from ...types import Closeable
from ..decompression import DecompressionError, decompress_file
from ..messages.ros import Storage, list_topics, read_sample
from ..messages.ros_images import MessageError
from ..samples import Losses, Sample, SampleReader, Topic, natural_order
from . import rosbag1, rosbag2_sqlite
from .mcap import McapBag
from .mcap_stream import McapStream
from .rosbag1 import Rosbag1
from .rosbag2_sqlite import Rosbag2Sqlite

METADATA = "metadata.yaml"

_PACKED = (".zstd", ".zst", ".lz4")
_SUFFIXES = (".db3", ".mcap")
_LISTED = re.compile(r"""[^\s"',\[\]][^"',\[\]\n]*\.(?:db3|mcap)(?:\.\w+)?(?=["'\s,\]]|$)""", re.M)
_KEY = re.compile(r"^(-\s+)?(\w+:\s+)?")


class RosBag(Closeable):
    """A recording of ROS 1 or 2: a SampleReader.

    A recording that was never closed, or is cut off, gives every whole message before the damage. Raises BagError for
    another file or folder, or one without topics, and MissingExtraError without the extra `bags`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._losses = Losses()
        self._unpacked: tempfile.TemporaryDirectory[str] | None = None
        self._files: list[SampleReader] = []
        try:
            self._files = self._open()
        except BaseException:
            self.close()
            raise
        self.topics = tuple({topic.name: topic for file in self._files for topic in file.topics}.values())

    @staticmethod
    def recognises(path: Path) -> bool:
        """Return True if this is a ROS 1 bag, a `.db3`, a packed file, or a folder with files of a ROS 2 bag."""
        if path.is_dir():
            return (path / METADATA).is_file() or bool(_list_parts(path))
        if path.suffix in _PACKED and _ending(path) in (*_SUFFIXES, ".bag"):
            return True
        return rosbag1.is_rosbag1(path) or rosbag2_sqlite.is_sqlite(path)

    @property
    def lost(self) -> str | None:
        """Description of what could not be read, once `samples` has ended; None if nothing was lost."""
        losses = Losses()
        for reason in (self._losses.text(), *(file.lost for file in self._files)):
            losses.add(None if reason is None else self._name(reason))
        return losses.text()

    def samples(self, topics: Collection[str]) -> Iterator[Sample]:
        """Yield the messages on these topics in the order of the recording; BagError for an unknown encoding."""
        for file in self._files:
            yield from file.samples(topics)

    def close(self) -> None:
        """Close the files. Idempotent."""
        for file in self._files:
            file.close()
        if self._unpacked is not None:
            self._unpacked.cleanup()

    def _open(self) -> list[SampleReader]:
        if not self.path.is_dir():
            return [self._open_best([self.path])]
        parts = _list_parts(self.path)
        if not parts:
            raise BagError(f"expected a ROS 2 bag in {self.path}, found no file of {' or '.join(_SUFFIXES)}")
        self._note_missing_files(parts)
        files: list[SampleReader] = []
        for copies in parts.values():
            try:
                files.append(self._open_best(copies))
            except BagError as error:
                self._losses.add(str(error))
        if not files:
            raise BagError(f"expected a ROS 2 bag in {self.path}, found {self._losses.text()}")
        return files

    def _open_best(self, copies: Sequence[Path]) -> SampleReader:
        """Open the first copy of a part that is whole, else the copy with the most messages, and note its damage."""
        best: tuple[bool, int, SampleReader, str | None] | None = None
        errors: list[str] = []
        for copy in copies:
            try:
                file, damage = self._open_copy(copy)
            except BagError as error:
                errors.append(str(error))
                continue
            # a part with one copy is not read for its messages
            count, is_whole = _count_messages(file) if len(copies) > 1 else (0, True)
            is_whole = is_whole and damage is None
            worse = file if best is not None and (is_whole, count) <= best[:2] else best and best[2]
            if worse is not file:
                best = (is_whole, count, file, damage)
            if worse is not None:
                worse.close()
            if is_whole:
                break
        if best is None:
            raise BagError("; ".join(errors))
        self._losses.add(best[3])
        return best[2]

    def _open_copy(self, path: Path) -> tuple[SampleReader, str | None]:
        """Open a file, or an unpacked copy of it; return also why the end of the packed one is lost."""
        try:
            if stand_in := describe_stand_in(path):
                raise BagError(f"expected a ROS bag at {path}, found {stand_in}")
            if path.suffix not in _PACKED:
                return _open_file(path), None
            self._unpacked = self._unpacked or tempfile.TemporaryDirectory(prefix="sam3-node-")
            target = Path(self._unpacked.name) / path.name
            damage = decompress_file(path, target)
            try:
                return _open_file(target), damage
            except BagError as error:
                raise BagError(damage or self._name(str(error))) from error
        except (OSError, DecompressionError) as error:
            raise BagError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error

    def _name(self, text: str) -> str:
        """Return a text in which unpacked files have the paths of the packed ones."""
        folder = self.path if self.path.is_dir() else self.path.parent
        return text if self._unpacked is None else text.replace(self._unpacked.name, str(folder))

    def _note_missing_files(self, parts: Collection[str]) -> None:
        """Note the files that the metadata lists and the folder lacks, packed and unpacked."""
        metadata = self.path / METADATA
        try:
            text = metadata.read_text("utf-8", "replace")
        except OSError as error:
            state = "has no" if not metadata.exists() else f"has an unreadable ({error.strerror})"
            self._losses.add(f"{self.path.name} {state} {METADATA}: it was never closed, its end may be lost")
            return
        listed = [Path(_KEY.sub("", entry)) for entry in _LISTED.findall(text)]
        if not listed:
            self._losses.add(
                f"the {METADATA} of {self.path.name} lists no files: it was never closed, its end may be lost"
            )
        for name in dict.fromkeys(path.name for path in listed if _part_name(path) not in parts):
            self._losses.add(f"{self.path.name} lacks {name}")


class _RosFile(Closeable):
    """One file of serialised ROS messages as samples."""

    def __init__(self, path: Path, storage: Storage) -> None:
        require("rosbags.typesys", "bags")
        self.path = path
        self.topics: tuple[Topic, ...] = list_topics(storage.types)
        self._storage = storage
        self._losses = Losses()

    @property
    def lost(self) -> str | None:
        losses = Losses()
        losses.add(self._storage.lost)
        losses.add(self._losses.text())
        return losses.text()

    def samples(self, topics: Collection[str]) -> Iterator[Sample]:
        self._losses, good_topics = Losses(), set[str]()
        chosen = {topic.name for topic in self.topics if topic.name in topics and topic.kind != "other"}
        for raw in self._storage.messages(chosen):
            try:
                sample = read_sample(raw, self._storage.types[raw.topic], self._storage.is_cdr)
            except BagError as error:
                # an unknown encoding after messages that were read is damage
                if not isinstance(error, MessageError) and raw.topic not in good_topics:
                    raise
                self._losses.skip(raw.topic, error)
                continue
            good_topics.add(raw.topic)
            if sample is not None:
                yield sample

    def count_messages(self) -> tuple[int, bool]:
        """Return the number of messages, and whether the file is whole."""
        count = sum(1 for _ in self._storage.messages(self._storage.types))
        return count, self._storage.lost is None

    def close(self) -> None:
        self._storage.close()


def _open_file(path: Path) -> SampleReader:
    if rosbag1.is_rosbag1(path):
        return _RosFile(path, Rosbag1(path))
    if _ending(path) == ".mcap":
        return McapBag(path)
    return _RosFile(path, Rosbag2Sqlite(path))


def _count_messages(file: SampleReader) -> tuple[int, bool]:
    """Read a file to its end; return the number of its messages, and whether it is whole."""
    if isinstance(file, _RosFile):
        return file.count_messages()
    stream = McapStream(file.path)
    return sum(1 for _ in stream.rows()), stream.damage is None


def _list_parts(folder: Path) -> dict[str, list[Path]]:
    """Return the parts of a ROS 2 bag by their unpacked names, in the order of writing.

    Each has the files in which it is, the unpacked one first.
    """
    try:
        files = [path for path in folder.iterdir() if _ending(path) in _SUFFIXES]
    except OSError as error:
        raise BagError(f"cannot read {folder}: {error.strerror}") from error
    parts: dict[str, list[Path]] = {}
    for path in sorted(
        files, key=lambda path: (natural_order(Path(_part_name(path))), path.suffix in _PACKED)
    ):
        parts.setdefault(_part_name(path), []).append(path)
    return parts


def _part_name(path: Path) -> str:
    return path.stem if path.suffix in _PACKED else path.name


def _ending(path: Path) -> str:
    return Path(_part_name(path)).suffix
