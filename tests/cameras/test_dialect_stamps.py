"""Times of capture from the stamps of a camera server."""

from __future__ import annotations

import itertools
import random

import pytest

from sam3_node.cameras.server_source import StampReader
from sam3_node.types import NANOSECONDS

NOW_NS = 1_800_000_000 * NANOSECONDS
MS = NANOSECONDS // 1000


def seconds(unix_ns: int) -> float:
    return unix_ns / NANOSECONDS


def test_a_stamp_of_unix_time_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    reader = StampReader("head")
    for i in range(5):
        stamp_ns = NOW_NS + i * 33 * MS
        assert reader.read(seconds(stamp_ns), stamp_ns + 40 * MS) == pytest.approx(stamp_ns, abs=MS)
    assert not caplog.text


def test_a_stamp_after_the_arrival_is_not_of_the_future() -> None:
    assert StampReader("head").read(seconds(NOW_NS + 20 * MS), NOW_NS) == NOW_NS


def test_old_images_keep_their_age_and_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    reader = StampReader("head")
    for i in range(3):
        stamp_ns = NOW_NS + i * 33 * MS
        assert reader.read(seconds(stamp_ns), stamp_ns + 3 * NANOSECONDS) == pytest.approx(stamp_ns, abs=MS)
    assert caplog.text.count("camera head: its stamps are 3.0 s before the arrival") == 1


@pytest.mark.parametrize(
    "offset_s", [-1_799_995_000.0, -3600.0, 7.0, 86400.0], ids=["monotonic", "late", "early", "day"]
)
def test_another_clock_gives_the_arrival_less_the_jitter(
    offset_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Delays of 5 ms and more; the constant 5 ms cannot be seen from one side."""
    reader, jitter = StampReader("head"), random.Random(1)
    errors = []
    for i in range(400):
        true_ns = NOW_NS + i * 33 * MS
        arrival_ns = true_ns + 5 * MS + jitter.randrange(30 * MS)
        errors.append(reader.read(seconds(true_ns) + offset_s, arrival_ns) - true_ns)
    assert max(errors[60:]) < 9 * MS
    assert min(errors[60:]) > 3 * MS
    assert caplog.text.count("expected stamps in Unix seconds, found") == 1


@pytest.mark.parametrize("stamp", [None, 0.0, -1.0, 1e300, -1e300])
def test_without_a_usable_stamp_the_arrival_is_taken(stamp: float | None) -> None:
    reader = StampReader("head")
    assert [reader.read(stamp, NOW_NS + i) for i in range(3)] == [NOW_NS, NOW_NS + 1, NOW_NS + 2]


def test_times_increase_where_stamps_repeat_or_go_back() -> None:
    reader = StampReader("head")
    stamps = [0, 33, 33, 10, -5000, 66, 40, 20_000, 99]
    times = [
        reader.read(seconds(NOW_NS + stamp * MS), NOW_NS + (40 + i * 33) * MS)
        for i, stamp in enumerate(stamps)
    ]
    assert all(later > earlier for earlier, later in itertools.pairwise(times))
    assert max(time - (NOW_NS + (40 + i * 33) * MS) for i, time in enumerate(times)) <= 0
    assert reader.read(seconds(NOW_NS), 1) == times[-1] + 1  # the host's clock went back, too


def test_no_stamps_make_it_fail() -> None:
    reader, random_ = StampReader("head"), random.Random(2)
    last = 0
    for i in range(2000):
        stamp = random_.choice(
            [random_.uniform(-1e10, 1e10), random_.expovariate(1e-9), 1.8e9 + i / 30, 5e3 + i, 0.0]
        )
        now = reader.read(stamp, NOW_NS + i * 33 * MS)
        assert now > last
        last = now
