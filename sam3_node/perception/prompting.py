"""Do what users ask of one camera's objects between two steps, on its cached frames."""

import torch

from ..errors import RequestError
from ..models import TrackerModel
from ..resumable import Resumable
from ..schema.state import SavedPart, SavedState
from ..settings import TrackerSettings
from ..tracking import Tracker
from ..tracking.confidence import ConfidenceEstimator, ConfidenceState
from ..tracking.everything import EverythingOptions, FilterStatistics, segment_everything
from ..tracking.memory import get_rule
from ..tracking.object_crops import ObjectCrops
from ..tracking.propagation import WarmUp
from ..tracking.tracker import TrackerState
from ..tracking.tracks import PromptTensors
from ..types import Priority
from ..wire.frame_prompt import FramePrompt
from .catch_up import (
    MAX_CORRECTIONS,
    CachedFrame,
    CacheLimits,
    CatchUps,
    CatchUpsState,
    FrameCache,
    FramesState,
)
from .objects import Objects, ObjectsState
from .output_masks import copy_masks, to_prompt_results, to_results_job
from .prompts import PromptOutcome, PromptResult, check_choice, to_model
from .stage import PerObject


class PromptingState(SavedState):
    """What `Prompting` keeps."""

    tracker: TrackerState
    registry: ObjectsState
    confidence: ConfidenceState
    frame_cache: FramesState
    catch_ups: CatchUpsState

    def drop_frames(self) -> None:
        """Leave out the cached frames but the newest, and those that objects need to catch up.

        Next masks are the same; prompts on other past frames are refused.
        """
        ways = [progress.frame_number for progress in self.catch_ups.progress.values()]
        first = min(ways, default=self.tracker.frame_number)
        cache = self.frame_cache
        needed = [frame for frame in cache.frames if frame.frame_number > first]
        cache.frames = needed or cache.frames[-1:]


class Prompting(SavedPart[PromptingState]):
    """The objects of one camera, and the frames on which they can be added, corrected and asked about.

    It owns what tracks the objects between two frames; the stages of `Pipeline` use the same fields.

    Prompts and masks are in pixels of the frame. A prompt takes effect at once, on the cached features of frame `seq`
    or of the latest frame; `CacheLimits` says which frames are cached. All methods with a `seq` raise UnknownFrameError
    if the frame is not cached. An object that was prompted on an earlier frame catches up from there, in calls of
    `catch_ups.advance`, and then joins the next step. An object added without `seq` enters on the next frame.
    """

    STATE = PromptingState

    def __init__(self, model: TrackerModel, settings: TrackerSettings, camera: str) -> None:
        self.camera = camera
        self.registry = Objects(settings.max_objects)
        self._model = model
        self.tracker = Tracker(
            model,
            settings.max_objects,
            settings.bank_size,
            settings.selection,
            history=1,
            corrections=MAX_CORRECTIONS,
        )
        self.crops: ObjectCrops | None = None
        if settings.window == "auto" and not model.capabilities.why_not_crops():
            self.crops = ObjectCrops(model, settings.bank_size, get_rule(settings.selection))
            self.registry.on_remove(self.crops.forget)
        self.confidence = ConfidenceEstimator(
            settings.max_objects + MAX_CORRECTIONS, model.mask_size[0], model.hidden
        )
        limits = CacheLimits.from_settings(settings, model.device)
        self.frame_cache = FrameCache(camera, limits, model.device)
        self.pending = self.registry.register(PerObject("pending", PromptTensors))
        """Prompts of the objects that enter on the next frame."""
        # rows of memory are given again in the order in which they become free, which the order here decides
        self.catch_ups = CatchUps(
            self.tracker, self.frame_cache, self.registry, self.confidence, self._close_crop
        )
        self.registry.on_remove(self.frame_cache.remove_object)
        self.registry.on_remove(self.confidence.remove)
        self.registry.on_remove(self._stop_tracking)

    @property
    def cache_usage(self) -> dict[str, int]:
        """Number of cached and of pinned frames, of objects that catch up, and bytes of cache and memory bank."""
        return {
            "cached_frames": len(self.frame_cache),
            "pinned_frames": sum(frame.lease_ns > 0 for frame in self.frame_cache),
            "cached_bytes": self.frame_cache.nbytes,
            "catching_up": len(self.catch_ups),
            "bank_bytes": self.tracker.bank.nbytes + (self.crops.nbytes if self.crops is not None else 0),
        }

    def warm_up_reads(self) -> None:
        """Run the read of the memory bank once in every shape that it will have, if shapes are static."""
        self.tracker.warm_up_reads()

    def plan_warm_up(self, most: int) -> WarmUp:
        """Return with which numbers of objects, of at most `most`, the stages run other code."""
        return self.tracker.plan_warm_up(most)

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
        every `stride`-th frame, by default `catch_ups.stride`. With `choice`, it begins with that one of `candidates`.
        Raises RequestError for a bad prompt, CapacityError if all slots are taken.
        """
        # all that may be refused comes first, so that a refused prompt changes nothing
        object_id = self.registry.reserve()
        cached = self.find(seq)
        checked = to_model(prompt, object_id, cached.scaling)
        if choice is not None:
            checked = checked._replace(choice=check_choice(choice, prompt, self._model.candidates))
        result = self._prompt(cached, checked, stride) if seq is not None else None
        if result is None:
            self.pending[object_id] = checked
        self.registry.add(object_id, label, priority)
        return PromptOutcome(object_id, result)

    def refine(
        self, object_id: int, prompt: FramePrompt, seq: int | None = None, stride: int | None = None
    ) -> PromptResult:
        """Correct an object on the cached frame `seq`, or on the latest for None. Points correct its mask there.

        What is remembered of its appearance does not change: users call `Pipeline.refine`. Raises the errors of `add`,
        UnknownObjectError, and RequestError for an object that has not entered yet.
        """
        self.registry.require(object_id)
        if object_id in self.pending:
            raise RequestError(
                f"object {object_id} has no mask to refine: expected an object on a frame, found one that enters on "
                "the next frame; try again when masks show it"
            )
        cached = self.find(seq)
        # points correct the mask on the frame that the user has seen, not the latest mask
        checked = to_model(prompt, object_id, cached.scaling, cached.logits.get(object_id))
        return self._prompt(cached, checked, stride)

    def pin(self, seq: int, lease_s: float) -> None:
        """Keep the cached frame `seq` for prompts until later frames are `lease_s` newer; 0 lets it go."""
        self.frame_cache.pin(seq, round(1e9 * lease_s))

    def find(self, seq: int | None = None) -> CachedFrame:
        """Return the cached frame `seq`, or the latest for None."""
        return self.frame_cache.get(seq)

    @torch.inference_mode()
    def segment(self, prompt: FramePrompt, seq: int | None = None) -> PromptResult:
        """Segment the cached frame `seq`, or the latest for None, from points and/or a box, without tracking."""
        cached = self.find(seq)
        features = cached.features_on(self._model.device)
        # ids begin with 1, so 0 names no object
        logits, score = self.tracker.segment(features, to_model(prompt, 0, cached.scaling))
        return to_prompt_results(cached.seq, cached.scaling, logits[None], score)[0]

    @torch.inference_mode()
    def candidates(self, prompt: FramePrompt, seq: int | None = None) -> list[PromptResult]:
        """Segment as `segment` does, to all masks that may be meant, by falling score: a part, a larger one, the whole.

        Weights that were not trained for it have one.
        """
        cached = self.find(seq)
        features = cached.features_on(self._model.device)
        masks = self.tracker.segment_candidates(features, to_model(prompt, 0, cached.scaling))
        return to_prompt_results(cached.seq, cached.scaling, *masks)

    def find_everything(
        self, options: EverythingOptions, seq: int | None
    ) -> Resumable[tuple[int, list[PromptResult], str]]:
        """Segment everything on the cached frame `seq`, or the latest for None.

        Return its seq, the masks, and the reason for an empty result. Steps and removals in between change nothing.
        """
        cached = self.find(seq)
        # held for all turns, because the frame may leave the cache in between
        features = cached.features_on(self._model.device)
        statistics = FilterStatistics()
        masks = yield from segment_everything(self._model, features, options, statistics)
        results = yield from to_results_job(cached.seq, cached.scaling, *masks)
        note = "" if results else statistics.explain(options.complete(self._model))
        return cached.seq, results, note

    @torch.inference_mode()
    def _prompt(self, cached: CachedFrame, prompt: PromptTensors, stride: int | None) -> PromptResult:
        """Add or correct an object. On an earlier frame than the latest, it begins to catch up."""
        # on the latest frame there is nothing to catch up on, unless a prompt on an earlier frame still does
        is_latest = cached is self.frame_cache.get(None)
        if is_latest and prompt.object_id not in self.catch_ups:
            features = cached.features_on(self._model.device)
            logits, score = self.tracker.prompt_at(features, cached.frame_number, prompt)
            if self.crops is not None:
                self.crops.begin(cached.frame_number, prompt.object_id, logits)
            self.confidence.start(prompt.object_id, copy_masks(logits[None])[0].levels)
        else:
            logits, score = self.catch_ups.begin(cached, prompt, stride)
        # later points on this frame correct this mask
        cached.set_logits(prompt.object_id, logits)
        return to_prompt_results(cached.seq, cached.scaling, logits[None], score)[0]

    def _close_crop(self, object_id: int) -> None:
        """Let an object that has caught up have a new crop, which begins with its next mask."""
        if self.crops is not None:
            self.crops.forget(object_id)

    def _stop_tracking(self, object_id: int) -> None:
        # an object that waits for its first frame, or is new and catches up, is not tracked yet
        if object_id in self.tracker.ids:
            self.tracker.remove(object_id)
