"""Run one camera's frames: decode, preprocess, encode, track, detect, masks. It uses no sockets and no files.

The tracks of a frame stay on the device until the end of the step, and are then copied to the host at once. A
`FramePreparer` decodes and uploads a frame in another thread while the model is busy. `FrameQueries` answer questions
about cached frames and change nothing. `StageTimer` measures the stages of a frame.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import cv2
import numpy as np
import torch
from torch import Tensor

from ..detection.detectors import Detector, ExemplarDetector, PromptSet
from ..errors import CalibrationError, ReplayError, RequestError, Sam3NodeError
from ..geometry import Scaling
from ..models import Features, TrackerModel
from ..resumable import Resumable
from ..settings import DetectorSettings, SpatialSettings, TrackerSettings
from ..tracking import Tracker, Tracks
from ..tracking.confidence import CALIBRATION, ConfidenceEstimator, is_calibrated
from ..tracking.everything import Census, EverythingOptions, segment_everything
from ..tracking.host_copy import copy_to_device
from ..tracking.names import is_calibrated as is_name_calibrated
from ..tracking.tracks import Cover, PromptTensors
from ..types import Frame, Image, Instance, Mask, MaskFrame, Priority, RobotState, Shed, State
from ..wire import decode_image
from ..wire.frame_prompt import FramePrompt
from .catch_up import MAX_CORRECTIONS, CachedFrame, CacheLimits, CatchUps, FrameCache
from .output_masks import HostTracks, copy_masks, copy_to_host, to_prompt_results, to_results_job
from .prompts import PromptOutcome, PromptResult, check_choice, to_model
from .registry import ObjectRegistry, ObjectStatus, choose_shed, stretch_detection
from .robot import RobotPixels, RobotStage
from .spatial import SpatialStage
from .track_manager import FrameContext, TrackManager

log = logging.getLogger(__name__)

FindRobot = Callable[[Frame], RobotState]


class Pipeline:
    """Turns the frames of one camera into MaskFrames. Between frames, objects can be added, corrected and removed.

    Prompts and masks are in pixels of the frame. A prompt takes effect at once, on the cached features of frame `seq`
    or of the latest frame; `CacheLimits` says which frames are cached. An object that was prompted on an earlier frame
    catches up from there, in calls of `catch_ups.advance`, and then joins the next step. An object added without `seq`
    enters on the next frame. With a detector, `set_prompts` selects which objects are found automatically.
    """

    def __init__(
        self,
        model: TrackerModel,
        settings: TrackerSettings,
        camera: str,
        detector: Detector | None = None,
        detection: DetectorSettings | None = None,
        spatial: SpatialStage | None = None,
        robot: RobotStage | None = None,
    ) -> None:
        self.camera = camera
        self.epoch: int | None = None
        """Set by a live node: ids of another epoch name other objects."""
        self._max_frame_pixels = settings.max_frame_pixels
        self._model = model
        self._tracker = Tracker(
            model,
            settings.max_objects,
            settings.bank_size,
            settings.selection,
            history=1,
            corrections=MAX_CORRECTIONS,
        )
        self.registry = ObjectRegistry(settings.max_objects)
        self._confidence = ConfidenceEstimator(
            settings.max_objects + MAX_CORRECTIONS, model.mask_size[0], model.hidden
        )
        self._min_confidence = settings.min_confidence
        self._hide_below = settings.hide_below if is_calibrated(model.name) else 0.0
        self._pending: dict[int, PromptTensors] = {}
        self._frame_cache = FrameCache(camera, CacheLimits.from_settings(settings, model.device))
        self.queries = FrameQueries(model, self._tracker, self._frame_cache)
        self.catch_ups = CatchUps(
            self._tracker, self._frame_cache, self.registry, self._confidence, self.remove
        )
        self._timer = StageTimer(model.device)
        self.spatial = spatial or SpatialStage(SpatialSettings(), None)
        self.robot = robot
        self._exclude_robot = settings.exclude_robot
        self._track_manager: TrackManager | None = None
        self._min_name_confidence = 0.0
        self._takes_exemplars = isinstance(detector, ExemplarDetector)
        if detector is not None:
            detection = detection or DetectorSettings()
            if is_name_calibrated(detector.name):
                self._min_name_confidence = detection.min_name_confidence
            self._track_manager = TrackManager(detector, self._tracker, self.registry, self.remove, detection)

    @property
    def objects(self) -> list[ObjectStatus]:
        """The objects, in the order in which they were added."""
        return list(self.registry)

    def warm_up_reads(self) -> None:
        """Run the read of the memory bank once in every shape that it will have, if shapes are static."""
        self._tracker.warm_up_reads()

    @torch.inference_mode()
    def step(
        self,
        frame: Frame,
        received_ns: int = 0,
        skipped: int = 0,
        find_robot: FindRobot = lambda _: RobotState(),
        prepared: PreparedFrame | None = None,
        shed_level: int = 0,
    ) -> MaskFrame:
        """Track all objects on the next frame. `find_robot`, called last, gives the robot at its capture.

        With a `robot`, it is called before the objects are tracked.
        `prepared` holds this frame if a thread has decoded it already; the result is the same. `shed_level` says what
        to shed, see `registry`. The result's `stages_us` holds the stages that ran; packing comes later.
        Raises WireError if the image cannot be decoded; nothing is changed then.
        """
        timer = self._timer
        timer.start()
        context, robot = self._make_context(frame, prepared, find_robot)
        tracks, shed = self._track(context, shed_level)
        cached = CachedFrame.from_step(frame, received_ns, context, tracks, self._takes_exemplars)
        for dropped in self._frame_cache.add(cached, shed.held if shed else ()):
            self.catch_ups.use_dropped(dropped)
        on_host = copy_to_host(tracks)
        with timer.host("masks"):
            instances = self._instances(on_host, context)
        with timer.host("spatial") if frame.depth is not None else nullcontext():
            pose = find_robot(frame).pose if self.robot is None else None
            instances, place = self.spatial.measure(frame, instances, pose, robot and robot.inside)
        return MaskFrame(
            camera=frame.camera,
            seq=frame.seq,
            capture_ns=frame.capture_ns,
            clock=frame.clock,
            width=frame.width,
            height=frame.height,
            received_ns=received_ns,
            skipped=skipped,
            model=self._model.name,
            prompts=self.prompts,
            stages_us=timer.read(),
            instances=instances,
            camera_pose=place.camera_pose,
            robot_pose=place.robot_pose,
            joints=robot and robot.joints,
            robot_mask=robot and Mask.from_full(robot.inside),
            table=place.table,
            shed=shed,
        )

    def _make_context(
        self, frame: Frame, prepared: PreparedFrame | None, find_robot: FindRobot
    ) -> tuple[FrameContext, RobotPixels | None]:
        """Encode a frame, and find the robot's pixels; None if they are not known: `spatial.problem` says why."""
        image, features = self._encode(frame, prepared)
        scaling = Scaling((frame.height, frame.width), self._model.image_size)
        context = FrameContext(image, features, self._tracker.frame_number, scaling, frame.capture_ns)
        if self.robot is None:
            return context, None
        with self._timer.host("robot"):
            pose, joints = find_robot(frame)
            view = self.spatial.look(frame, pose)
            try:
                robot = self.robot.see(joints, view, self.spatial.read_depth(view))
            except CalibrationError as error:
                self.spatial.problem = self.spatial.problem or f"no mask of the robot: {error}"
                self.spatial.lacks_robot |= joints is None
                return context, None
            if self._exclude_robot:
                bright, size = robot.inside.view(np.uint8) * np.uint8(255), self._model.mask_size[::-1]
                low = cv2.resize(bright, size, interpolation=cv2.INTER_AREA) > 127
                cover = Cover(copy_to_device(low, self._model.device), self.robot.find_covered(robot))
                context = context._replace(robot=robot, cover=cover)
            return context, robot

    def _track(self, context: FrameContext, shed_level: int) -> tuple[Tracks, Shed | None]:
        """Track the objects on a frame, and detect if it is time to; return also what was shed."""
        detector = self._track_manager
        detects = detector is not None and detector.is_due(stretch_detection(shed_level))
        objects = () if detects else self.registry  # a held object would be found as a new one
        shed = choose_shed(shed_level, objects, self._tracker.ids, context.frame_number)
        with self._timer.device("track"), self._pending_prompts() as prompts:
            held = shed.held if shed else ()
            tracks = self._tracker.step_features(context.features, prompts, held, context.cover)
        if not detects:
            return tracks, shed
        with self._timer.device("detect"):
            return self._detect(context, tracks), shed

    def _encode(self, frame: Frame, prepared: PreparedFrame | None) -> tuple[Image, Features]:
        """Return the image of a frame, and its features."""
        timer, model = self._timer, self._model
        with timer.host("decode"):
            image = prepared.image if prepared else decode_image(frame, self._max_frame_pixels)
        with timer.device("preprocess"):
            pixels = prepared.take_pixels() if prepared else model.preprocess(image)
        with timer.device("encode"):
            features = model.encode(pixels)
        if self._track_manager is not None:
            self._track_manager.mark_encoded()
        return image, features

    @property
    def cache_usage(self) -> dict[str, int]:
        """Number of cached and of pinned frames, of objects that catch up, and bytes of cache and memory bank."""
        cache = self._frame_cache
        pinned = sum(frame.lease_ns > 0 for frame in cache)
        cached = {"cached_frames": len(cache), "pinned_frames": pinned, "cached_bytes": cache.nbytes}
        return {**cached, "catching_up": len(self.catch_ups), "bank_bytes": self._tracker.bank.nbytes}

    def add(
        self,
        prompt: FramePrompt,
        label: str = "object",
        seq: int | None = None,
        priority: Priority = "normal",
        stride: int | None = None,
        choice: int | None = None,
    ) -> PromptOutcome:
        """Start to track an object: at once on the cached frame `seq`, or on the next frame if `seq` is None.

        Objects of low `priority` are the first to be held under load. An object that has to catch up is tracked on
        every `stride`-th frame, by default `catch_ups.stride`. With `choice`, it begins with that one of
        `FrameQueries.candidates`. Raises RequestError for a bad prompt, CapacityError if all slots are taken,
        UnknownFrameError if the frame is not cached.
        """
        object_id = self.registry.reserve()
        cached = self._frame_cache.get(seq)
        checked = to_model(prompt, object_id, cached.scaling)
        if choice is not None:
            checked = checked._replace(choice=check_choice(choice, prompt, self._model.candidates))
        result = self._prompt(cached, checked, stride) if seq is not None else None
        if result is None:
            self._pending[object_id] = checked
        self.registry.add(object_id, label, priority)
        return PromptOutcome(object_id, result)

    def refine(
        self, object_id: int, prompt: FramePrompt, seq: int | None = None, stride: int | None = None
    ) -> PromptResult:
        """Correct an object on the cached frame `seq`, or on the latest for None. Points correct its mask there.

        Raises the errors of `add`, UnknownObjectError, and RequestError for an object that has not entered yet.
        """
        self.registry.require(object_id)
        if object_id in self._pending:
            raise RequestError(
                f"object {object_id} has no mask to refine: expected an object on a frame, found one that enters on "
                "the next frame; try again when masks show it"
            )
        cached = self._frame_cache.get(seq)
        checked = to_model(prompt, object_id, cached.scaling, cached.logits.get(object_id))
        return self._prompt(cached, checked, stride)

    def pin(self, seq: int, lease_s: float) -> None:
        """Keep the cached frame `seq` for prompts until later frames are `lease_s` newer; 0 lets it go.

        Raises UnknownFrameError if the frame is not cached.
        """
        self._frame_cache.pin(seq, round(1e9 * lease_s))

    @property
    def prompts(self) -> tuple[str, ...]:
        """The phrases that the detector searches for."""
        return self._track_manager.phrases if self._track_manager else ()

    @property
    def best_scores(self) -> dict[str, float]:
        """Highest score of a detection of each prompt, of those that had any, see TrackManager."""
        return self._track_manager.best_scores if self._track_manager else {}

    @property
    def turned_away(self) -> int:
        """Number of detections that were dropped because all object slots were taken."""
        return self._track_manager.turned_away if self._track_manager else 0

    def name_features(self, object_id: int) -> list[float] | None:
        """Return the features of the name of a detected object, see `tracking.names`; None for other objects."""
        return self._track_manager.name_features(object_id) if self._track_manager else None

    def set_prompts(self, prompts: PromptSet) -> None:
        """Detect these prompts, starting with the next frame; without phrases, detection stops.

        Detected objects whose label is no longer among the prompts are removed. Other objects do not change. Without a
        detector, none can be prepared.
        """
        if self._track_manager is not None:
            self._track_manager.set_prompts(prompts)

    def remove(self, object_id: int) -> None:
        """Remove an object; UnknownObjectError if there is none with this id."""
        self.registry.remove(object_id)
        if self._track_manager is not None:
            self._track_manager.forget(object_id)
        self._pending.pop(object_id, None)
        self.catch_ups.forget(object_id)
        self._frame_cache.remove_object(object_id)
        self._confidence.remove(object_id)
        self.spatial.remove(object_id)
        if self.robot is not None:
            self.robot.remove(object_id)
        if object_id in self._tracker.ids:
            self._tracker.remove(object_id)

    def rename(self, object_id: int, label: str) -> None:
        """Change an object's label for good: detections change it no longer. UnknownObjectError for an unknown id."""
        self.registry.rename(object_id, label)
        if self._track_manager is not None:
            self._track_manager.forget(object_id)

    def reset(self) -> None:
        """Remove all objects. Cached frames stay, so prompts on them still work."""
        for status in self.objects:
            self.remove(status.id)

    def state(self, whole: bool = True) -> State:
        """Return the state that `restore` takes: everything except model, detector and settings.

        Unless `whole`, of the cached frames it holds the newest, and those that objects need to catch up. Next masks
        are the same; prompts on other past frames are refused.
        """
        first = None if whole else self.catch_ups.first_place
        after = -1 if whole else self._tracker.frame_number if first is None else first
        return {
            "origin": self._origin(),
            "track_manager": self._track_manager and self._track_manager.state(),
            "tracker": self._tracker.state(),
            "objects": self.registry.state(),
            "confidence": self._confidence.state(),
            "spatial": self.spatial.state(),
            "robot": self.robot and self.robot.state(),
            "pending": [prompt.state() for prompt in self._pending.values()],
            "frame_cache": self._frame_cache.state(after),
            "catch_ups": self.catch_ups.state(),
        }

    def restore(self, state: State) -> None:
        """Continue from the moment at which `state` was called.

        From then on, the same frames and prompts give the same masks, bit for bit on the same device, if the settings
        are the same. Raises ReplayError for the state of another model, detector or memory bank, and RequestError if
        the detector cannot search for its prompts; nothing is changed then.
        """
        origin, expected = state.get("origin"), self._origin()
        if origin != expected:
            raise ReplayError(
                f"camera {self.camera}: expected a state of {expected}, found one of {origin!r:.400}; continue with "
                "the model and the settings of that state"
            )
        if self._track_manager is not None:
            self._track_manager.restore(state["track_manager"])
        self._tracker.restore(state["tracker"])
        self.registry.restore(state["objects"])
        self._confidence.restore(state["confidence"])
        self.spatial.restore(state["spatial"])
        if self.robot is not None and state["robot"] is not None:
            self.robot.restore(state["robot"])
        pending = (PromptTensors(**prompt) for prompt in state["pending"])
        self._pending = {prompt.object_id: prompt for prompt in pending}
        self._frame_cache.restore(state["frame_cache"], self._model.device)
        self.catch_ups.restore(state["catch_ups"])
        if unknown := set(self._tracker.ids) - {status.id for status in self.registry}:
            raise ReplayError(f"camera {self.camera}: expected a state that names objects {sorted(unknown)}")

    def _origin(self) -> State:
        """Return the properties that must be equal for a state to fit this pipeline."""
        detector = self._track_manager and self._track_manager.detector_name
        bank = self._tracker.bank.layout
        return {"model": self._model.name, "detector": detector, "bank": bank, "calibration": CALIBRATION}

    @torch.inference_mode()
    def _prompt(self, cached: CachedFrame, prompt: PromptTensors, stride: int | None) -> PromptResult:
        """Add or correct an object. On an earlier frame than the latest, it begins to catch up."""
        is_latest = cached is self._frame_cache.get(None)
        if is_latest and prompt.object_id not in self.catch_ups:
            features = cached.features_on(self._model.device)
            logits, score = self._tracker.prompt_at(features, cached.frame_number, prompt)
            self._confidence.start(prompt.object_id, copy_masks(logits[None])[0].levels)
        else:
            logits, score = self.catch_ups.begin(cached, prompt, stride)
        cached.set_logits(prompt.object_id, logits)
        return to_prompt_results(cached.seq, cached.scaling, logits[None], score)[0]

    @contextmanager
    def _pending_prompts(self) -> Iterator[Sequence[PromptTensors]]:
        """Yield the prompts of the objects that enter on this frame. The objects are removed if the frame fails."""
        prompts = list(self._pending.values())
        self._pending.clear()
        try:
            yield prompts
        except Exception:
            self._remove_untracked()
            raise

    def _remove_untracked(self) -> None:
        tracked = set(self._tracker.ids)
        for status in self.objects:
            if status.id not in tracked and status.id not in self.catch_ups:
                log.warning(
                    "%s: object %d was removed: the frame on which it would have entered failed",
                    self.camera,
                    status.id,
                )
                self.remove(status.id)

    def _detect(self, context: FrameContext, tracks: Tracks) -> Tracks:
        """Run detection on the frame and return the updated tracks. If the detector fails, log it and keep `tracks`."""
        assert self._track_manager is not None
        try:
            changed = self._track_manager.detect(context, tracks)
        except Sam3NodeError as error:
            log.error("camera %s: detection failed: %s", self.camera, error)
            return tracks
        for object_id in changed:  # the history begins again with the mask that the detector gave
            self._confidence.remove(object_id)
        return self._tracker.updated(tracks, changed)

    def _instances(self, tracks: HostTracks, context: FrameContext) -> tuple[Instance, ...]:
        evidence = tracks.evidence
        read_masks = tracks.masks.rasterize(context.scaling.frame_size)
        confidences = self._confidence.observe(evidence)  # while a GPU makes the masks
        columns = zip(evidence.ids, read_masks(), evidence.scores, evidence.visible, confidences, strict=True)
        return tuple(self._observe(*values, context) for values in columns)

    def _observe(
        self,
        object_id: int,
        mask: Mask,
        score: float,
        visible: bool,
        confidence: float,
        context: FrameContext,
    ) -> Instance:
        robot, cover = context.robot, context.cover
        if visible and confidence < self._hide_below:
            visible, mask = False, Mask.empty(mask.size)
        if robot is not None:
            mask = mask.without(robot.inside)
        # a detection may have found it elsewhere
        covered = cover is not None and object_id in cover.ids and not visible
        if covered:
            mask = Mask.empty(mask.size)
        tentative, in_view, name = False, visible and mask.area > 0, None
        if self.robot is not None and in_view:
            self.robot.observe(object_id, mask, robot)
        if self._track_manager is not None:
            if covered:
                self._track_manager.wait(object_id, context.now_ns)
            else:
                self._track_manager.observe(object_id, score, in_view, context.now_ns)
            tentative = self._track_manager.is_tentative(object_id)
            name = self._track_manager.name_confidence(object_id)
        instance = self.registry.observe(object_id, mask, score, visible, tentative)
        if not in_view:
            return replace(instance, hidden_by="robot") if covered else instance
        doubtful = confidence < self._min_confidence or (
            name is not None and name < self._min_name_confidence
        )
        return replace(instance, confidence=confidence, doubtful=doubtful, name_confidence=name)


class PreparedFrame(NamedTuple):
    """A frame whose image is decoded and preprocessed."""

    frame: Frame
    image: Image
    """BGR uint8 [h, w, 3]"""
    pixels: Tensor
    """[1, 3, S, S] on the model's device; take them by `take_pixels`"""
    uploaded: torch.cuda.Event | None
    """after which the pixels are on a GPU"""

    def take_pixels(self) -> Tensor:
        """Return the pixels. On a GPU, the current stream waits for them; the host does not."""
        if self.uploaded is not None:
            stream = torch.cuda.current_stream(self.pixels.device)
            stream.wait_event(self.uploaded)
            self.pixels.record_stream(stream)
        return self.pixels


def prepares_ahead(model: TrackerModel) -> bool:
    """Return True where preparing a frame beside a step costs it nothing. On a CPU it takes cores from the model."""
    return model.device.type != "cpu"


class FramePreparer:
    """Decodes and preprocesses frames in any one thread, on a GPU in a stream of its own."""

    def __init__(self, model: TrackerModel, max_frame_pixels: int) -> None:
        self._model, self._max_frame_pixels = model, max_frame_pixels
        is_cuda = model.device.type == "cuda"
        self._stream = torch.cuda.Stream(model.device) if is_cuda else None

    @torch.inference_mode()
    def __call__(self, frame: Frame) -> PreparedFrame:
        """Prepare a frame. Raises WireError if its image cannot be decoded."""
        image = decode_image(frame, self._max_frame_pixels)
        if self._stream is None:
            return PreparedFrame(frame, image, self._model.preprocess(image), None)
        with torch.cuda.stream(self._stream):
            pixels = self._model.preprocess(image)
            uploaded = torch.cuda.Event()
            uploaded.record(self._stream)
        return PreparedFrame(frame, image, pixels, uploaded)


class FrameQueries:
    """Answers questions about the frames in `cache`. `seq` names a cached frame, or None the latest.

    All methods raise UnknownFrameError if the frame is not cached.
    """

    def __init__(self, model: TrackerModel, tracker: Tracker, cache: FrameCache) -> None:
        self._model, self._tracker, self._frame_cache = model, tracker, cache

    def find(self, seq: int | None = None) -> CachedFrame:
        """Return the cached frame `seq`, or the latest for None. Raises UnknownFrameError if it is not cached."""
        return self._frame_cache.get(seq)

    @torch.inference_mode()
    def segment(self, prompt: FramePrompt, seq: int | None = None) -> PromptResult:
        """Segment the cached frame `seq`, or the latest for None, from points and/or a box, without tracking."""
        cached = self._frame_cache.get(seq)
        features = cached.features_on(self._model.device)
        logits, score = self._tracker.segment(features, to_model(prompt, 0, cached.scaling))
        return to_prompt_results(cached.seq, cached.scaling, logits[None], score)[0]

    @torch.inference_mode()
    def candidates(self, prompt: FramePrompt, seq: int | None = None) -> list[PromptResult]:
        """Segment as `segment` does, to all masks that may be meant, by falling score: a part, a larger one, the whole.

        Weights that were not trained for it have one.
        """
        cached = self._frame_cache.get(seq)
        features = cached.features_on(self._model.device)
        masks = self._tracker.segment_candidates(features, to_model(prompt, 0, cached.scaling))
        return to_prompt_results(cached.seq, cached.scaling, *masks)

    def find_everything(
        self, options: EverythingOptions, seq: int | None
    ) -> Resumable[tuple[int, list[PromptResult], str]]:
        """Segment everything on the cached frame `seq`, or the latest for None.

        Return its seq, the masks, and the reason for an empty result. Steps and removals in between change nothing.
        """
        cached = self._frame_cache.get(seq)
        features, census = cached.features_on(self._model.device), Census()
        masks = yield from segment_everything(self._model, features, options, census)
        results = yield from to_results_job(cached.seq, cached.scaling, *masks)
        return cached.seq, results, "" if results else census.explain(options.complete(self._model))


class StageTimer:
    """Times the stages of a frame in microseconds, without waiting for the device.

    The wall clock times host stages, and all stages on a CPU. CUDA events time device stages on a GPU. `read` reads
    them after the frame's copy to the host, which has synchronised with the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._spent_us: dict[str, int] = {}
        self._events: dict[str, tuple[torch.cuda.Event, torch.cuda.Event]] = {}

    def start(self) -> None:
        """Start a frame."""
        self._spent_us = {}

    @contextmanager
    def host(self, stage: str) -> Iterator[None]:
        """Time a stage that runs on the CPU."""
        begin = time.perf_counter_ns()
        yield
        self._spent_us[stage] = (time.perf_counter_ns() - begin) // 1000

    @contextmanager
    def device(self, stage: str) -> Iterator[None]:
        """Time a stage that runs on the model's device."""
        if not self._is_cuda:
            begin_ns = time.perf_counter_ns()  # not by `host`: a frame has six stages, and each hop costs
            yield
            self._spent_us[stage] = (time.perf_counter_ns() - begin_ns) // 1000
            return
        if stage not in self._events:
            self._events[stage] = torch.cuda.Event(True), torch.cuda.Event(True)
        begin, end = self._events[stage]
        begin.record()
        yield
        end.record()
        self._spent_us[stage] = -1  # keeps the stages in order until `read`

    def read(self) -> dict[str, int]:
        """Return the microseconds of each stage, in order. On a GPU, call it after the device has finished."""
        spent_us = dict(self._spent_us)
        for stage in spent_us:
            if spent_us[stage] < 0:
                begin, end = self._events[stage]
                spent_us[stage] = int(begin.elapsed_time(end) * 1000)
        return spent_us
