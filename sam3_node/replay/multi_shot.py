"""The strategy multi-shot: where the forward pass was not sure of an object, it is tracked again, backward from where
it was sure once more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..types import MaskFrame
from .spans import ObjectKey, Span, is_sure

LEAST_FRAMES = 3
"""Frames without a sure mask, from which on a span is worth a second pass."""


@dataclass(slots=True)
class _Sure:
    """The place at which an object was last sure, and on how many frames it has not been since."""

    place: int
    doubts: int = 0


def spans(masks: Iterable[MaskFrame], doubt: float) -> Iterator[Span]:
    """From all masks of the forward pass, what is tracked again: LEAST_FRAMES or more successive frames of a camera on
    which an object was out of view or scored below `doubt`, between frames on which it was sure. The frame after them
    is the second shot: its mask there is the prompt. The frame before them is tracked on as well: where both passes
    disagree there, `merge` leaves the second one out (forward-backward error: Kalal et al. 2010).

    It mends what is lost while an object comes back into view, and drift of a low score. It does not find what the
    forward pass never found again, nor doubts what scored high on another thing; an object that was given up and found
    by name anew is another one.
    """
    known: dict[ObjectKey, _Sure] = {}
    for place, found in enumerate(masks):
        for one in found.instances:
            key = ObjectKey(found.camera, one.id)
            if is_sure(one, doubt):
                before = known.get(key)
                if before is not None and before.doubts >= LEAST_FRAMES:
                    yield Span.back_to(before.place, place, key, one)
                known[key] = _Sure(place)
            elif key in known:
                known[key].doubts += 1
