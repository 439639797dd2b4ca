"""Decoding of video that a recording holds message by message: foxglove.CompressedVideo, ROS's FFMPEGPacket, and
CompressedImage with a video format.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import require
from .decompression import max_pixels, max_video_pixels
from .samples import Colour, Losses, Sample, VideoPacket

_AXES = struct.Struct("=2i4x2i")  # of the nine numbers of a display matrix


def decode_packets(samples: Iterable[Sample], losses: Losses) -> Iterator[Sample]:
    """Yield the samples, packets of video as colour in bgr8 with the stamps of their packets.

    Packets that cannot be decoded, as those before the first key frame, are passed over and added to `losses`.
    """
    streams: dict[str, _Stream] = {}
    for sample in samples:
        if not isinstance(sample.payload, VideoPacket):
            yield sample
            continue
        if sample.topic not in streams:
            streams[sample.topic] = _Stream(sample.payload, losses)
        yield from streams[sample.topic].decode(sample, sample.payload)
    for stream in streams.values():
        yield from stream.flush()


def read_bgr(frame: Any) -> npt.NDArray[Any]:
    """Return a decoded frame of PyAV as BGR uint8 [height, width, 3], as it is stored."""
    return np.asarray(frame.to_ndarray(format="bgr24"), np.uint8)


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
            has_axes = matrix is not None and memoryview(matrix).nbytes >= _AXES.size
            self._axes = _AXES.unpack_from(matrix) if has_axes else None
        if self._axes is None:
            return image
        x_to_x, x_to_y, y_to_x, y_to_y = self._axes
        is_transposed = abs(x_to_x) + abs(y_to_y) < abs(x_to_y) + abs(y_to_x)
        if is_transposed:
            image, x_to_x, y_to_y = image.swapaxes(0, 1), y_to_x, x_to_y
        return image[:: -1 if y_to_y < 0 else 1, :: -1 if x_to_x < 0 else 1]


class _Stream:
    """The decoder of one topic. A decoder may give an image some packets later; its number leads back to its packet."""

    def __init__(self, first: VideoPacket, losses: Losses) -> None:
        self._av, self._losses = require("av", "bags"), losses
        self._context = self._av.CodecContext.create(first.codec, "r")
        self._context.thread_count = 1  # several threads hold images back
        limit = max_pixels(memoryview(first.data).nbytes)
        self._context.options = {"max_pixels": str(limit), "flags": "low_delay"}
        self._turner = Turner()
        self._pixels = self._bytes = 0
        self._number = 0
        self._waiting: dict[int, Sample] = {}

    def decode(self, sample: Sample, payload: VideoPacket) -> Iterator[Sample]:
        if self._pixels > max_video_pixels(self._bytes):
            self._lose(sample.topic, "there are more pictures than so few bytes can hold")
            return
        packet = self._av.Packet(bytes(payload.data))
        if not packet.size:  # to the decoder it is the end of the stream
            self._lose(sample.topic, "it is empty")
            return
        self._bytes += packet.size
        packet.pts = packet.dts = self._number
        self._waiting[self._number] = sample
        self._number += 1
        yield from self._images(packet, sample.topic)
        for number in [number for number in self._waiting if number < self._number - 32]:
            self._lose(self._waiting.pop(number).topic, "no image came of it")

    def flush(self) -> Iterator[Sample]:
        """Yield the images that the decoder still holds."""
        topic = next((sample.topic for sample in self._waiting.values()), "")
        yield from self._images(None, topic)
        for sample in self._waiting.values():
            self._lose(sample.topic, "no image came of it")

    def _images(self, packet: Any, topic: str) -> Iterator[Sample]:
        try:
            frames = self._context.decode(packet)
        except (self._av.error.FFmpegError, EOFError) as error:
            if packet is not None:
                self._waiting.pop(packet.pts, None)
                self._lose(topic, error)
            return
        for frame in frames:
            self._pixels += frame.width * frame.height
            sample = self._waiting.pop(frame.pts, None)
            if sample is not None:
                image = np.ascontiguousarray(self._turner.turn(read_bgr(frame), frame))
                colour = Colour(image.shape[1], image.shape[0], "bgr8", image.data.cast("B"))
                yield sample._replace(payload=colour)

    def _lose(self, topic: str, reason: object) -> None:
        self._losses.skip(topic, f"the packet cannot be decoded ({reason})")
