"""Reader of video files: mp4, mov, avi, mkv, webm and other formats that OpenCV's ffmpeg decodes."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from ...errors import BagError
from ...types import NANOSECONDS, Closeable, Image
from ..messages.ros import first_bytes
from ..samples import Colour, Losses, Sample, Topic

_FALLBACK_FPS = 30.0
SEEK_MARGIN = 2  # frames before the wanted one to begin at, because positions follow from rounded times
_HEAD = 377  # bytes: to the third packet of an MPEG transport stream
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


class VideoBag(Closeable):
    """A video as one colour topic, its frames decoded to bgr8: a SampleReader.

    Stamps count from the video's start. A frame without a time in the file follows the previous frame by the period of
    the video's rate. Raises BagError for a file without a frame that can be decoded.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lost: str | None = None
        if next(_Playback(path).frames(), None) is None:
            raise BagError(
                f"expected a video at {path}, found no frame that can be decoded: damaged, or cut off"
            )
        self.topics: tuple[Topic, ...] = (Topic(f"/{path.stem}/image", "video", "colour"),)

    @staticmethod
    def recognises(path: Path) -> bool:
        """Return True if a file begins as a video container does."""
        return path.is_file() and _BEGIN.match(first_bytes(path, _HEAD)) is not None

    @property
    def lost(self) -> str | None:
        """Description of what could not be read, once `samples` has ended; None if nothing was lost."""
        return self._lost

    def samples(self, topics: Collection[str]) -> Iterator[Sample]:
        """Yield the frames in the order of the video, if its topic is in `topics`."""
        yield from self._samples(topics, None)

    def samples_from(self, topics: Collection[str], begin_ns: int) -> Iterator[Sample]:
        """Yield the frames from `begin_ns` of the video's time, as SeekableReader.samples_from does.

        Numbers of frames follow from their times, so they are estimates in a video whose rate varies.
        """
        yield from self._samples(topics, begin_ns)

    def _samples(self, topics: Collection[str], begin_ns: int | None) -> Iterator[Sample]:
        self._lost = None
        if self.topics[0].name not in topics:
            return
        playback = _Playback(self.path)
        if begin_ns is not None:
            playback.seek(begin_ns)
        for stamp_ns, image in playback.frames():
            height, width = image.shape[:2]
            colour = Colour(width, height, "bgr8", np.ascontiguousarray(image).data.cast("B"))
            number = None if begin_ns is None else playback.number
            yield Sample(self.topics[0].name, stamp_ns, stamp_ns, colour, number)
        self._lost = playback.lost()

    def close(self) -> None:
        """Do nothing: only an iteration holds the file open."""


class _Playback:
    """One pass over a video."""

    def __init__(self, path: Path) -> None:
        import cv2

        self._path = path
        self.number = -1
        """Number of the last frame, from 0."""
        self._begin_ns = 0
        self._capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG)
        fps = self._capture.get(cv2.CAP_PROP_FPS)
        self._period_ns = round(
            NANOSECONDS / (fps if math.isfinite(fps) and 0 < fps <= 1000 else _FALLBACK_FPS)
        )
        self._declared = self._capture.get(cv2.CAP_PROP_FRAME_COUNT)
        self._end_ns = 0
        self._bad = 0

    def seek(self, begin_ns: int) -> None:
        """Begin with the first frame at or after `begin_ns`. A video that cannot be positioned is read to there."""
        import cv2

        self._begin_ns = begin_ns
        first_ns = self._grab_ns() or 0
        target = (begin_ns - first_ns) // self._period_ns - SEEK_MARGIN
        self._capture.set(cv2.CAP_PROP_POS_FRAMES, max(target, 0))
        reached_ns = self._grab_ns() if target > 0 else None
        if reached_ns is None or not first_ns < reached_ns <= begin_ns:
            self._capture.release()
            self._capture = cv2.VideoCapture(str(self._path), cv2.CAP_FFMPEG)
            return
        self._capture.set(cv2.CAP_PROP_POS_FRAMES, target)
        self.number = round((reached_ns - first_ns) / self._period_ns) - 1

    def _grab_ns(self) -> int | None:
        """Return the file's stamp of the next frame in ns; None at the end."""
        import cv2

        return round(self._capture.get(cv2.CAP_PROP_POS_MSEC) * 1e6) if self._capture.grab() else None

    def frames(self) -> Iterator[tuple[int, Image]]:
        """Yield stamps in ns, and images BGR uint8 [height, width, 3]."""

        try:
            while (file_ns := self._grab_ns()) is not None:
                stamp_ns = file_ns if file_ns > self._end_ns - self._period_ns else self._end_ns
                self._end_ns, self.number = stamp_ns + self._period_ns, self.number + 1
                if stamp_ns < self._begin_ns:
                    continue
                is_decoded, image = self._capture.retrieve()
                if is_decoded:
                    yield stamp_ns, np.asarray(image, np.uint8)
                else:
                    self._bad += 1
        finally:
            self._capture.release()

    def lost(self) -> str | None:
        """Describe the difference between the declared and the decoded video; None if there is none."""
        losses = Losses()
        # compared by time, because the declared count is an estimate if the rate varies
        if 0 < self._declared * self._period_ns - self._end_ns - self._period_ns / 2 < math.inf:
            seconds, declared = self._end_ns / NANOSECONDS, self._declared * self._period_ns / NANOSECONDS
            losses.add(
                f"{self._path.name} ends after {seconds:.1f} of {declared:.1f} s: it is damaged or cut off"
            )
        if self._bad:
            losses.add(f"{self._bad} frames of {self._path.name} cannot be decoded")
        return losses.text()
