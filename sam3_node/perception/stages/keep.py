"""Keep the features of a frame, so that users can prompt on it later."""

from ..catch_up import CachedFrame, CatchUps, FrameCache
from ..stage import Stage
from ..step import StepFrame


class KeepFrame(Stage):
    """Adds the tracked frame to the cache. Objects that catch up use the frames that leave it, before they are gone.

    The latest frame has its image, for what is found by its looks. `with_images`: all keep theirs, because the detector
    takes exemplars from them.
    """

    name = "keep"

    def __init__(self, cache: FrameCache, catch_ups: CatchUps, with_images: bool) -> None:
        self._cache = cache
        self._catch_ups = catch_ups
        self._with_images = with_images

    def run(self, step: StepFrame) -> None:
        """Cache the frame with its features and masks."""
        if not self._with_images:
            self._cache.drop_images()
        cached = CachedFrame.from_step(step)
        # these objects have no mask on this frame, so the cache gives them the one before
        held = step.shed.held if step.shed is not None else ()
        for dropped in self._cache.add(cached, held):
            self._catch_ups.use_dropped(dropped)
