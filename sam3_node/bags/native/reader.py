"""Reads recordings in this package's layout: the frames as the cameras sent them, and the node's actions.

`LabelledClip` holds a short recording with ground truth in memory, to score masks against.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from ... import wire
from ...errors import BagError, WireError, require
from ...schema.fields import Plain
from ...types import NANOSECONDS, Buffer, Clock, Frame, FrameKey, MaskFrame, RobotAction, RobotMessage
from ...wire.codec import choice
from ...wire.video import MAX_KEY_GAP_S, VIDEO, VideoDecoders
from ..formats.mcap import WHOLE, McapStream, Row
from ..pairing import TimeSpan
from ..samples import ReadReport
from . import (
    ACTIONS_ROOT,
    EVENTS,
    JOINTS_ROOT,
    LAYOUT,
    LAYOUT_VERSION,
    MASKS_ROOT,
    POSE_ROOT,
    ROBOT_POSES_ROOT,
    TRUTH_ROOT,
    Pose,
    unpack_pose,
)

T = TypeVar("T")

MAX_RECORDS_TO_LAYOUT = 16
"""Number of a file's first records among which the layout is."""

TABLETOP = Path(__file__).parents[2] / "assets" / "tabletop.mcap"
"""The bundled clip."""

# schema of a video's packets, and the time before a frame in which its video has a key frame
_VIDEO_SCHEMA = "foxglove.CompressedVideo"
_KEY_REACH_NS = round(2 * MAX_KEY_GAP_S * NANOSECONDS)
# frames that a labelled clip needs: a rate takes two
_MIN_CLIP_FRAMES = 2
_ACTIONS = f"{EVENTS}|{MASKS_ROOT}.*"
_CLOCK = choice(get_args(Clock))
_FRAME_TOPIC = re.compile(r"/((?!\.+/)[A-Za-z0-9_.-]{1,64})/(image|depth|header)")


@dataclass(frozen=True, slots=True)
class RecordedMasks:
    """Masks that the node published, and the body of their message as it arrived."""

    masks: MaskFrame
    body: bytes


Action = wire.Event | RecordedMasks
"""One thing that the node did. Events and masks come in the order in which the node did them."""


@dataclass(frozen=True, slots=True)
class FrameHead:
    """A recorded frame without its pixels."""

    key: FrameKey
    clock: Clock
    width: int
    height: int


class IndexEntry(NamedTuple):
    """A message of a recording without pixels, and the time at which it was recorded. Masks decode at their use."""

    logged_ns: int
    message: FrameHead | MaskFrame | wire.Event | RobotMessage | RobotAction


def is_recorded(path: Path) -> bool:
    """Return True if this is a file in the layout; False if it is another one, or cannot be read."""
    try:
        return _read_layout(path) is not None
    except BagError:
        return False


def read_masks(path: Path) -> Iterator[MaskFrame]:
    """Yield the node's masks of one file.

    Raises BagError after the complete masks of a damaged file, and if the file cannot be opened or is no recording.
    """
    reader = RecordingReader([path])
    yield from reader.masks()
    if reader.lost is not None:
        raise BagError(reader.lost)


class RecordingReader:
    """A recording of one file, or of several that follow one another.

    A damaged file, or one whose recorder was killed, yields everything before the damage. `lost` says then why the
    iteration ended. Malformed messages are skipped, and `lost` names their topic. Raises BagError for a file that is no
    recording, or cannot be opened.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        if not paths:
            raise BagError("expected the files of a recording, found none")
        self.paths = tuple(paths)
        self._report = ReadReport()
        self._damages: dict[Path, str] = {}
        for path in self.paths:
            _check(path)

    @property
    def lost(self) -> str | None:
        """Description of everything that could not be read so far; None if nothing was lost."""
        return ReadReport(*self._damages.values(), self._report.text()).text()

    def first_frame_ns(self, cameras: Collection[str]) -> int | None:
        """Return the time at which the first frame of these cameras was recorded; None if there is none."""
        for key, logged_ns in self.frame_keys():
            if key.camera in cameras:
                return logged_ns
        return None

    def frames(self, span: TimeSpan = WHOLE) -> Iterator[Frame]:
        """Yield the frames in the order of their arrival, pixels still encoded, from the beginning each time.

        Each frame is as the camera sent it, except that depth of z16+zstd has become z16, with the same values, and
        that a video's packets are decoded to bgr8. A resolved `span` limits the frames to those recorded in it. Frames
        of a video before its first key frame, and from a missing packet to the next one, have no picture: they are
        skipped and reported.
        """
        videos = VideoDecoders()
        for path in self.paths:
            # the newest image of each camera and kind, until the header that comes after it
            pixels: dict[tuple[str, str], Row] = {}
            for row in self._rows(path, _reach_key_frame(path, span)):
                camera, part = _split_frame_topic(row.channel.topic)
                if part == "header":
                    # a malformed frame is skipped and reported; those after it are whole
                    images = [pixels.pop((camera, name), None) for name in ("image", "depth")]
                    frame = self._unpack(path, row, partial(_join_frame, images=images))
                    if frame is not None:
                        frame = self._unpack(path, row, partial(_decode_video, frame=frame, videos=videos))
                    if frame is not None and span.contains(row.logged_ns):
                        yield frame
                elif part:
                    pixels[camera, part] = row

    def frame_keys(self) -> Iterator[tuple[FrameKey, int]]:
        """Yield the key of each frame, and the time at which it was recorded, without decoding its pixels."""
        return self._unpack_all("/[^/]+/header", lambda row: (_read_key(row), row.logged_ns))

    def index(self, span: TimeSpan = WHOLE) -> Iterator[IndexEntry]:
        """Yield all messages in the order of their arrival, frames without their pixels.

        A resolved `span` limits them to those recorded in it.
        """
        for path in self.paths:
            for row in self._rows(path, span):
                unpack = _find_unpacker(row.channel.topic)
                if unpack is None:
                    continue
                message = self._unpack(path, row, unpack)
                if message is not None:
                    yield IndexEntry(row.logged_ns, message)

    def has_actions(self) -> bool:
        """Return True if the recording holds masks or events of a node."""
        for path in self.paths:
            if any(re.fullmatch(_ACTIONS, channel.topic) for channel in McapStream(path).channels()):
                return True
        return False

    def actions(self) -> Iterator[Action]:
        """Yield masks and events in the order of their arrival, from the beginning each time."""
        return self._unpack_all(_ACTIONS, _unpack_action)

    def masks(self) -> Iterator[MaskFrame]:
        """Yield the node's masks in the order of their arrival, from the beginning each time."""
        return (action.masks for action in self.actions() if isinstance(action, RecordedMasks))

    def truth(self) -> Iterator[MaskFrame]:
        """Yield the ground truth, an instance for each object in view or not; nothing if there is none."""
        return self._unpack_all(f"{TRUTH_ROOT}.*", lambda row: _unpack_masks(row, TRUTH_ROOT))

    def poses(self) -> Iterator[Pose]:
        """Yield the camera poses; nothing if there are none."""
        return self._unpack_all(f"{POSE_ROOT}.*", lambda row: unpack_pose(row.data))

    def robot(self, joints: bool = True) -> Iterator[RobotMessage]:
        """Yield the poses and, with `joints`, the joints that robots published, in the order of their arrival."""
        topics = f"({ROBOT_POSES_ROOT}|{JOINTS_ROOT}).*" if joints else f"{ROBOT_POSES_ROOT}.*"
        return self._unpack_all(topics, _unpack_robot)

    def metadata(self) -> dict[str, list[Plain]]:
        """Return the metadata records by their names; those of one name are in the order of writing."""
        records: dict[str, list[Plain]] = {}
        for path in self.paths:
            stream = McapStream(path)
            for name, texts in stream.metadata():
                values = {key: _parse_json(text) for key, text in texts.items()}
                records.setdefault(name, []).append(values)
            # the damage that an iteration of messages has found is described already
            if stream.damage is not None:
                self._damages.setdefault(path, stream.damage)
        return records

    def _unpack_all(self, topics: str, unpack_row: Callable[[Row], T]) -> Iterator[T]:
        """Yield the messages of all topics that match a regular expression."""
        for path in self.paths:
            for row in self._rows(path):
                if re.fullmatch(topics, row.channel.topic):
                    value = self._unpack(path, row, unpack_row)
                    if value is not None:
                        yield value

    def _unpack(self, path: Path, row: Row, unpack_row: Callable[[Row], T]) -> T | None:
        try:
            return unpack_row(row)
        except WireError:
            self._report.add(f"{path}, {row.channel.topic}: skipped malformed messages")
            return None

    def _rows(self, path: Path, span: TimeSpan = WHOLE) -> Iterator[Row]:
        stream = McapStream(path)
        yield from stream.rows(span)
        if stream.damage is not None:
            self._damages[path] = stream.damage


def _check(path: Path) -> None:
    """Raise BagError if this is no recording that can be read here."""
    layout = _read_layout(path)
    if layout not in (None, LAYOUT_VERSION):
        raise BagError(
            f"{path}: expected layout {LAYOUT_VERSION} of recordings, found {layout}; read it with a newer sam3-node"
        )
    if layout is None:
        raise BagError(f"expected a recording of sam3-node record, found another file at {path}")


def _read_layout(path: Path) -> Any:
    """Return the version in the layout record near the beginning of a file; None if there is no such record."""
    for name, values in McapStream(path).metadata(MAX_RECORDS_TO_LAYOUT):
        if name == LAYOUT:
            return _parse_json(values.get("version", ""))
    return None


def read_record(path: Path, name: str) -> dict[str, Any] | None:
    """Return a metadata record near the beginning of a file; None for a file without it, or one that cannot be read."""
    try:
        for found, values in McapStream(path).metadata(MAX_RECORDS_TO_LAYOUT):
            if found == name:
                return {key: _parse_json(text) for key, text in values.items()}
    except (OSError, BagError):
        return None
    return None


def _split_frame_topic(topic: str) -> tuple[str, str]:
    """Return the camera, and `image`, `depth` or `header`; empty for other topics."""
    match = _FRAME_TOPIC.fullmatch(topic)
    if match is None:
        return "", ""
    return match[1], match[2]


def _join_frame(header: Row, images: Sequence[Row | None]) -> Frame:
    """Join a header with its colour and, if there is one, its depth; WireError if they do not decode."""
    camera = header.channel.topic.split("/")[1]
    # an image of another frame is left over from one whose header was lost
    key = header.sequence, header.logged_ns
    own = [image for image in images if image is not None and (image.sequence, image.logged_ns) == key]
    return wire.unpack_frame([wire.frame_topic(camera), header.data, *map(_decode_foxglove_data, own)])


def _reach_key_frame(path: Path, span: TimeSpan) -> TimeSpan:
    """Return a span that begins before a key frame, if the file has a video and the span a beginning."""
    if span.begin_ns is None or all(
        channel.schema != _VIDEO_SCHEMA for channel in McapStream(path).channels()
    ):
        return span
    return span._replace(begin_ns=span.begin_ns - _KEY_REACH_NS)


def _decode_video(header: Row, frame: Frame, videos: VideoDecoders) -> Frame:
    """Return a frame with its picture, if it is a packet of a video. Raises WireError for one without a picture.

    Raises MissingExtraError without PyAV: no frame of the recording could be read.
    """
    if frame.encoding == VIDEO:
        require("av", "bags")
    picture = videos.decode(frame)
    if picture is None:
        raise WireError(
            f"{header.channel.topic}: expected a key frame, or each packet after one, found a gap"
        )
    return picture


def _read_key(header: Row) -> FrameKey:
    fields = wire.Fields(wire.unpack(header.data, what="frame"), "frame")
    return FrameKey(fields.text("camera"), fields.integer("seq"), fields.integer("capture_ns"))


def _find_unpacker(topic: str) -> Callable[[Row], Any] | None:
    """Return what reads the messages of a topic for the index; None for a topic that is not in it."""
    if topic == EVENTS:
        return _unpack_action
    if topic.startswith(MASKS_ROOT):
        return lambda row: _unpack_masks(row, MASKS_ROOT, lazy=True)
    if topic.startswith((ROBOT_POSES_ROOT, JOINTS_ROOT)):
        return _unpack_robot
    if topic.startswith(ACTIONS_ROOT):
        return lambda row: wire.unpack_action([row.channel.topic.encode(), row.data])
    if _split_frame_topic(topic)[1] == "header":
        return _read_head
    return None


def _read_head(header: Row) -> FrameHead:
    fields = wire.Fields(wire.unpack(header.data, what="frame"), "frame")
    clock = _CLOCK(fields, "clock")
    return FrameHead(_read_key(header), clock, fields.integer("width"), fields.integer("height"))


def _decode_foxglove_data(row: Row) -> Buffer:
    """Return the bytes that a Foxglove image holds."""
    name = row.channel.schema.removeprefix("foxglove.")
    if name not in ("RawImage", "CompressedImage", "CompressedVideo"):
        raise WireError(
            f"{row.channel.topic}: expected a Foxglove image, found {row.channel.schema or 'no schema'}"
        )
    decode_error = require("google.protobuf.message", "bags").DecodeError
    try:
        kind = getattr(require(f"foxglove_schemas_protobuf.{name}_pb2", "bags"), name)
        return bytes(kind.FromString(row.data).data)
    except decode_error as error:
        raise WireError(f"{row.channel.topic}: expected {row.channel.schema}, found other bytes") from error


def _unpack_action(row: Row) -> Action:
    if row.channel.topic == EVENTS:
        return wire.unpack_event([wire.EVENTS_TOPIC, row.data])
    return RecordedMasks(_unpack_masks(row, MASKS_ROOT), row.data)


def _unpack_masks(row: Row, root: str, lazy: bool = False) -> MaskFrame:
    return wire.unpack_masks([wire.masks_topic(row.channel.topic.removeprefix(root)), row.data], lazy)


def _unpack_robot(row: Row) -> RobotMessage:
    # poses of the robot have another root in a recording, where pose/ is that of the cameras
    topic = row.channel.topic.replace(ROBOT_POSES_ROOT, "pose/", 1)
    return wire.unpack_pose([topic.encode(), row.data])


def _parse_json(text: str) -> Any:
    """Return the value of a metadata record. A text that is no JSON is returned as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


class LabelledClip:
    """One camera's frames and their truth, by index. The clip loops: an index past the end starts again."""

    def __init__(self, frames: list[Frame], truth: dict[int, MaskFrame]) -> None:
        self.frames = frames
        self._truth = truth

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the first camera's clip; BagError if the file is damaged or one of its frames has no truth."""
        reader = RecordingReader([path])
        # the whole clip stays in memory, so that it can loop
        frames = list(reader.frames())
        if not frames:
            raise BagError(
                f"{path}: expected recorded frames, found none ({reader.lost or 'nothing is damaged'})"
            )
        camera = frames[0].camera
        frames = [frame for frame in frames if frame.camera == camera]
        truth = {masks.seq: masks for masks in reader.truth() if masks.camera == camera}
        if reader.lost is not None:
            raise BagError(reader.lost)

        # scores need the truth of each frame
        labelled = sum(frame.seq in truth for frame in frames)
        if labelled < len(frames) or labelled < _MIN_CLIP_FRAMES:
            raise BagError(
                f"{path}: expected {_MIN_CLIP_FRAMES} or more frames of {camera}, each with its truth, "
                f"found {len(frames)} and truth of {labelled}"
            )
        return cls(frames, truth)

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def fps(self) -> float:
        """Frames per second, on average."""
        span_ns = self.frames[-1].capture_ns - self.frames[0].capture_ns
        return (len(self) - 1) * NANOSECONDS / max(span_ns, 1)

    @property
    def labels(self) -> dict[int, str]:
        """Names of the objects by their ids in the truth."""
        return {instance.id: instance.label for masks in self._truth.values() for instance in masks.instances}

    def image(self, index: int) -> npt.NDArray[np.uint8]:
        """Return the image, BGR uint8 [h, w, 3]; WireError if it cannot be decoded."""
        return wire.decode_image(self.frames[index % len(self)])

    def truth(self, index: int) -> dict[int, npt.NDArray[np.bool_]]:
        """Return the mask of each object that is in view, bool [h, w], by its id."""
        masks = self._truth[self.frames[index % len(self)].seq]
        return {instance.id: instance.mask.full() for instance in masks.instances if instance.area}

    def areas(self, object_id: int) -> npt.NDArray[np.int64]:
        """Return the pixels of an object that are in view, by index: [frames]."""
        areas = []
        for frame in self.frames:
            instances = self._truth[frame.seq].instances
            areas.append(sum(instance.area for instance in instances if instance.id == object_id))
        return np.array(areas)
