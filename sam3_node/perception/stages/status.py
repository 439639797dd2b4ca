"""Update the status of each object with what is seen of it, and make the instances of the masks message."""

from ..objects import Objects
from ..stage import Stage
from ..step import StepFrame


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
