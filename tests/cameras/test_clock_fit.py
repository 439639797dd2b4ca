"""The fit of a device's clock, with synthetic drift and delays."""

import numpy as np
import pytest

from sam3_node.cameras.clock_fit import ClockFit
from sam3_node.types import NANOSECONDS

MS = 1_000_000
PERIOD_NS = NANOSECONDS // 30
SHORTEST_NS = 4 * MS


def errors_ms(drift_ppm: float, delays_ns: np.ndarray, fit: ClockFit | None = None) -> np.ndarray:
    """Return the error of each mapped stamp in ms, beside the shortest delay, which cannot be seen."""
    fit = fit or ClockFit()
    found = []
    for index, delay in enumerate(delays_ns.tolist()):
        captured = 7_000 * NANOSECONDS + index * PERIOD_NS
        stamp = round(123_456 + index * PERIOD_NS / (1 + drift_ppm * 1e-6))
        arrival = captured + SHORTEST_NS + round(delay)
        found.append(arrival - fit.delay_ns(stamp, arrival) - captured - SHORTEST_NS)
    return np.array(found) / MS


def jitter(count: int, seed: int = 1) -> np.ndarray:
    """Return delays: mostly about 2 ms, one in fifty up to 80 ms."""
    rng = np.random.default_rng(seed)
    return rng.exponential(2 * MS, count) + (rng.random(count) < 0.02) * rng.uniform(0, 80 * MS, count)


@pytest.mark.parametrize("drift_ppm", [-150.0, 0.0, 40.0, 150.0])
def test_stamps_are_mapped_through_drift_and_jitter(drift_ppm: float) -> None:
    fit = ClockFit()
    errors = errors_ms(drift_ppm, jitter(30 * 120), fit)
    assert np.abs(errors[30 * 20 :]).max() < 0.6
    assert np.abs(errors).max() < 80  # never worse than the time of arrival
    assert fit.drift_ppm == pytest.approx(drift_ppm, abs=4)


def test_seconds_of_congestion_do_not_bend_the_line() -> None:
    delays = jitter(30 * 60)
    delays[30 * 30 : 30 * 38] += 60 * MS
    errors = errors_ms(60.0, delays)
    assert np.abs(errors[30 * 20 :]).max() < 0.8


def test_stamps_that_are_ahead_are_outvoted() -> None:
    delays = jitter(30 * 60)
    delays[30 * 25 :: 30 * 8] -= 100 * MS
    kept = np.ones(len(delays), bool)
    kept[30 * 25 :: 30 * 8] = False
    assert np.abs(errors_ms(20.0, delays)[kept][30 * 20 :]).max() < 0.8


def test_no_image_is_mapped_behind_its_arrival_or_by_a_negative_delay() -> None:
    fit = ClockFit()
    for index, delay in enumerate(jitter(900).astype(int).tolist()):
        assert 0 <= fit.delay_ns(index * PERIOD_NS, index * PERIOD_NS + delay) <= 200 * MS


def test_a_clock_that_begins_again_is_fitted_anew() -> None:
    fit = ClockFit()
    for index in range(300):
        fit.delay_ns(index * PERIOD_NS, 10**12 + index * PERIOD_NS)
    for index in range(300, 400):
        delay = fit.delay_ns((index - 300) * PERIOD_NS, 10**12 + index * PERIOD_NS + (index % 2) * MS)
        assert delay <= MS + 1000


def test_one_wrong_stamp_changes_nothing() -> None:
    fit = ClockFit()
    stamps = [index * PERIOD_NS for index in range(600)]
    stamps[400] += 3600 * NANOSECONDS
    delays = [fit.delay_ns(stamp, index * PERIOD_NS) for index, stamp in enumerate(stamps)]
    assert delays == [0] * 600


def test_one_very_late_image_keeps_its_stamp() -> None:
    fit = ClockFit()
    for index in range(600):
        fit.delay_ns(index * PERIOD_NS, index * PERIOD_NS)
    assert fit.delay_ns(600 * PERIOD_NS, 600 * PERIOD_NS + 3 * NANOSECONDS) == pytest.approx(
        3 * NANOSECONDS, abs=1000
    )
