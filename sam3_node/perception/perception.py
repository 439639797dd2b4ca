"""Hold the pipelines of all cameras with one model, one detector and one set of prompts.

Node and replay share it. A live node also has a `LiveIdentity`: its name, the epochs of its cameras' ids, and which
cameras send. A replay has none, so its results depend neither on random numbers nor on the time at which it runs.
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import cv2
import torch

from ..calibration import Calibration, load_calibration
from ..detection.detectors import (
    Boxes,
    Detector,
    PromptSet,
    add_exemplar,
    prepare_prompts,
)
from ..detection.loading import KINDS
from ..detection.phrases import clean_prompts
from ..engines.detector import resolve_folder
from ..engines.engine_store import checkpoint_digest
from ..engines.options import resolve
from ..errors import (
    EngineError,
    SettingsError,
    find_version,
)
from ..models import TrackerModel
from ..robot.body import RobotBody
from ..schema.state import State, from_plain, to_plain
from ..settings import Settings
from ..tracking.confidence import CALIBRATION, is_calibrated
from ..tracking.names import BUNDLED, NameCalibration, load_name_calibration
from ..types import Frame, Image, MaskEncoding, MaskFrame, Priority, RobotState
from .identity import LiveIdentity
from .linking import CameraObject, LinkRules, WorldLinker
from .loading import load_models
from .pipeline import Pipeline, Surroundings
from .saved import PerceptionState, check_state


class Perception:
    """The pipelines of all cameras. They share one model, one detector, and one set of prompts.

    The operations of the control socket change this object.
    """

    def __init__(self, settings: Settings, model: TrackerModel, detector: Detector | None) -> None:
        self.paused = False
        self.searching = False
        """True while everything on a frame is searched for, which takes many turns."""
        self.reading_photo = False
        """True while the photo of a request is decoded, which takes many turns."""
        self.session: LiveIdentity | None = None
        """Set by a live node before it serves a camera."""
        self.settings = settings
        self.model = model
        self.detector = detector
        self.name_calibration = load_name_calibration(settings.detector.name_calibration)
        self._calibrations: tuple[Calibration, ...] = ()
        self._nameless_owner: str | None = None
        """The camera that the calibration without a camera's name serves: the first one without its own."""
        self.find_robot: Callable[[Frame], RobotState] = lambda _: RobotState()
        """Returns the robot at a frame's capture, for steps that do not say it. Set before a camera is served."""
        urdf = settings.robot.urdf
        self.robot = RobotBody(urdf, settings.robot.base) if urdf is not None else None
        self.pipelines: dict[str, Pipeline] = {}
        """The pipeline of each camera; `serve` and `drop` change it."""
        self._prompts = PromptSet()
        self.forget_things()
        if settings.detector.prompts:
            self.set_prompts(settings.detector.prompts)

    @classmethod
    def load(cls, settings: Settings) -> Self:
        """Load the model and the detector that `settings` name.

        Raises ModelError, VocabularyError, EngineError, MissingExtraError or SettingsError if they cannot be used.
        """
        # before the model, which takes long to load: a wrong file is refused at once
        calibrations = tuple(map(load_calibration, settings.spatial.calibration))
        load_name_calibration(settings.detector.name_calibration)
        settings = resolve(settings)
        perception = cls(settings, *load_models(settings))
        perception.calibrations = calibrations
        return perception

    @property
    def calibrations(self) -> tuple[Calibration, ...]:
        """The calibrations of the cameras. Set them before a camera is served."""
        return self._calibrations

    @calibrations.setter
    def calibrations(self, calibrations: tuple[Calibration, ...]) -> None:
        self._calibrations = calibrations
        # other files have another one without a camera's name
        self._nameless_owner = None

    @property
    def name_calibration(self) -> NameCalibration:
        """Return what tells how sure names of the detector are. Set it before a camera is served.

        To set one that was fitted to another detector raises SettingsError, unless it is the bundled one.
        """
        return self._name_calibration

    @name_calibration.setter
    def name_calibration(self, found: NameCalibration) -> None:
        if found is not BUNDLED and self.detector and not found.suits(self.detector.name):
            raise SettingsError(
                f"detector.name_calibration: expected one for {self.detector.name}, found one for "
                f"{', '.join(found.detectors):.200}; make it with sam3-node calibrate names"
            )
        self._name_calibration = found

    @property
    def prompts(self) -> tuple[str, ...]:
        """The phrases that the detector searches for."""
        return self._prompts.phrases

    @property
    def mask_encoding(self) -> MaskEncoding:
        """The encoding of masks in replies."""
        return self.settings.tracker.mask_encoding

    def serve(self, camera: str) -> Pipeline:
        """Return the pipeline of a camera; create it if the camera has none."""
        if camera not in self.pipelines:
            calibration = self._find_calibration(camera)
            surroundings = Surroundings(
                spatial=self.settings.spatial,
                calibration=calibration,
                uncalibrated=self._explain_uncalibrated(camera) if calibration is None else None,
                robot=self.robot,
                robot_settings=self.settings.robot,
                find_robot=self.find_robot,
            )
            pipeline = Pipeline(
                self.model,
                self.settings.tracker,
                camera,
                self.detector,
                self.settings.detector,
                surroundings,
                self._name_calibration,
            )
            if self.session is not None:
                pipeline.epoch = self.session.make_epoch()
            # a camera that comes later searches for the same names
            if self.prompts:
                pipeline.set_prompts(self._prompts)
            self.pipelines[camera] = pipeline
        return self.pipelines[camera]

    def _find_calibration(self, camera: str) -> Calibration | None:
        """Return the camera's own calibration, else the one that names no camera if no other camera has taken it."""
        own = [calibration for calibration in self.calibrations if calibration.camera == camera]
        if own:
            return own[0]
        nameless = [calibration for calibration in self.calibrations if not calibration.camera]
        if not nameless:
            return None
        # two cameras stand at two places: what is right for one gives wrong positions for the other. A restored state
        # may name a camera that has a file of its own by now
        named = {calibration.camera for calibration in self.calibrations}
        if self._nameless_owner is None or self._nameless_owner in named:
            self._nameless_owner = camera
        return nameless[0] if self._nameless_owner == camera else None

    def _explain_uncalibrated(self, camera: str) -> str | None:
        """Return why no calibration file serves a camera, None if there is no file."""
        if not self.calibrations:
            return None
        if self._nameless_owner is not None:
            return (
                f"no calibration of camera {camera}: the file that names no camera serves {self._nameless_owner:.200}, "
                f'found first; write camera = "NAME" into each file of spatial.calibration, one of them "{camera}"'
            )
        named = sorted({calibration.camera for calibration in self.calibrations})
        return (
            f"no calibration of camera {camera}: the files of spatial.calibration are for {', '.join(named):.200}; "
            f'add one with camera = "{camera}"'
        )

    def drop(self, camera: str) -> None:
        """Remove a camera and its objects, if the camera has a pipeline."""
        # served anew, the camera would give the same ids to other things, so the links go, too
        self.pipelines.pop(camera, None)
        if self.linker is not None:
            self.linker.drop(camera)

    def forget_things(self) -> None:
        """Forget what belongs to no camera alone: the links of objects, and whom the nameless calibration serves.

        Call it when there are no cameras.
        """
        self._nameless_owner = None
        distance_m = self.settings.tracker.link_distance_m
        self.linker = WorldLinker(LinkRules(distance_m)) if distance_m else None

    def link(self, masks: MaskFrame) -> MaskFrame:
        """Return the masks of a step with `world_id`, if objects are linked. Call it once for each step, in order."""
        return masks if self.linker is None else self.linker.observe(masks)

    def join(self, camera: str, object_id: int, other_camera: str, other_id: int) -> None:
        """Take objects of two cameras for one thing, if objects are linked."""
        if self.linker is not None:
            self.linker.join(CameraObject(camera, object_id), CameraObject(other_camera, other_id))

    def set_prompts(
        self,
        phrases: Sequence[object],
        scores: Mapping[str, float] | None = None,
        max_counts: Mapping[str, int] | None = None,
        priorities: Mapping[str, Priority] | None = None,
    ) -> tuple[str, ...]:
        """Detect these phrases on all cameras, starting with the next frame; no phrases stop detection.

        scores: the thresholds of some phrases. max_counts: the maximum number of objects of some phrases. priorities:
        of the objects of some phrases. A phrase keeps its exemplar. Return the cleaned phrases. Raises RequestError for
        phrases that cannot be used; nothing is changed then.
        """
        cleaned = clean_prompts(phrases)
        score = self.settings.detector.score
        kept = self._prompts.exemplars
        # all of it is prepared before any camera changes, so that a refusal changes nothing
        prompts = prepare_prompts(self.detector, cleaned, score, scores, max_counts, priorities, kept)
        self._use_prompts(prompts)
        return cleaned

    def add_exemplar(
        self, name: str, image: Image, *, place: str, boxes: Boxes, labels: Sequence[int], text: str
    ) -> tuple[str, ...]:
        """Detect all that is like boxes on a BGR image, under this name, on all cameras, as `set_prompts` does.

        See `detectors.add_exemplar`. Return the phrases. Raises RequestError for what cannot be used; nothing is
        changed then.
        """
        prompts = add_exemplar(
            self.detector,
            self._prompts,
            name,
            image,
            place=place,
            boxes=boxes,
            labels=labels,
            text=text,
            score=self.settings.detector.score,
        )
        self._use_prompts(prompts)
        return self.prompts

    def _use_prompts(self, prompts: PromptSet) -> None:
        self._prompts = prompts
        for pipeline in self.pipelines.values():
            pipeline.set_prompts(prompts)

    def state(self, whole: bool = True) -> State:
        """Return the state that `restore` takes: prompts, cameras with their objects and epochs, links, the pause.

        Also the camera that the calibration without a camera's name serves. Unless `whole`, most cached frames are left
        out, see `PromptingState.drop_frames`.
        """
        # by hand, as is `restore`: a camera is made when it is restored, and its epoch belongs to the live node
        state = PerceptionState(
            prompts=self._prompts,
            paused=self.paused,
            cameras={camera: pipeline.state() for camera, pipeline in self.pipelines.items()},
            epochs={camera: pipeline.epoch for camera, pipeline in self.pipelines.items()},
            links=None if self.linker is None else self.linker.state(),
            nameless_owner=self._nameless_owner,
        )
        if not whole:
            for saved in state.cameras.values():
                saved.prompting.drop_frames()
        plain: State = to_plain(state)
        return plain

    def restore(self, state: State) -> None:
        """Replace all cameras, and continue from the moment at which `state` was called.

        Raises ReplayError for the state of another model or other settings, and RequestError if the detector cannot
        search for its prompts. Some cameras may be missing then.
        """
        # before anything changes: later steps rely on all of it
        self._use(check_state(state))

    def put_back(self, state: State) -> None:
        """Do the same with a state of this object itself, whose parts need not be compared."""
        self._use(from_plain(PerceptionState, state))

    def _use(self, state: PerceptionState) -> None:
        # nothing of before may stay, also of cameras that the state does not have
        for camera in list(self.pipelines):
            self.drop(camera)
        self.forget_things()
        self._nameless_owner = state.nameless_owner
        # before the cameras, which are served with these prompts
        # without phrases, no detector is needed
        self._prompts = state.prompts.prepare(self.detector) if state.prompts.phrases else state.prompts
        for camera, saved in state.cameras.items():
            pipeline = self.serve(camera)
            pipeline.restore(saved)
            # the state's own epoch, not the one that `serve` has just made
            pipeline.epoch = state.epochs[camera]
        if self.linker is not None and state.links is not None:
            self.linker.restore(state.links)
        self.paused = state.paused

    def begin_epochs(self) -> None:
        """Let the ids of all cameras begin again: clients learn that the objects are not those that they knew."""
        if self.session is not None:
            for pipeline in self.pipelines.values():
                pipeline.epoch = self.session.make_epoch()

    def status(self) -> dict[str, Any]:
        """Return the names of model and detector, the prompts, the device and the dtype; the node's name if live."""
        return {
            **({"node": self.session.node} if self.session else {}),
            "paused": self.paused,
            "model": self.model.name,
            "can_track": self.model.can_track,
            "has_memory": self.model.has_memory,
            "confidence_calibrated": is_calibrated(self.model.name),
            "detector": self.detector.name if self.detector else None,
            "prompts": list(self.prompts),
            "prompt_limits": {
                "scores": dict(self._prompts.thresholds),
                "most": dict(self._prompts.max_counts),
                "priorities": dict(self._prompts.priorities),
            },
            "exemplars": {name: shown.labels for name, shown in self._prompts.exemplars.items()},
            "prompt_scores": self.best_scores,
            "device": str(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            # it decides how sums are split, and so how they round
            "threads": torch.get_num_threads(),
        }

    @property
    def best_scores(self) -> dict[str, float]:
        """Highest score of a detection of each prompt since it was set, over all cameras; 0 for none."""
        scores = [pipeline.best_scores for pipeline in self.pipelines.values()]
        return {
            name: round(max((some.get(name, 0.0) for some in scores), default=0.0), 4)
            for name in self.prompts
        }

    @property
    def device_bytes(self) -> int | None:
        """Memory that torch holds on the GPU, in bytes; None on a CPU. Any thread may read it."""
        device = self.model.device
        return torch.cuda.memory_reserved(device) if device.type == "cuda" else None

    def describe(self) -> dict[str, Any]:
        """Return what is needed to compute the same masks again: settings, digests, device and versions."""
        return {
            **self.status(),
            "settings": self.settings.model_dump(mode="json"),
            "calibrations": [calibration.model_dump(mode="json") for calibration in self.calibrations],
            "name_calibration": None if self.name_calibration is BUNDLED else to_plain(self.name_calibration),
            **self.digests,
            "confidence": {"calibration": CALIBRATION, "calibrated": is_calibrated(self.model.name)},
            "device_name": _device_name(self.model.device),
            "versions": {
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "opencv": cv2.__version__,
                "sam3-node": find_version("sam3-node") or "not installed",
            },
        }

    # weights are large files, so they are read once
    @cached_property
    def digests(self) -> dict[str, str]:
        """SHA-256 of the weights of model and detector; empty for weights that are not files."""
        settings = self.settings
        weights = resolve_folder(settings.detector)
        # the hub is not asked for a name that another package reads
        is_read = self.detector is not None and (settings.detector.kind in KINDS or weights.exists())
        return {
            "model_digest": compute_digest(settings.model.name),
            "detector_digest": compute_digest(str(weights)) if is_read else "",
        }


def compute_digest(name: str) -> str:
    """Return the SHA-256 of the weights with this name or in this folder; empty if there are no local files."""
    try:
        return checkpoint_digest(name)
    except EngineError:
        return ""


def _device_name(device: torch.device) -> str:
    """Return the device's name. A CPU's includes its instruction set, which decides how torch's kernels round."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or 'cpu'} {torch.backends.cpu.get_cpu_capability()}"
