"""Decodes video by PyAV: files (mp4, mov, avi, mkv, webm and more), and packets that a recording holds as messages.

Packets come from foxglove.CompressedVideo, ROS's FFMPEGPacket, and CompressedImage with a video format. OpenCV's reader
is not used: it returns unwritten memory for interlaced video, and takes the time before the first frame for a loss.
"""

import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy.typing as npt

from ...errors import BagError, require
from ...files import describe_stand_in
from ...types import NANOSECONDS
from ...wire.video import read_pixels
from ..decompression import make_bgr, max_pixels, max_video_pixels
from ..messages.ros import first_bytes
from ..samples import ReadReport, Sample, SampleReader, Topic, VideoPacket, reading

# the four numbers of a display matrix that turn the picture, of nine
_AXES = struct.Struct("=2i4x2i")
# rate of a video that declares none, or one above _MAX_FPS, in Hz
_FALLBACK_FPS = 30
_MAX_FPS = 1000
# bytes that show a container: up to the third packet of an MPEG transport stream
_HEAD = 377
# boxes of an MP4 that hold its parts, and most of them that are looked at
_PARTS = (b"moof", b"mdat")
_MAX_BOXES = 1 << 20
# images that a decoder may hold back: a packet that is older gave none
_MAX_DELAY = 32
# first bytes of the containers
_BEGINS = (
    rb".{4}(ftyp|moov|mdat|wide|free|skip|pnot)",  # MP4 and QuickTime
    rb"RIFF.{4}AVI ",
    rb"\x1aE\xdf\xa3",  # Matroska and WebM
    rb"FLV\x01",
    rb"OggS",
    rb"0&\xb2u\x8ef\xcf\x11",  # ASF: wmv
    rb"\x00\x00\x01[\xba\xb3]",  # MPEG program stream, MPEG video
    rb"G.{187}G.{187}G",  # MPEG transport stream
    rb"YUV4MPEG2 ",
)
_BEGIN = re.compile(b"|".join(_BEGINS), re.DOTALL)


def count_frames(path: Path) -> int:
    """Return the number of pictures that a video declares; 0 if it declares none, or cannot be opened."""
    av = require("av", "bags")
    if describe_stand_in(path) or not path.is_file():
        return 0
    try:
        with av.open(str(path), metadata_errors="replace") as container:
            streams = _find_tracks(av, container)
            return int(streams[0].frames) if streams else 0
    except (av.error.FFmpegError, OSError, IndexError):
        return 0


class VideoBag(SampleReader):
    """A video as one colour topic, its frames decoded to bgr8.

    Stamps count from the video's start. A frame without a time in the file follows the previous frame by the period of
    the video's rate. Raises BagError for a file without a frame that can be decoded.
    """

    can_seek = True
    """True. From the middle, frames are numbered by their times, which is an estimate if the rate varies."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        playback = Playback(path)
        if next(playback.frames(), None) is None:
            raise BagError(
                f"expected a video at {path}, found no frame that can be decoded: damaged, or cut off"
            )
        if len(playback.tracks) > 1:
            self.opening.add(
                f"{path.name} has {len(playback.tracks)} video tracks ({', '.join(playback.tracks)}): the first is "
                f"read; for the second, give the file that ffmpeg -i {path.name} -map 0:v:1 -c copy makes"
            )
        self.topics = (Topic(f"/{path.stem}/image", "video", "colour"),)

    @staticmethod
    def recognises(path: Path) -> bool:
        """Return True if a file begins as a video container does."""
        return path.is_file() and _BEGIN.match(first_bytes(path, _HEAD)) is not None

    def _read(self, topics: Collection[str], begin_ns: int) -> Iterator[Sample]:
        if self.topics[0].name not in topics:
            return
        playback = Playback(self.path, begin_ns)
        for number, stamp_ns, image in playback.frames():
            yield Sample(self.topics[0].name, stamp_ns, stamp_ns, make_bgr(image), number)
        self.report = playback.report()


class Playback:
    """One pass over a video, from `begin_ns` of its time; `convert` reads the pixels of a frame of PyAV.

    Raises BagError if the video is absent, or something stands in for it.
    """

    def __init__(
        self, path: Path, begin_ns: int = 0, convert: Callable[[Any], npt.NDArray[Any]] = read_pixels
    ) -> None:
        self._av = require("av", "bags")
        self._convert = convert
        self._turner = Turner()
        self._path = path
        self._begin_ns = begin_ns
        if stand_in := describe_stand_in(path):
            raise BagError(f"expected a video at {path}, found {stand_in}")
        with reading(path):
            size = path.stat().st_size
        self._max_pixels = max_pixels(size)
        self._pixels_left = max_video_pixels(size)
        # for the report: where the frames end, where the file declares the end, and the number of unreadable packets
        self._end_ns = 0
        self._declared_ns = 0
        self._bad = 0
        self.tracks: tuple[str, ...] = ()
        """Sizes of the video tracks, once `frames` has begun. The first is read."""

    def frames(self) -> Iterator[tuple[int, int, npt.NDArray[Any]]]:
        """Yield numbers from 0, stamps in ns, and images, BGR [height, width, 3] or what `convert` makes."""
        try:
            with self._av.open(str(self._path), metadata_errors="replace") as container:
                streams = _find_tracks(self._av, container)
                self.tracks = tuple(f"{stream.width}x{stream.height}" for stream in streams)
                if streams:
                    yield from self._decode(container, streams[0])
        # IndexError: PyAV lacks streams that begin after the first
        except (self._av.error.FFmpegError, OSError, IndexError):
            self._bad += 1

    def _decode(self, container: Any, stream: Any) -> Iterator[tuple[int, int, npt.NDArray[Any]]]:
        stream.thread_type = "AUTO"
        stream.codec_context.options = {"max_pixels": str(self._max_pixels)}
        rate = stream.average_rate or stream.guessed_rate
        if not rate or not 0 < rate <= _MAX_FPS:
            rate = _FALLBACK_FPS
        period_ns = round(NANOSECONDS / rate)
        first_ns = _nanoseconds(stream.start_time, stream.time_base) or 0
        # half a period of tolerance, so that rounding in the file is no loss
        self._declared_ns = _declared_ns(container, stream, period_ns) - period_ns // 2

        number: int | None = self._seek(container, stream, first_ns) if self._begin_ns else 0
        for frame in self._whole_frames(container, stream):
            # a frame without a time, or with an earlier one, follows the previous frame
            file_ns = _nanoseconds(frame.pts, frame.time_base)
            stamp_ns = max(file_ns - first_ns, 0) if file_ns is not None else self._end_ns
            if stamp_ns <= self._end_ns - period_ns:
                stamp_ns = self._end_ns

            # after a seek the first frame's number follows from its time
            if number is None:
                number = round(stamp_ns / period_ns)
            self._end_ns = stamp_ns + period_ns
            if stamp_ns >= self._begin_ns:
                yield number, stamp_ns, self._turner.turn(self._convert(frame), frame)
            number += 1

    def _seek(self, container: Any, stream: Any, first_ns: int) -> int | None:
        """Go to the last key frame before the beginning. Return the number of the next frame, or None if unknown."""
        target = round((first_ns + self._begin_ns) / (NANOSECONDS * stream.time_base))
        try:
            container.seek(target, stream=stream)
        except self._av.error.FFmpegError:
            return 0  # a video that cannot be positioned is read up to there
        return None

    def _whole_frames(self, container: Any, stream: Any) -> Iterator[Any]:
        """Yield the frames that can be decoded. Count the packets that cannot."""
        for packet in container.demux(stream):
            try:
                for frame in packet.decode():
                    self._pixels_left -= frame.width * frame.height
                    if self._pixels_left < 0:
                        return
                    yield frame
            except self._av.error.FFmpegError:
                self._bad += 1

    def report(self) -> ReadReport:
        """Report the difference between the declared and the decoded video."""
        # a container says its length at its beginning, so a cut one is shorter than it says
        report = ReadReport()
        if self._declared_ns > self._end_ns:
            seconds = self._end_ns / NANOSECONDS
            declared = self._declared_ns / NANOSECONDS
            report.add(
                f"{self._path.name} ends after {seconds:.1f} of {declared:.1f} s: it is damaged or cut off"
            )
        elif _is_cut(self._path):
            report.add(f"{self._path.name} is cut off: its end is lost")
        if self._pixels_left < 0:
            report.add(
                f"{self._path.name} has more pictures than a file of its size can hold; the rest is lost"
            )
        if self._bad:
            report.add(f"{self._bad} frames of {self._path.name} cannot be decoded")
        return report


def _find_tracks(av: Any, container: Any) -> list[Any]:
    """Return the video streams of a known codec, without pictures that stand for the film, such as its cover."""
    cover = av.stream.Disposition.attached_pic
    streams = [stream for stream in container.streams.video if stream.codec_context is not None]
    return [stream for stream in streams if not stream.disposition & cover]


def _is_cut(path: Path) -> bool:
    """Return True if a part of an MP4 ends behind the end of its file. One in fragments declares no length."""
    with reading(path), path.open("rb") as file:
        size = path.stat().st_size
        place = 0
        for _ in range(_MAX_BOXES):
            file.seek(place)
            head = file.read(16)
            if len(head) < 8:
                break
            length = int.from_bytes(head[:4])
            if length == 1:  # the length follows the kind
                length = int.from_bytes(head[8:16])
            if head[4:8] in _PARTS and place + length > size:
                return True
            if length < 8:  # 0: up to the end
                break
            place += length
    return False


def _nanoseconds(time: int | None, base: Fraction | None) -> int | None:
    if time is None or base is None:
        return None
    return round(time * base * NANOSECONDS)


def _declared_ns(container: Any, stream: Any, period_ns: int) -> int:
    """Return the length that the file declares for the video; 0 if it declares none."""
    if container.format.name == "avi":  # its duration is cut with the file
        return int(stream.frames * period_ns)
    declared_ns = _nanoseconds(stream.duration, stream.time_base)
    if declared_ns is not None:
        return declared_ns
    if container.duration is None or len(container.streams) > 1:  # the other streams may be longer
        return 0
    # Matroska counts from 0, not from the first frame
    offset = (container.start_time or 0) if "matroska" in container.format.name else 0
    return int(container.duration - offset) * 1000


def decode_packets(samples: Iterable[Sample], report: ReadReport) -> Iterator[Sample]:
    """Yield the samples, packets of video as colour in bgr8 with the stamps of their packets.

    Packets that cannot be decoded, such as any before the first key frame, are skipped and reported.
    """
    streams: dict[str, PacketDecoder] = {}
    for sample in samples:
        packet = sample.payload
        if not isinstance(packet, VideoPacket):
            yield sample
            continue
        stream = streams.get(sample.topic)
        if stream is None:
            lose = partial(report.skip, sample.topic)
            stream = PacketDecoder(packet.codec, lose, max_pixels(memoryview(packet.data).nbytes))
            streams[sample.topic] = stream
        yield from stream.decode(sample, packet)
    for stream in streams.values():
        yield from stream.flush()


class Turner:
    """Turns and mirrors the pictures of one stream as its file says.

    The first two rows of the display matrix say where the picture's x and y axes point. Between quarter turns the
    nearer one counts.
    """

    def __init__(self) -> None:
        self._rotation: int | None = None
        self._axes: tuple[int, int, int, int] | None = None

    def turn(self, image: npt.NDArray[Any], frame: Any) -> npt.NDArray[Any]:
        """Return the pixels [height, width, ...] of a decoded frame upright."""
        if frame.rotation != self._rotation:
            self._rotation = frame.rotation
            # not for each frame: frame and side data refer to each other, so both stay until a garbage collection
            matrix = frame.side_data.get("DISPLAYMATRIX")
            self._axes = None
            if matrix is not None and memoryview(matrix).nbytes >= _AXES.size:
                self._axes = _AXES.unpack_from(matrix)
        if self._axes is None:
            return image

        # a quarter turn is a transposition and a mirroring
        x_to_x, x_to_y, y_to_x, y_to_y = self._axes
        is_transposed = abs(x_to_x) + abs(y_to_y) < abs(x_to_y) + abs(y_to_x)
        if is_transposed:
            image = image.swapaxes(0, 1)
            x_to_x = y_to_x
            y_to_y = x_to_y
        if y_to_y < 0:
            image = image[::-1]
        if x_to_x < 0:
            image = image[:, ::-1]
        return image


class PacketDecoder:
    """The decoder of the packets of one topic. `lose` gets the reason for each that gives no picture.

    A decoder may give an image some packets later. The number in the image leads back to its packet. After a packet
    that is missing or damaged there is no picture until the next key frame, because later ones are made of those before
    them. That a packet is missing shows only where packets have numbers that count them.
    """

    def __init__(self, codec: str, lose: Callable[[str], object], most_pixels: int) -> None:
        self._av = require("av", "bags")
        self._lose = lose
        self._context = self._av.CodecContext.create(codec, "r")
        self._context.thread_count = 1  # several threads hold images back
        self._context.options = {"max_pixels": str(most_pixels), "flags": "low_delay"}
        self._turner = Turner()
        self._pixels = 0
        self._bytes = 0
        self._count = 0
        # packets without an image so far, by their numbers here
        self._waiting: dict[int, Sample] = {}
        # the first packet since the last loss; None after a key frame
        self._broken_from: int | None = None
        self._last_number: int | None = None
        self._is_counting = False

    def decode(self, sample: Sample, payload: VideoPacket) -> Iterator[Sample]:
        """Yield the pictures that a packet completes, each as its own sample in bgr8."""
        if self._pixels > max_video_pixels(self._bytes):
            self._lose(_cannot("there are more pictures than so few bytes can hold"))
            return
        packet = self._av.Packet(bytes(payload.data))
        if not packet.size:  # to the decoder it is the end of the stream
            self._lose(_cannot("it is empty"))
            self._break(self._count)
            return
        self._bytes += packet.size
        if self._lacks_before(payload.number):
            self._break(self._count)

        # the decoder hands the number on to the image of the packet
        packet.pts = self._count
        packet.dts = self._count
        self._waiting[self._count] = sample
        self._count += 1
        yield from self._images(packet)

        late = [number for number in self._waiting if number < self._count - _MAX_DELAY]
        for number in late:
            del self._waiting[number]
            self._lose(_cannot("no image came of it"))

    def flush(self) -> Iterator[Sample]:
        """Yield the images that the decoder still holds."""
        yield from self._images(None)
        for _ in self._waiting:
            self._lose(_cannot("no image came of it"))

    def _lacks_before(self, number: int | None) -> bool:
        """Return True if numbers have counted packets by one so far, and this one is not the next."""
        last = self._last_number
        self._last_number = number
        if number is None or last is None:
            return False
        was_counting = self._is_counting
        self._is_counting = number == last + 1
        return was_counting and not self._is_counting

    def _break(self, number: int) -> None:
        """Give no picture of this packet, or of a later one, until the next key frame."""
        if self._broken_from is None:
            self._broken_from = number

    def _images(self, packet: Any) -> Iterator[Sample]:
        try:
            frames = self._context.decode(packet)
        except (self._av.error.FFmpegError, EOFError) as error:
            if packet is not None:
                self._waiting.pop(packet.pts, None)
                self._lose(_cannot(error))
                self._break(packet.pts)
            return
        for frame in frames:
            self._pixels += frame.width * frame.height
            sample = self._waiting.pop(frame.pts, None)
            if sample is None:
                continue
            if self._broken_from is not None and frame.pts >= self._broken_from:
                if not frame.key_frame:
                    self._lose("a packet before it is missing or damaged, and no key frame came since")
                    continue
                self._broken_from = None
            yield sample._replace(payload=make_bgr(self._turner.turn(read_pixels(frame), frame)))


def _cannot(reason: object) -> str:
    return f"the packet cannot be decoded ({reason})"
