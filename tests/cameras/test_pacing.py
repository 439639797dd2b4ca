"""The grid of due times, and the rate limit of a faster camera. Times are given instead of measured if possible."""

import threading
import time

import pytest

from sam3_node.cameras.live_source import Pacer, RateLimit

MS = 1_000_000


def admitted(limit: RateLimit, interval_ns: float, count: int, jitter_ns: int = 0) -> list[int]:
    stamps = [10**12 + round(i * interval_ns) + (jitter_ns if i % 2 else 0) for i in range(count)]
    return [i for i, stamp in enumerate(stamps) if limit.admits(stamp)]


def test_ticks_stay_on_the_grid_however_late_each_is() -> None:
    pacer = Pacer(50, threading.Event())
    pacer.wait()
    start = time.monotonic()
    for _ in range(10):
        time.sleep(0.004)
        pacer.wait()
    assert time.monotonic() - start >= 0.199


def test_missed_ticks_are_not_made_up_for() -> None:
    pacer = Pacer(20, threading.Event())
    pacer.wait()
    time.sleep(0.26)  # five ticks missed
    pacer.wait()  # late: at once
    start = time.monotonic()
    for _ in range(3):
        pacer.wait()
    assert time.monotonic() - start >= 0.1


def test_a_stopped_wait_says_so() -> None:
    stop = threading.Event()
    pacer = Pacer(0.001, stop)
    assert pacer.wait()
    stop.set()
    assert not pacer.wait()


def waited_s(pacer: Pacer, *stamps_ns: int) -> float:
    start = time.monotonic()
    for stamp in stamps_ns:
        assert pacer.wait(stamp)
    return time.monotonic() - start


def test_stamps_pass_as_far_apart_as_they_are() -> None:
    pacer = Pacer(0, threading.Event())
    assert waited_s(pacer, 10**18, 10**18 + 30 * MS, 10**18 + 100 * MS) >= 0.099


def test_a_recording_that_starts_again_keeps_its_pace() -> None:
    pacer = Pacer(0, threading.Event())
    assert waited_s(pacer, 0, 50 * MS, 0) >= 0.099


def test_time_lost_between_stamps_is_not_made_up_for() -> None:
    pacer = Pacer(0, threading.Event())
    waited_s(pacer, 0)
    time.sleep(0.15)
    assert waited_s(pacer, 50 * MS, 100 * MS, 150 * MS) >= 0.099


def test_a_wait_for_a_stamp_can_be_stopped() -> None:
    stop = threading.Event()
    pacer = Pacer(0, stop)
    pacer.wait(0)
    threading.Timer(0.05, stop.set).start()
    assert not pacer.wait(2**62)


@pytest.mark.parametrize(("fps", "every"), [(10, 3), (15, 2), (30, 1), (60, 1), (0, 1)])
def test_a_faster_camera_is_thinned_evenly(fps: float, every: int) -> None:
    assert admitted(RateLimit(fps), 1e9 / 30, 30) == list(range(0, 30, every))


def test_jitter_does_not_thin_a_camera_of_the_same_rate() -> None:
    assert len(admitted(RateLimit(30), 1e9 / 30, 60, jitter_ns=-5 * MS)) == 60


def test_an_uneven_ratio_keeps_the_rate() -> None:
    assert len(admitted(RateLimit(20), 1e9 / 30, 300)) == pytest.approx(200, abs=2)


def test_after_a_pause_there_is_no_burst() -> None:
    limit = RateLimit(10)
    assert limit.admits(0)
    assert limit.admits(5000 * MS)
    assert not limit.admits(5033 * MS)
    assert not limit.admits(5066 * MS)
    assert limit.admits(5100 * MS)
