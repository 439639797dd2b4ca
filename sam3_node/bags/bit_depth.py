"""Scales images of 16 bits a channel to the 8 bits of a frame, by the bits that their sensor has.

No encoding of 16 bits says how many of them the sensor fills: a camera of 12 bits gives values up to 4095 in mono16,
whose high byte is black. So the largest value that a stream has had tells it: the fewest of SENSOR_BITS that hold it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from ..wire.images import SENSOR_BITS, count_bits, narrow
from .samples import Colour, Sample, WideColour


class _Seen(NamedTuple):
    bits: int
    number: int
    """images that came before the first of so many bits"""


class BitDepths:
    """Scales the images of each topic by the most bits that its values have needed so far, at least 8.

    So a dark image is as dark as a bright one of the same stream, and the scale changes a few times at most, when the
    first bright image comes.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._counts: dict[str, int] = {}

    def narrow(self, topic: str, colour: Colour) -> Colour:
        """Return an image in 8 bits; itself if it has them."""
        if not isinstance(colour, WideColour):
            return colour
        values = np.frombuffer(colour.data, np.uint16)
        bits = count_bits(values)
        count = self._counts.get(topic, 0)
        self._counts[topic] = count + 1
        if topic not in self._seen or bits > self._seen[topic].bits:
            self._seen[topic] = _Seen(bits, count)
        pixels = narrow(values, self._seen[topic].bits)
        return Colour(colour.width, colour.height, colour.encoding, pixels.data)

    def narrow_all(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yield the samples, their images in 8 bits."""
        for sample in samples:
            if isinstance(sample.payload, WideColour):
                sample = sample._replace(payload=self.narrow(sample.topic, sample.payload))
            yield sample

    def describe(self) -> list[str]:
        """Return a line for each topic whose images do not use all of their 16 bits, so that their scale is a guess."""
        lines = []
        for topic, (bits, number) in self._seen.items():
            if bits < SENSOR_BITS[-1]:
                since = f" since image {number}" if number else ""
                lines.append(
                    f"{topic}: expected values of 16 bits, as the encoding has, found none that needs more than {bits}"
                    f"{since}: they are read as {bits} bits, divided by {1 << (bits - 8)}"
                )
        return lines
