"""Tests of the pairing of masks with their frames."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from sam3_node.errors import WireError
from sam3_node.transport.mask_pairing import (
    MASKS_LATE_S,
    MAX_CAMERAS,
    MAX_FRAMES,
    MaskPair,
    MaskPairing,
    RecentFrames,
)
from sam3_node.types import Depth, Frame, MaskFrame
from sam3_node.wire import pack_frame, pack_masks

SIZE = (24, 32)


def frame(seq: int, camera: str = "cam0", capture_ns: int | None = None) -> Frame:
    pixels = np.full((*SIZE, 3), seq % 256, np.uint8).tobytes()
    capture_ns = 1000 + seq if capture_ns is None else capture_ns
    return Frame(camera, seq, capture_ns, SIZE[1], SIZE[0], "bgr8", pixels)


def masks(seq: int, camera: str = "cam0") -> MaskFrame:
    return MaskFrame(camera, seq, 1000 + seq, SIZE[1], SIZE[0])


def views(parts: Sequence[Any]) -> list[memoryview]:
    return [memoryview(bytes(part)) for part in parts]


class Clocked:
    """A pairing whose clock only the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.pairing = MaskPairing()
        monkeypatch.setattr("sam3_node.transport.mask_pairing.time.monotonic", lambda: self.now_s)

    def add(self, item: Frame | MaskFrame) -> tuple[int | None, int | None] | None:
        """Return the seq of frame and masks of the pair that the message completes."""
        parts = pack_frame(item) if isinstance(item, Frame) else pack_masks(item)
        pair = self.pairing.accept(views(parts))
        if pair is None:
            return None
        return pair.frame and pair.frame.seq, pair.masks and pair.masks.seq


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Clocked:
    return Clocked(monkeypatch)


def test_masks_complete_a_pair_with_exactly_their_frame(clocked: Clocked) -> None:
    assert [clocked.add(frame(seq)) for seq in range(3)] == [(0, None), (1, None), (2, None)]
    assert clocked.add(masks(1)) == (1, 1)
    assert clocked.add(frame(3)) is None
    assert clocked.add(masks(3)) == (3, 3)


def test_masks_that_overtake_their_frame_wait_for_it(clocked: Clocked) -> None:
    assert clocked.add(masks(7)) is None
    assert clocked.add(frame(7)) == (7, 7)


def test_masks_whose_frame_never_comes_are_a_pair_alone(clocked: Clocked) -> None:
    assert [clocked.add(masks(seq)) for seq in range(3)] == [None, (None, 0), (None, 1)]


def test_a_frame_of_another_run_of_the_camera_is_not_that_of_the_masks(clocked: Clocked) -> None:
    clocked.add(frame(5, capture_ns=9))
    assert clocked.add(masks(5)) is None
    assert clocked.add(frame(5)) == (5, 5)


def test_frames_go_on_alone_while_masks_are_late(clocked: Clocked) -> None:
    clocked.add(frame(0))
    clocked.add(masks(0))
    assert clocked.add(frame(1)) is None
    clocked.now_s += MASKS_LATE_S + 0.1
    assert clocked.add(frame(2)) == (2, None)


def test_other_topics_are_no_pairs_and_malformed_messages_are_named(clocked: Clocked) -> None:
    assert clocked.pairing.accept(views([b"events", b"x"])) is None
    with pytest.raises(WireError):
        clocked.pairing.accept(views([b"masks/cam0", b"x"]))
    with pytest.raises(WireError):
        clocked.pairing.accept(views([b"frame/cam0", b"x"]))


def test_the_camera_that_was_silent_for_longest_is_forgotten(clocked: Clocked) -> None:
    for number in range(MAX_CAMERAS + 1):
        clocked.add(frame(0, f"cam{number}"))
    assert list(clocked.pairing.cameras) == [f"cam{number}" for number in range(1, MAX_CAMERAS + 1)]


def test_frames_that_wait_are_bounded_in_number_and_bytes() -> None:
    recent = RecentFrames()
    for seq in range(2 * MAX_FRAMES):
        recent.add(frame(seq), 1 << 30)
    kept = [seq for seq in range(2 * MAX_FRAMES) if recent.find(masks(seq))]
    assert kept == list(range(MAX_FRAMES, 2 * MAX_FRAMES))
    recent.add(frame(500), 3 * len(frame(0).colour))
    assert [seq for seq in (*kept, 500) if recent.find(masks(seq))] == [178, 179, 500]


def test_depth_counts_as_bytes_of_a_frame() -> None:
    recent = RecentFrames()
    for seq in range(3):
        depth = Depth(100, 100, "z16", 0.001, True, bytes(20_000))
        plain = frame(seq)
        recent.add(Frame(*plain.key, 32, 24, "bgr8", plain.colour, depth=depth), 30_000)
    assert [seq for seq in range(3) if recent.find(masks(seq))] == [2]


def test_a_pair_knows_its_camera() -> None:
    assert MaskPair(frame(0, "left"), None).camera == MaskPair(None, masks(0, "left")).camera == "left"
