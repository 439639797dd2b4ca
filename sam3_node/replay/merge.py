"""Masks of two passes over the same frames, forward and backward in time, as one stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from ..types import Instance, MaskFrame

Position = Callable[[MaskFrame], int]
Parts = Sequence[Callable[[], Iterable[MaskFrame]]]


def by_seq(found: MaskFrame) -> int:
    """Where a frame comes in a stream of one camera."""
    return found.seq


def merge(
    forward: Iterable[MaskFrame], backward: Iterable[MaskFrame], position: Position = by_seq
) -> Iterator[MaskFrame]:
    """All frames of both, each once; of an object that both have there, what scored higher, of equals the forward one.

    Both come in the order of `position`, ascending and without repeats: by seq those of one camera, by place in the
    recording those of several. An id means the same object in both. A frame that both have keeps the forward pass's
    times; its objects come in the forward pass's order, then those that backward alone has. Two frames in memory.
    """
    ahead, behind = iter(forward), iter(backward)
    a, b = next(ahead, None), next(behind, None)
    while a is not None or b is not None:
        if b is None or (a is not None and position(a) < position(b)):
            assert a is not None
            yield a
            a = next(ahead, None)
        elif a is None or position(b) < position(a):
            yield b
            b = next(behind, None)
        else:
            yield better(a, b)
            a, b = next(ahead, None), next(behind, None)


def better(forward: MaskFrame, backward: MaskFrame) -> MaskFrame:
    """One frame of both passes as `merge` gives it."""
    chosen: dict[int, Instance] = {one.id: one for one in forward.instances}
    for one in backward.instances:
        if one.id not in chosen or one.score > chosen[one.id].score:
            chosen[one.id] = one
    return replace(forward, instances=tuple(chosen.values()))


def turned(parts: Parts) -> Iterator[MaskFrame]:
    """What a backward pass left, in the order of the frames: `parts` in the order in which it wrote them.

    The frames within each part are in that order, too, which is the latest first. One part is in memory at a time.
    """
    for part in reversed(parts):
        yield from reversed(list(part()))
