"""Work beside the main stream of a GPU.

Looking for things by name on one camera: when to detect, and what becomes of what is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..detection.base import Detector, PromptSet
from ..geometry import Scaling
from ..models import Features
from ..models.sam.stages import Decoded
from ..settings import DetectorSettings
from ..tracking import Track, Tracker, Tracks
from ..tracking.association import Association, Comparison, Rules, associate, compare
from ..tracking.lifecycle import Lifecycle, LifeRules
from ..types import Detection, State
from .registry import ObjectRegistry


class SideStream:
    """A CUDA stream of its own, so that its work runs while the main stream's does; on a CPU nothing of the kind.

    Whoever works in `run` waits for its results there, so that they are plain numbers on the host afterwards.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready = torch.cuda.Event() if self._stream is not None else None

    def mark(self) -> None:
        """What was given to the main stream so far is what work in `run` builds on; what comes later, it does not
        wait for.
        """
        if self._ready is not None:
            self._ready.record()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Give work to the side stream."""
        if self._stream is None or self._ready is None:
            yield
            return
        self._stream.wait_event(self._ready)
        with torch.cuda.stream(self._stream):
            yield


WEAK = 0.5  # of a prompt's threshold, from where on a detection counts for what is tracked (arXiv 2110.06864)
AGREE = 0.8  # IoU of masks below which a detection corrects what is tracked
MIN_GAP = 2  # frames between detections that doubt alone asks for
MOST = 32  # detections of a frame that are looked at, the best ones: each costs a mask


class FrameContext(NamedTuple):
    """One frame as it was tracked: BGR image [h, w, 3], features, the tracker's step, scaling and capture time."""

    image: npt.NDArray[np.uint8]
    features: Features
    frame_number: int
    scaling: Scaling
    now_ns: int


class _Found(NamedTuple):
    """Detections of one frame, the best first, and the masks that their boxes give."""

    detections: list[Detection]
    proposals: Decoded


class TrackManager:
    """Detects now and then and gives what is found to the tracker: objects that are new, corrected, or back.

    remove: forgets an object everywhere. An object that was not found by name is never touched; a detection on it is
    nothing new.
    """

    def __init__(
        self,
        detector: Detector,
        tracker: Tracker,
        objects: ObjectRegistry,
        remove: Callable[[int], None],
        settings: DetectorSettings,
    ) -> None:
        self.turned_away = 0
        """Detections that there was no room for."""
        self._detector, self._tracker, self._objects, self._remove = detector, tracker, objects, remove
        self._settings, self._rules = settings, Rules()
        self._beside = SideStream(tracker.model.device)
        self._lives = Lifecycle(LifeRules(max_lost_s=settings.max_lost_s))
        self._wanted: PromptSet | None = None
        self._since = 0  # frames since the last detection
        self._asked = self._doubt = False
        self._sure: set[int] = set()

    @property
    def detector_name(self) -> str:
        """Of the detector's model."""
        return self._detector.name

    @property
    def phrases(self) -> tuple[str, ...]:
        """What is looked for now."""
        return self._wanted.phrases if self._wanted else ()

    def set_prompts(self, wanted: PromptSet | None) -> None:
        """Look for these from the next frame on; objects that only had other names are forgotten."""
        self._wanted, self._asked = wanted, wanted is not None
        for object_id in self._lives.keep_labels(self.phrases):
            self._remove(object_id)

    def state(self) -> State:
        """What `restore` takes, the names that are looked for and their limits among it."""
        wanted = self._wanted
        return {
            "wanted": wanted and {"thresholds": dict(wanted.thresholds), "most": dict(wanted.most)},
            "since": self._since,
            "asked": self._asked,
            "doubt": self._doubt,
            "sure": sorted(self._sure),
            "turned_away": self.turned_away,
            "lives": self._lives.state(),
        }

    def restore(self, state: State) -> None:
        """Look for what was looked for, and go on, from when `state` was asked for.

        Raises RequestError where the detector does not know these names; nothing has changed then.
        """
        wanted = state["wanted"]
        if wanted is not None:
            wanted = PromptSet(self._detector.prepare(tuple(wanted["thresholds"])), **wanted)
        self._wanted = wanted
        self._since, self._asked, self._doubt = state["since"], state["asked"], state["doubt"]
        self._sure, self.turned_away = set(state["sure"]), state["turned_away"]
        self._lives.restore(state["lives"])

    def forget(self, object_id: int) -> None:
        """An object was removed."""
        self._lives.forget(object_id)
        self._sure.discard(object_id)

    def is_tentative(self, object_id: int) -> bool:
        """Whether an object was found by name, and not often enough to be believed."""
        return object_id in self._lives and self._lives.is_tentative(object_id)

    def observe(self, object_id: int, score: float, visible: bool, now_ns: int) -> None:
        """Take note of an object's mask on a frame. One that is no longer sure asks for a detection, once."""
        if object_id not in self._lives:
            return
        self._lives.observe(object_id, score, visible, now_ns)
        if visible and score >= self._settings.min_track_score:
            self._sure.add(object_id)
        elif object_id in self._sure:
            self._sure.remove(object_id)
            self._doubt = True

    def encoded(self) -> None:
        """The frame's features are under way: a detection of it need not wait for what the device is given next."""
        self._beside.mark()

    def is_due(self) -> bool:
        """Whether to detect on this frame, the next one that is stepped; to be asked once a frame."""
        self._since += 1
        if self._wanted is None:
            return False
        doubt = self._doubt and self._since >= MIN_GAP
        return self._asked or doubt or self._since >= self._settings.every

    def look(self, sight: FrameContext, tracks: Tracks) -> dict[int, Track]:
        """Detect on a frame that was tracked; the masks of objects that are new, corrected or back on it.

        Raises ModelError where the detector fails; nothing has changed then.
        """
        self._since, self._asked, self._doubt = 0, False, False
        detections = self._detect(sight)
        results: dict[int, Track] = {}
        if detections:
            found, boxes = self._propose(detections, sight)
            comparison = self._compare(tracks, found, boxes)
            self._settle(tracks.ids, found, comparison, sight, results)
        else:
            for object_id in self._lives.ids:
                self._lives.miss(object_id)
        for object_id in self._lives.expired(sight.now_ns):
            self._drop(object_id, results)
        return results

    def _detect(self, sight: FrameContext) -> list[Detection]:
        assert self._wanted is not None
        thresholds = self._wanted.thresholds
        least = WEAK * min(thresholds.values())
        with self._beside.run():
            detections = self._detector.detect(sight.image, self._wanted.query, least, sight.features.trunk)
        return [d for d in detections if d.score >= WEAK * thresholds[d.label]][:MOST]

    def _propose(self, detections: list[Detection], sight: FrameContext) -> tuple[_Found, Tensor]:
        """With boxes [D, 4] in model pixels."""
        boxes = torch.from_numpy(sight.scaling.to_model([d.box for d in detections]))
        return _Found(detections, self._tracker.propose(sight.features, boxes)), boxes

    def _compare(self, tracks: Tracks, found: _Found, boxes: Tensor) -> Comparison:
        proposals, model = found.proposals, self._tracker.model
        logits = torch.where(tracks.visible[:, None, None], tracks.logits, -1)
        scale = model.mask_size[0] / model.image_size
        appearance = self._tracker.appearance(tracks.ids)
        return compare(logits, proposals.logits, boxes.float() * scale, appearance, proposals.pointer)

    def _settle(
        self,
        ids: list[int],
        found: _Found,
        comparison: Comparison,
        sight: FrameContext,
        results: dict[int, Track],
    ) -> None:
        """Carry out what the association says; `ids` are those of its rows."""
        association = self._associate(ids, found, comparison)
        for row, index in (association.seen | association.returned).items():
            if ids[row] not in self._lives:
                continue
            self._sight(ids[row], found.detections[index], sight)
            if row in association.returned or self._disagrees(comparison, row, index, found):
                results[ids[row]] = self._adopt(ids[row], index, found, sight)
        given = {ids[row] for row in association.seen | association.returned}
        for object_id in self._lives.ids:
            if object_id not in given:
                self._lives.miss(object_id)
        for first, second in association.twins:
            self._merge(ids[first], ids[second], results)
        for index in association.fresh:
            self._begin(index, found, sight, results)

    def _associate(self, ids: list[int], found: _Found, comparison: Comparison) -> Association:
        labels = [self._lives.label(i) if i in self._lives else "" for i in ids]
        away = [i in self._lives and self._lives.is_away(i) for i in ids]
        names = [detection.label for detection in found.detections]
        association = associate(comparison, labels, away, names, self._rules)
        if self._settings.association:
            return association
        return Association(association.seen, {}, association.fresh, [])

    def _disagrees(self, comparison: Comparison, row: int, index: int, found: _Found) -> bool:
        """Whether a detection that is believed has another mask than the object it is."""
        agrees = comparison.mask_iou[row, index] >= AGREE
        return self._settings.association and not agrees and self._is_believed(found.detections[index])

    def _is_believed(self, detection: Detection) -> bool:
        assert self._wanted is not None
        return detection.score >= self._wanted.thresholds[detection.label]

    def _merge(self, first: int, second: int, results: dict[int, Track]) -> None:
        """Of two objects with one mask, drop the one that is no longer detected; the younger, if both are not."""
        for object_id in (second, first):
            if object_id in self._lives and self._lives.is_repeat(object_id):
                return self._drop(object_id, results)

    def _begin(self, index: int, found: _Found, sight: FrameContext, results: dict[int, Track]) -> None:
        """A new object, where there may be one more of its name, and room."""
        detection = found.detections[index]
        if not self._is_believed(detection) or self._is_full(detection.label):
            return
        if len(self._objects) >= self._objects.capacity:
            victim = self._lives.gives_way(detection.score)
            if victim is None:
                self.turned_away += 1
                return
            self._drop(victim, results)
        object_id = self._objects.reserve()
        self._objects.add(object_id, detection.label)
        self._sight(object_id, detection, sight)
        results[object_id] = self._adopt(object_id, index, found, sight)

    def _sight(self, object_id: int, detection: Detection, sight: FrameContext) -> None:
        """A detection of an object, which may change what it is called."""
        self._lives.sight(object_id, detection.label, detection.score, sight.now_ns)
        label = self._lives.label(object_id)
        if not self._is_full(label):
            self._objects.rename(object_id, label)

    def _is_full(self, label: str) -> bool:
        """Whether there are as many objects of this name as there may be."""
        limit = self._wanted.most.get(label) if self._wanted else None
        return limit is not None and sum(self._objects.label(i) == label for i in self._lives.ids) >= limit

    def _adopt(self, object_id: int, index: int, found: _Found, sight: FrameContext) -> Track:
        return self._tracker.adopt(sight.features, sight.frame_number, object_id, found.proposals, index)

    def _drop(self, object_id: int, results: dict[int, Track]) -> None:
        results.pop(object_id, None)
        self._remove(object_id)
