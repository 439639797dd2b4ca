"""Remember where the objects were seen and what they look like. A frame's work does not grow with their number."""

from ...tracking.looks import describe_colours, describe_features, make_views
from ..remembering import ObjectMemory
from ..stage import Stage
from ..step import StepFrame


class RememberObjects(Stage):
    """Notes where all objects are, and looks at one of them: at the one that was not looked at for longest."""

    name = "remember"
    timed = "host"
    SAVED = ("_memory",)

    def __init__(self, memory: ObjectMemory) -> None:
        self._memory = memory

    def run(self, step: StepFrame) -> None:
        """Fill the memory. The frame's fields do not change."""
        frame = step.frame
        memory = self._memory
        memory.expire(frame.capture_ns)
        memory.observe(step.instances, frame.seq, frame.capture_ns, step.camera_pose)
        chosen = memory.choose(step.instances)
        if chosen is None:
            return
        row = step.tracks.ids.index(chosen.id)
        features = describe_features(step.features.top, step.tracks.logits[row : row + 1])
        view = make_views(features, [describe_colours(step.image, chosen.mask)])[0]
        memory.look(chosen, view, step.image, frame.seq, frame.capture_ns)
