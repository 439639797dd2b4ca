"""What the tracker says of a frame, on the host.

One camera's straight line: decode, preprocess, encode, track, detect, masks. No sockets, no files."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..detection.base import Detector, PromptSet
from ..errors import ReplayError, RequestError, Sam3NodeError
from ..geometry import Scaling
from ..models import TrackerModel
from ..settings import DetectorSettings, TrackerSettings
from ..tracking import ObjectPrompt, Tracker, Tracks
from ..types import Frame, Instance, Mask, MaskFrame, State
from ..wire import decode_image
from .frame_cache import CachedFrame, FrameCache
from .prompts import FramePrompt
from .rasterize import rasterize
from .registry import ObjectRegistry, ObjectStatus
from .stage_timer import StageTimer
from .track_manager import FrameContext, TrackManager


class HostTracks(NamedTuple):
    """N objects on one frame."""

    logits: npt.NDArray[np.float32]  # [N, h, w]
    scores: list[float]  # N in 0..1
    visible: list[bool]  # N


def copy_to_host(logits: Tensor, scores: Tensor, visible: Tensor) -> HostTracks:
    """Logits [N, h, w], scores [N] and visible [N] in one copy: the one that synchronises with the device."""
    if logits.device.type == "cpu":
        return HostTracks(logits.float().numpy(), _bounded(scores.float().numpy()), visible.bool().tolist())
    columns = [logits.float().flatten(1), scores.float()[:, None], visible.float()[:, None]]
    rows = torch.cat(columns, dim=1).cpu().numpy()
    return HostTracks(rows[:, :-2].reshape(logits.shape), _bounded(rows[:, -2]), (rows[:, -1] > 0).tolist())


def _bounded(scores: npt.NDArray[np.float32]) -> list[float]:
    """Scores in 0..1, whatever the model gave."""
    return [min(max(score, 0.0), 1.0) if score == score else 0.0 for score in scores.tolist()]


log = logging.getLogger(__name__)


class Answer(NamedTuple):
    """What a prompt gave on frame `seq`: a mask at the frame's size and its score in 0..1."""

    seq: int
    mask: Mask
    score: float


class Added(NamedTuple):
    """A new object's id, and its mask where it was prompted on a past frame."""

    id: int
    answer: Answer | None


class Pipeline:
    """Frames of one camera in, MaskFrames out; between frames, objects are added, corrected and removed.

    Pixels of prompts and masks are those of the frame. A prompt takes effect at once, on the features of the
    frame `seq`, of which the last `settings.feature_cache` are kept, or of the latest; an object added without
    `seq` enters on the next frame. With a detector, `set_prompts` names what is found on its own.
    """

    def __init__(
        self,
        model: TrackerModel,
        settings: TrackerSettings,
        camera: str,
        detector: Detector | None = None,
        detection: DetectorSettings | None = None,
    ) -> None:
        self.camera = camera
        self._model = model
        self._tracker = Tracker(model, settings.max_objects, settings.bank_size, settings.selection)
        self._objects = ObjectRegistry(settings.max_objects)
        self._entering: dict[int, ObjectPrompt] = {}
        self._recent = FrameCache(camera, settings.feature_cache)
        self._clock = StageTimer(model.device)
        self._search: TrackManager | None = None
        if detector is not None:
            detection = detection or DetectorSettings()
            self._search = TrackManager(detector, self._tracker, self._objects, self.remove, detection)

    @property
    def objects(self) -> list[ObjectStatus]:
        """The objects in the order in which they were added."""
        return list(self._objects)

    @torch.inference_mode()
    def step(self, frame: Frame, received_ns: int = 0, skipped: int = 0) -> MaskFrame:
        """Track all objects on the next frame.

        Raises WireError when its image does not decode; nothing has changed then.
        `stages_us` holds the stages that ran, without the packing of the result, which comes after.
        """
        clock, model = self._clock, self._model
        clock.start()
        with clock.host("decode"):
            image = decode_image(frame)
        with clock.device("preprocess"):
            pixels = model.preprocess(image)
        with clock.device("encode"):
            features = model.encode(pixels)
        if self._search is not None:
            self._search.encoded()
        with clock.device("track"), self._entering_prompts() as prompts:
            number = self._tracker.frame_number
            tracks = self._tracker.step_features(features, prompts)
        scaling = self._scaling(frame)
        if self._search is not None and self._search.is_due():
            with clock.device("detect"):
                tracks = self._detect(
                    FrameContext(image, features, number, scaling, frame.capture_ns), tracks
                )
        logits = dict(zip(tracks.ids, tracks.logits, strict=True))
        self._recent.keep(CachedFrame(frame.seq, number, features, logits, scaling))
        found = copy_to_host(tracks.logits, tracks.scores, tracks.visible)
        with clock.host("masks"):
            instances = self._instances(tracks.ids, found, (frame.height, frame.width), frame.capture_ns)
        return MaskFrame(
            camera=frame.camera,
            seq=frame.seq,
            capture_ns=frame.capture_ns,
            clock=frame.clock,
            width=frame.width,
            height=frame.height,
            received_ns=received_ns,
            skipped=skipped,
            model=model.name,
            prompts=self.prompts,
            stages_us=clock.read(),
            instances=instances,
        )

    def add(self, prompt: FramePrompt, label: str = "object", seq: int | None = None) -> Added:
        """Begin to track an object: on frame `seq` at once, without it on the next frame.

        Raises RequestError for a bad prompt, CapacityError when there is no room, UnknownFrameError for a
        frame that is not held.
        """
        require_tracking(self._model)
        object_id = self._objects.reserve()
        seen = self._recent.recall(seq)
        checked = prompt.to_model(object_id, seen.scaling)
        answer = self._prompt(seen, checked) if seq is not None else None
        if answer is None:
            self._entering[object_id] = checked
        self._objects.add(object_id, label)
        return Added(object_id, answer)

    def refine(self, object_id: int, prompt: FramePrompt, seq: int | None = None) -> Answer:
        """Correct an object on a recent frame (None: the latest); points correct its mask so far on that frame.

        Raises as `add`, UnknownObjectError, and RequestError for an object that still waits for its first frame.
        """
        self._objects.require(object_id)
        if object_id in self._entering:
            raise RequestError(
                f"object {object_id} has no mask to refine: expected one that has entered, found that it waits for "
                "the next frame; ask again when masks show it"
            )
        seen = self._recent.recall(seq)
        return self._prompt(seen, prompt.to_model(object_id, seen.scaling, seen.logits.get(object_id)))

    @property
    def prompts(self) -> tuple[str, ...]:
        """What is looked for by name."""
        return self._search.phrases if self._search else ()

    @property
    def turned_away(self) -> int:
        """Detections that there was no room for."""
        return self._search.turned_away if self._search else 0

    def set_prompts(self, wanted: PromptSet | None) -> None:
        """Look for these from the next frame on, None for nothing.

        What was found under a name that is no longer there is forgotten; other objects stay as they are. Raises
        RequestError where there is no detector, and for weights that cannot track.
        """
        if self._search is None:
            raise RequestError("no detector: expected one to look for things by name (detector.kind)")
        require_tracking(self._model)
        self._search.set_prompts(wanted)

    def remove(self, object_id: int) -> None:
        """Forget an object; UnknownObjectError if there is none of this id."""
        self._objects.remove(object_id)
        if self._search is not None:
            self._search.forget(object_id)
        self._entering.pop(object_id, None)
        self._recent.forget(object_id)
        if object_id in self._tracker.ids:
            self._tracker.remove(object_id)

    def reset(self) -> None:
        """Forget all objects. Recent frames stay, so that a prompt on one of them still works."""
        for known in self.objects:
            self.remove(known.id)

    @torch.inference_mode()
    def segment(self, prompt: FramePrompt, seq: int | None = None) -> Answer:
        """The mask that points and/or a box give on a recent frame (None: the latest), tracking nothing."""
        seen = self._recent.recall(seq)
        return _answer(seen, *self._tracker.segment(seen.features, prompt.to_model(0, seen.scaling)))

    def state(self) -> State:
        """What `restore` takes: all that comes next depends on, besides the model, the detector and the settings."""
        return {
            "origin": self._origin(),
            "search": self._search and self._search.state(),
            "tracker": self._tracker.state(),
            "objects": self._objects.state(),
            "entering": [prompt.state() for prompt in self._entering.values()],
            "recent": self._recent.state(),
        }

    def restore(self, state: State) -> None:
        """Go on as if this had done all that the pipeline had done when its `state` was asked for: the same frames and
        prompts give the same masks, bit for bit on the same device.

        Settings are not part of a state: give this the same. Raises ReplayError for a state of another model, detector
        or memory, and RequestError where the detector does not know the names in it; nothing has changed then.
        """
        found, expected = state.get("origin"), self._origin()
        if found != expected:
            raise ReplayError(
                f"camera {self.camera}: expected a state of {expected}, found one of {found!r:.400}; go on with the "
                "model and the settings that it was made with"
            )
        if self._search is not None:
            self._search.restore(state["search"])
        self._tracker.restore(state["tracker"])
        self._objects.restore(state["objects"])
        entering = (ObjectPrompt.of(prompt) for prompt in state["entering"])
        self._entering = {prompt.object_id: prompt for prompt in entering}
        self._recent.restore(state["recent"], self._model.device)

    def _origin(self) -> State:
        """What the pipelines that a state fits have in common."""
        detector = self._search and self._search.detector_name
        return {"model": self._model.name, "detector": detector, "bank": self._tracker.bank.layout}

    def _scaling(self, frame: Frame) -> Scaling:
        return Scaling((frame.height, frame.width), self._model.image_size)

    @torch.inference_mode()
    def _prompt(self, seen: CachedFrame, prompt: ObjectPrompt) -> Answer:
        logits, score = self._tracker.prompt_at(seen.features, seen.frame_number, prompt)
        seen.logits[prompt.object_id] = logits.clone()  # compiled stages use their outputs again
        return _answer(seen, logits, score)

    @contextmanager
    def _entering_prompts(self) -> Iterator[Sequence[ObjectPrompt]]:
        """The prompts of the objects that enter on this frame. They are lost if it fails."""
        now = list(self._entering.values())
        self._entering.clear()
        try:
            yield now
        except Exception:
            self._forget_unborn()
            raise

    def _forget_unborn(self) -> None:
        tracked = set(self._tracker.ids)
        for known in self.objects:
            if known.id not in tracked:
                log.warning(
                    "%s: object %d is lost: the frame that it was to enter on failed", self.camera, known.id
                )
                self.remove(known.id)

    def _detect(self, sight: FrameContext, tracks: Tracks) -> Tracks:
        """The objects of the frame after detection: some new, some with other masks, some gone.

        A detector that fails costs its detections, not the frame.
        """
        assert self._search is not None
        try:
            changed = self._search.look(sight, tracks)
        except Sam3NodeError as error:
            log.error("camera %s: detection failed: %s", self.camera, error)
            return tracks
        return self._tracker.updated(tracks, changed)

    def _instances(
        self, ids: list[int], found: HostTracks, size: tuple[int, int], now_ns: int
    ) -> tuple[Instance, ...]:
        return tuple(
            self._observe(object_id, rasterize(logits, size), score, visible, now_ns)
            for object_id, logits, score, visible in zip(
                ids, found.logits, found.scores, found.visible, strict=True
            )
        )

    def _observe(self, object_id: int, mask: Mask, score: float, visible: bool, now_ns: int) -> Instance:
        tentative = False
        if self._search is not None:
            self._search.observe(object_id, score, visible and mask.area > 0, now_ns)
            tentative = self._search.is_tentative(object_id)
        return self._objects.observe(object_id, mask, score, visible, tentative)


def require_tracking(model: TrackerModel) -> None:
    """Raise RequestError for weights that cannot follow objects."""
    if not model.can_track:
        raise RequestError(
            f"{model.name} has no memory modules: expected weights that can track, such as nano or "
            "facebook/sam3 (--model.name); segment works with these"
        )


def _answer(seen: CachedFrame, logits: Tensor, score: Tensor) -> Answer:
    found = copy_to_host(logits[None], score.reshape(1), score.new_ones(1))
    return Answer(seen.seq, rasterize(found.logits[0], seen.scaling.frame_size), found.scores[0])
