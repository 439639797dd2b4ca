"""Pair masks with the frames that they belong to, for processes that show both.

Masks come later than their frame, and may overtake it where the frame is large. A pair is always one frame and its own
masks.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from ..types import Frame, MaskFrame, keep_newest
from ..wire import FRAMES_ROOT, MASKS_ROOT, unpack_frame, unpack_masks
from ..wire.video import VideoDecoders

MAX_FRAMES = 90
"""Frames of one camera that wait for their masks: 3 s at 30 FPS."""
MAX_BYTES = 256 << 20
"""Memory of the waiting frames of all cameras, which share it equally."""
MAX_CAMERAS = 16
"""Cameras that are paired. Beyond them, the one that has sent nothing for longest is forgotten."""
MASKS_LATE_S = 1.0
"""Seconds without masks after which frames are shown without them."""


class MaskPair(NamedTuple):
    """A frame and its masks, one of which may be missing."""

    frame: Frame | None
    masks: MaskFrame | None

    @property
    def camera(self) -> str:
        """Name of the camera of both."""
        shown = self.frame or self.masks
        assert shown is not None
        return shown.camera


class RecentFrames:
    """The newest frames of a camera that wait for their masks, at most MAX_FRAMES and a share of MAX_BYTES."""

    def __init__(self) -> None:
        self._frames: OrderedDict[int, Frame] = OrderedDict()
        self._bytes = 0

    def add(self, frame: Frame, max_bytes: int) -> None:
        """Add the newest frame. One with the same seq is from before a restart of the camera, and is replaced."""
        self._drop(frame.seq)
        self._frames[frame.seq] = frame
        self._bytes += _count_bytes(frame)
        # the newest frame stays, however large it is: its masks may be the next
        while len(self._frames) > 1 and (len(self._frames) > MAX_FRAMES or self._bytes > max_bytes):
            self._drop(next(iter(self._frames)))

    def find(self, masks: MaskFrame) -> Frame | None:
        """Return the frame of these masks if it is here."""
        frame = self._frames.get(masks.seq)
        # a camera that was restarted counts from 0 again: the same seq may be another frame
        if frame is None or frame.key != masks.key:
            return None
        return frame

    def _drop(self, seq: int) -> None:
        frame = self._frames.pop(seq, None)
        if frame is not None:
            self._bytes -= _count_bytes(frame)


class MaskPairing:
    """Makes pairs of the messages of all cameras, in the order of arrival.

    Masks wait for their frame until the camera's next masks come, and are then a pair without a frame. A frame is a
    pair without masks while the camera has had no whole pair for MASKS_LATE_S. Beyond `max_cameras`, the camera that
    has sent nothing for longest is forgotten.
    """

    def __init__(self, max_cameras: int = MAX_CAMERAS) -> None:
        self._cameras: dict[str, _CameraPairing] = {}
        self._max_cameras = max_cameras
        self._videos = VideoDecoders()

    @property
    def cameras(self) -> Sequence[str]:
        """Names of the cameras, ordered by their newest message."""
        return list(self._cameras)

    def accept(self, parts: Sequence[memoryview]) -> MaskPair | None:
        """Take a message of frames or masks. Return the pair that it completes; None without one, or for another topic.

        Raises WireError for a malformed message.
        """
        topic = bytes(parts[0])
        if topic.startswith(FRAMES_ROOT):
            frame = self._videos.decode(unpack_frame(parts))
            return None if frame is None else self.add_frame(frame)
        if topic.startswith(MASKS_ROOT):
            return self.add_masks(unpack_masks(parts))
        return None

    def add_frame(self, frame: Frame) -> MaskPair | None:
        """Take a frame. Return the pair that it completes."""
        camera = self._find(frame.camera)
        return camera.add_frame(frame, time.monotonic(), MAX_BYTES // len(self._cameras))

    def add_masks(self, masks: MaskFrame) -> MaskPair | None:
        """Take masks. Return the pair that they complete."""
        return self._find(masks.camera).add_masks(masks, time.monotonic())

    def _find(self, name: str) -> _CameraPairing:
        # a new camera, or one that is now the newest again
        camera = self._cameras.get(name) or _CameraPairing()
        keep_newest(self._cameras, name, camera, self._max_cameras)
        return camera


class _CameraPairing:
    """The frames and masks of one camera that wait for each other."""

    def __init__(self) -> None:
        self._frames = RecentFrames()
        self._waiting: MaskFrame | None = None
        self._masks_s = (
            -MASKS_LATE_S
        )  # time of the last whole pair; a new camera is shown without waiting for masks

    def add_frame(self, frame: Frame, now_s: float, max_bytes: int) -> MaskPair | None:
        self._frames.add(frame, max_bytes)
        # its masks came first, because the frame is larger
        if self._waiting is not None and self._waiting.key == frame.key:
            return self._complete(frame, self._waiting, now_s)
        # shown without masks only where none came for a while: else each frame would flicker without its masks
        if now_s - self._masks_s > MASKS_LATE_S:
            return MaskPair(frame, None)
        return None

    def add_masks(self, masks: MaskFrame, now_s: float) -> MaskPair | None:
        frame = self._frames.find(masks)
        if frame is not None:
            return self._complete(frame, masks, now_s)
        # these masks wait now, in place of the last ones, whose frame will not come any more
        overtaken = self._waiting
        self._waiting = masks
        if overtaken is None:
            return None
        return MaskPair(None, overtaken)

    def _complete(self, frame: Frame, masks: MaskFrame, now_s: float) -> MaskPair:
        self._waiting = None
        self._masks_s = now_s
        return MaskPair(frame, masks)


def _count_bytes(frame: Frame) -> int:
    depth = memoryview(frame.depth.data).nbytes if frame.depth else 0
    return memoryview(frame.colour).nbytes + depth
