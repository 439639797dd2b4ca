"""Decide which masks are too unsure to show, and which objects are doubtful."""

from collections.abc import Callable

from ...types import Mask
from ..stage import Stage
from ..step import StepFrame


class HideUnsure(Stage):
    """Hides masks whose confidence is below `hide_below`: the object counts as out of view."""

    name = "hide"
    timed = "host"
    counts_as = "masks"

    def __init__(self, hide_below: float) -> None:
        self._hide_below = hide_below

    def run(self, step: StepFrame) -> None:
        """Fill `in_view` of what is seen."""
        for seen in step.seen:
            if seen.visible and seen.confidence < self._hide_below:
                seen.visible = False
                seen.mask = Mask.empty(seen.mask.size)
            seen.in_view = seen.visible and seen.mask.area > 0


class JudgeDoubt(Stage):
    """Marks objects in view whose mask or name is less sure than the limits, or whose appearance is another thing's."""

    name = "doubt"
    timed = "host"
    counts_as = "masks"

    def __init__(
        self, min_confidence: float, min_name_confidence: float, has_identity_mismatch: Callable[[int], bool]
    ) -> None:
        """`has_identity_mismatch` says whether an object has come back with another appearance."""
        self._has_identity_mismatch = has_identity_mismatch
        self._min_confidence = min_confidence
        self._min_name_confidence = min_name_confidence

    def run(self, step: StepFrame) -> None:
        """Fill `doubtful` of what is seen."""
        for seen in step.seen:
            name = seen.name_confidence
            unsure_name = name is not None and name < self._min_name_confidence
            # an object out of view shows no mask that could be doubted
            unsure_mask = seen.confidence < self._min_confidence
            seen.doubtful = seen.in_view and (
                unsure_mask or unsure_name or self._has_identity_mismatch(seen.id)
            )
