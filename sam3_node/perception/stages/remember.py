"""Remember where the objects were seen and what they look like. A frame's work does not grow with their number."""

import torch

from ...schema.state import SavedState
from ...tracking.host_copy import HostCopy
from ...tracking.looks import describe_colours, describe_features, make_views
from ..remembering import LostObjectsState, ObjectMemory
from ..stage import Stage
from ..step import StepFrame


class DescribeLooks(Stage):
    """Describes the features of one object on the device: of the one that was not looked at for longest.

    Stands before the copy of the tracks to the host, which waits for the device.
    """

    name = "describe"

    def __init__(self, memory: ObjectMemory) -> None:
        self._memory = memory

    def run(self, step: StepFrame) -> None:
        """Fill `looked_at` and `look`."""
        step.looked_at = self._memory.choose(step.tracks.ids)
        if step.looked_at is not None:
            row = step.tracks.ids.index(step.looked_at)
            step.look = HostCopy(describe_features(step.features.top, step.tracks.logits[row : row + 1]))


class RememberState(SavedState):
    """What `RememberObjects` keeps."""

    memory: LostObjectsState


class RememberObjects(Stage):
    """Notes where all objects are, and compares the one that was described with what it looked like before."""

    name = "remember"
    timed = "host"
    STATE = RememberState

    def __init__(self, memory: ObjectMemory) -> None:
        self._memory = memory

    def run(self, step: StepFrame) -> None:
        """Fill the memory. The frame's fields do not change."""
        frame = step.frame
        memory = self._memory
        memory.expire(frame.capture_ns)
        memory.observe(step.instances, frame.seq, frame.capture_ns, step.camera_pose)
        chosen = next((seen for seen in step.instances if seen.id == step.looked_at), None)
        if chosen is None or step.look is None or not chosen.mask.crop.size:
            return
        features = torch.from_numpy(step.look.read())
        view = make_views(features, [describe_colours(step.image, chosen.mask)])[0]
        memory.look(chosen, view, step.image, frame.seq, frame.capture_ns)
