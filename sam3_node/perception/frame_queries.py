"""Questions about the cached frames of a camera: they change nothing."""

from __future__ import annotations

import torch

from ..models import TrackerModel
from ..tracking import Tracker
from ..tracking.everything import Census, EverythingOptions, segment_everything
from ..types import Turns
from .frame_cache import FrameCache
from .host_tracks import to_prompt_results, to_results_in_turns
from .prompts import FramePrompt, PromptResult


class FrameQueries:
    """Answers questions about the frames in `cache`. `seq` is that of a cached frame, or None for the latest.

    All methods raise UnknownFrameError if the frame is not cached.
    """

    def __init__(self, model: TrackerModel, tracker: Tracker, cache: FrameCache) -> None:
        self._model, self._tracker, self._frame_cache = model, tracker, cache

    def frame_size(self, seq: int | None = None) -> tuple[int, int]:
        """Return (height, width) of the cached frame `seq`, or of the latest; UnknownFrameError if it is not cached."""
        return self._frame_cache.get(seq).scaling.frame_size

    def age_origin_ns(self, seq: int | None = None) -> int:
        """Return the Unix time from which the age of the cached frame `seq`, or of the latest for None, is measured.

        Raises UnknownFrameError if the frame is not cached.
        """
        return self._frame_cache.get(seq).age_origin_ns

    @torch.inference_mode()
    def segment(self, prompt: FramePrompt, seq: int | None = None) -> PromptResult:
        """Segment the cached frame `seq`, or the latest for None, from points and/or a box, without tracking."""
        cached = self._frame_cache.get(seq)
        features = cached.features_on(self._model.device)
        logits, score = self._tracker.segment(features, prompt.to_model(0, cached.scaling))
        return to_prompt_results(cached.seq, cached.scaling, logits[None], score)[0]

    def find_everything(
        self, options: EverythingOptions, seq: int | None
    ) -> Turns[tuple[int, list[PromptResult], str]]:
        """Segment everything on the cached frame `seq`, or the latest for None.

        Return its seq, the masks, and why there are none.
        Frames may be stepped, objects and the frame itself removed between the turns: the masks are the same.
        """
        cached = self._frame_cache.get(seq)
        features, census = cached.features_on(self._model.device), Census()
        found = yield from segment_everything(self._model, features, options, census)
        results = yield from to_results_in_turns(cached.seq, cached.scaling, *found)
        return cached.seq, results, "" if results else census.explain(options.complete(self._model))
