"""The number of windows of a live camera follows its rate, and the time of other cameras."""

from dataclasses import replace

import pytest

from sam3_node.node.status import SILENT_S, CameraStats
from sam3_node.types import Frame, Instance, Mask, MaskFrame
from tests.support.live import MS, moving_frame

FRAMES = 100
STAGES = {"encode": 10_000, "track": 20_000}
"""A window takes 20 ms beside two objects."""


def frame_at(seq: int, ms: float, every: int = 1) -> Frame:
    """Return a frame of a camera that captures one in so many milliseconds, every N-th of which is stepped."""
    return replace(moving_frame(0), seq=every * seq, capture_ns=round(every * seq * ms * MS))


def follow(
    stats: CameraStats, period_ms: float, rest_s: float, every: int = 1, load_of_others: float = 0.0
) -> list[int | None]:
    """Step frames with two objects, and return the number of windows of each step."""
    mask = Mask.empty((48, 64))
    instances = tuple(Instance(i, "", 1.0, "tracked", 1, 0, mask) for i in (1, 2))
    counts = []
    for seq in range(FRAMES):
        frame = frame_at(seq, period_ms, every)
        stats.begin(frame, 0, every - 1 if seq else 0, limits_windows=True)
        windows = stats.decisions.windows or 0
        counts.append(stats.decisions.windows)
        stages = {**STAGES, "window": 20_000 * windows} if windows else STAGES
        masks = MaskFrame("left", seq, frame.capture_ns, 64, 48, instances=instances, stages_us=stages)
        stats.note_cost(masks, windows, rest_s + 0.02 * windows, load_of_others)
    return counts


@pytest.mark.parametrize(
    ("period_ms", "every", "load_of_others", "budget_ms", "windows"),
    [
        (100, 1, 0.0, 0, 2),
        (66, 1, 0.0, 0, 1),
        (40, 1, 0.0, 0, 0),
        # the frames between were skipped: the camera is as fast as before
        (40, 3, 0.0, 0, 0),
        (100, 1, 0.5, 0, 0),
        (100, 1, 0.0, 66, 1),
    ],
)
def test_as_many_windows_as_the_rate_allows(
    period_ms: float, every: int, load_of_others: float, budget_ms: float, windows: int
) -> None:
    stats = CameraStats(silent_s=lambda: 0.0, budget_ms=budget_ms)
    counts = follow(stats, period_ms, 0.03, every, load_of_others)
    assert counts[0] == 0
    assert counts[-1] == windows == stats.decisions.windows
    failure = stats.describe_failure(frame_at(1, period_ms), "why")
    assert failure["windows"] == windows


def test_without_windows_no_message_has_their_number() -> None:
    stats = CameraStats()
    stats.begin(frame_at(0, 40), 0, 0)
    assert stats.decisions.windows is None
    assert "windows" not in stats.describe_failure(frame_at(0, 40), "why")


def test_a_silent_camera_takes_no_time_of_others() -> None:
    silent_s = 0.0
    stats = CameraStats(silent_s=lambda: silent_s)
    assert stats.load == 0
    for seq in range(3):
        stats.begin(frame_at(seq, 40), 0, 0)
        stats.end(frame_at(seq, 40), 0)
    assert stats.load > 0
    silent_s = SILENT_S + 1
    assert stats.load == 0
    # a clock that begins again says nothing about the rate
    stats.begin(frame_at(0, 40), 0, 0)
    assert stats.period_s == pytest.approx(0.04)
