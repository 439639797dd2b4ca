"""Pairing of colour and depth: no colour image is lost, repeated or given a depth of another time."""

from __future__ import annotations

import random

import pytest

from sam3_node.cameras.realsense_device import FramePairer, Pair, StampedFrame

MS = 1_000_000


def stamped(
    kind: str, stamp_ms: float, domain: str = "hardware_clock", arrival_ms: float = 0.0
) -> StampedFrame:
    return StampedFrame(kind, round(stamp_ms * MS), domain, round(arrival_ms * MS), 0)


def run(*frames: StampedFrame, patience: int = 1, flush: bool = False) -> list[tuple[float, float | None]]:
    pairer = FramePairer(16 * MS, patience)
    found: list[Pair] = []
    for frame in frames:
        found += pairer.add_colour(frame) if frame.frame == "c" else pairer.add_depth(frame)
    if flush:
        found += pairer.flush()
    return [(colour.stamp_ns / MS, None if depth is None else depth.stamp_ns / MS) for colour, depth in found]


def test_either_may_come_first() -> None:
    frames = [stamped("c", 0), stamped("d", 5), stamped("d", 38), stamped("c", 33)]
    assert run(*frames) == [(0, 5), (33, 38)]


def test_colour_without_depth_comes_alone() -> None:
    assert run(stamped("c", 0), stamped("c", 33), stamped("c", 66)) == [(0, None), (33, None)]
    assert run(stamped("c", 0), stamped("d", 33), stamped("c", 33)) == [(0, None), (33, 33)]
    assert run(stamped("d", 66), stamped("c", 33), stamped("c", 66)) == [(33, None), (66, 66)]


def test_a_stream_that_lags_is_awaited() -> None:
    colours = [stamped("c", 33 * index) for index in range(6)]
    depths = [stamped("d", 33 * index + 1) for index in range(6)]
    expected = [(33.0 * index, 33.0 * index + 1) for index in range(6)]
    assert run(*colours, *depths, patience=8) == expected
    assert run(*depths, *colours, patience=8) == expected


def test_what_waits_at_the_end_is_given() -> None:
    assert run(stamped("c", 0), stamped("d", 0), stamped("c", 33), flush=True) == [(0, 0), (33, None)]


def test_depth_that_is_too_old_is_left_out() -> None:
    assert run(stamped("d", 0), stamped("c", 33), stamped("d", 30)) == [(33, 30)]
    assert run(stamped("c", 66), stamped("d", 33), stamped("d", 66)) == [(66, 66)]


def test_stamps_of_two_clocks_are_not_compared() -> None:
    frames = [stamped("c", 9e6, "global_time", 1), stamped("d", 5, arrival_ms=3)]
    assert run(*frames) == [(9e6, 5)]


@pytest.mark.parametrize("seed", range(20))
def test_every_colour_image_comes_once_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    queues = {
        kind: [33.3 * index + rng.uniform(-3, 3) for index in range(60) if rng.random() < 0.8]
        for kind in "cd"
    }
    frames = []
    waiting = {kind: list(stamps) for kind, stamps in queues.items()}
    while any(waiting.values()):
        kind = rng.choice([kind for kind in waiting if waiting[kind]])
        ahead = min(stamps[0] for stamps in waiting.values() if stamps)
        if waiting[kind][0] - ahead < 40:
            frames.append(stamped(kind, waiting[kind].pop(0)))
    found = run(*frames)
    colours = [round(stamp, 6) for stamp, _ in found]
    assert colours == [round(stamp, 6) for stamp in queues["c"]][: len(colours)]
    assert len(colours) >= len(queues["c"]) - 1
    assert all(depth is None or abs(colour - depth) <= 16 for colour, depth in found)
