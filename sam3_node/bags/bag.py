"""Opens any recording: `open_bag` recognises the format by the content of a file or folder.

`sample_images` takes single images from any recording, video or folder, for calibration and comparison of engines.
"""

import logging
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..errors import BagError, WireError
from ..files import describe_stand_in
from ..resources import Closeable, closed_on_error
from ..types import Depth, Frame, Image, RobotMessage
from ..wire import decode_image
from ..wire.images import narrow
from .bit_depth import BitDepths
from .decompression import STILL_SUFFIXES
from .discovery import Camera, Firsts, choose_cameras, probe, settle_kinds
from .formats.hdf5 import Hdf5Bag
from .formats.image_folders import ImagesBag
from .formats.lerobot import LeRobotBag
from .formats.mcap import WHOLE, McapBag, McapStream
from .formats.realsense import RealSenseBag
from .formats.rosbag import RosBag
from .formats.video import VideoBag, decode_packets
from .native.reader import RecordingReader, is_recorded
from .native.series import require_one_recording
from .pairing import Pairing, TimeSpan, cut_samples
from .samples import (
    Payload,
    ReadReport,
    Sample,
    SampleReader,
    natural_order,
    reading,
    split_selection,
)

READERS: tuple[type[SampleReader], ...] = (
    McapBag,
    RealSenseBag,
    RosBag,
    VideoBag,
    LeRobotBag,
    Hdf5Bag,
    ImagesBag,
)
"""Readers of all formats. The first one that recognises a recording reads it."""

FORMATS = (
    "MCAP (this package's, ROS 2, ROS 1, Foxglove), ROS 1 .bag, ROS 2 folders, RealSense .db3 and .bag, "
    "video files, folders of images, LeRobot datasets, HDF5 episodes (ALOHA, robomimic)"
)
"""Names of the known formats, for error messages."""

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", *STILL_SUFFIXES}
"""Endings, in lower case, of the files that `sample_images` takes from a folder."""

# what a folder of these files is, and what the user can do, where no reader recognises it
_NOT_READ = {
    "data/chunk-*": "a LeRobot dataset without its description, meta/info.json: download that, too",
    ".zgroup": "a Zarr dataset, which is not read: write its images as video or as a folder of images",
    "zarr.json": "a Zarr dataset, which is not read: write its images as video or as a folder of images",
    "*.tfrecord*": "an RLDS dataset (TFRecord), which is not read: write its images as video",
}
_log = logging.getLogger(__name__)


class Bag(Closeable):
    """An open recording.

    It iterates the Frames of `cameras` in the order of the recording. Colour and depth stay encoded. Each iteration
    starts at the beginning. A damaged or truncated recording yields every complete frame. After an iteration, `lost`
    describes the missing part; it is None if nothing is missing. Raises BagError if the recording has disappeared or
    has an unknown encoding.
    """

    cameras: tuple[str, ...]
    episode_starts: tuple[int, ...] = ()
    """Numbers (`seq`) at which the episodes of a dataset begin; empty for any other recording."""

    def __init__(self, path: Path, span: TimeSpan, depth_aligned: bool) -> None:
        self._path = path
        self._span = span
        self._depth_aligned = depth_aligned
        self._report = ReadReport()
        self._closed = False

    def __iter__(self) -> Iterator[Frame]:
        with reading(self._path):
            for frame in self._frames():
                if self._closed:
                    return
                if self._depth_aligned and frame.depth is not None:
                    frame = replace(frame, depth=replace(frame.depth, aligned=True))
                yield frame

    @property
    def lost(self) -> str | None:
        return self._report.text()

    @property
    def notes(self) -> tuple[str, ...]:
        """Assumptions and remarks so far that cost no frame: alignment of depth, late writers."""
        return ()

    @property
    def topics(self) -> tuple[str, ...]:
        """Topics of another program's recording that the frames are made of."""
        return ()

    @property
    def colour_topics(self) -> dict[str, str]:
        """The topic of each camera's colour images, by the camera's name."""
        raise NotImplementedError

    def frame_names(self, camera: str) -> tuple[str, ...]:
        """Return the names of a camera's images without their suffix, each at its `seq`; empty without names."""
        return ()

    def robot(self, joints: bool = True) -> Iterator[RobotMessage]:
        """Yield the robot's poses and joints with the stamps and the clock of the recording, if it has any.

        Without `joints`, yield the poses alone, and read nothing of a recording that has joints only.
        """
        with reading(self._path):
            yield from self._robot(joints)

    def close(self) -> None:
        """End every iteration at its next frame and close the files. Idempotent."""
        self._closed = True

    def _frames(self) -> Iterator[Frame]:
        raise NotImplementedError

    def _robot(self, joints: bool) -> Iterator[RobotMessage]:
        raise NotImplementedError


def open_bag(
    path: Path, topics: Collection[str] = (), span: TimeSpan = WHOLE, depth_aligned: bool = False
) -> Bag:
    """Open a recording of any of FORMATS, with the cameras in `topics`, or with all cameras if it is empty.

    `topics` holds names of cameras or of colour topics. A depth topic in it is preferred to others of its camera. If
    it holds topics with joints, `robot` reads no others.
    A `span` limits the frames to those recorded in it. Recordings of this package and videos are not read before it.
    `depth_aligned` states that depth is registered to colour where the recording does not say so.
    `PATH#episode=3` reads one episode of a dataset (`split_selection`).

    Raises BagError for a recording that is absent, empty, of an unknown format or without such a camera, and
    MissingExtraError if a format's library is absent. The iteration raises BagError for a span in Unix time if the
    recording has no Unix times.
    """
    path = Path(path)
    with reading(path):
        # a recording of this package is one file, or a folder of splits
        files = sorted(path.glob("*.mcap*"), key=natural_order) if path.is_dir() else [path]
        mcap = {file: _list_colour_topics(file) for file in files if McapBag.recognises(file)}
        native = {file: cameras for file, cameras in mcap.items() if cameras}
        require_one_recording(path, list(native))
        if not native:
            return _ForeignBag(_open_reader(path), topics, span, depth_aligned)

        # all other files of the folder are reported as lost, such as a split that is still compressed
        others = [file for file in files if file not in mcap and file.with_suffix("") not in native]
        # an empty file is a split that never began
        others = [file for file in others if file.is_symlink() or (file.is_file() and file.stat().st_size)]
        return _NativeBag(path, native, others, topics, span, depth_aligned)


def _list_colour_topics(path: Path) -> dict[str, str]:
    """Return the colour topic of each camera in a file of this package; nothing for another MCAP file."""
    topics = [channel.topic for channel in McapStream(path).channels() if channel.encoding == "msgpack"]
    if not is_recorded(path):
        return {}
    # each camera has a topic of headers beside its images
    names = (re.fullmatch("/(.*)/header", topic) for topic in topics)
    return {name[1]: f"/{name[1]}/image" for name in names if name}


class _NativeBag(Bag):
    """Frames that this package recorded, from one file after the other."""

    def __init__(
        self,
        path: Path,
        files: dict[Path, dict[str, str]],
        others: Sequence[Path],
        chosen: Collection[str],
        span: TimeSpan,
        depth_aligned: bool,
    ) -> None:
        super().__init__(path, span, depth_aligned)
        self._files = tuple(files)
        self._others = others

        # a camera may be in some of the files only
        topics: dict[str, str] = {}
        for cameras in files.values():
            topics |= cameras
        absent = [name for name in chosen if name not in topics and name not in topics.values()]
        if absent:
            raise BagError(f"{path}: expected {', '.join(absent)}, found the cameras {', '.join(topics)}")
        self.cameras = tuple(
            camera for camera, topic in topics.items() if not chosen or camera in chosen or topic in chosen
        )
        self._topics = topics

    @property
    def colour_topics(self) -> dict[str, str]:
        return {camera: self._topics[camera] for camera in self.cameras}

    def _frames(self) -> Iterator[Frame]:
        self._report = ReadReport()
        for other in self._others:
            content = describe_stand_in(other) or "another file; decompress it first if it is packed"
            self._report.add(f"expected an MCAP file at {other}, found {content}")

        # a span in seconds counts from the first frame of the chosen cameras
        reader = RecordingReader(self._files)
        span = self._span
        if not span.is_whole:
            span = span.resolve(reader.first_frame_ns(self.cameras) or 0)

        for frame in reader.frames(span):
            if frame.camera in self.cameras:
                yield frame
        self._report.add(reader.lost)

    def _robot(self, joints: bool) -> Iterator[RobotMessage]:
        return RecordingReader(self._files).robot(joints)


class _ForeignBag(Bag):
    """Frames made of the messages in another program's recording."""

    def __init__(
        self, reader: SampleReader, chosen: Collection[str], span: TimeSpan, depth_aligned: bool
    ) -> None:
        super().__init__(reader.path, span, depth_aligned)
        self._reader = reader
        self._opening = ReadReport()
        # a topic with joints is no camera
        joints = {topic.name for topic in reader.topics if topic.kind == "joints"}
        reader.chosen_joints = tuple(name for name in chosen if name in joints)
        chosen = [name for name in chosen if name not in joints]
        with closed_on_error(reader):
            self._cameras = self._drop_unreadable(*self._choose(chosen), chosen)
        self._pairing = Pairing(self._cameras)
        self._depths = BitDepths()
        self.cameras = tuple(camera.name for camera in self._cameras)
        self.episode_starts = reader.episode_starts

    @property
    def lost(self) -> str | None:
        reasons = (
            self._opening.text(),
            self._reader.lost,
            self._report.text(),
            self._pairing.describe_losses(),
            *self._depths.describe(),
        )
        return "; ".join(filter(None, reasons)) or None

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self._reader.notes, *self._pairing.notes())

    @property
    def topics(self) -> tuple[str, ...]:
        return tuple(topic for camera in self._cameras for topic in camera.topics)

    @property
    def colour_topics(self) -> dict[str, str]:
        return {camera.name: camera.colour for camera in self._cameras}

    def close(self) -> None:
        super().close()
        self._reader.close()

    def frame_names(self, camera: str) -> tuple[str, ...]:
        if not isinstance(self._reader, ImagesBag):
            return ()
        return self._reader.frame_names(self.colour_topics.get(camera, ""))

    def _frames(self) -> Iterator[Frame]:
        # `lost` and `notes` report the pairing of the newest iteration
        pairing = Pairing(self._cameras)
        self._pairing = pairing
        for sample in self._samples():
            yield from pairing.add(sample)
        yield from pairing.flush()

    def _robot(self, joints: bool) -> Iterator[RobotMessage]:
        return self._reader.robot(joints)

    def _samples(self) -> Iterator[Sample]:
        self._report = ReadReport()
        self._depths = BitDepths()
        topics = {topic for camera in self._cameras for topic in camera.topics}
        # a part of a video stream needs what was before it
        whole = self._depths.narrow_all(decode_packets(self._reader.samples(topics), self._report))
        if self._span.is_whole:
            return whole

        # a span in seconds counts from the first colour image
        colour = {camera.colour for camera in self._cameras}
        first = next(iter(self._reader.samples(colour)), None)
        span = self._span.resolve(0 if first is None else first.logged_ns)
        if span.begin_ns is not None and self._reader.can_seek:
            samples = self._depths.narrow_all(self._reader.samples(topics, span.begin_ns))
            return cut_samples(samples, span, colour)
        return cut_samples(whole, span, colour)

    def _choose(self, chosen: Collection[str]) -> tuple[Sequence[Camera], dict[str, BagError]]:
        """Return the cameras, with depth from topics that hold depth, and the errors of topics that cannot be read.

        A depth topic without depth is reported if its camera has no other one.
        """
        topics = settle_kinds(self._reader)
        firsts = Firsts()
        # cameras by their colour topic, as they were with a depth topic that holds no depth
        unfit = dict[str, Camera]()

        # a depth topic without depth makes room for another one of its camera, until all that are left hold depth
        while True:
            cameras = choose_cameras(self._reader.path, topics, chosen)
            names = [name for camera in cameras for name in camera.topics]
            firsts |= probe(self._reader, [name for name in names if name not in firsts])
            depthless = {camera.depth for camera in cameras if not _is_depth(firsts.get(camera.depth or ""))}
            depthless -= {None, *chosen}
            if not depthless:
                break
            unfit = {camera.colour: camera for camera in cameras if camera.depth in depthless} | unfit
            topics = tuple(
                topic._replace(kind="other") if topic.name in depthless else topic for topic in topics
            )

        # a camera that found no other depth is reported with the topic that it would have had
        kept = []
        for camera in cameras:
            if camera.depth is None:
                camera = unfit.get(camera.colour, camera)
            # a topic that is absent from `firsts` is silent or damaged, which its iteration reports
            if camera.depth in firsts and not _is_depth(firsts[camera.depth]):
                self._opening.add(
                    f"skipped {camera.depth}: expected depth (16UC1 in mm, 32FC1 in m, PNG of 16-bit grey), found "
                    "images of 8 bits or in colour"
                )
                camera = replace(camera, depth=None)
            kept.append(camera)
        return kept, {name: first for name, first in firsts.items() if isinstance(first, BagError)}

    def _drop_unreadable(
        self, cameras: Sequence[Camera], obstacles: dict[str, BagError], chosen: Collection[str]
    ) -> list[Camera]:
        """Return the cameras without streams of an unknown encoding, and report these.

        Raises BagError if no camera is left, or if the colour of a chosen one cannot be read.
        """
        readable: list[Camera] = []
        for camera in cameras:
            # without colour there is no camera: an error if the user asked for it, else a loss
            error = obstacles.get(camera.colour)
            if error is not None and (len(cameras) == 1 or chosen):
                raise error
            if error is not None:
                self._opening.add(f"skipped the camera {camera.name}: {error}")
                continue
            # without depth or intrinsics the camera still has its images
            for part, topic in (("depth", camera.depth), ("intrinsics", camera.intrinsics)):
                if topic in obstacles:
                    self._opening.add(f"skipped {topic}: {obstacles[topic]}")
                    camera = replace(camera, **{part: None})  # type: ignore[arg-type]
            readable.append(camera)
        if not readable:
            raise BagError(f"expected a camera that can be read, found none: {self._opening.text()}")
        return readable


def _is_depth(first: type[Payload] | BagError | None) -> bool:
    """Return True for depth, and for a topic that cannot be read."""
    return isinstance(first, BagError) or (first is not None and issubclass(first, Depth))


def find_reader(path: Path) -> type[SampleReader]:
    """Return the kind of reader that recognises the content; BagError if none does. Reads little of it."""
    # a path that does not exist may be one that does, with a selection of episodes behind a #
    kinds = READERS if path.exists() else (LeRobotBag, Hdf5Bag)
    for kind in kinds:
        if split_selection(path).path.exists() and kind.recognises(path):
            return kind
    stand_in = describe_stand_in(path)
    advice = f"; it is {stand_in}" if stand_in else ""
    raise BagError(f"expected a recording, {_describe_other(path)}; known formats: {FORMATS}{advice}")


def _open_reader(path: Path) -> SampleReader:
    """Open the reader that recognises the content; BagError if none does."""
    return find_reader(path)(path)


def _describe_other(path: Path) -> str:
    if path.is_dir():
        for pattern, content in _NOT_READ.items():
            if next(path.glob(pattern), None):
                return f"found {content} at {path}"
        return f"found a folder without one at {path}"
    if not path.is_file():
        return f"found no file at {path}"
    if path.suffix == ".zip" and ".zarr" in path.suffixes:
        return f"found {_NOT_READ['.zgroup']} at {path}"
    if not path.stat().st_size:
        return f"found an empty one at {path}"
    return f"found another file at {path}"


def sample_images(source: str | Path, count: int, step: int | None = None) -> Iterator[Image]:
    """Yield up to `count` images of a source in its order, BGR uint8 [h, w, 3]; all of them if it has fewer.

    Without `step` they are spread evenly over the source; with it, they are every `step`-th image from its beginning.
    A source is a folder of images in the order of their names, or the first camera of any recording that `open_bag`
    reads. Damaged images are skipped with a warning. Raises BagError if no image can be read, MissingExtraError if the
    library of a format is absent.
    """
    path = Path(source).expanduser()
    files: list[Path] = []
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES)
    images = _read_files(files, count, step) if files else _read_bag(path, count, step)

    # read one before any is used, so that a source without images is an error here
    first = next(images, None)
    if first is None:
        raise BagError(f"{path}: expected images, found none that can be read; are they damaged?")
    yield first
    yield from images


def _read_files(files: list[Path], count: int, step: int | None) -> Iterator[Image]:
    """Read files of any sizes, which a bag's camera would refuse."""
    import cv2

    for index in _choose(len(files), count, step):
        path = str(files[index])
        flags = cv2.IMREAD_COLOR | cv2.IMREAD_ANYDEPTH | cv2.IMREAD_IGNORE_ORIENTATION
        image = None
        # a pipe would block OpenCV
        if files[index].is_file():
            image = cv2.imread(path, flags)
            if image is None:  # OpenCV cannot ignore the orientation of a TIFF
                image = cv2.imread(path, cv2.IMREAD_COLOR | cv2.IMREAD_ANYDEPTH)
        if image is not None and image.dtype == np.uint16:
            image = narrow(image)
        if image is None or image.dtype != np.uint8:  # floats
            _log.warning("skipped %s: it cannot be read as an image", files[index])
        else:
            yield np.asarray(image, np.uint8)


def _read_bag(path: Path, count: int, step: int | None) -> Iterator[Image]:
    with open_bag(path) as bag:
        camera = bag.cameras[0]
    # opened for one camera, the bag reads none of the others
    with open_bag(path, (camera,)) as bag:
        chosen = set(_choose(sum(1 for _ in bag), count, step))
        for index, frame in enumerate(bag):
            if index > max(chosen, default=-1):
                break
            if index in chosen:
                try:
                    yield decode_image(frame)
                except WireError as error:
                    _log.warning("%s: skipped image %d: %s", path, index, error)
        if bag.lost is not None:
            _log.warning("%s", bag.lost)


def _choose(total: int, count: int, step: int | None) -> list[int]:
    """Return the indices of `count` images out of `total`: every `step`-th, or spread evenly."""
    if step is not None:
        return list(range(0, total, step))[:count]
    return [int(index) for index in np.linspace(0, total - 1, min(count, total)).round()]
