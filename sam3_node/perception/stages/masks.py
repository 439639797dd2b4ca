"""Bring the tracks of a step to the host, and make masks at the frame's size, with the confidence of each."""

from ...tracking.confidence import ConfidenceEstimator
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
            seen.mask = step.window_masks.get(seen.id, seen.mask)
