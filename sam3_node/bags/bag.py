"""Entry point for all recordings: `open_bag` recognises a format by the content of a file or folder.

Sampling of single images from any recording, video or folder, for calibration and comparison of engines.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from ..errors import BagError, WireError
from ..files import describe_stand_in
from ..types import Closeable, Depth, Frame, FramePose, Image
from ..wire import decode_image
from .discovery import Camera, choose_cameras, probe, settle_kinds
from .formats.hdf5 import Hdf5Bag
from .formats.images import ImagesBag
from .formats.lerobot import LeRobotBag
from .formats.mcap import WHOLE, McapBag, McapStream
from .formats.realsense import RealSenseBag
from .formats.rosbag import RosBag
from .formats.video import VideoBag, decode_packets
from .native.layout import FRAME_ROOT
from .native.reader import RecordingReader, is_recorded
from .pairing import Pairing, TimeSpan, cut_samples
from .samples import Losses, Payload, Sample, SampleReader, SeekableReader, natural_order, split_selection
from .still_images import SUFFIXES

FORMATS = (
    "MCAP (this package's, ROS 2, ROS 1, Foxglove), ROS 1 .bag, ROS 2 folders, RealSense .db3 and .bag, "
    "video files, folders of images, LeRobot datasets, HDF5 episodes (ALOHA, robomimic)"
)

_NOT_READ = {
    "data/chunk-*": "a LeRobot dataset without its description, meta/info.json: download that, too",
    ".zgroup": "a Zarr dataset, which is not read: write its images as video or as a folder of images",
    "zarr.json": "a Zarr dataset, which is not read: write its images as video or as a folder of images",
    "*.tfrecord*": "an RLDS dataset (TFRecord), which is not read: write its images as video",
}


class Bag(Closeable):
    """An open recording. Iterates the Frames of `cameras` in the order of the recording, colour and depth still
    encoded, from the beginning each time.

    Of a damaged or truncated recording every whole frame comes. When the iteration has ended, `lost` describes the
    missing part; it is None if nothing is missing. Raises BagError if the recording has disappeared, or has an unknown
    encoding.
    """

    def __init__(self, path: Path, source: _Source) -> None:
        self.cameras = source.cameras
        self._path, self._source = path, source
        self._closed = False

    def __iter__(self) -> Iterator[Frame]:
        with _reading(self._path):
            for frame in self._source.frames():
                if self._closed:
                    return
                yield frame

    @property
    def lost(self) -> str | None:
        return self._source.lost

    @property
    def notes(self) -> tuple[str, ...]:
        """Assumptions and remarks up to now where nothing is missing: alignment of depth, late writers."""
        return self._source.notes

    @property
    def episode_starts(self) -> tuple[int, ...]:
        """Numbers (`seq`) at which the episodes of a dataset begin; empty for any other recording."""
        return self._source.episode_starts

    def robot_poses(self) -> Iterator[FramePose]:
        """Yield the robot's poses: those that this package recorded, or that a LeRobot dataset names as such."""
        with _reading(self._path):
            yield from self._source.robot_poses()

    def close(self) -> None:
        """End every iteration at its next frame and close the files. Idempotent."""
        self._closed = True
        self._source.close()


def open_bag(
    path: Path, topics: Collection[str] = (), span: TimeSpan = WHOLE, depth_aligned: bool = False
) -> Bag:
    """Open a recording of any of FORMATS, with the cameras that are in `topics`, or with all if it is empty.

    `topics` holds names of cameras, or of colour topics; a topic of depth is preferred to others of its camera. With a
    `span`, only the frames that were recorded in it come; recordings of this package and videos are not read before it.
    `depth_aligned` states that depth is registered to colour where the recording does not say so.
    Raises BagError for a recording that is absent, empty, of an unknown format or without such a camera, and
    MissingExtraError if a format's library is absent; the iteration raises BagError for a span in Unix time of a
    recording whose times are none. `PATH#episode=3` reads one episode of a dataset (`episodes`).
    """
    path = Path(path)
    with _reading(path):
        native = _open_native(path, topics, span, depth_aligned)
        return Bag(path, native or _open_foreign(path, topics, span, depth_aligned))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn OSError, of a recording that disappears or cannot be read, into BagError."""
    try:
        yield
    except OSError as error:
        raise BagError(f"cannot read {error.filename or path}: {error.strerror or error}") from error


class _Source(Protocol):
    """Source of a bag's frames."""

    cameras: tuple[str, ...]
    episode_starts: tuple[int, ...]

    @property
    def lost(self) -> str | None: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    def frames(self) -> Iterator[Frame]: ...

    def robot_poses(self) -> Iterator[FramePose]: ...

    def close(self) -> None: ...


def _open_native(
    path: Path, topics: Collection[str], span: TimeSpan, depth_aligned: bool
) -> _NativeSource | None:
    """Open a recording of this package, or a folder of its files; None for any other recording."""
    files = sorted(path.glob("*.mcap*"), key=natural_order) if path.is_dir() else [path]
    colour_topics = {file: _list_colour_topics(file) for file in files if McapBag.recognises(file)}
    native = {file: cameras for file, cameras in colour_topics.items() if cameras}
    others = [file for file in files if file not in colour_topics and file.with_suffix("") not in native]
    # an empty file is a split that never began
    others = [file for file in others if file.is_symlink() or (file.is_file() and file.stat().st_size)]
    return _NativeSource(path, native, topics, span, others, depth_aligned) if native else None


def _list_colour_topics(path: Path) -> dict[str, str]:
    """Return the colour topic of each camera in a file of this package; nothing for another MCAP file."""
    topics = [channel.topic for channel in McapStream(path).channels() if channel.encoding == "msgpack"]
    if is_recorded(path):
        end = "/header"
        names = [topic[1 : -len(end)] for topic in topics if topic.startswith("/") and topic.endswith(end)]
        return {name: f"/{name}/image" for name in names}
    return {topic.removeprefix(FRAME_ROOT): topic for topic in topics if topic.startswith(FRAME_ROOT)}


class _NativeSource:
    """Frames that this package recorded, from one file after the other."""

    episode_starts: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def __init__(
        self,
        path: Path,
        files: dict[Path, dict[str, str]],
        chosen: Collection[str],
        span: TimeSpan,
        others: Sequence[Path],
        depth_aligned: bool,
    ) -> None:
        self._files, self._others = tuple(files), tuple(others)
        self._span, self._depth_aligned = span, depth_aligned
        self._losses = Losses()
        topics = {camera: topic for cameras in files.values() for camera, topic in cameras.items()}
        absent = [name for name in chosen if name not in topics and name not in topics.values()]
        if absent:
            raise BagError(f"{path}: expected {', '.join(absent)}, found the cameras {', '.join(topics)}")
        self.cameras = tuple(
            camera for camera, topic in topics.items() if not chosen or camera in chosen or topic in chosen
        )

    @property
    def lost(self) -> str | None:
        return self._losses.text()

    def frames(self) -> Iterator[Frame]:
        self._losses = Losses()
        for other in self._others:
            found = describe_stand_in(other) or "another file; decompress it first if it is packed"
            self._losses.add(f"expected an MCAP file at {other}, found {found}")
        span, count = self._resolve_span(), 0
        for path in self._files:
            try:
                reader = RecordingReader([path])
                for frame in reader.frames(span):
                    count += 1
                    if frame.camera in self.cameras:
                        yield self._align(frame)
                self._losses.add(reader.lost)
            except BagError as error:
                if not count and path is self._files[-1]:
                    raise
                self._losses.add(str(error))

    def _align(self, frame: Frame) -> Frame:
        if not self._depth_aligned or frame.depth is None:
            return frame
        return replace(frame, depth=replace(frame.depth, aligned=True))

    def robot_poses(self) -> Iterator[FramePose]:
        return RecordingReader(list(self._files)).robot_poses()

    def close(self) -> None:
        """Do nothing: a file is open only while it is read."""

    def _resolve_span(self) -> TimeSpan:
        if self._span.is_whole:
            return self._span
        times = (RecordingReader([path]).first_frame_ns(self.cameras) for path in self._files)
        return self._span.resolve(next((time_ns for time_ns in times if time_ns is not None), 0))


def _open_foreign(path: Path, topics: Collection[str], span: TimeSpan, depth_aligned: bool) -> _SampledSource:
    reader = _open_reader(path)
    try:
        losses = Losses()
        cameras, obstacles = _choose_readable(reader, topics, losses)
        cameras = [
            replace(camera, depth_stated=depth_aligned)
            for camera in _drop_unreadable(cameras, obstacles, topics, losses)
        ]
        return _SampledSource(reader, cameras, span, losses.text())
    except BaseException:
        reader.close()
        raise


def _choose_readable(
    reader: SampleReader, chosen: Collection[str], losses: Losses
) -> tuple[Sequence[Camera], dict[str, BagError]]:
    """Return the cameras, with depth from topics that hold depth, and the errors of topics that cannot be read.

    A depth topic without depth is noted in `losses` if its camera finds no other one.
    """
    topics, firsts, unfit = settle_kinds(reader), dict[str, type[Payload] | BagError](), dict[str, Camera]()
    while True:
        cameras = choose_cameras(reader.path, topics, chosen)
        firsts |= probe(reader, [name for camera in cameras for name in camera.topics if name not in firsts])
        found = {camera.depth for camera in cameras if not _is_depth(firsts.get(camera.depth or ""))}
        found -= {None, *chosen}
        if not found:
            break
        unfit = {camera.colour: camera for camera in cameras if camera.depth in found} | unfit
        topics = tuple(topic._replace(kind="other") if topic.name in found else topic for topic in topics)
    kept = []
    for camera in cameras:
        if not _is_depth(firsts.get(camera.depth or "")):
            camera = camera if camera.depth is not None else unfit.get(camera.colour, camera)
        if camera.depth in firsts and not _is_depth(
            firsts[camera.depth]
        ):  # the others are silent, or damaged
            losses.add(
                f"{camera.depth} is left out: expected depth (16UC1 in mm, 32FC1 in m, PNG of 16-bit grey), found "
                "images of 8 bits or in colour"
            )
            camera = replace(camera, depth=None)
        kept.append(camera)
    return kept, {name: first for name, first in firsts.items() if isinstance(first, BagError)}


def _is_depth(first: type[Payload] | BagError | None) -> bool:
    """Return True for depth, and for a topic that cannot be read."""
    return isinstance(first, BagError) or (first is not None and issubclass(first, Depth))


def _drop_unreadable(
    cameras: Sequence[Camera], obstacles: dict[str, BagError], chosen: Collection[str], losses: Losses
) -> list[Camera]:
    """Return the cameras without streams of an unknown encoding, and add these to `losses`.

    Raises BagError if no camera is left, or if the colour of a chosen one cannot be read.
    """
    left: list[Camera] = []
    for camera in cameras:
        error = obstacles.get(camera.colour)
        if error is not None and (len(cameras) == 1 or chosen):
            raise error
        if error is not None:
            losses.add(f"the camera {camera.name} is left out: {error}")
            continue
        for topic in (camera.depth, camera.intrinsics):
            if topic in obstacles:
                losses.add(f"{topic} is left out: {obstacles[topic]}")
                is_depth = topic == camera.depth
                camera = replace(camera, depth=None) if is_depth else replace(camera, intrinsics=None)
        left.append(camera)
    if not left:
        raise BagError(f"expected a camera that can be read, found none: {losses.text()}")
    return left


class _SampledSource:
    """Frames made of the messages of another program's recording."""

    def __init__(
        self, reader: SampleReader, cameras: Sequence[Camera], span: TimeSpan, left_out: str | None
    ) -> None:
        self._reader, self._span, self._left_out = reader, span, left_out
        self._losses = Losses()
        self._chosen = tuple(cameras)
        self._pairing = Pairing(cameras)
        self.cameras = tuple(camera.name for camera in cameras)
        self.episode_starts: tuple[int, ...] = getattr(reader, "episode_starts", ())

    @property
    def lost(self) -> str | None:
        losses = (
            self._left_out,
            self._reader.lost,
            self._losses.text(),
            self._pairing.describe_losses(),
        )
        return "; ".join(filter(None, losses)) or None

    @property
    def notes(self) -> tuple[str, ...]:
        return (*getattr(self._reader, "notes", ()), *self._pairing.notes())

    def frames(self) -> Iterator[Frame]:
        pairing = self._pairing = Pairing(self._chosen)
        for sample in self._samples():
            yield from pairing.add(sample)
        yield from pairing.flush()

    def robot_poses(self) -> Iterator[FramePose]:
        return self._reader.robot_poses() if isinstance(self._reader, LeRobotBag) else iter(())

    def _samples(self) -> Iterator[Sample]:
        self._losses = Losses()
        topics = {topic for camera in self._chosen for topic in camera.topics}
        if self._span.is_whole:
            return decode_packets(self._reader.samples(topics), self._losses)
        colour = {camera.colour for camera in self._chosen}
        first = next(iter(self._reader.samples(colour)), None)
        span = self._span.resolve(first.logged_ns if first else 0)
        if span.begin_ns is not None and isinstance(self._reader, SeekableReader):
            return cut_samples(self._reader.samples_from(topics, span.begin_ns), span, colour)
        # a part of a video stream needs what was before it
        return cut_samples(decode_packets(self._reader.samples(topics), self._losses), span, colour)

    def close(self) -> None:
        self._reader.close()


class _Format(Protocol):
    """A class of readers."""

    def __call__(self, path: Path) -> SampleReader: ...

    @staticmethod
    def recognises(path: Path) -> bool: ...


def _open_reader(path: Path) -> SampleReader:
    """Open the reader that recognises the content; BagError if none does."""
    formats: tuple[_Format, ...] = (McapBag, RealSenseBag, RosBag, VideoBag, LeRobotBag, Hdf5Bag, ImagesBag)
    with_episodes: tuple[_Format, ...] = (LeRobotBag, Hdf5Bag)
    for format_ in formats if path.exists() else with_episodes:
        if split_selection(path).path.exists() and format_.recognises(path):
            return format_(path)
    stand_in = describe_stand_in(path)
    advice = f"; it is {stand_in}" if stand_in else ""
    raise BagError(f"expected a recording, {_describe_other(path)}; known formats: {FORMATS}{advice}")


def _describe_other(path: Path) -> str:
    if path.is_dir():
        known = next((text for pattern, text in _NOT_READ.items() if next(path.glob(pattern), None)), None)
        return f"found {known or 'a folder without one'} at {path}"
    if not path.is_file():
        return f"found no file at {path}"
    if path.suffix == ".zip" and ".zarr" in path.suffixes:
        return f"found {_NOT_READ['.zgroup']} at {path}"
    return f"found {'another file' if path.stat().st_size else 'an empty one'} at {path}"


IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", *SUFFIXES}
_log = logging.getLogger(__name__)


def sample_images(source: str | Path, count: int, step: int | None = None) -> Iterator[Image]:
    """Yield up to `count` images of a source in its order, BGR uint8 [h, w, 3]; all of them if it has fewer.

    They are spread evenly over the source or, with `step`, are every `step`-th image from its beginning. A source is a
    folder of images in the order of their names, or any recording that `open_bag` reads, of which the first camera
    counts. Damaged images are left out with a warning. Raises BagError if no image can be read, MissingExtraError if
    the library of a format is absent.
    """
    path = Path(source).expanduser()
    files = sorted(_list_images(path)) if path.is_dir() else []
    images = _read_files(files, count, step) if files else _read_bag(path, count, step)
    is_empty = True
    for image in images:
        is_empty = False
        yield image
    if is_empty:
        raise BagError(f"{path}: expected images, found none that can be read; are they damaged?")


def _list_images(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES]


def _read_files(files: list[Path], count: int, step: int | None) -> Iterator[Image]:
    """Read files of any sizes, which a bag's camera would refuse."""
    import cv2

    for index in _choose(len(files), count, step):
        path, flags = str(files[index]), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
        image = cv2.imread(path, flags)
        if image is None:  # of a TIFF OpenCV cannot leave out the turn
            image = cv2.imread(path, cv2.IMREAD_COLOR)
        if image is None:
            _log.warning("%s is left out: it cannot be read as an image", files[index])
        else:
            yield np.asarray(image, np.uint8)


def _read_bag(path: Path, count: int, step: int | None) -> Iterator[Image]:
    with open_bag(path) as bag:
        camera = bag.cameras[0]
    with open_bag(path, (camera,)) as bag:
        chosen = set(_choose(sum(1 for _ in bag), count, step))
        for index, frame in enumerate(bag):
            if index > max(chosen, default=-1):
                break
            if index in chosen:
                try:
                    yield decode_image(frame)
                except WireError as error:
                    _log.warning("%s: image %d is left out: %s", path, index, error)
        if bag.lost is not None:
            _log.warning("%s", bag.lost)


def _choose(total: int, count: int, step: int | None) -> list[int]:
    """Return the indices of `count` images out of `total`: every `step`-th, or spread evenly."""
    if step is not None:
        return list(range(0, total, step))[:count]
    return [int(index) for index in np.linspace(0, total - 1, min(count, total)).round()]
