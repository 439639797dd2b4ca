"""Run the steps of one camera: each frame goes through a list of stages. It uses no sockets and no files.

The tracks of a frame stay on the device until the end of the step, and are then copied to the host at once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from msgspec.structs import asdict

from ..calibration import Calibration
from ..detection.detectors import Detector, ExemplarDetector, PromptSet
from ..engines.oom import find_device_error, is_out_of_memory
from ..errors import ReplayError, summarize_error
from ..models import TrackerModel
from ..robot.body import RobotBody
from ..schema.replies import ObjectPlace
from ..schema.state import SavedPart
from ..settings import DetectorSettings, RobotSettings, SpatialSettings, TrackerSettings
from ..tracking.appearance import Gallery
from ..tracking.confidence import CALIBRATION, is_calibrated
from ..tracking.names import BUNDLED, NameCalibration
from ..types import Frame, Instance, Mask, MaskFrame, Priority, RobotState
from ..wire.frame_prompt import FramePrompt
from .object_memory import ObjectMemory
from .objects import Objects, ObjectStatus
from .output_masks import copy_masks, to_prompt_results
from .picks.picking import PickScene
from .prompting import Prompting
from .prompts import PromptOutcome, PromptResult
from .reidentification import AppearanceFrame, find_like
from .saved import CameraState, Origin, StagesState
from .stage import Nothing, Stage, StageTimer
from .stages.depth import ReadDepth
from .stages.detect import DetectObjects, FollowDetected, PlanDetection
from .stages.doubt import HideUnsure, JudgeDoubt
from .stages.encode import DecodeImage, EncodeImage, Preprocess
from .stages.held import FindHeld
from .stages.masks import CopyToHost, KeepFrame, MakeMasks, UpdateStatus
from .stages.reidentify import ChooseDescribed, ReidentifyObjects, UpdateObjectMemory
from .stages.robot import CutRobot, FindRobot, Places
from .stages.spatial import MeasuredPoints, MeasureObjects
from .stages.table import DescribeOnTable, FindTable
from .stages.track import FollowCrops, TrackObjects
from .step import StepFrame

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Surroundings:
    """What is known of the pose of one camera: its calibration and its robot."""

    spatial: SpatialSettings = field(default_factory=SpatialSettings)
    calibration: Calibration | None = None
    robot: RobotBody | None = None
    """None: the robot is not looked for"""
    robot_settings: RobotSettings = field(default_factory=RobotSettings)
    find_robot: Callable[[Frame], RobotState] = lambda _: RobotState()
    """Returns the robot at a frame's capture. It is called as late in a step as possible, so that poses may arrive."""
    uncalibrated: str | None = None
    """why no calibration file serves the camera, though there are some"""


class ConfidenceLimits(NamedTuple):
    """Confidences, in 0..1, below which an object is hidden or doubtful."""

    hide_below: float
    """of a mask, below which it is hidden"""
    min_mask: float
    """of a mask, below which it is doubtful"""
    min_name: float
    """of a name, below which the object is doubtful"""


def find_limits(
    model: TrackerModel,
    settings: TrackerSettings,
    detector: Detector | None,
    detection: DetectorSettings,
    names: NameCalibration = BUNDLED,
) -> ConfidenceLimits:
    """Return the limits of the settings. Where confidences are not calibrated for the weights, none is a reason."""
    hide_below = settings.hide_below if is_calibrated(model.name) else 0.0
    are_names_calibrated = detector is not None and names.suits(detector.name)
    min_name = detection.min_name_confidence if are_names_calibrated else 0.0
    return ConfidenceLimits(hide_below, settings.min_confidence, min_name)


@dataclass(frozen=True)
class SpatialStages:
    """The stages that measure objects in 3-D."""

    depth: ReadDepth
    measure: MeasureObjects
    held: FindHeld
    table: FindTable | None
    """None: the table is not looked for"""
    on_table: DescribeOnTable | None
    """None where `table` is"""

    @classmethod
    def make(cls, objects: Objects, surroundings: Surroundings) -> Self:
        """Make the stages that the surroundings ask for."""
        settings = surroundings.spatial
        return cls(
            depth=ReadDepth(
                surroundings.calibration,
                surroundings.find_robot,
                settings.table,
                surroundings.robot is not None,
                surroundings.uncalibrated,
            ),
            measure=MeasureObjects(objects, settings, surroundings.calibration),
            held=FindHeld(objects),
            table=FindTable() if settings.table else None,
            on_table=DescribeOnTable() if settings.table else None,
        )

    def list_after_depth(self) -> list[Stage]:
        """Return the stages that follow `depth`, in their order."""
        stages: list[Stage] = [self.measure]
        if self.table is not None:
            stages.append(self.table)
        # after the others, because it compares the positions that they have measured
        stages.append(self.held)
        # the box of an object that is held does not reach down to the table
        if self.on_table is not None:
            stages.append(self.on_table)
        return stages


class StageList(list[Stage], SavedPart[StagesState]):
    """The stages of a step, in their order. Those that keep something are saved by their names."""

    STATE = StagesState

    def _saved(self) -> dict[str, Stage]:
        return {stage.name: stage for stage in self if stage.STATE is not Nothing}


class Pipeline(SavedPart[CameraState]):
    """Turns the frames of one camera into MaskFrames. Between frames, objects can be added, corrected and removed.

    `prompting` has what else can be asked of the objects and the cached frames. With a detector, `set_prompts` selects
    which objects are found automatically.

    All but model, detector and settings is saved. From where a state was taken, the same frames and prompts give the
    same masks, bit for bit on the same device, if the settings are the same.
    """

    STATE = CameraState

    def __init__(
        self,
        model: TrackerModel,
        settings: TrackerSettings,
        camera: str,
        detector: Detector | None = None,
        detection: DetectorSettings | None = None,
        surroundings: Surroundings | None = None,
        names: NameCalibration = BUNDLED,
    ) -> None:
        surroundings = surroundings or Surroundings()
        self.camera = camera
        self.epoch: int | None = None
        """Set by a live node: ids of another epoch name other objects."""
        self.prompting = Prompting(model, settings, camera)
        self.registry = self.prompting.registry
        """The objects"""
        self.catch_ups = self.prompting.catch_ups
        """The objects that were prompted on an earlier frame"""
        self.finds_robot = surroundings.robot is not None
        self.problem: str | None = None
        """What is wrong with the last frame beside its masks: which stages failed, why 3-D fields are missing or not in
        the base, or why they may be wrong. None if nothing is."""
        self.stage_failures = Counter[str]()
        """Frames that went on without an optional stage, which failed, by its name, since the start."""
        self._late_failures: list[str] = []
        self._model = model
        self._last_instances: Sequence[Instance] = ()
        self._last_had_depth = False
        self._last_capture_ns = 0
        self.last_scene = PickScene()
        """What the last step knows, for picks"""
        self._timer = StageTimer(model.device)
        self._detector = detector
        self._detection: DetectObjects | None = None
        detection = detection or DetectorSettings()
        self.memory = ObjectMemory(self.registry, model.name, settings)
        """What is remembered of the objects, also of those that were lost"""
        if detector is not None:
            self._detection = DetectObjects(
                camera,
                detector,
                self.prompting.tracker,
                self.registry,
                self.prompting.confidence,
                detection,
                self.memory if settings.recall else None,
                names,
            )
        self.spatial = SpatialStages.make(self.registry, surroundings)
        limits = find_limits(model, settings, detector, detection, names)
        self.stages = StageList(self._list_stages(settings, surroundings, limits))
        """What each frame goes through, in this order."""
        self._finishing = [stage for stage in self.stages if type(stage).finish is not Stage.finish]

    def _list_stages(
        self, settings: TrackerSettings, surroundings: Surroundings, limits: ConfidenceLimits
    ) -> list[Stage]:
        """Return the stages in their order."""
        model = self._model
        prompting = self.prompting
        places = Places(self.registry)
        stages: list[Stage] = [
            DecodeImage(model, settings.max_frame_pixels),
            Preprocess(model),
            EncodeImage(model),
        ]
        if surroundings.robot is not None:
            # before the objects that the robot may cover; so depth is read early, which else may not be needed at all
            stages.append(self.spatial.depth)
            how = surroundings.robot_settings
            stages.append(FindRobot(surroundings.robot, how, model, places, settings.exclude_robot))
        # on the device
        if self._detection is not None:
            stages.append(PlanDetection(self._detection))
        stages.append(
            TrackObjects(self.camera, prompting.tracker, self.registry, prompting.pending, self.catch_ups)
        )
        if self._detection is not None:
            stages.append(self._detection)
        if settings.recall:
            stages.append(
                ReidentifyObjects(prompting.tracker, self.registry, self.memory, prompting.confidence)
            )
        # after all that decides which object has which mask
        if prompting.crops is not None:
            stages.append(FollowCrops(model, prompting.tracker, prompting.crops))
        takes_exemplars = isinstance(self._detector, ExemplarDetector)
        stages.append(KeepFrame(prompting.frame_cache, self.catch_ups, takes_exemplars))
        stages.append(ChooseDescribed(self.memory))
        # on the host
        stages += [CopyToHost(), MakeMasks(prompting.confidence), HideUnsure(limits.hide_below)]
        if self.finds_robot:
            stages.append(CutRobot(places))
        if self._detection is not None:
            stages.append(FollowDetected(self._detection))
        has_identity_mismatch = self.memory.has_identity_mismatch if settings.recall else lambda _: False
        stages.append(JudgeDoubt(limits.min_mask, limits.min_name, has_identity_mismatch))
        stages.append(UpdateStatus(self.registry))
        if surroundings.robot is None:
            stages.append(self.spatial.depth)
        stages += self.spatial.list_after_depth()
        # after all that says where the objects are
        stages.append(UpdateObjectMemory(self.memory))
        return stages

    @torch.inference_mode()
    def step(self, given: StepFrame | Frame) -> MaskFrame:
        """Track all objects on the next frame, and find and measure what the settings say.

        A frame alone stands for a StepFrame of it. The result's `stages_us` holds the stages that ran; packing comes
        later. Raises WireError if the image cannot be decoded; nothing is changed then.
        """
        step = StepFrame(given) if isinstance(given, Frame) else given
        step.failures += self._late_failures
        self._late_failures = []
        self._timer.start()
        for stage in self.stages:
            with (
                self._guard(stage, step.failures),
                self._timer.measure(stage.counts_as or stage.name, stage.clock(step)),
            ):
                stage.run(step)
        # first what went wrong in this program
        step.problem = "; ".join([*step.failures, *([step.problem] if step.problem else [])]) or None
        self.problem = step.problem
        self._last_instances = step.instances
        self._last_capture_ns = step.frame.capture_ns
        self._last_had_depth = step.frame.depth is not None
        self.last_scene = PickScene.of(step)
        masks = make_masks(step, self._model.name, self.prompts, self._timer.read())
        if step.finishes:
            self.finish(step)
        return masks

    @torch.inference_mode()
    def finish(self, step: StepFrame) -> None:
        """Do what the masks of the last step did not need. A failure is told with those of the next one."""
        for stage in self._finishing:
            with self._guard(stage, self._late_failures):
                stage.finish(step)

    @contextmanager
    def _guard(self, stage: Stage, failures: list[str]) -> Iterator[None]:
        """Note a failure of an optional stage, without which the frame goes on."""
        try:
            yield
        except Exception as error:
            # a failed device fails later stages, too; memory that ran out may suffice in a replay
            if not stage.is_optional or find_device_error(error) or is_out_of_memory(error):
                raise
            failures.append(self._give_up(stage, error))

    def _give_up(self, stage: Stage, error: Exception) -> str:
        """Count and log that an optional stage has failed; return what the frame's `problem` says of it."""
        stage.give_up()
        # the first one tells where it failed; more would fill the log with each frame
        if stage.name not in self.stage_failures:
            log.warning(
                "%s: the frame goes on without %s, which failed", self.camera, stage.name, exc_info=error
            )
        self.stage_failures[stage.name] += 1
        return f"the stage {stage.name} failed: the frame has masks without what it adds: {summarize_error(error)}"

    @property
    def prompts(self) -> tuple[str, ...]:
        """The phrases that the detector searches for."""
        return self._detection.phrases if self._detection is not None else ()

    @property
    def best_scores(self) -> dict[str, float]:
        """Highest score of a detection of each prompt, of those that had any, see DetectObjects."""
        return self._detection.best_scores if self._detection is not None else {}

    @property
    def turned_away(self) -> int:
        """Number of detections that were dropped because all object slots were taken."""
        return self._detection.turned_away if self._detection is not None else 0

    def name_features(self, object_id: int) -> list[float] | None:
        """Return the features of the name of a detected object, see `tracking.names`; None for other objects."""
        return self._detection.name_features(object_id) if self._detection is not None else None

    def set_prompts(self, prompts: PromptSet) -> None:
        """Detect these prompts, starting with the next frame; without phrases, detection stops.

        Detected objects whose label is no longer among the prompts are removed. Other objects do not change. Without a
        detector, none can be prepared.
        """
        if self._detection is not None:
            self._detection.set_prompts(prompts)

    @property
    def objects(self) -> list[ObjectStatus]:
        """The objects, in the order in which they were added."""
        return list(self.registry)

    def add(
        self,
        prompt: FramePrompt,
        label: str = "object",
        seq: int | None = None,
        priority: Priority = "normal",
        stride: int | None = None,
        choice: int | None = None,
    ) -> PromptOutcome:
        """Start to track an object, see `Prompting.add`."""
        return self.prompting.add(prompt, label, seq, priority, stride, choice)

    def refine(
        self, object_id: int, prompt: FramePrompt, seq: int | None = None, stride: int | None = None
    ) -> PromptResult:
        """Correct an object, see `Prompting.refine`. What the user shows is the object, whatever it looks like."""
        result = self.prompting.refine(object_id, prompt, seq, stride)
        self.memory.confirm(object_id)
        return result

    def remove(self, object_id: int) -> None:
        """Remove an object; UnknownObjectError if there is none with this id."""
        self.registry.remove(object_id)

    def reset(self) -> None:
        """Remove all objects, and forget those that were lost. Cached frames stay, so prompts on them still work."""
        for status in self.objects:
            self.remove(status.id)
        self.memory.clear()

    def rename(self, object_id: int, label: str) -> None:
        """Change an object's label for good: detections change it no longer. UnknownObjectError for an unknown id."""
        self.registry.rename(object_id, label)
        if self._detection is not None:
            self._detection.forget(object_id)

    def where(self, object_id: int | None, label: str | None) -> list[ObjectPlace]:
        """Return where the objects of an id or a label are, or were seen last; see `ObjectMemory.describe`."""
        return self.memory.describe(object_id, label, self._last_capture_ns, self.camera)

    @torch.inference_mode()
    def add_like(self, gallery: Gallery, label: str) -> PromptOutcome:
        """Begin an object where the latest frame surely shows what has this appearance.

        Raises RequestError where it does not, and CapacityError if all slots are taken; nothing is changed then.
        """
        object_id = self.registry.reserve()
        prompting = self.prompting
        tracker = prompting.tracker
        cached = prompting.find()
        image = prompting.frame_cache.latest_image
        assert image is not None  # as there is a frame
        scene = AppearanceFrame.from_cached(cached, image, tracker)
        found = find_like(scene, tracker, gallery, self.memory.limits)
        track = tracker.adopt(scene.features, cached.frame_number, object_id, found.decoded, found.choice)
        self.registry.add(object_id, label)
        self.memory.begin(object_id, gallery)
        logits = track.logits[None]
        prompting.confidence.start(object_id, copy_masks(logits)[0].levels)
        cached.set_logits(object_id, track.logits)
        result = to_prompt_results(cached.seq, cached.scaling, logits, track.score[None])[0]
        return PromptOutcome(object_id, result)

    def points(self, object_id: int, count: int) -> MeasuredPoints | None:
        """Return up to `count` measured points of an object's surface on the last frame; None if it has none."""
        return self.spatial.measure.points(object_id, count)

    def explain_no_points(self, object_id: int) -> str:
        """Say why `points` has none of an object."""
        # the object first: the frame's problem may be a mere warning, which has not kept it from being measured
        seen = next((instance for instance in self._last_instances if instance.id == object_id), None)
        if seen is None:
            return "it has not been on a frame yet; ask again when it is tracked"
        if not self._last_had_depth:
            return "the frame has no depth; send frames with depth"
        if not seen.mask.crop.size:
            return "it has no mask there, so it is hidden or lost"
        if seen.doubtful:
            return "its mask is doubtful; correct it with refine_object, or wait until it is sure"
        if seen.depth_share is None and self.problem is not None:
            return self.problem
        reason = "no valid depth under its mask; it may be too near, too far, shiny or transparent"
        return reason if self.problem is None else f"{reason}; the frame's problem: {self.problem}"

    @property
    def prompt_set(self) -> PromptSet | None:
        """The prompts of the detector; None without one."""
        return self._detection.prompts if self._detection is not None else None

    @property
    def origin(self) -> Origin:
        """The properties that must be equal for a state to fit this pipeline."""
        return Origin(
            model=self._model.name,
            detector=None if self._detector is None else self._detector.name,
            bank=str(self.prompting.tracker.bank.layout),
            calibration=CALIBRATION,
        )

    def before_restore(self, state: CameraState) -> None:
        """Check that the state fits, and prepare its prompts.

        Raises ReplayError for the state of another model, detector or memory bank, and RequestError if the detector
        cannot search for its prompts; nothing is changed then.
        """
        if state.origin != self.origin:
            raise ReplayError(
                f"camera {self.camera}: expected a state of {self.origin}, found one of {state.origin!r:.400}; "
                "continue with the model and the settings of that state"
            )
        if self._detection is not None and state.prompt_set is not None:
            self._detection.prompts = state.prompt_set.prepare(self._detector)


def make_masks(step: StepFrame, model: str, prompts: tuple[str, ...], stages_us: dict[str, int]) -> MaskFrame:
    """Return the masks of a step that has gone through all stages."""
    frame = step.frame
    return MaskFrame(
        camera=frame.camera,
        seq=frame.seq,
        capture_ns=frame.capture_ns,
        clock=frame.clock,
        width=frame.width,
        height=frame.height,
        received_ns=step.received_ns,
        skipped=step.skipped,
        model=model,
        prompts=prompts,
        stages_us=stages_us,
        instances=tuple(step.instances),
        camera_pose=step.camera_pose,
        robot_pose=step.robot_state.pose if step.robot_state is not None else None,
        joints=step.robot.joints if step.robot is not None else None,
        robot_mask=Mask.from_full(step.robot.inside) if step.robot is not None else None,
        table=step.table,
        **(asdict(step.decisions) | {"shed": step.shed}),
    )
