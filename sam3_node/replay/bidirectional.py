"""The strategy bidirectional: objects are tracked from where they are known both forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..types import Instance, MaskFrame
from .spans import ObjectKey, Span, is_sure


def spans(masks: Iterable[MaskFrame], doubt: float) -> Iterator[Span]:
    """From all masks of the forward pass, what is tracked again: each object, from where it is known to its camera's
    first frame.

    It is known on the frame that it was shown on; otherwise (found by name, or entered without a frame) on the first
    where it is in view with a score of at least `doubt`, and where there is none it is not tracked backward. Its mask
    there is the prompt. What was found by mistake is tracked backward as well.
    """
    begun: dict[str, int] = {}
    known: set[ObjectKey] = set()
    for place, found in enumerate(masks):
        first = begun.setdefault(found.camera, place)
        for one in found.instances:
            key = ObjectKey(found.camera, one.id)
            if key not in known and (_is_shown(one) or is_sure(one, doubt)):
                known.add(key)
                if first < place:
                    yield Span.back_to(first, place, key, one)


def _is_shown(instance: Instance) -> bool:
    """Whether this frame is the one that the object was shown on: it was not tracked yet."""
    return instance.age == 0 and instance.area > 0
