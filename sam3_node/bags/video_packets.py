"""Decoding of video that a recording holds message by message: foxglove.CompressedVideo and ROS's FFMPEGPacket."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ..errors import require
from .decompression import max_pixels, max_video_pixels
from .samples import Colour, Losses, Sample, VideoPacket


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


class _Stream:
    """The decoder of one topic. A decoder may give an image some packets later; its number leads back to its packet."""

    def __init__(self, first: VideoPacket, losses: Losses) -> None:
        self._av, self._losses = require("av", "bags"), losses
        self._context = self._av.CodecContext.create(first.codec, "r")
        self._context.thread_count = 1  # several threads hold images back
        limit = max_pixels(memoryview(first.data).nbytes)
        self._context.options = {"max_pixels": str(limit), "flags": "low_delay"}
        self._pixels = self._bytes = 0
        self._number = 0
        self._waiting: dict[int, Sample] = {}

    def decode(self, sample: Sample, payload: VideoPacket) -> Iterator[Sample]:
        if self._pixels > max_video_pixels(self._bytes):
            self._lose(sample.topic, "there are more pictures than so few bytes can hold")
            return
        packet = self._av.Packet(bytes(payload.data))
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
                image = np.ascontiguousarray(frame.to_ndarray(format="bgr24"))
                colour = Colour(frame.width, frame.height, "bgr8", image.data.cast("B"))
                yield sample._replace(payload=colour)

    def _lose(self, topic: str, reason: object) -> None:
        self._losses.skip(topic, f"the packet cannot be decoded ({reason})")
