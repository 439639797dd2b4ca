"""Encode a camera's images as H.264, by the processor or by what a GPU or board has for it.

Each image gives one packet at once: no B-frames, no looking ahead. Key frames come every `wire.video.MAX_KEY_GAP_S`
seconds, and when they are asked for.
"""

from __future__ import annotations

import logging
import os
from fractions import Fraction
from functools import cache
from typing import Any

import cv2

from ..errors import CameraError, WireError, require
from ..types import NANOSECONDS, Image
from ..wire.video import MAX_KEY_GAP_S

MIN_KEY_GAP_S = 0.5
"""Least time between two key frames, in seconds, however often they are asked for: each takes ten times as much."""
ENCODERS = ("h264_nvenc", "h264_v4l2m2m", "libx264", "libopenh264")
"""ffmpeg's encoders in the order in which they are tried: of NVIDIA, of boards by V4L2, and by the processor."""
MAX_THREADS = 4
"""Threads of the encoder. Each has a slice of the image, so that none holds it back."""

_FALLBACK_FPS = 30
_TIME_BASE = Fraction(1, 1_000_000)
_ANY_GAP = 1 << 20  # key frames come when they are told to
_TRIAL_SIZE = (640, 480)
_X264 = {
    "preset": "ultrafast",  # masks of nano lose nothing by it, and it takes half the time of the next one
    "tune": "zerolatency",
    "forced-idr": "1",
    # by the times of the images, whatever the rate
    "x264-params": "vfr-input=1:scenecut=0",
}
_OPTIONS = {
    "libx264": _X264,
    "h264_nvenc": {"preset": "p3", "tune": "ull", "zerolatency": "1", "forced-idr": "1", "delay": "0"},
}

_log = logging.getLogger(__name__)


class VideoEncoder:
    """Encodes the images of one camera, of width x height pixels, at about `bit_rate` bits a second.

    Raises CameraError without an encoder, and for odd sides, which H.264 does not have.
    """

    def __init__(self, width: int, height: int, bit_rate: float, fps: float) -> None:
        if width % 2 or height % 2:
            raise CameraError(
                f"expected even sides for h264, found {width} x {height}; set camera.width and camera.height"
            )
        self.size = (width, height)
        self._av = require("av", "bags")
        self._context = _open(_choose_encoder(), self.size, bit_rate, fps)
        self._key_ns: int | None = None
        self._last_us = -1

    def encode(self, image: Image, capture_ns: int, wants_key: bool) -> tuple[bytes, bool]:
        """Return the packet of a BGR image uint8 [height, width, 3], and True if it is a key frame.

        Raises WireError if the encoder fails.
        """
        # five times as fast as ffmpeg's own conversion
        planes = cv2.cvtColor(image, cv2.COLOR_BGR2YUV_I420)
        picture = self._av.VideoFrame.from_ndarray(planes, format="yuv420p")
        # times grow: those of a clock that was set back would stop the encoder
        time_us = max(capture_ns // 1000, self._last_us + 1)
        self._last_us = time_us
        picture.pts = time_us
        picture.time_base = _TIME_BASE
        since_s = None if self._key_ns is None else (time_us * 1000 - self._key_ns) / NANOSECONDS
        is_key = since_s is None or since_s >= (MIN_KEY_GAP_S if wants_key else MAX_KEY_GAP_S)
        if is_key:
            picture.pict_type = self._av.video.frame.PictureType.I
            self._key_ns = time_us * 1000
        try:
            packets = self._context.encode(picture)
        except self._av.error.FFmpegError as error:
            raise WireError(f"h264 image: cannot be encoded: {error}") from error
        if len(packets) != 1:
            raise WireError(f"h264 image: expected one packet for each image, found {len(packets)}")
        return bytes(packets[0]), is_key


def _open(name: str, size: tuple[int, int], bit_rate: float, fps: float) -> Any:
    """Open an encoder of ffmpeg. Raises its error if the machine lacks what it needs."""
    av = require("av", "bags")
    context = av.CodecContext.create(name, "w")
    context.width, context.height = size
    context.pix_fmt = "yuv420p"
    context.time_base = _TIME_BASE
    context.framerate = Fraction(fps or _FALLBACK_FPS).limit_denominator(1001)
    context.bit_rate = int(bit_rate)
    context.gop_size = _ANY_GAP
    context.max_b_frames = 0
    context.thread_type = "SLICE"
    context.thread_count = min(MAX_THREADS, os.cpu_count() or 1)
    # at most half a second of the rate at once, also for key frames
    limits = {"maxrate": str(int(bit_rate)), "bufsize": str(int(bit_rate / 2))}
    context.options = {**_OPTIONS.get(name, {}), **limits}
    context.open()
    return context


@cache
def _choose_encoder() -> str:
    """Return the first encoder that encodes an image here. Raises CameraError without one."""
    av = require("av", "bags")
    width, height = _TRIAL_SIZE
    for name in ENCODERS:
        if name not in av.codecs_available:
            continue
        try:
            context = _open(name, _TRIAL_SIZE, 1e6, _FALLBACK_FPS)
            picture = av.VideoFrame(width, height, "yuv420p")
            picture.pts = 0
            if len(context.encode(picture)) == 1:
                _log.info("h264 is encoded by %s", name)
                return name
        except (av.error.FFmpegError, OSError, ValueError) as error:
            _log.debug("%s does not work here: %s", name, error)
    raise CameraError(
        f"expected an encoder of H.264, found none of {', '.join(ENCODERS)} in PyAV; set camera.encoding to jpeg"
    )
