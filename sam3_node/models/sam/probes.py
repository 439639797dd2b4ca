"""Judge an operation by its error against float32, as probes of GPU operations do before they serve."""

import math

from torch import Tensor

PROBE_ERROR = 0.02
"""Relative error of half precision from which an operation is wrong. Rounding alone gives 0.002."""


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return |found - expected| / |expected|, by the norms of all values; values that are not finite count as infinite.

    Random values make it a test of every element: one that was never written, or at a wrong index, shows.
    """
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    value = error.item()
    return value if math.isfinite(value) else math.inf
