"""The one door to all recordings: what a file or folder is, is told by its content."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from ..errors import BagError
from ..types import Closeable, Frame
from .discovery import Camera, choose_cameras, settle_kinds
from .formats.images import ImagesBag
from .formats.mcap import McapBag
from .formats.mcap_stream import McapStream
from .formats.realsense import RealSenseBag
from .formats.rosbag import RosBag
from .formats.video import VideoBag
from .native import frames
from .native.reader import RecordingReader, is_recorded
from .pairing import Pairing
from .samples import Losses, SampleReader, natural_order

FORMATS = (
    "MCAP (this package's, ROS 2, ROS 1, Foxglove), ROS 1 .bag, ROS 2 folders, RealSense .db3 and .bag, "
    "video files, folders of images"
)


class _Kind(Protocol):
    """A class of readers."""

    def __call__(self, path: Path) -> SampleReader: ...

    @staticmethod
    def recognises(path: Path) -> bool: ...


class _Source(Protocol):
    """Where the frames of a bag come from."""

    cameras: tuple[str, ...]

    @property
    def lost(self) -> str | None: ...

    def frames(self) -> Iterator[Frame]: ...

    def close(self) -> None: ...


class Bag(Closeable):
    """A recording, opened: iterates the Frames of `cameras` in the order of the recording, colour and depth still
    encoded, from the beginning each time.

    Of a damaged or truncated recording all that is whole comes; when the iteration has ended `lost` says what did
    not, and None where all did. Raises BagError where the recording is gone or has an encoding that is not known.
    """

    def __init__(self, source: _Source) -> None:
        self.cameras = source.cameras
        self._source = source
        self._closed = False

    def __iter__(self) -> Iterator[Frame]:
        for frame in self._source.frames():
            if self._closed:
                return
            yield frame

    @property
    def lost(self) -> str | None:
        return self._source.lost

    def close(self) -> None:
        """End every iteration at its next frame and let go of the files. Idempotent."""
        self._closed = True
        self._source.close()


def open_bag(path: Path, topics: Collection[str] = ()) -> Bag:
    """Open a recording of any format that is known; of its cameras those that `topics` has, all if it is empty.

    `topics` holds names of cameras, or of colour topics; a topic of depth is preferred to others of its camera.
    Raises BagError for what is absent, empty, of no known format or without such a camera, MissingExtraError
    where a format's library is absent.
    """
    path = Path(path)
    return Bag(_own(path, topics) or _foreign(path, topics))


class _Part(NamedTuple):
    """One file of this package's own recordings: `topics` has the colour topic of each camera.

    `frames` may end in BagError where the file is damaged, or `lost` tells after it.
    """

    topics: dict[str, str]
    frames: Callable[[], Iterator[Frame]]
    lost: Callable[[], str | None]


class _Recorded:
    """Frames as this package recorded them, of one file after the other."""

    def __init__(self, path: Path, parts: Sequence[_Part], wanted: Collection[str]) -> None:
        self._parts = parts
        self._losses = Losses()
        topics = {camera: topic for part in parts for camera, topic in part.topics.items()}
        absent = [name for name in wanted if name not in topics and name not in topics.values()]
        if absent:
            raise BagError(f"{path}: expected {', '.join(absent)}, found the cameras {', '.join(topics)}")
        self.cameras = tuple(
            camera for camera, topic in topics.items() if not wanted or camera in wanted or topic in wanted
        )

    @property
    def lost(self) -> str | None:
        return self._losses.text()

    def frames(self) -> Iterator[Frame]:
        self._losses = Losses()
        count = 0
        for part in self._parts:
            try:
                for frame in part.frames():
                    count += 1
                    if frame.camera in self.cameras:
                        yield frame
                self._losses.add(part.lost())
            except BagError as error:
                if not count and part is self._parts[-1]:
                    raise
                self._losses.add(str(error))

    def close(self) -> None:
        """Files are open only while they are read."""


class _Sampled:
    """Frames made of the messages of another program's recording."""

    def __init__(self, reader: SampleReader, cameras: tuple[Camera, ...]) -> None:
        self._reader = reader
        self._chosen = cameras
        self.cameras = tuple(camera.name for camera in cameras)

    @property
    def lost(self) -> str | None:
        return self._reader.lost

    def frames(self) -> Iterator[Frame]:
        pairing = Pairing(self._chosen)
        topics = {topic for camera in self._chosen for topic in camera.topics}
        for sample in self._reader.samples(topics):
            yield from pairing.add(sample)
        yield from pairing.flush()

    def close(self) -> None:
        self._reader.close()


def _own(path: Path, wanted: Collection[str]) -> _Recorded | None:
    """A recording of this package, or a folder of its splits; None for what is neither."""
    files = sorted(path.glob("*.mcap"), key=natural_order) if path.is_dir() else [path]
    parts = [part for part in map(_part, files) if part is not None]
    return _Recorded(path, parts, wanted) if parts else None


def _part(path: Path) -> _Part | None:
    if not McapBag.recognises(path):
        return None
    topics = [channel.topic for channel in McapStream(path).channels() if channel.encoding == "msgpack"]
    root, end = frames.FRAME_ROOT, "/header"
    if is_recorded(path):
        recorded = RecordingReader([path])
        names = [topic[1 : -len(end)] for topic in topics if topic.startswith("/") and topic.endswith(end)]
        cameras = {name: f"/{name}/image" for name in names}
        return _Part(cameras, recorded.frames, lambda: recorded.lost) if cameras else None
    cameras = {topic.removeprefix(root): topic for topic in topics if topic.startswith(root)}
    return _Part(cameras, lambda: frames.read_frames(path), lambda: None) if cameras else None


def _foreign(path: Path, wanted: Collection[str]) -> _Sampled:
    reader = _reader(path)
    try:
        return _Sampled(reader, choose_cameras(path, settle_kinds(reader), wanted))
    except BaseException:
        reader.close()
        raise


def _reader(path: Path) -> SampleReader:
    """By what is in it; BagError for what no reader knows."""
    kinds: tuple[_Kind, ...] = (McapBag, RealSenseBag, RosBag, VideoBag, ImagesBag)
    for kind in kinds:
        if path.exists() and kind.recognises(path):
            return kind(path)
    raise BagError(f"expected a recording, {_found(path)}; what is read: {FORMATS}")


def _found(path: Path) -> str:
    if path.is_dir():
        return f"found a folder without one at {path}"
    if not path.is_file():
        return f"found no file at {path}"
    return f"found {'another file' if path.stat().st_size else 'an empty one'} at {path}"
