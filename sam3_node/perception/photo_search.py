"""Segment a picture that belongs to no camera, once, by prompts or by names."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ..detection.detectors import Detector, PromptSet, prepare_prompts
from ..detection.phrases import clean_prompts
from ..errors import RequestError
from ..geometry import Scaling
from ..models import Features, TrackerModel
from ..resumable import Resumable
from ..tracking import Tracker
from ..types import Image
from ..wire.frame_prompt import FramePrompt
from .output_masks import to_prompt_results
from .prompts import PromptResult, to_model

MAX_FOUND = 32
"""Best detections of a picture that get a mask, as on a frame"""


class NamedResult(NamedTuple):
    """A mask and what it is of: a name that was looked for, or "" for a prompt."""

    label: str
    result: PromptResult


class PhotoSearch:
    """What to segment on a picture: objects by their prompts, or names. Nothing of it is remembered."""

    def __init__(
        self,
        model: TrackerModel,
        detector: Detector | None,
        prompts: Sequence[FramePrompt] = (),
        multimask: bool = False,
    ) -> None:
        """`multimask`: find all masks that the one prompt may mean."""
        self._model = model
        self._detector = detector
        self._prompts = prompts
        self._multimask = multimask
        self._names = PromptSet()

    def look_for(self, names: Sequence[str], scores: Mapping[str, float] | None, score: float) -> None:
        """Look for names whose detections have at least a score: `scores` of some names, `score` of the others.

        Raises RequestError for names that cannot be searched for.
        """
        if self._detector is None:
            raise RequestError("names: no detector is configured; set detector.kind, or give points or a box")
        self._names = prepare_prompts(self._detector, clean_prompts(names), score, scores)

    def check(self) -> None:
        """Raise RequestError unless there are prompts or names, and one prompt for `multimask`."""
        names = self._names.phrases
        if bool(names) == bool(self._prompts):
            found = "both" if names else "neither"
            raise RequestError(f"segment_photo: expected objects (points, box) or names, found {found}")
        if self._multimask and len(self._prompts) != 1:
            raise RequestError(
                f"multimask: expected one object, found {len(self._prompts)}, and {len(names)} names"
            )

    def run(self, image: Image) -> Resumable[list[NamedResult]]:
        """Segment a BGR picture [h, w, 3]: one mask of each prompt in their order, or of what is found, the best first.

        Raises RequestError for a prompt that does not lie on the picture, and ModelError if the detector fails.
        """
        scaling = Scaling(image.shape[:2], self._model.image_size)
        # a wrong prompt is refused before the encoder runs; ids begin with 1, so 0 names no object
        prompts = [to_model(prompt, 0, scaling) for prompt in self._prompts]
        with torch.inference_mode():
            features = self._model.encode(self._model.preprocess(image))
        yield
        # of one object and the shortest memory, because it remembers nothing
        tracker = Tracker(self._model, max_objects=1, bank_size=2, history=0)
        if self._names.phrases:
            return self._find_names(tracker, image, features, scaling)
        results: list[NamedResult] = []
        for prompt in prompts:
            if self._multimask:
                logits, scores = tracker.segment_candidates(features, prompt)
            else:
                logits, scores = tracker.segment(features, prompt)
                logits = logits[None]
            results.extend(
                NamedResult("", result) for result in to_prompt_results(0, scaling, logits, scores)
            )
            yield
        return results

    @torch.inference_mode()
    def _find_names(
        self, tracker: Tracker, image: Image, features: Features, scaling: Scaling
    ) -> list[NamedResult]:
        """Detect the names, and return a mask of each detection above the threshold of its name."""
        assert self._detector is not None
        thresholds = self._names.thresholds
        limit = min(thresholds.values())
        detections = self._detector.detect(image, self._names.query, limit, features.trunk)
        found = [one for one in detections if one.score >= thresholds[one.label]][:MAX_FOUND]
        if not found:
            return []
        boxes = torch.from_numpy(scaling.to_model([one.box for one in found]))
        logits = tracker.propose(features, boxes).logits
        scores = torch.tensor([one.score for one in found], device=logits.device)
        results = to_prompt_results(0, scaling, logits, scores)
        pairs = zip(found, results, strict=True)
        return [NamedResult(one.label, result) for one, result in pairs if result.mask.area]
