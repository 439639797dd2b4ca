"""The stages that measure objects in 3-D, alone, on masks that the caller has."""

from collections.abc import Sequence
from typing import Any

from sam3_node.calibration import Calibration
from sam3_node.perception.objects import Objects, ObjectsState
from sam3_node.perception.pipeline import SpatialStages, StageList, Surroundings
from sam3_node.perception.saved import StagesState
from sam3_node.perception.stages.spatial import MeasuredPoints
from sam3_node.perception.step import StepFrame
from sam3_node.schema.state import State, from_plain, to_plain
from sam3_node.settings import SpatialSettings
from sam3_node.types import Frame, FramePose, Instance, RobotState


class Measuring:
    """The stages of one camera, and the values that they keep for its objects."""

    def __init__(
        self, settings: SpatialSettings | None = None, calibration: Calibration | None = None
    ) -> None:
        self.objects = Objects(16)
        surroundings = Surroundings(settings or SpatialSettings(), calibration)
        self._spatial = SpatialStages.make(self.objects, surroundings)
        self._stages = StageList([self._spatial.depth, *self._spatial.list_after_depth()])

    def measure(
        self, frame: Frame, instances: Sequence[Instance], pose: FramePose | None, **given: Any
    ) -> StepFrame:
        """Return the step of a frame with these instances, with the gripper at a pose."""
        step = StepFrame(frame, robot_state=RobotState(pose), instances=instances, **given)
        for stage in self._stages:
            stage.run(step)
        return step

    def points(self, object_id: int, count: int) -> MeasuredPoints | None:
        return self._spatial.measure.points(object_id, count)

    def state(self) -> State:
        """Return a copy of what objects and stages keep, as a file has it."""
        plain: State = to_plain({"objects": self.objects.state(), "stages": self._stages.state()})
        return plain

    def restore(self, state: State) -> None:
        self.objects.restore(from_plain(ObjectsState, state["objects"]))
        self._stages.restore(from_plain(StagesState, state["stages"]))
