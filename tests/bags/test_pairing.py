"""Pairing of colour with depth: nearest by stamp, in order, in bounded memory, without endless waiting."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from sam3_node.bags.discovery import Camera
from sam3_node.bags.pairing import MAX_WAITING, PATIENCE_NS, TOLERANCE_NS, Pairing
from sam3_node.bags.samples import Colour, Sample
from sam3_node.types import Depth, Frame, Intrinsics
from sam3_node.wire import decode_depth

MS = 1_000_000
T0 = 1_700_000_000_000 * MS
LENS = Intrinsics(60.0, 60.0, 3.5, 2.5, "brown_conrady", (0.1, 0.2, 0.0, 0.0, 0.0))
TABLE = Camera("table", "/table/image", "/table/depth", "/table/info", aligned=True)
BARE = Camera("wrist", "/wrist/image")


def colour(at_ms: int, camera: Camera = TABLE, logged_ms: int | None = None) -> Sample:
    logged_ns = T0 + (at_ms if logged_ms is None else logged_ms) * MS
    return Sample(camera.colour, T0 + at_ms * MS, logged_ns, Colour(8, 6, "mono8", bytes([at_ms % 256] * 48)))


def depth(at_ms: int, logged_ms: int | None = None, size: tuple[int, int] = (8, 6)) -> Sample:
    logged_ns = T0 + (at_ms if logged_ms is None else logged_ms) * MS
    data = np.full(size[0] * size[1], at_ms % 50_000, "<u2").tobytes()
    return Sample("/table/depth", T0 + at_ms * MS, logged_ns, Depth(*size, "z16", 0.001, False, data))


def info(at_ms: int, lens: Intrinsics = LENS) -> Sample:
    return Sample("/table/info", T0 + at_ms * MS, T0 + at_ms * MS, lens)


def pair_frames(samples: Iterable[Sample], *cameras: Camera) -> list[Frame]:
    pairing = Pairing(cameras or (replace(TABLE, intrinsics=None),))
    return [frame for sample in samples for frame in pairing.add(sample)] + list(pairing.flush())


def depth_times(frames: Iterable[Frame]) -> list[int | None]:
    """Return the capture time in ms of each frame's depth."""
    return [None if frame.depth is None else int(decode_depth(frame.depth)[0, 0]) for frame in frames]


def test_depth_comes_before_or_after_its_colour() -> None:
    samples = [colour(0), depth(0), depth(33), colour(33), colour(66), colour(99), depth(66), depth(99)]
    frames = pair_frames(samples)
    assert depth_times(frames) == [0, 33, 66, 99]
    assert [(frame.seq, frame.capture_ns) for frame in frames] == [
        (index, T0 + 33 * index * MS) for index in range(4)
    ]
    assert {frame.clock for frame in frames} == {"system"}


def test_the_nearest_depth_is_taken_and_none_that_is_too_far() -> None:
    tolerance = TOLERANCE_NS // MS
    assert depth_times(pair_frames([colour(100), depth(92), depth(105), depth(120)])) == [105]
    assert depth_times(pair_frames([depth(92), colour(100), depth(111)])) == [92]
    assert depth_times(pair_frames([colour(100), depth(100 + tolerance)])) == [100 + tolerance]
    assert depth_times(pair_frames([colour(100), depth(101 + tolerance)])) == [None]
    assert depth_times(pair_frames([depth(99 - tolerance), colour(100)])) == [None]


def test_depth_at_half_the_rate_belongs_to_every_other_frame() -> None:
    samples = sorted(
        [*(colour(50 * index) for index in range(8)), *(depth(100 * index) for index in range(4))],
        key=lambda sample: sample.stamp_ns,
    )
    assert depth_times(pair_frames(samples)) == [0, None, 100, None, 200, None, 300, None]


def test_a_frame_comes_as_soon_as_it_is_complete() -> None:
    pairing = Pairing([replace(TABLE, intrinsics=None)])
    assert not pairing.add(colour(0))
    assert not pairing.add(colour(33))
    assert len(pairing.add(depth(0))) == 1
    assert len(pairing.add(depth(66))) == 1  # later than 33: nothing nearer will come
    assert not pairing.flush()


def test_without_depth_or_intrinsics_nothing_waits() -> None:
    (frame,) = Pairing([BARE]).add(colour(0, BARE))
    assert (frame.camera, frame.depth, frame.intrinsics) == ("wrist", None, None)


def test_depth_that_never_comes_is_waited_for_by_a_bounded_number_of_frames() -> None:
    pairing = Pairing([replace(TABLE, intrinsics=None)])
    waiting, seqs = 0, []
    for index in range(200):
        seqs += [frame.seq for frame in pairing.add(colour(index))]
        waiting = max(waiting, index + 1 - len(seqs))
    assert waiting <= MAX_WAITING
    seqs += [frame.seq for frame in pairing.flush()]
    assert seqs == list(range(200))


def test_no_frame_waits_longer_than_the_patience() -> None:
    pairing = Pairing([replace(TABLE, intrinsics=None)])
    assert not pairing.add(colour(0))
    late_ms = PATIENCE_NS // MS + 1
    assert [frame.seq for frame in pairing.add(colour(late_ms))] == [0]


def test_stamps_that_jump_back_stop_nothing() -> None:
    samples = [
        colour(90_000),
        depth(90_000),
        *(item for at in range(0, 990, 33) for item in (colour(at), depth(at))),
    ]
    frames = pair_frames(samples)
    assert len(frames) == 31
    assert [frame.seq for frame in frames] == list(range(31))
    assert depth_times(frames)[-1] == 957


def test_the_first_frame_waits_for_intrinsics_and_the_latest_count() -> None:
    other = replace(LENS, fx=70.0)
    samples = [colour(0), depth(0), info(0), colour(33), depth(33), info(50, other), colour(66), depth(66)]
    assert [frame.intrinsics for frame in pair_frames(samples, TABLE)] == [LENS, LENS, other]


def test_intrinsics_that_never_come_hold_nothing_back_for_good() -> None:
    frames = pair_frames([item for at in range(0, 3300, 33) for item in (colour(at), depth(at))], TABLE)
    assert len(frames) == 100
    assert all(frame.intrinsics is None and frame.depth is not None for frame in frames[:50])


def test_rectified_images_have_intrinsics_without_distortion() -> None:
    (frame,) = pair_frames([info(0), colour(0), depth(0)], replace(TABLE, rectified=True))
    assert frame.intrinsics == Intrinsics(60.0, 60.0, 3.5, 2.5)


def test_depth_is_aligned_where_its_topic_says_so_and_the_sizes_agree() -> None:
    for size, aligned in (((8, 6), True), ((4, 3), False)):
        (frame,) = pair_frames([colour(0), depth(0, size=size)])
        assert frame.depth is not None
        assert frame.depth.aligned == aligned
    (frame,) = pair_frames([colour(0), depth(0)], replace(TABLE, intrinsics=None, aligned=False))
    assert frame.depth is not None
    assert not frame.depth.aligned


def test_frames_of_several_cameras_come_in_the_order_of_the_recording() -> None:
    table = replace(TABLE, intrinsics=None)
    samples = [
        colour(0),
        colour(1, BARE),
        colour(20, BARE),
        depth(0),
        colour(33),
        depth(33),
        colour(40, BARE),
    ]
    frames = pair_frames(samples, table, BARE)
    assert [(frame.camera, frame.seq) for frame in frames] == [
        ("table", 0),
        ("wrist", 0),
        ("wrist", 1),
        ("table", 1),
        ("wrist", 2),
    ]
    assert depth_times(frames) == [0, None, None, 33, None]


def test_stamps_that_are_not_of_unix_time_are_of_the_device() -> None:
    (frame,) = Pairing([BARE]).add(Sample(BARE.colour, 5 * MS, 5 * MS, Colour(8, 6, "mono8", bytes(48))))
    assert (frame.capture_ns, frame.clock) == (5 * MS, "device")


def test_samples_of_no_camera_are_left_out() -> None:
    assert not pair_frames([Sample("/other", T0, T0, LENS), info(0), depth(0)])
