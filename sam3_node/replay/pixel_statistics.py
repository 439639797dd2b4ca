"""Exact statistics of images that a LeRobot dataset stores with a feature, by episode and over all episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

CHANNELS = 3
QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
STATISTICS = ("min", "max", "mean", "std", *QUANTILES)

Histogram = npt.NDArray[np.int64]
"""Number of pixels of each value, [3 channels, 256]."""
Stats = npt.NDArray[np.float64]
"""The values of STATISTICS of each channel, in 0..1."""


class PixelStatistics:
    """Statistics of one camera's pixels by episode, [number of values][3 channels] each, and of all together."""

    def __init__(self) -> None:
        self._total = np.zeros((CHANNELS, 256), np.int64)
        self._episode = np.zeros_like(self._total)
        self._number: int | None = None
        self._done: dict[int, Stats] = {}

    def add(self, episode: int, image: npt.NDArray[np.uint8]) -> None:
        """Add an image of an episode; all of an episode come one after the other."""
        if episode != self._number:
            self._finish()
            self._number = episode
        for channel, histogram in enumerate(self._episode):
            histogram += np.bincount(image[..., channel].ravel(), minlength=256)

    def describe_episode(self, episode: int) -> Stats:
        """Return the statistics of an episode; zeros for one without rows."""
        self._finish()
        return self._done.get(episode, np.zeros((len(STATISTICS), CHANNELS)))

    def describe_all(self) -> Stats:
        """Return the statistics of all episodes."""
        self._finish()
        return _compute_stats(self._total)

    def _finish(self) -> None:
        if self._number is not None:
            self._done[self._number] = _compute_stats(self._episode)
            self._total += self._episode
            self._episode[:] = 0
            self._number = None


def _compute_stats(histogram: Histogram) -> Stats:
    """Compute the STATISTICS of pixels, which are exact."""
    values = np.arange(256) / 255
    total = np.maximum(histogram.sum(axis=1), 1)
    mean = histogram @ values / total
    variance = np.maximum(histogram @ values**2 / total - mean**2, 0)
    present, cumulated = histogram > 0, histogram.cumsum(axis=1)
    least = np.where(present.any(axis=1), values[present.argmax(axis=1)], 0)
    most = np.where(present.any(axis=1), values[255 - present[:, ::-1].argmax(axis=1)], 0)
    quantiles = [values[(cumulated >= share * total[:, None]).argmax(axis=1)] for share in QUANTILES.values()]
    return np.stack([least, most, mean, np.sqrt(variance), *quantiles])


def name_stats(stats: Stats, frames: int, names: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the statistics with these names, each [3][1][1]; `count` is [frames]."""
    named: dict[str, Any] = {
        name: [[[float(value)]] for value in row]
        for name, row in zip(STATISTICS, stats, strict=True)
        if name in names
    }
    return {**named, "count": [frames]} if "count" in names else named
