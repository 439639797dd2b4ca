"""Hold the pipelines of all cameras with one model, one detector and one set of prompts; load and warm up the models.

Node and replay share it. A live node also has a `LiveIdentity`: its name, the epochs of its cameras' ids, and which
cameras send. A replay has none, so its results depend neither on random numbers nor on the time at which it runs.
"""

import platform
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, Self

import cv2
import numpy as np
import torch

from ..calibration import Calibration, load_calibration
from ..detection.detectors import (
    Boxes,
    Detector,
    PromptSet,
    add_exemplar,
    prepare_prompts,
    restore_prompts,
)
from ..detection.phrases import clean_prompts
from ..engines.choice import choose
from ..engines.detector import choose_phrases, load_chosen, resolve_folder, serve_detector
from ..engines.engine_store import FP8, checkpoint_digest, choose_model_dtype, identify_setup
from ..engines.fast_torch import has_open_dtype, load_by_gate, serve_fast_torch
from ..engines.inductor import CompiledArtifacts, keep_compiled, use_graphs
from ..engines.oom import STAGE_ERRORS, find_device_error, reraise_out_of_memory, to_engine_error
from ..engines.slot import serve_tracker, use_torch
from ..errors import (
    EngineError,
    ModelError,
    NodeRestarted,
    RequestError,
    SettingsError,
    UnknownFrameError,
    find_version,
)
from ..models import TrackerModel, load_tracker
from ..models.sam.stages import Stages
from ..settings import DetectorSettings, EngineSettings, ModelSettings, Settings, TrackerSettings
from ..tracking.confidence import CALIBRATION, is_calibrated
from ..types import CAMERA_SILENT_S, Frame, Image, Mask, MaskEncoding, MaskFrame, Priority, State
from ..wire import MAX_EPOCH
from ..wire.frame_prompt import FramePrompt
from .linking import LinkRules, WorldLinker
from .pipeline import Pipeline
from .robot import RobotBody, RobotStage
from .spatial import SpatialStage


class Perception:
    """The pipelines of all cameras. They share one model, one detector, and one set of prompts.

    The operations of the control socket change this object.
    """

    def __init__(self, settings: Settings, model: TrackerModel, detector: Detector | None) -> None:
        self.paused = False
        self.searching = False
        """True while everything on a frame is searched for, which takes many turns."""
        self.session: LiveIdentity | None = None
        """Set by a live node before it serves a camera."""
        self.settings, self.model, self.detector = settings, model, detector
        self.calibrations: tuple[Calibration, ...] = ()
        """Set before a camera is served."""
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
        calibrations = tuple(map(load_calibration, settings.spatial.calibration))
        settings = choose(settings, _load_to_serve)
        perception = cls(settings, *load_models(settings))
        perception.calibrations = calibrations
        return perception

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
            # the camera's own calibration, else the first that names no camera
            fitting = [calibration for calibration in self.calibrations if calibration.camera in (camera, "")]
            calibration = min(fitting, key=lambda calibration: calibration.camera != camera, default=None)
            spatial = SpatialStage(self.settings.spatial, calibration)
            robot = RobotStage(self.robot, self.settings.robot) if self.robot is not None else None
            pipeline = Pipeline(
                self.model,
                self.settings.tracker,
                camera,
                self.detector,
                self.settings.detector,
                spatial,
                robot,
            )
            if self.session is not None:
                pipeline.epoch = self.session.make_epoch()
            if self.prompts:
                pipeline.set_prompts(self._prompts)
            self.pipelines[camera] = pipeline
        return self.pipelines[camera]

    def drop(self, camera: str) -> None:
        """Remove a camera and its objects, if the camera has a pipeline."""
        self.pipelines.pop(camera, None)
        if self.linker is not None:
            self.linker.drop(camera)

    def forget_things(self) -> None:
        """Begin again to link the objects of several cameras, if the settings say that they are linked."""
        distance_m = self.settings.tracker.link_distance_m
        self.linker = WorldLinker(LinkRules(distance_m)) if distance_m else None

    def link(self, masks: MaskFrame) -> MaskFrame:
        """Return the masks of a step with `world_id`, if objects are linked. Call it once for each step, in order."""
        return masks if self.linker is None else self.linker.observe(masks)

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
        score, kept = self.settings.detector.score, self._prompts.exemplars
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

        See `Pipeline.state` for `whole`.
        """
        return {
            "prompts": self._prompts.state(),
            "paused": self.paused,
            "cameras": {camera: pipeline.state(whole) for camera, pipeline in self.pipelines.items()},
            "epochs": {camera: pipeline.epoch for camera, pipeline in self.pipelines.items()},
            "links": self.linker and self.linker.state(),
        }

    def restore(self, state: State) -> None:
        """Replace all cameras, and continue from the moment at which `state` was called.

        Raises ReplayError for the state of another model or other settings, and RequestError if the detector cannot
        search for its prompts. Some cameras may be missing then.
        """
        for camera in list(self.pipelines):
            self.drop(camera)
        self.forget_things()
        self._prompts = restore_prompts(self.detector, state["prompts"])
        for camera, saved in state["cameras"].items():
            pipeline = self.serve(camera)
            pipeline.restore(saved)
            pipeline.epoch = state["epochs"][camera]
        if self.linker is not None and state["links"] is not None:
            self.linker.restore(state["links"])
        self.paused = state["paused"]

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
            **self.digests,
            "confidence": {"calibration": CALIBRATION, "calibrated": is_calibrated(self.model.name)},
            "device_name": _device_name(self.model.device),
            "threads": torch.get_num_threads(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "opencv": cv2.__version__,
                "sam3-node": find_version("sam3-node") or "not installed",
            },
        }

    @cached_property
    def digests(self) -> dict[str, str]:
        """SHA-256 of the weights of model and detector; empty for weights that are not files."""
        settings = self.settings
        return {
            "model_digest": compute_digest(settings.model.name),
            "detector_digest": compute_digest(str(resolve_folder(settings.detector)))
            if self.detector
            else "",
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


class LiveIdentity:
    """One run of a live node; `node` is its name, 16 random hex digits.

    `silent_s` returns the seconds since the last frame of a camera; None if none has come. Prompts on frames that are
    older than `max_prompt_age_s` are refused; 0 is no limit. With lossless delivery (`live` is False) frames wait in
    queues, so that neither silence nor age says anything.
    """

    def __init__(self, silent_s: Callable[[str], float | None], max_prompt_age_s: float, live: bool) -> None:
        self.node = secrets.token_hex(8)
        self.silent_s = silent_s
        self._max_prompt_age_s = max_prompt_age_s
        self._live = live

    @staticmethod
    def make_epoch() -> int:
        """Return an epoch for a camera whose ids begin now."""
        return 1 + secrets.randbelow(MAX_EPOCH)

    def sends(self, camera: str) -> bool:
        """Return True if a frame of this camera has come within CAMERA_SILENT_S."""
        silent_s = self.silent_s(camera)
        return not self._live or (silent_s is not None and silent_s < CAMERA_SILENT_S)

    @staticmethod
    def check_epoch(epoch: int, current: Collection[int | None]) -> None:
        """Raise NodeRestarted unless the `epoch` of a request is one of the `current` ones that it may mean."""
        if epoch not in current:
            raise NodeRestarted(
                f"the object ids of epoch {epoch} are void, now it is {', '.join(map(str, current))}: the node was "
                "started again, or served the camera anew; forget its ids and add its objects again"
            )

    def prompt_age_ms(self, age_origin_ns: int) -> float | None:
        """Return the age in ms of a frame to prompt on; None with lossless delivery."""
        return round(max(0, time.time_ns() - age_origin_ns) / 1e6, 3) if self._live else None

    def check_prompt_age(self, camera: str, age_ms: float | None) -> None:
        """Raise UnknownFrameError if a frame to prompt on is older than the limit."""
        if age_ms is not None:
            self._check_limit(f"camera {camera}: the frame to prompt on was taken", age_ms / 1000)

    def check_next_frame(self, camera: str) -> None:
        """Raise UnknownFrameError if a camera has sent no frame for longer than the limit."""
        silent_s = self.silent_s(camera)
        if self._live and silent_s is not None:
            self._check_limit(f"camera {camera}: the latest frame came", silent_s)

    def _check_limit(self, subject: str, age_s: float) -> None:
        if 0 < self._max_prompt_age_s < age_s:
            raise UnknownFrameError(
                f"{subject} {age_s:.1f} s ago, expected at most {self._max_prompt_age_s:g} s before the prompt "
                "(tracker.max_prompt_age_s): check that the camera runs, and prompt on a newer frame"
            )


MEMORY_HINT = (
    "stop other processes that use it, or lower --tracker.max_objects, --tracker.bank_size or "
    "--model.image_size"
)


def load_model(
    model_settings: ModelSettings, tracker: TrackerSettings, engine: EngineSettings | None = None
) -> TrackerModel:
    """Load the tracker, install the engine that `engine` selects, and warm up where the first frames would be slow.

    Where a detector may share the tracker's encoder, use `load_models`. Raises ModelError if the weights cannot be used
    or do not fit into memory. Without `engine.fallback`, raises EngineError or MissingExtraError if the engine cannot
    be used.
    """
    settings = Settings(
        model=model_settings,
        tracker=tracker,
        engine=engine or EngineSettings(),
        detector=DetectorSettings(kind="none"),
    )
    return load_models(settings)[0]


def load_models(settings: Settings) -> tuple[TrackerModel, Detector | None]:
    """Load the tracker as `load_model` does, and the detector as `load_configured_detector` does.

    The detector is loaded before a gate or a warm-up runs the tracker: one that shares its encoder adds an output to
    it, and the encoder would be compiled or captured again.
    """
    settings = choose(settings, _load_to_serve)
    hint = f"while {settings.model.name} was loaded"
    with reraise_out_of_memory(ModelError, hint, MEMORY_HINT):
        model = _load_torch(settings)
    detector = load_configured_detector(settings.detector, settings.model, model, settings.engine)
    with reraise_out_of_memory(ModelError, hint, MEMORY_HINT), _keeping_artifacts(settings):
        torch_stages = model.stages
        _serve(model, settings)
        if model.has_memory and (settings.model.compile or model.device.type == "cuda"):
            warm_up(model, settings, torch_stages)
            if detector is not None:
                _detect_on_blank_frame(detector, model, settings)
    return model, detector


def _load_torch(settings: Settings) -> TrackerModel:
    """Load the tracker with its torch stages."""
    model_settings = settings.model
    if model_settings.threads:
        torch.set_num_threads(model_settings.threads)
    if _compiles(settings):
        keep_compiled(settings.engine.folder)

    def load(dtype: str | torch.dtype) -> TrackerModel:
        return load_tracker(
            model_settings.name,
            device=model_settings.device,
            dtype=dtype,
            compile=model_settings.compile is True,
            image_size=model_settings.image_size,
        )

    model = load_by_gate(load, settings) if has_open_dtype(settings) else load(choose_model_dtype(settings))
    _use_read(model, settings)
    return model


def _compiles(settings: Settings) -> bool:
    engine = settings.engine
    return settings.model.compile is True or (engine.kind == "torch" and engine.precision == FP8)


def _serve(model: TrackerModel, settings: Settings) -> None:
    """Put engines, faster stages and CUDA graphs in the place of the tracker's torch stages, as the settings say."""
    serve_tracker(model, settings)
    serve_fast_torch(model, settings)
    if settings.engine.graphs:
        use_graphs(model)


def _load_to_serve(settings: Settings) -> TrackerModel:
    """Load the tracker alone, as it would serve."""
    with reraise_out_of_memory(ModelError, f"while {settings.model.name} was loaded", MEMORY_HINT):
        model = _load_torch(settings)
        _serve(model, settings)
    return model


@contextmanager
def _keeping_artifacts(settings: Settings) -> Iterator[None]:
    """Load what torch compiled for these weights before, and keep what the block compiles."""
    artifacts = None
    if _compiles(settings):
        with suppress(EngineError):  # of weights that are no files
            artifacts = CompiledArtifacts(settings.engine.folder, identify_setup(settings))
    if artifacts:
        artifacts.load()
    yield
    if artifacts:
        artifacts.save()


def _use_read(model: TrackerModel, settings: Settings) -> None:
    """Let the model attend to memories as the settings say. Raises SettingsError for an approximation with engines."""
    method, kind = settings.tracker.read, settings.engine.kind
    if method != "exact" and kind != "torch":
        raise SettingsError(
            f"tracker.read {method}: expected engine.kind torch, found {kind}, whose engines read exactly; use "
            "--tracker.read exact"
        )
    model.use_read(method)


def warm_up(model: TrackerModel, settings: Settings, torch_stages: Stages) -> None:
    """Track on blank frames, so that kernels, contexts, CUDA graphs and memory exist before the first real frame.

    If other stages than `torch_stages` fail here, `torch_stages` replace them, and the model's name states the
    reason. Raises EngineError instead if `engine.fallback` is off. Raises the error of torch if `torch_stages` fail.
    """
    try:
        _track_blank_frames(model, settings.tracker)
        return
    except STAGE_ERRORS as error:
        if model.stages is torch_stages:
            raise
        if lost := find_device_error(error):
            raise lost from error
        reason = to_engine_error(error, "on the first frames")
        if not settings.engine.fallback:
            raise reason from error
    # outside of the except block: the traceback, which holds the failed stages' memory, is released by now
    use_torch(model, torch_stages, reason)
    _track_blank_frames(model, settings.tracker)


def _track_blank_frames(model: TrackerModel, settings: TrackerSettings) -> None:
    """Prompt of each kind, and track one object. Where more objects run other code, track more.

    With static shapes, each batch size runs; compiled stages have one graph for 2 or more objects; and a GPU's
    libraries choose their kernels by size.
    """
    pipeline = Pipeline(model, settings, "warm-up")
    pipeline.warm_up_reads()
    side, static = model.image_size, model.static_shapes
    blank = Frame("warm-up", 0, 0, side, side, "bgr8", bytes(side * side * 3))
    point = FramePrompt(points=[(side / 2, side / 2)])
    pipeline.step(blank)
    for prompt in (
        FramePrompt(box=(0, 0, side / 2, side / 2)),
        FramePrompt(mask=Mask.from_full(np.eye(side, dtype=np.bool_))),
    ):
        pipeline.remove(pipeline.add(prompt).id)
    most = settings.max_objects if static or model.device.type == "cuda" else 1 + model.is_compiled
    for count in range(1, min(most, settings.max_objects) + 1):
        pipeline.add(point)
        if static or count in (1, 2, settings.max_objects):
            pipeline.step(blank)
        if count & (count - 1) == 0:  # a power of two: the next object needs the next batch size
            pipeline.step(blank)


@torch.inference_mode()
def _detect_on_blank_frame(detector: Detector, model: TrackerModel, settings: Settings) -> None:
    """Search a blank frame for one phrase, so that the detector's kernels and memory exist before a real frame."""
    image = np.zeros((model.image_size, model.image_size, 3), dtype=np.uint8)
    with suppress(RequestError):  # a phrase that it does not know is refused where the prompts are set
        query = detector.prepare(choose_phrases(settings.detector)[:1])
        detector.detect(image, query, 0.5, model.encode(model.preprocess(image)).trunk)


def load_configured_detector(
    settings: DetectorSettings,
    model: ModelSettings,
    tracker: TrackerModel | None = None,
    engine: EngineSettings | None = None,
) -> Detector | None:
    """Load the detector that `settings` name, with the device and dtype of the tracker; None if `kind` is "none".

    tracker: the model whose encoder the detector may share. engine: selects the detector's engine. Raises ModelError
    or VocabularyError if the detector cannot be used. Without `engine.fallback`, raises EngineError or
    MissingExtraError if its engine cannot be used.
    """
    if settings.kind == "none":
        return None
    with reraise_out_of_memory(ModelError, f"while the detector {settings.name} was loaded", MEMORY_HINT):
        detector = load_chosen(settings, model, tracker)
        serve_detector(detector, Settings(model=model, detector=settings, engine=engine or EngineSettings()))
    return detector
