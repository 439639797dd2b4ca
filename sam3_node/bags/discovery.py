"""Finds the cameras in a recording: colour topics, each with its depth and its intrinsics.

Drivers name their topics NAMESPACE/STREAM/IMAGE/TRANSPORT. All parts but the first consist of common words (`color`,
`aligned_depth_to_color`, `image_raw`, `compressed`). Topics that share a namespace belong to one device.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path

from ..errors import BagError
from ..types import Depth
from .samples import Kind, Payload, SampleReader, Topic, UnreadableTopicError

MAX_NAME = 64
"""Length of the longest name of a camera, in characters."""

MAX_LISTED_TOPICS = 30
"""Number of topics or cameras that an error message lists."""

MAX_TOPICS = 1024
"""Maximum number of topics with images or calibration. A recording with more is refused."""

MAX_FAILURES = 32
"""Number of unreadable topics after which probing ends. Each costs a pass over the recording."""

# messages of topics that are known already after which a pass begins anew without these topics
_MAX_OTHERS = 200

# last parts of a topic that name an encoding, not an image
_TRANSPORTS = {"compressed", "compressedDepth", "ffmpeg"}
_IMAGE = re.compile(r"image(_(raw|rect|rectified|mono|colou?r|rgb|bgr|depth|compressed))*", re.IGNORECASE)
_STREAM = re.compile(
    r"((image|raw|unrectified|rectified|rect|compressed|mono|gr[ae]y|colou?r|rgb|bgr|depth|aligned|registered|to|hw|"
    r"sw|infrared|infra|ir|left|right|stereo|camera_info|calibration)\d?(_|$))+",
    re.IGNORECASE,
)
_COLOUR = re.compile(r"colou?r|rgb|bgr", re.IGNORECASE)
_INFRARED = re.compile(r"infra|(?<![a-z])ir\d?(?![a-z])", re.IGNORECASE)
_ALIGNED = re.compile(r"aligned|registered|depth_to_(colou?r|rgb|left)", re.IGNORECASE)
_INTO_DEPTH = re.compile(r"_to_depth", re.IGNORECASE)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")  # of image_rect_color, imageRect
_RECTIFIED = {"rect", "rectified", "undistorted"}
_VARIANTS = {*_RECTIFIED, "raw", "unrectified"}  # of the images of one sensor
_NO_PICTURE = re.compile(r"confidence|disparity", re.IGNORECASE)


Firsts = dict[str, type[Payload] | BagError]
"""The type of each topic's first payload, or the error of reading it."""


@dataclass(frozen=True, slots=True)
class Camera:
    """One camera of a recording, described by the topics of its frames.

    `aligned` is True if depth is registered to colour. `rectified` is True if the images have no distortion left.
    """

    name: str
    colour: str
    depth: str | None = None
    intrinsics: str | None = None
    aligned: bool = False
    rectified: bool = False

    @property
    def topics(self) -> tuple[str, ...]:
        """Topics that the camera's frames are made of."""
        return tuple(topic for topic in (self.colour, self.depth, self.intrinsics) if topic is not None)


def choose_cameras(path: Path, topics: Sequence[Topic], names: Collection[str] = ()) -> tuple[Camera, ...]:
    """Return the cameras of `topics`. If `names` is given, return only cameras whose name or colour topic it holds.

    A topic in `names` is also preferred if a camera has several (raw and compressed, aligned depth and its own).
    Raises BagError if there is no camera, or if one of `names` is absent.
    """
    cameras = find_cameras(topics, names)
    if not cameras:
        listed = _format_list(f"{topic.name} ({topic.type})" for topic in topics)
        raise BagError(
            f"{path}: expected a topic with colour images (Image or CompressedImage of sensor_msgs, RawImage or "
            f"CompressedImage of foxglove), found {listed}"
        )
    # what the user names must be there
    if not names:
        return cameras
    images = {topic.name for topic in topics if topic.kind != "other"}
    absent = [name for name in names if name not in images and all(name != camera.name for camera in cameras)]
    chosen = tuple(camera for camera in cameras if camera.name in names or camera.colour in names)
    if absent or not chosen:
        listed = _format_list(f"{camera.name} ({camera.colour})" for camera in cameras)
        expected = ", ".join(absent) or f"a colour image among {', '.join(names)}"
        raise BagError(f"{path}: expected {expected}, found the cameras {listed}")
    return chosen


def find_cameras(topics: Sequence[Topic], preferred: Collection[str] = ()) -> tuple[Camera, ...]:
    """Return all cameras in the order of their first topics. `preferred` topics win over others of their sensor."""
    # one topic for each sensor; drivers also offer an empty depth topic for colour streams
    colours = _choose_per_sensor(topics, "colour", preferred)
    depths = [depth for depth in _choose_per_sensor(topics, "depth", preferred) if not depth.is_colour]
    served = _pair(colours, depths, preferred)

    # each colour topic is a camera, with the depth and the intrinsics that belong to it
    infos = [TopicName(topic.name) for topic in topics if topic.kind == "intrinsics"]
    cameras = []
    for name, colour in zip(_names(colours), colours, strict=True):
        depth = served.get(colour.topic)
        info = _find_intrinsics(colour, depth, infos, colours)
        cameras.append(
            Camera(
                name,
                colour.topic,
                depth=None if depth is None else depth.topic,
                intrinsics=None if info is None else info.topic,
                aligned=depth is not None and depth.is_aligned,
                rectified=colour.is_rectified,
            )
        )
    return tuple(cameras)


def settle_kinds(reader: SampleReader) -> tuple[Topic, ...]:
    """Return a reader's topics with corrected kinds. The first image decides where a name leaves the kind open."""
    # first by the names, which costs nothing, then by the first image where names leave it open
    topics = [_settle_by_name(topic) for topic in reader.topics]
    if sum(topic.kind != "other" for topic in topics) > MAX_TOPICS:
        raise BagError(f"{reader.path}: expected at most {MAX_TOPICS} topics of cameras, found {len(topics)}")

    firsts = probe(reader, [topic.name for topic in topics if _is_open(topic)])
    kinds: dict[str, Kind] = {}
    for name, first in firsts.items():
        # an unknown encoding is an error only if the topic is read
        if not isinstance(first, BagError):
            kinds[name] = "depth" if issubclass(first, Depth) else "colour"
    return tuple(topic._replace(kind=kinds.get(topic.name, topic.kind)) for topic in topics)


def _settle_by_name(topic: Topic) -> Topic:
    is_image = topic.kind in ("colour", "depth") and topic.type.endswith("Image")
    if is_image and _NO_PICTURE.search(topic.name):
        return topic._replace(kind="other")
    return topic


def _is_open(topic: Topic) -> bool:
    """Return True if the topic's name does not tell whether its images are colour or depth."""
    if topic.kind not in ("colour", "depth"):
        return False
    is_named = topic.kind == "depth" or _COLOUR.search(topic.name)
    return not is_named or _INTO_DEPTH.search(topic.name) is not None


def probe(reader: SampleReader, topics: Collection[str]) -> Firsts:
    """Return the type of each topic's first payload, or the error of reading it; nothing for a silent topic.

    One pass serves all topics that begin together and can be read, unless the reader reads single topics cheaply. After
    MAX_FAILURES topics that cannot be read, the topics that have not come are not read either.
    """
    groups = [{name} for name in topics] if reader.is_sequential else [set(topics)]

    found: Firsts = {}
    for group in groups:
        waiting = group
        failures = 0
        is_over = False
        # a topic that cannot be read ends its pass: begin anew without it
        while waiting and not is_over and failures < MAX_FAILURES:
            try:
                is_over = _probe_together(reader, waiting, found)
            except UnreadableTopicError as error:
                found[error.topic] = error
                failures += 1
            waiting = waiting - found.keys()
        if not is_over:
            expected = f"expected fewer than {MAX_FAILURES} topics that cannot be read"
            found |= {name: UnreadableTopicError(name, expected) for name in waiting}
    return found


def _probe_together(reader: SampleReader, waiting: Collection[str], found: Firsts) -> bool:
    """Add to `found` in one pass. Return False where it is better to begin anew with fewer topics."""
    left = set(waiting)
    others = 0
    for sample in reader.samples(waiting):
        if sample.topic in left:
            found[sample.topic] = type(sample.payload)
            left.remove(sample.topic)
            others = 0
        others += 1
        if not left:
            return True
        # many messages of known topics come before those of a topic that begins late: decode them no more
        if others > _MAX_OTHERS and len(left) < len(waiting):
            return False
    return True


class TopicName:
    """A topic's name in parts. /robot/color/image_raw is image_raw of the stream color in the namespace robot."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        parts = [part for part in topic.split("/") if part]
        self.transport = parts.pop() if len(parts) > 1 and parts[-1] in _TRANSPORTS else ""
        self.parts = tuple(parts)

    @cached_property
    def namespace(self) -> tuple[str, ...]:
        """Leading parts up to the common words of drivers. The topics of one device share them."""
        streams = sum(1 for _ in takewhile(_STREAM.fullmatch, reversed(self.parts)))
        return self.parts[: len(self.parts) - streams]

    @cached_property
    def folder(self) -> tuple[str, ...]:
        """Parts without the image's own name. The images of one sensor share them."""
        if self.parts and _IMAGE.fullmatch(self.parts[-1]):
            return self.parts[:-1]
        return self.parts

    @property
    def image(self) -> str:
        """The last part, in lower case."""
        return self.parts[-1].lower() if self.parts else ""

    @property
    def streams(self) -> tuple[str, ...]:
        """Parts between the namespace and the image's own name."""
        return self.folder[len(self.namespace) :]

    @property
    def is_colour(self) -> bool:
        """True if the stream is named for colour. Drivers also offer an empty compressedDepth topic for these."""
        streams = "/".join(self.streams)
        return _COLOUR.search(streams) is not None and "depth" not in streams.lower()

    @property
    def is_rectified(self) -> bool:
        """True if a word of the name says that the images have no distortion left."""
        return any(not _RECTIFIED.isdisjoint(_words(part)) for part in self.parts)

    @cached_property
    def sensor(self) -> tuple[str, ...]:
        """Folder without the words that tell raw images from rectified ones."""
        # image_raw and image_rect of one sensor differ in such words alone
        words = ([word for word in _words(part) if word not in _VARIANTS] for part in self.folder)
        return tuple("_".join(left) for left in words if left)

    @property
    def is_infrared(self) -> bool:
        return any(map(_INFRARED.search, self.streams))

    @property
    def is_aligned(self) -> bool:
        return _ALIGNED.search(self.topic) is not None

    def shared_with(self, other: TopicName) -> int:
        """Return the number of leading parts that both names share."""
        return sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.parts, other.parts, strict=False))
        )


def _words(part: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(part)]


def _choose_per_sensor(topics: Iterable[Topic], kind: Kind, preferred: Collection[str]) -> list[TopicName]:
    """Choose one topic per sensor: a preferred one, or raw colour before rectified, grey and compressed."""
    sensors: defaultdict[tuple[str, ...], list[TopicName]] = defaultdict(list)
    for topic in topics:
        if topic.kind == kind:
            name = TopicName(topic.name)
            sensors[name.folder].append(name)
    return [min(names, key=lambda name: _rank(name, preferred)) for names in sensors.values()]


def _rank(name: TopicName, preferred: Collection[str]) -> tuple[bool, int, int]:
    """Return a sort key of the topics of one sensor. The best is the smallest."""
    if "mono" in name.image:
        quality = 3
    elif "rect" in name.image:
        quality = 2
    elif _COLOUR.search(name.image):
        quality = 0
    else:
        quality = 1

    # "compressed" of depth may be a JPEG to look at
    if not name.transport:
        transport = 0
    elif name.transport == "compressedDepth":
        transport = 1
    else:
        transport = 2
    return name.topic not in preferred, transport, quality


def _pair(
    colours: list[TopicName], depths: list[TopicName], preferred: Collection[str]
) -> dict[str, TopicName]:
    """Map colour topics to depth: of the same device, the nearest by name; each depth serves one camera."""
    # one colour topic takes depth of any device: drivers of a single camera name its topics freely
    pairs = [
        (_distance(colour, depth, preferred), colour, depth)
        for colour in colours
        for depth in depths
        if len(colours) == 1 or colour.namespace == depth.namespace
    ]

    # the nearest pairs first; an infrared image gets depth if the device's colour camera has none
    served: dict[str, TopicName] = {}
    taken: set[str] = set()
    devices: set[tuple[str, ...]] = set()  # devices with a camera that has depth
    for _, colour, depth in sorted(pairs, key=lambda pair: pair[0]):
        is_free = colour.topic not in served and depth.topic not in taken
        if is_free and not (colour.is_infrared and colour.namespace in devices):
            served[colour.topic] = depth
            taken.add(depth.topic)
            devices.add(colour.namespace)
    return served


def _distance(colour: TopicName, depth: TopicName, preferred: Collection[str]) -> tuple[object, ...]:
    """Return a sort key of the pairs of colour and depth. The best is the smallest."""
    # depth of a stereo camera is registered to its left image
    if colour.is_colour:
        rank = 0
    elif "left" in colour.streams:
        rank = 1
    else:
        rank = 2
    return (
        colour.is_infrared,
        depth.topic not in preferred,
        colour.namespace != depth.namespace,
        -colour.shared_with(depth),
        rank,
        not depth.is_aligned,
    )


def _find_intrinsics(
    colour: TopicName, depth: TopicName | None, infos: list[TopicName], colours: list[TopicName]
) -> TopicName | None:
    """Find the topic beside the image, else above it if the device has one camera, else beside its aligned depth."""
    # the folder of the image, then those above it if no other sensor of the device shares them
    folders = [colour.folder]
    mates = [other for other in colours if other.namespace == colour.namespace and not other.is_infrared]
    if colour in mates and {other.sensor for other in mates} == {colour.sensor}:
        ends = range(len(colour.folder) - 1, max(len(colour.namespace), 1) - 1, -1)
        folders += [colour.folder[:end] for end in ends]

    # aligned depth has the colour's pixels, so its intrinsics are those of the colour
    if depth is not None and depth.is_aligned:
        folders.append(depth.parts[:-1])

    # a rectified info beside a raw one, such as camera_info_rect, is of the rectified image
    infos = sorted(
        (info for info in infos if colour.is_rectified or _RECTIFIED.isdisjoint(_words(info.image))),
        key=lambda info: info.is_rectified != colour.is_rectified,
    )
    for folder in folders:
        for info in infos:
            if info.parts[:-1] == folder:
                return info

    # a recording with one camera and one info needs no matching names
    usable = [info for info in infos if "depth" not in info.topic or info.is_aligned]
    if len(colours) == len(usable) == 1:
        return usable[0]
    return None


def _names(colours: list[TopicName]) -> list[str]:
    """Return the shortest unique name of each camera, from its device's name to its whole topic."""
    levels = [[_clean(parts) for parts in _name_parts(colour)] for colour in colours]
    chosen = [0] * len(levels)
    # cameras that share a name take their next longer one, until no two share one or there is no longer one
    for level in range(max(map(len, levels), default=0) - 1):
        names = [own[at] for own, at in zip(levels, chosen, strict=True)]
        for index, name in enumerate(names):
            if names.count(name) > 1:
                chosen[index] = level + 1
    return _numbered([own[at] for own, at in zip(levels, chosen, strict=True)])


def _name_parts(colour: TopicName) -> list[tuple[str, ...]]:
    """Return the parts of a camera's possible names, the shortest first."""
    namespace = colour.namespace
    streams = colour.streams
    device = namespace[-1:]
    return [device or streams[:1], device + streams, namespace or streams, namespace + streams, colour.parts]


def _clean(parts: tuple[str, ...]) -> str:
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", "_".join(parts))[-MAX_NAME:]
    return name if name.strip(".") else "camera"  # no camera is named by dots alone


def _numbered(names: list[str]) -> list[str]:
    """Make names unique: a later duplicate gets a number."""
    unique: list[str] = []
    for name in names:
        candidate = name
        number = 2
        while candidate in unique:
            suffix = f"_{number}"
            candidate = name[: MAX_NAME - len(suffix)] + suffix
            number += 1
        unique.append(candidate)
    return unique


def _format_list(items: Iterable[str]) -> str:
    listed = list(items)
    if not listed:
        return "no topic at all"
    text = ", ".join(listed[:MAX_LISTED_TOPICS])
    if len(listed) > MAX_LISTED_TOPICS:
        text += f" and {len(listed) - MAX_LISTED_TOPICS} more"
    return text
