"""Prefetching keeps the actions and their order, within its limits."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from sam3_node.errors import BagError
from sam3_node.replay.event_log import Action, Step
from sam3_node.replay.run import Prefetcher
from sam3_node.schema.operations import PinFrame
from sam3_node.wire import decode_image
from tests.support.live import SIZE, moving_frame
from tests.support.node_rig import until
from tests.support.resources import nothing_added

FRAME_BYTES = SIZE[0] * SIZE[1] * 3


def actions(count: int) -> list[Action]:
    """Yield steps, with an edit before every third."""
    found: list[Action] = []
    for seq in range(count):
        if seq % 3 == 0:
            found.append(PinFrame(seq=seq))
        found.append(Step(moving_frame(seq), seq, 1))
    return found


class Source:
    """A source that counts the actions taken from it."""

    def __init__(self, items: list[Action]) -> None:
        self.taken = 0
        self._items = items

    def __iter__(self) -> Iterator[Action]:
        for item in self._items:
            self.taken += 1
            yield item


def test_order_and_pixels_are_as_they_were() -> None:
    expected = actions(40)
    with Prefetcher(expected, threads=3, max_frames=7) as ahead:
        found = list(ahead)
    assert len(found) == len(expected)
    for here, there in zip(found, expected, strict=True):
        if not isinstance(here, Step) or not isinstance(there, Step):
            assert here == there
            continue
        assert here.frame.encoding == "bgr8"
        assert np.array_equal(decode_image(here.frame), decode_image(there.frame))
        assert here._replace(frame=there.frame) == there
        assert replace(here.frame, encoding="jpeg", colour=there.frame.colour) == there.frame


@pytest.mark.parametrize(("frames", "size"), [(5, 1 << 30), (100, 5 * FRAME_BYTES)])
def test_the_queue_stays_within_its_limits(frames: int, size: int) -> None:
    source = Source([Step(moving_frame(seq), 0) for seq in range(30)])
    with Prefetcher(source, max_frames=frames, max_bytes=size) as ahead:
        found = iter(ahead)
        for taken in range(1, 20):
            next(found)
            until(lambda taken=taken: source.taken >= min(5 + taken, 30), "the next")  # type: ignore[misc]
            assert source.taken <= 6 + taken


def test_a_frame_above_the_limit_passes() -> None:
    with Prefetcher(actions(5), max_bytes=10) as ahead:
        assert len(list(ahead)) == 7


def test_a_frame_that_does_not_decode_passes_as_it_is() -> None:
    broken = replace(moving_frame(1), colour=b"no jpeg")
    with Prefetcher([Step(moving_frame(0), 0), Step(broken, 0), Step(moving_frame(2), 0)]) as ahead:
        found = [action.frame for action in ahead if isinstance(action, Step)]
    assert found[1] is broken
    assert [frame.encoding for frame in found] == ["bgr8", "jpeg", "bgr8"]


def test_an_error_of_the_source_comes_after_earlier_actions() -> None:
    def failing() -> Iterator[Action]:
        yield from actions(6)
        raise BagError("gone")

    seen = []
    with Prefetcher(failing()) as ahead, pytest.raises(BagError, match="gone"):
        seen.extend(ahead)
    with Prefetcher(failing()) as ahead:
        found = iter(ahead)
        for _ in range(8):
            next(found)
        with pytest.raises(BagError):
            next(found)


def test_it_closes_at_any_moment_and_leaves_no_thread() -> None:
    with nothing_added():
        for taken in (0, 1, 5):
            with Prefetcher(actions(40), max_frames=3) as ahead:
                found = iter(ahead)
                for _ in range(taken):
                    next(found)
            ahead.close()
