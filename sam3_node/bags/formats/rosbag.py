"""Reader of ROS recordings: ROS 1 `.bag`, ROS 2 folders with `.db3` or `.mcap` files, and single `.db3` files.

This package reads the files itself, because rosbags refuses bags without an index or metadata: bags whose recorder was
killed, or whose end is missing. rosbags only deserialises single messages.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from ...errors import BagError, require
from ...types import Closeable
from ..decompression import DecompressionError, decompress_file
from ..messages.ros import Storage, list_topics, read_sample
from ..messages.ros_images import MessageError
from ..samples import Losses, Sample, SampleReader, Topic, natural_order
from . import rosbag1, rosbag2_sqlite
from .mcap import McapBag
from .rosbag1 import Rosbag1
from .rosbag2_sqlite import Rosbag2Sqlite

METADATA = "metadata.yaml"

_PACKED = (".zstd", ".zst")
_SUFFIXES = (".db3", ".mcap")


class RosBag(Closeable):
    """A recording of ROS 1 or 2: a SampleReader.

    A recording that was never closed, or is cut off, gives every whole message before the damage. Raises BagError for
    another file or folder, or one without topics, and MissingExtraError without the extra `bags`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._losses = Losses()
        self._unpacked = tempfile.TemporaryDirectory(prefix="sam3-node-") if path.is_dir() else None
        self._files: list[SampleReader] = []
        try:
            self._files = self._open()
        except BaseException:
            self.close()
            raise
        self.topics = tuple({topic.name: topic for file in self._files for topic in file.topics}.values())

    @staticmethod
    def recognises(path: Path) -> bool:
        """Return True if this is a ROS 1 bag, a `.db3`, or a folder with files of a ROS 2 bag."""
        if path.is_dir():
            return (path / METADATA).is_file() or bool(_parts(path))
        return rosbag1.is_rosbag1(path) or rosbag2_sqlite.is_sqlite(path)

    @property
    def lost(self) -> str | None:
        """Description of what could not be read, once `samples` has ended; None if nothing was lost."""
        losses = Losses()
        for reason in (self._losses.text(), *(file.lost for file in self._files)):
            losses.add(reason)
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
            return [_open_file(self.path)]
        parts = _parts(self.path)
        if not parts:
            raise BagError(f"expected a ROS 2 bag in {self.path}, found no file of {' or '.join(_SUFFIXES)}")
        self._note_missing_files(self.path / METADATA)
        files: list[SampleReader] = []
        for part in parts:
            try:
                files.append(_open_file(self._unpack(part)))
            except (BagError, OSError, DecompressionError) as error:
                self._losses.add(str(error))
        if not files:
            raise BagError(f"expected a ROS 2 bag in {self.path}, found {self._losses.text()}")
        return files

    def _note_missing_files(self, metadata: Path) -> None:
        """Note the files that the metadata lists and the folder lacks."""
        if not metadata.is_file():
            self._losses.add(f"{self.path.name} has no {METADATA}: it was never closed, its end may be lost")
            return
        listed = re.findall(
            r"^\s*-\s+[\"']?([^\"'\s:]+\.(?:db3|mcap)(?:\.zst\w*)?)[\"']?\s*$",
            metadata.read_text("utf-8", "replace"),
            re.M,
        )
        for name in dict.fromkeys(Path(entry).name for entry in listed):
            if not (self.path / name).exists():
                self._losses.add(f"{self.path.name} lacks {name}")

    def _unpack(self, part: Path) -> Path:
        """Return the file itself, or a decompressed copy if ROS 2 has compressed the file as a whole."""
        if part.suffix not in _PACKED:
            return part
        assert self._unpacked is not None
        target = Path(self._unpacked.name) / part.stem
        decompress_file(part, target)
        return target


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

    def close(self) -> None:
        self._storage.close()


def _open_file(path: Path) -> SampleReader:
    if rosbag1.is_rosbag1(path):
        return _RosFile(path, Rosbag1(path))
    if path.suffix == ".mcap":
        return McapBag(path)
    return _RosFile(path, Rosbag2Sqlite(path))


def _parts(folder: Path) -> list[Path]:
    """Return the files of a ROS 2 bag in the order of writing."""
    try:
        return sorted((path for path in folder.iterdir() if _ending(path) in _SUFFIXES), key=natural_order)
    except OSError as error:
        raise BagError(f"cannot read {folder}: {error.strerror}") from error


def _ending(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in _PACKED else path.suffix
