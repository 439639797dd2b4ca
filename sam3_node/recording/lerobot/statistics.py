"""Statistics of pixels and of numbers, by the names that lerobot gives them, and their sum over episodes.

Policies normalise with these. Values of pixels are in 0..1, as the loader gives them. A statistic of a feature has a
value for each channel of a picture, or for each number of a vector.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...schema.fields import MAX_INT

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
"""Share of the values below each quantile, by lerobot's names."""
STATISTICS = ("min", "max", "mean", "std", *QUANTILES)
"""Names of the statistics, in the order of `Stats`."""
COUNT = "count"
"""Name of the number of rows that the statistics of a feature are of."""
CHANNELS = 3
"""Number of channels of a picture."""
SIDE = 160
"""Length of a picture's shorter side, in pixels, to which it is thinned for its statistics."""

Histogram = npt.NDArray[np.int64]
"""Number of pixels of each value, [3 channels, 256]."""
Stats = npt.NDArray[np.float64]
"""The values of STATISTICS, each of all channels or numbers: [9, channels]."""
NamedStats = dict[str, list[Any]]
"""Statistics of a feature by their names, with COUNT, as lerobot stores them."""


def check_stats(stats: object, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless these are the STATISTICS of a feature, finite and each of this shape, with a COUNT."""
    if not isinstance(stats, dict):
        raise ValueError("a map of statistics was expected")
    for name in STATISTICS:
        values = np.array(stats.get(name))
        # other types, and integers of more than 64 bits, are numbers of no kind
        if values.dtype.kind not in "if" or values.shape != shape or not np.isfinite(values).all():
            raise ValueError(
                f"finite numbers of the shape {list(shape)} were expected in the statistics {name}"
            )
    count = stats.get(COUNT)
    if not isinstance(count, list) or [type(item) for item in count] != [int] or not 0 <= count[0] <= MAX_INT:
        raise ValueError(f"a list of one whole number was expected in the statistics {COUNT}")


def thin(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return every n-th pixel of a picture, for statistics."""
    step = max(1, min(image.shape[:2]) // SIDE)
    return image[::step, ::step]


class PixelStatistics:
    """Statistics of one camera's pixels, of each episode and of all together: [number of values][3 channels]."""

    def __init__(self) -> None:
        self._total = np.zeros((CHANNELS, 256), np.int64)
        self._episode = np.zeros_like(self._total)
        self._number: int | None = None
        self._done: dict[int, Stats] = {}

    def add(self, episode: int, image: npt.NDArray[np.uint8]) -> None:
        """Add an image of an episode. All images of an episode come one after the other."""
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
        return _describe_pixels(self._total)

    def _finish(self) -> None:
        if self._number is not None:
            self._done[self._number] = _describe_pixels(self._episode)
            self._total += self._episode
            self._episode[:] = 0
            self._number = None


def _describe_pixels(histogram: Histogram) -> Stats:
    """Compute the STATISTICS of pixels, exactly, from their histogram."""
    # pixels as the loader gives them, 0..1
    values = np.arange(256) / 255
    total = np.maximum(histogram.sum(axis=1), 1)
    mean = histogram @ values / total
    variance = np.maximum(histogram @ values**2 / total - mean**2, 0)
    present = histogram > 0
    cumulated = histogram.cumsum(axis=1)
    least = np.where(present.any(axis=1), values[present.argmax(axis=1)], 0)
    most = np.where(present.any(axis=1), values[255 - present[:, ::-1].argmax(axis=1)], 0)
    quantiles = [values[(cumulated >= share * total[:, None]).argmax(axis=1)] for share in QUANTILES.values()]
    return np.stack([least, most, mean, np.sqrt(variance), *quantiles])


def name_pixel_stats(stats: Stats, count: int) -> NamedStats:
    """Return the statistics of a picture feature as lerobot stores them: each [3][1][1], COUNT [count]."""
    named: NamedStats = {
        name: row[:, None, None].tolist() for name, row in zip(STATISTICS, stats, strict=True)
    }
    named[COUNT] = [count]
    return named


def describe_numbers(values: npt.NDArray[Any]) -> NamedStats:
    """Return the statistics of a feature of numbers, [rows, numbers], as lerobot stores them: each [numbers]."""
    rows = np.asarray(values, np.float64)
    found = [rows.min(axis=0), rows.max(axis=0), rows.mean(axis=0), rows.std(axis=0)]
    found += [np.quantile(rows, share, axis=0) for share in QUANTILES.values()]
    named: NamedStats = {name: row.tolist() for name, row in zip(STATISTICS, found, strict=True)}
    named[COUNT] = [len(rows)]
    return named


class NumberStatistics:
    """Statistics of a feature of numbers, of each episode and of all together."""

    def __init__(self) -> None:
        self._rows: list[list[float]] = []
        self._number: int | None = None
        self._done: dict[int, NamedStats] = {}

    def add(self, episode: int, numbers: list[float]) -> None:
        """Add the numbers of a row of an episode. All rows of an episode come one after the other."""
        if episode != self._number:
            self._finish()
            self._number = episode
        self._rows.append(numbers)

    def describe_episode(self, episode: int) -> NamedStats:
        """Return the statistics of an episode; none for one without rows."""
        self._finish()
        return self._done.get(episode, {})

    def describe_all(self) -> NamedStats:
        """Return the statistics of all episodes; none without rows."""
        self._finish()
        return add_up(self._done.values()) if self._done else {}

    def _finish(self) -> None:
        if self._number is not None:
            self._done[self._number] = describe_numbers(np.array(self._rows))
            self._rows.clear()
            self._number = None


def add_up(episodes: Iterable[Mapping[str, Sequence[Any]]]) -> NamedStats:
    """Return the statistics of a feature over several episodes from those of each.

    The least, the most, the mean and the deviation are exact. A quantile is the mean of the episodes' quantiles,
    weighted by their rows, as lerobot adds them up.
    """
    parts = list(episodes)
    counts = np.array([part[COUNT][0] for part in parts], np.float64)
    weights = counts / max(counts.sum(), 1.0)

    def weigh(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        # the first axis is that of the episodes
        weighted: npt.NDArray[np.float64] = np.tensordot(weights, values, axes=1)
        return weighted

    stacked = {name: np.array([part[name] for part in parts], np.float64) for name in STATISTICS}
    mean = weigh(stacked["mean"])
    # the variance of all rows: that within the episodes, and that of their means
    variance = weigh(stacked["std"] ** 2 + (stacked["mean"] - mean) ** 2)
    total: dict[str, npt.NDArray[np.float64]] = {
        "min": stacked["min"].min(axis=0),
        "max": stacked["max"].max(axis=0),
        "mean": mean,
        "std": np.sqrt(variance),
    }
    total |= {name: weigh(stacked[name]) for name in QUANTILES}
    named: NamedStats = {name: values.tolist() for name, values in total.items()}
    named[COUNT] = [math.floor(counts.sum())]
    return named
