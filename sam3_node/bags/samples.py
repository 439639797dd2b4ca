"""Defines what readers of recordings give: topics, samples, and a report of what was lost.

A reader of any format is a `SampleReader`. `discovery` finds cameras among its topics, and `pairing` makes Frames of
its samples. `split_selection` parses which episodes a path selects: `PATH#episode=3`, `#episode=2-5&fps=50`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import BagError
from ..resources import Closeable
from ..types import ROBOT, Buffer, Clock, ColourEncoding, Depth, Intrinsics, JointState, RobotMessage
from ..wire.images import decode_wide, identify_compressed, is_wide_png
from .joint_topics import PROBED, JointTopics, claim_first

MAX_REASONS = 20
"""Number of different losses that a report lists. It counts the others."""

MAX_MISSES = 2000
"""Unreadable rows in succession after which reading a dataset ends. A small file can declare endless rows."""

MAX_FPS = 1000.0
"""Highest rate of a dataset that is believed, in Hz."""

PROBED_MORE = 20
"""Joint states a topic that are read at least to find its joints."""

UNIX_SINCE_NS = 10**17
"""Smallest stamp that is Unix time (in 1973). Smaller ones are of the clock of a video or a simulation."""

_SELECTIONS = "expected #episode=3, #episode=2-5, #fps=50 or both joined by & after the path"
_EPISODES = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_RATE = re.compile(r"\d{1,4}(\.\d{1,6})?")

Kind = Literal["colour", "depth", "intrinsics", "joints", "other"]


class Topic(NamedTuple):
    """One topic of a recording. `type` is the full name of its message type, as the format spells it."""

    name: str
    type: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Colour:
    """A colour image as it was recorded, not yet decoded."""

    width: int
    height: int
    encoding: ColourEncoding
    data: Buffer

    @staticmethod
    def from_compressed(data: Buffer) -> Colour:
        """Create one from the bytes of a JPEG or PNG; a PNG of 16 bits is decoded. Raises WireError for other bytes."""
        encoding, width, height = identify_compressed(data)
        if is_wide_png(data):
            return WideColour.from_pixels(decode_wide(data))
        return Colour(width, height, encoding, data)


@dataclass(frozen=True, slots=True)
class WideColour(Colour):
    """A colour image of 16 bits a channel, which `BitDepths` scales to 8.

    `data` are uint16 in this machine's byte order, `encoding` that of the same image in 8 bits.
    """

    @staticmethod
    def from_pixels(image: npt.NDArray[np.uint16], encoding: ColourEncoding = "bgr8") -> WideColour:
        """Create one from uint16 [h, w, channels]."""
        return WideColour(
            image.shape[1], image.shape[0], encoding, np.ascontiguousarray(image).data.cast("B")
        )


@dataclass(frozen=True, slots=True)
class VideoPacket:
    """One packet of a video stream. `codec` is ffmpeg's name of it. `number` may count the packets by one."""

    codec: str
    data: Buffer
    number: int | None = None


class MillimetreDepth(Depth, frozen=True):
    """Depth in floating point whose format says metres, and whose values say millimetres."""


@dataclass(frozen=True, slots=True)
class CameraInfo:
    """The calibration of a camera's images, as sensor_msgs/CameraInfo defines it.

    `lens` (K and D) is for raw images, `projection` (P) for rectified ones. None means not calibrated, a text says why
    the calibration cannot be used. Both are in pixels of the full resolution `size` (width, height), which is (0, 0) if
    it is unknown. Images show the region `roi` of it (x, y, width, height); a width and height of 0 mean all of it. One
    pixel of an image is `binning` (x, y) pixels of the region.
    """

    lens: Intrinsics | str | None
    projection: Intrinsics | str | None = None
    size: tuple[int, int] = (0, 0)
    binning: tuple[int, int] = (1, 1)
    roi: tuple[int, int, int, int] = (0, 0, 0, 0)

    def fit(self, size: tuple[int, int], is_rectified: bool) -> Intrinsics | None:
        """Return the intrinsics of an image of `size` (width, height); None for a camera that was never calibrated.

        An image of another size than region and binning give is a resized one if it has the full resolution's aspect
        ratio. (cx, cy) is scaled as ROS scales it: plainly, not about the pixels' corner. Raises BagError for any other
        size, and for figures that are no lens.
        """
        # a rectified image has no distortion left, whether or not the driver says which pinhole it has
        lens = self.lens
        if is_rectified and self.projection is not None:
            lens = self.projection
        elif is_rectified and isinstance(lens, Intrinsics):
            lens = replace(lens, model="none", coeffs=())
        if isinstance(lens, str):
            raise BagError(lens)
        if lens is None:
            return None

        # the driver's own cut and binning, if the image has their size
        (x, y, *sides) = self.roi
        full = self.size
        region = [side or whole - start for side, whole, start in zip(sides, full, (x, y), strict=True)]
        if 0 in full or self._gives(size, region):
            return _cut_and_scale(lens, (x, y), (1 / self.binning[0], 1 / self.binning[1]))

        # else the whole image may have been resized after the driver; a side may be rounded to whole pixels
        is_whole = (x, y, *region) == (0, 0, *full)
        if is_whole and abs(size[0] * full[1] - size[1] * full[0]) < max(full):
            return _cut_and_scale(lens, (0, 0), (size[0] / full[0], size[1] / full[1]))

        found = f"{full[0]} x {full[1]}"
        if not is_whole:
            found += f" with the region {self.roi}"
        raise BagError(
            f"expected intrinsics of {size[0]} x {size[1]} pixels, or of their aspect ratio, found intrinsics of "
            f"{found}, binning {self.binning}"
        )

    def _gives(self, size: tuple[int, int], region: Sequence[int]) -> bool:
        """Return True if an image of `size` is the region with its pixels binned. Drivers round up or down."""
        parts = zip(self.roi, region, self.size, self.binning, size, strict=False)
        return all(
            start + side <= whole and abs(side / binned - found) < 1
            for start, side, whole, binned, found in parts
        )


def _cut_and_scale(lens: Intrinsics, start: tuple[int, int], scale: tuple[float, float]) -> Intrinsics:
    cx = (lens.cx - start[0]) * scale[0]
    cy = (lens.cy - start[1]) * scale[1]
    return replace(lens, fx=lens.fx * scale[0], fy=lens.fy * scale[1], cx=cx, cy=cy)


@dataclass(frozen=True, slots=True)
class Joints:
    """Positions of joints by their names, in radians or metres. A format without names has numbers from 0."""

    positions: Mapping[str, float]


Payload = Colour | Depth | CameraInfo | VideoPacket | Joints


def find_clock(stamp_ns: int) -> Clock:
    """Return the clock of a recorded stamp."""
    return "system" if stamp_ns >= UNIX_SINCE_NS else "device"


class Sample(NamedTuple):
    """One message of a camera. Stamps are Unix ns: `stamp_ns` of its capture, `logged_ns` of its recording.

    `number` counts the colour images of a topic from 0; None: one after the previous sample's.
    """

    topic: str
    stamp_ns: int
    logged_ns: int
    payload: Payload
    number: int | None = None


class UnreadableTopicError(BagError):
    """A topic whose messages have an unknown encoding. Its neighbours may be read."""

    def __init__(self, topic: str, reason: str) -> None:
        super().__init__(f"{topic}: {reason}")
        self.topic = topic


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn the OSError of a file that disappears or cannot be read into BagError."""
    try:
        yield
    except OSError as error:
        raise BagError(f"cannot read {error.filename or path}: {error.strerror or error}") from error


class ReadReport:
    """Collects why parts of a recording could not be read, and counts the items that were skipped at each place.

    The first MAX_REASONS different reasons are listed, the others counted.
    """

    def __init__(self, *reasons: str | None) -> None:
        self._reasons: dict[str, None] = {}
        self._skipped: dict[str, tuple[int, str]] = {}
        self.add(*reasons)

    def add(self, *reasons: str | None) -> None:
        """Note each reason once. Ignore None."""
        self._reasons |= dict.fromkeys(reason for reason in reasons if reason is not None)

    def skip(self, place: str, reason: object) -> None:
        """Count an item at `place` (a topic, a folder) that was skipped. Keep the first reason of each place."""
        # later reasons at a place are mostly the same, and would fill memory
        count, first = self._skipped.get(place, (0, str(reason)))
        self._skipped[place] = count + 1, first

    def text(self) -> str | None:
        """Return all losses in one sentence; None if nothing was lost."""
        parts = list(self._reasons)[:MAX_REASONS]
        if len(self._reasons) > MAX_REASONS:
            parts.append(f"{len(self._reasons) - MAX_REASONS} more losses")
        for place, (count, first) in self._skipped.items():
            parts.append(f"skipped {count} of {place} (first error: {first})")
        return "; ".join(parts) or None


class SampleReader(Closeable):
    """An open recording of a known format, with at least one topic.

    Raises BagError for another file or folder, MissingExtraError if the format's library is absent.
    """

    topics: tuple[Topic, ...]
    episode_starts: tuple[int, ...] = ()
    """Numbers of the first colour image of each episode; empty for a recording without episodes."""
    is_sequential = False
    """True if reading one topic costs nothing for the others, so that each is probed alone."""
    can_seek = False
    """True if `samples` can begin in the middle without decoding what comes before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opening = ReadReport()
        self.report = ReadReport()
        self.robot_notes = ReadReport()
        """Assumptions that `robot` has made."""
        self.chosen_joints: tuple[str, ...] = ()
        """Topics with joints that the user has chosen; empty: all of them."""

    @staticmethod
    def recognises(path: Path) -> bool:
        """Return True if the file or folder has this format."""
        raise NotImplementedError

    @property
    def lost(self) -> str | None:
        """Description of what could not be read, once `samples` has ended; None if nothing was lost."""
        return ReadReport(self.opening.text(), self.report.text()).text()

    @property
    def notes(self) -> tuple[str, ...]:
        """Assumptions that the reader has made so far."""
        text = self.robot_notes.text()
        return () if text is None else (text,)

    def samples(self, topics: Collection[str], begin_ns: int = 0) -> Iterator[Sample]:
        """Yield the messages on these topics in the order of the recording, from the beginning each time.

        A reader that can seek begins at `begin_ns` (recording time) or a little before, and numbers colour images.
        Damage ends the iteration without an error, and `lost` describes it. Raises BagError for an unknown encoding, an
        UnreadableTopicError where it concerns one topic.
        """
        # each iteration reports its own losses; those of opening stay
        self.report = ReadReport()
        yield from self._read(topics, begin_ns)

    def _read(self, topics: Collection[str], begin_ns: int) -> Iterator[Sample]:
        raise NotImplementedError

    def robot(self, joints: bool = True) -> Iterator[RobotMessage]:
        """Yield the poses and joints of the robot ROBOT, of all topics with joints or of `chosen_joints`.

        A message has its own joints alone: an arm and its gripper may send theirs apart, on one topic or on two, and
        one of them may end. Where two topics have the same joints, `notes` says which one counts.
        Without `joints`, yield the poses alone; most formats have none, and are not read.
        """
        if not joints:
            return
        topics = {topic.name for topic in self.topics if topic.kind == "joints"}
        if self.chosen_joints:
            topics &= set(self.chosen_joints)
        owners = self._find_owners(topics)
        try:
            for sample in self.samples(topics) if topics else ():
                if not isinstance(sample.payload, Joints):
                    continue
                positions = sample.payload.positions
                own = {name: positions[name] for name in owners.claim(sample.topic, positions)}
                if own:
                    yield JointState(ROBOT, sample.stamp_ns, own, find_clock(sample.stamp_ns))
        except UnreadableTopicError as error:
            self.robot_notes.add(f"no more joints of {error}")
        self.robot_notes.add(*owners.notes())

    def _find_owners(self, topics: set[str]) -> JointTopics:
        """Return which topic has which joint, from the first messages. Topics that cannot be read leave `topics`."""
        # joints in an unknown encoding cost the robot, not the images
        while True:
            found: list[tuple[str, Collection[str]]] = []
            silent = set(topics)
            try:
                for sample in self.samples(topics) if topics else ():
                    if isinstance(sample.payload, Joints):
                        found.append((sample.topic, sample.payload.positions.keys()))
                        silent.discard(sample.topic)
                    # an arm and its gripper may send in turn on one topic, so a few messages more
                    if len(found) >= (PROBED if silent else PROBED_MORE * len(topics)):
                        break
            except UnreadableTopicError as error:
                self.robot_notes.add(f"no joints of {error}")
                if error.topic not in topics:
                    return claim_first(found)
                topics.discard(error.topic)
            else:
                return claim_first(found)

    def close(self) -> None:
        """Close what the reader keeps open. Idempotent."""


def natural_order(path: Path) -> tuple[tuple[int, str], ...]:
    """Return a sort key that orders the files of a recording by their numbers: `bag_2` comes before `bag_10`."""
    return tuple(
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)
    )


class EpisodeSelection(NamedTuple):
    """A dataset's path, the first and last number of the chosen episodes, and a rate that the user gave, in Hz."""

    path: Path
    first: int = 0
    last: int | None = None
    fps: float | None = None

    def has(self, episode: int) -> bool:
        """Return True if the episode is chosen."""
        return self.first <= episode and (self.last is None or episode <= self.last)

    @property
    def is_whole(self) -> bool:
        """True if all episodes are chosen."""
        return self.first == 0 and self.last is None


def split_selection(path: Path) -> EpisodeSelection:
    """Split a path from the selection behind its last #. Raises BagError for a selection of another form.

    A path that exists as it is has no selection. A text behind a # without `=` belongs to the name.
    """
    # file names may have a # of their own
    name, mark, text = path.name.rpartition("#")
    if not mark or "=" not in text or path.exists():
        return EpisodeSelection(path)
    selection = EpisodeSelection(path.with_name(name))
    for part in text.split("&"):
        key, _, value = part.partition("=")
        if key == "episode" and (episodes := _EPISODES.fullmatch(value)):
            first, last = episodes.groups()
            selection = selection._replace(first=int(first), last=int(last or first))
        elif key == "fps" and _RATE.fullmatch(value) and 0 < float(value) <= MAX_FPS:
            selection = selection._replace(fps=float(value))
        else:
            raise BagError(f"{path}: {_SELECTIONS}, found {part!r:.60}")
    return selection
