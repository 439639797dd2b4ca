"""Velocities of objects that move uniformly, stand still, disappear, and change their frame."""

from __future__ import annotations

import numpy as np
import pytest

from sam3_node.perception.spatial import VelocityFilters

NOISE = np.eye(3)[None] * 1e-6
MS = 1_000_000


def feed(filters: VelocityFilters, count: int, speed_mps: float, noise_m: float = 0.0) -> None:
    random = np.random.default_rng(1)
    for step in range(count):
        position = np.array([speed_mps * step / 30, 0.0, 0.8]) + noise_m * random.normal(size=3)
        filters.observe([3], step * 1000 * MS // 30, "base", position[None], NOISE)


def test_a_uniform_motion_gives_its_velocity() -> None:
    filters = VelocityFilters()
    feed(filters, 30, 0.3, noise_m=0.001)
    found = filters.velocity(3, 29 * 1000 * MS // 30)
    assert found is not None
    frame, velocity, age_s = found
    assert (frame, age_s) == ("base", 0.0)
    assert velocity == pytest.approx([0.3, 0.0, 0.0], abs=0.06)


def test_a_velocity_needs_three_positions_and_grows_old() -> None:
    filters = VelocityFilters()
    feed(filters, 2, 0.3)
    assert filters.velocity(3, 40 * MS) is None
    feed(filters, 4, 0.3)
    assert filters.velocity(4, 100 * MS) is None
    found = filters.velocity(3, 600 * MS)
    assert found is not None
    assert found[2] == pytest.approx(0.5)
    assert filters.velocity(3, 1200 * MS) is None


@pytest.mark.parametrize(
    ("stamp_ns", "frame"), [(99 * MS, "base"), (5000 * MS, "base"), (133 * MS, "camera")]
)
def test_older_late_and_other_positions_start_anew(stamp_ns: int, frame: str) -> None:
    filters = VelocityFilters()
    feed(filters, 4, 0.3)
    filters.observe([3], stamp_ns, frame, np.zeros((1, 3)), NOISE)
    assert filters.velocity(3, stamp_ns) is None


def test_a_restored_filter_goes_on_bit_for_bit() -> None:
    filters, other = VelocityFilters(), VelocityFilters()
    feed(filters, 9, 0.3, noise_m=0.001)
    other.restore(filters.state())
    for item in (filters, other):
        item.observe([3], 333 * MS, "base", np.array([[0.1, 0.0, 0.8]]), NOISE)
    first, second = filters.velocity(3, 333 * MS), other.velocity(3, 333 * MS)
    assert first is not None
    assert second is not None
    assert np.array_equal(first.mps, second.mps)
    filters.remove(3)
    assert filters.velocity(3, 333 * MS) is None
