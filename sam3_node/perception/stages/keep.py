"""Keep the features of a frame, so that users can prompt on it later."""

from ..catch_up import CachedFrame, CatchUps, FrameCache
from ..stage import Stage
from ..step import StepFrame


class KeepFrame(Stage):
    """Adds the tracked frame to the cache. Objects that catch up use the frames that leave it, before they are gone.

    `with_image`: keep the image, too, because the detector takes exemplars from it.
    """

    name = "keep"

    def __init__(self, cache: FrameCache, catch_ups: CatchUps, with_image: bool) -> None:
        self._cache = cache
        self._catch_ups = catch_ups
        self._with_image = with_image

    def run(self, step: StepFrame) -> None:
        """Cache the frame with its features and masks."""
        self._cache.latest_image = step.image
        cached = CachedFrame.from_step(step, self._with_image)
        # these objects have no mask on this frame, so the cache gives them the one before
        held = step.shed.held if step.shed is not None else ()
        for dropped in self._cache.add(cached, held):
            self._catch_ups.use_dropped(dropped)
