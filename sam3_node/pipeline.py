"""One camera's straight line: decode, preprocess, encode, track, masks. No sockets, no files."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .clock import StageClock
from .errors import RequestError, UnknownFrameError
from .geometry import Scaling
from .models import Features, TrackerModel, load_tracker
from .prompts import FramePrompt
from .rasterize import rasterize
from .registry import ObjectRegistry, ObjectStatus
from .settings import ModelSettings, TrackerSettings
from .tracking import ObjectPrompt, Tracker
from .types import Frame, Instance, Mask, MaskFrame
from .wire import decode_image

log = logging.getLogger(__name__)


def load_model(settings: ModelSettings, tracker: TrackerSettings) -> TrackerModel:
    """Load the weights that `settings` name, and warm them up where the first frames would be slow.

    Raises ModelError when they cannot serve.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    model = load_tracker(
        settings.name, device=settings.device, dtype=settings.dtype, compile=settings.compile
    )
    if model.can_track and (settings.compile or model.device.type == "cuda"):
        _warm_up(model, tracker)
    return model


def _warm_up(model: TrackerModel, settings: TrackerSettings) -> None:
    """Track on blank frames: one object, and for compiled stages as many as each batch size needs."""
    pipeline = Pipeline(model, settings, "warm-up")
    side = model.image_size
    blank = Frame("warm-up", 0, 0, side, side, "bgr8", bytes(side * side * 3))
    pipeline.step(blank)
    for count in range(1, settings.max_objects + 1 if model.static_shapes else 2):
        pipeline.add(FramePrompt(points=[(side / 2, side / 2)]))
        pipeline.step(blank)
        if count & (count - 1) == 0:
            pipeline.step(blank)


class Answer(NamedTuple):
    """What a prompt gave on frame `seq`: a mask at the frame's size and its score in 0..1."""

    seq: int
    mask: Mask
    score: float


class Added(NamedTuple):
    """A new object's id, and its mask where it was prompted on a past frame."""

    id: int
    answer: Answer | None


class _Seen(NamedTuple):
    """A recent frame, kept for prompts on it."""

    seq: int
    frame_number: int
    features: Features
    logits: dict[int, Tensor]
    """[h, w] of each object on it, as tracked or, later, as prompted."""
    scaling: Scaling


class Pipeline:
    """Frames of one camera in, MaskFrames out; between frames, objects are added, corrected and removed.

    Pixels of prompts and masks are those of the frame. A prompt takes effect at once, on the features of the
    frame `seq`, of which the last `settings.feature_cache` are kept, or of the latest; an object added without
    `seq` enters on the next frame.
    """

    def __init__(self, model: TrackerModel, settings: TrackerSettings, camera: str) -> None:
        self.camera = camera
        self._model = model
        self._tracker = Tracker(model, settings.max_objects, settings.bank_size, settings.selection)
        self._objects = ObjectRegistry(settings.max_objects)
        self._entering: dict[int, ObjectPrompt] = {}
        self._seen: OrderedDict[int, _Seen] = OrderedDict()
        self._seen_most = settings.feature_cache
        self._clock = StageClock(model.device)

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
        with clock.device("track"), self._entering_prompts() as prompts:
            number = self._tracker.frame_number
            tracks = self._tracker.step_features(features, prompts)
        logits = dict(zip(tracks.ids, tracks.logits, strict=True))
        self._keep(_Seen(frame.seq, number, features, logits, self._scaling(frame)))
        found = _to_host(tracks.logits, tracks.scores, tracks.visible)
        with clock.host("masks"):
            instances = self._instances(tracks.ids, found, (frame.height, frame.width))
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
            stages_us=clock.read(),
            instances=instances,
        )

    def add(self, prompt: FramePrompt, label: str = "object", seq: int | None = None) -> Added:
        """Begin to track an object: on frame `seq` at once, without it on the next frame.

        Raises RequestError for a bad prompt, CapacityError when there is no room, UnknownFrameError for a
        frame that is not held.
        """
        if not self._model.can_track:
            raise RequestError(
                f"{self._model.name} has no memory modules: expected weights that can track, such as nano or "
                "facebook/sam3 (--model.name); segment works with these"
            )
        object_id = self._objects.reserve()
        seen = self._recall(seq)
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
        seen = self._recall(seq)
        return self._prompt(seen, prompt.to_model(object_id, seen.scaling, seen.logits.get(object_id)))

    def remove(self, object_id: int) -> None:
        """Forget an object; UnknownObjectError if there is none of this id."""
        self._objects.remove(object_id)
        self._entering.pop(object_id, None)
        for seen in self._seen.values():
            seen.logits.pop(object_id, None)
        if object_id in self._tracker.ids:
            self._tracker.remove(object_id)

    def reset(self) -> None:
        """Forget all objects. Recent frames stay, so that a prompt on one of them still works."""
        for known in self.objects:
            self.remove(known.id)

    @torch.inference_mode()
    def segment(self, prompt: FramePrompt, seq: int | None = None) -> Answer:
        """The mask that points and/or a box give on a recent frame (None: the latest), tracking nothing."""
        seen = self._recall(seq)
        return _answer(seen, *self._tracker.segment(seen.features, prompt.to_model(0, seen.scaling)))

    def _scaling(self, frame: Frame) -> Scaling:
        return Scaling((frame.height, frame.width), self._model.image_size)

    @torch.inference_mode()
    def _prompt(self, seen: _Seen, prompt: ObjectPrompt) -> Answer:
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

    def _keep(self, seen: _Seen) -> None:
        self._seen.pop(seen.seq, None)  # a camera that started again counts from the beginning
        self._seen[seen.seq] = seen
        while len(self._seen) > self._seen_most:
            self._seen.popitem(last=False)

    def _recall(self, seq: int | None) -> _Seen:
        if not self._seen:
            raise UnknownFrameError(
                f"camera {self.camera}: expected a frame to prompt on, found that none has come yet"
            )
        if seq is None:
            return next(reversed(self._seen.values()))
        if seq not in self._seen:
            raise UnknownFrameError(
                f"camera {self.camera}: expected seq among those held, {list(self._seen)}, found {seq}; "
                "prompt on a later frame, or raise tracker.feature_cache"
            )
        return self._seen[seq]

    def _instances(self, ids: list[int], found: _OnHost, size: tuple[int, int]) -> tuple[Instance, ...]:
        return tuple(
            self._objects.observe(object_id, rasterize(logits, size), score, visible)
            for object_id, logits, score, visible in zip(
                ids, found.logits, found.scores, found.visible, strict=True
            )
        )


class _OnHost(NamedTuple):
    logits: npt.NDArray[np.float32]  # [N, h, w]
    scores: list[float]  # N in 0..1
    visible: list[bool]  # N


def _to_host(logits: Tensor, scores: Tensor, visible: Tensor) -> _OnHost:
    """Logits [N, h, w], scores [N] and visible [N] in one copy: the one that synchronises with the device."""
    if logits.device.type == "cpu":
        return _OnHost(logits.float().numpy(), _bounded(scores.float().numpy()), visible.bool().tolist())
    columns = [logits.float().flatten(1), scores.float()[:, None], visible.float()[:, None]]
    rows = torch.cat(columns, dim=1).cpu().numpy()
    return _OnHost(rows[:, :-2].reshape(logits.shape), _bounded(rows[:, -2]), (rows[:, -1] > 0).tolist())


def _bounded(scores: npt.NDArray[np.float32]) -> list[float]:
    """Scores in 0..1, whatever the model gave."""
    return [min(max(score, 0.0), 1.0) if score == score else 0.0 for score in scores.tolist()]


def _answer(seen: _Seen, logits: Tensor, score: Tensor) -> Answer:
    found = _to_host(logits[None], score.reshape(1), score.new_ones(1))
    return Answer(seen.seq, rasterize(found.logits[0], seen.scaling.frame_size), found.scores[0])
