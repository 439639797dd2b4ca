"""Decode frames of H.264: packets of one camera after the other, each a picture that may need those before it.

A packet is one access unit in Annex B. A key frame begins with its parameter sets. There are no B-frames, so that each
packet gives its picture at once. Decoding starts at a key frame, the same packets give the same pixels everywhere, and
after a missing or damaged packet there is no picture until the next key frame: none is ever made of wrong ones.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from ..errors import MissingExtraError, WireError, require
from ..types import Buffer, Frame, keep_newest
from ..types import lazy_numpy as np

VIDEO = "h264"
"""The encoding of frames that are packets of a video."""
MAX_KEY_GAP_S = 2.0
"""Longest time between two key frames of a camera, in seconds."""
MAX_VIDEO_PIXELS = 4096 * 2304
"""Pixels of a picture of a video. Those of a larger one are refused: a decoder may keep sixteen of them."""
MAX_VIDEOS = 64
"""Cameras whose videos are decoded. A decoder takes some megabytes, and names come from outside."""

# units of a packet by their start codes: the type stands in five bits
_UNIT = re.compile(b"\0\0\1(.)", re.DOTALL)
_KEY_UNIT = 5  # a slice of a key frame
_PARAMETERS = 7  # of the sequence: without them a decoder cannot begin
# pixels that a decoder adds on a side to have whole blocks
_BLOCK = 32
# refuse what is damaged, and wait for no further packet
_OPTIONS = {"flags": "low_delay", "err_detect": "explode"}


def is_key_packet(packet: Buffer) -> bool:
    """Return True if a decoder can begin with this packet."""
    kinds = {match[1][0] & 31 for match in _UNIT.finditer(packet)}
    return {_KEY_UNIT, _PARAMETERS} <= kinds


def read_pixels(frame: Any) -> np.typing.NDArray[Any]:
    """Return a frame of PyAV as BGR [height, width, 3]: uint16 if it is grey or RGB of 16 bits, else uint8.

    Other formats say how many bits they have, and ffmpeg scales by these.
    """
    form = frame.format
    is_plain = form.is_rgb or form.name.startswith("gray")
    is_wide = is_plain and form.components[0].bits == 16
    return np.asarray(frame.to_ndarray(format="bgr48le" if is_wide else "bgr24"))


class VideoDecoders:
    """Decoders of the videos of several cameras. Frames in other encodings pass as they are."""

    def __init__(self) -> None:
        self._decoders: dict[str, _VideoDecoder] = {}

    def decode(self, frame: Frame) -> Frame | None:
        """Return a frame with its picture in bgr8; None for one that needs a frame that did not come.

        Raises WireError for a packet that cannot be decoded, also because PyAV is missing. The next picture is then
        that of the next key frame.
        """
        if frame.encoding != VIDEO:
            return frame
        decoder = self._decoders.get(frame.camera) or _VideoDecoder()
        keep_newest(self._decoders, frame.camera, decoder, MAX_VIDEOS)
        picture = decoder.decode(frame)
        if picture is None:
            return None
        return replace(frame, encoding="bgr8", colour=np.ascontiguousarray(picture).data.cast("B"))


class _VideoDecoder:
    """The decoder of one camera. It begins anew with each key frame that follows a gap."""

    def __init__(self) -> None:
        self._context: Any = None  # None until the next key frame
        self._size = (0, 0)
        self._next_seq = 0

    def decode(self, frame: Frame) -> np.typing.NDArray[Any] | None:
        is_next = frame.seq == self._next_seq and (frame.width, frame.height) == self._size
        self._next_seq = frame.seq + 1
        self._size = (frame.width, frame.height)
        if frame.width * frame.height > MAX_VIDEO_PIXELS:
            raise WireError(
                f"h264 image: expected at most {MAX_VIDEO_PIXELS} pixels, found {frame.width} x {frame.height}; set "
                "camera.width and camera.height"
            )
        if self._context is None or not is_next:
            self._context = None
            if not is_key_packet(frame.colour):
                return None
            self._context = self._open()
        try:
            return self._decode(frame)
        except WireError:
            self._context = None
            raise

    def _open(self) -> Any:
        try:
            av = require("av", "bags")
        except MissingExtraError as error:
            # whoever receives frames goes on without this camera's
            raise WireError(f"h264 image: {error}") from error
        context = av.CodecContext.create(VIDEO, "r")
        context.thread_count = 1  # several hold pictures back
        width, height = self._size
        # checked before memory is allocated
        limit = (width + _BLOCK) * (height + _BLOCK)
        context.options = {**_OPTIONS, "max_pixels": str(limit)}
        return context

    def _decode(self, frame: Frame) -> np.typing.NDArray[Any]:
        av = require("av", "bags")
        try:
            pictures = self._context.decode(av.Packet(bytes(frame.colour)))
        except (av.error.FFmpegError, EOFError, ValueError) as error:
            raise WireError(
                f"h264 image: expected a packet of a video, found a damaged one: {error}"
            ) from error
        found = [(picture.width, picture.height) for picture in pictures]
        if found != [self._size]:
            raise WireError(
                f"h264 image: expected one picture of {frame.width} x {frame.height} pixels in each packet, found "
                f"{found or 'none'}; encode without B-frames"
            )
        if pictures[0].is_corrupt:
            raise WireError("h264 image: expected a whole picture, found one that lacks parts")
        return read_pixels(pictures[0])
