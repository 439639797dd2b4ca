"""End a step: bring the tracks to the host, make masks and instances, and keep the features for later prompts."""

from ...tracking.confidence import ConfidenceEstimator
from ..catch_up import CachedFrame, CatchUps, FrameCache
from ..objects import Objects
from ..output_masks import copy_to_host
from ..stage import Stage
from ..step import Seen, StepFrame


class CopyToHost(Stage):
    """Copies the tracks to the host at once. It waits for the device, so that no later stage does."""

    name = "copy"

    def run(self, step: StepFrame) -> None:
        """Fill `host`."""
        step.host = copy_to_host(step.tracks)


class MakeMasks(Stage):
    """Makes the masks of all objects, and estimates how sure each is."""

    name = "masks"
    timed = "host"

    def __init__(self, confidence: ConfidenceEstimator) -> None:
        self._confidence = confidence

    def run(self, step: StepFrame) -> None:
        """Fill `seen`."""
        evidence = step.host.evidence
        read_masks = step.host.masks.rasterize(step.scaling.frame_size)
        confidences = self._confidence.observe(evidence)  # while a GPU makes the masks
        columns = zip(evidence.ids, read_masks(), evidence.scores, evidence.visible, confidences, strict=True)
        step.seen = [Seen(*values) for values in columns]
        for seen in step.seen:
            seen.mask = step.crop_masks.get(seen.id, seen.mask)


class UpdateStatus(Stage):
    """Counts ages and frames out of view, and decides between tentative, tracked and occluded."""

    name = "status"
    timed = "host"
    counts_as = "masks"

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def run(self, step: StepFrame) -> None:
        """Fill `instances`, without 3-D fields."""
        step.instances = [self._objects.observe(seen) for seen in step.seen]


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
