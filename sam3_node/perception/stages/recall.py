"""Find objects that are out of view by their looks, and let them go on under their ids.

Every few frames, one hidden object is searched for: where the features of the frame resemble its views most, a click
gives masks, and the one that looks most like it is compared with all objects that are away.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...models.sam.stages import Decoded
from ...tracking import Tracker
from ...tracking.confidence import ConfidenceEstimator
from ...tracking.looks import describe_colours, describe_features, make_views
from ...types import NANOSECONDS
from ...wire import AMBIGUOUS, RECALLED
from ..objects import Objects
from ..output_masks import rasterize
from ..remembering import Arrival, ObjectMemory, Verdict
from ..stage import Clock, Stage
from ..step import ObjectEvent, StepFrame

EVERY = 3
"""Frames from one search to the next. A search costs about as much as tracking one object."""
HIDDEN_FRAMES = 3
"""Frames out of view from which on an object is searched for."""
MIN_PEAK = 0.5
"""Cosine of a place's features and a view, below which nothing there is worth a click."""
COVERED = 0.3
"""Share of a place that tracked objects cover, from which on it is not searched."""
MAX_OVERLAP = 0.3
"""Share of a mask that other objects in view may cover."""


class RecallObjects(Stage):
    """Looks for one hidden object at a time, and begins to track it again where it is found."""

    name = "recall"
    timed = "device"
    SAVED = ("_since", "_last_id")

    def __init__(
        self, tracker: Tracker, objects: Objects, memory: ObjectMemory, confidence: ConfidenceEstimator
    ) -> None:
        self._tracker = tracker
        self._objects = objects
        self._memory = memory
        self._confidence = confidence
        self._since = 0
        self._last_id = 0

    def clock(self, step: StepFrame) -> Clock | None:
        """Return the clock of frames on which something is searched for."""
        return self.timed if self._is_due(step) else None

    def run(self, step: StepFrame) -> None:
        """Update `tracks` if a hidden object is found."""
        if not self._is_due(step):
            self._since += 1
            return
        self._since = 0
        hidden = [i for i in self._list_hidden(step) if not is_visible(step, i)]
        if not hidden:
            return
        # in turns, the next id after the last one
        self._last_id = min((i for i in hidden if i > self._last_id), default=min(hidden))
        decoded = self._propose(step, self._last_id)
        if decoded is None:
            return
        found = self._find(step, decoded, hidden)
        if found is None:
            return
        index, object_id = found
        track = self._tracker.adopt(step.features, step.frame_number, object_id, decoded, index)
        self._confidence.remove(object_id)
        step.tracks = self._tracker.updated(step.tracks, {object_id: track})

    def _is_due(self, step: StepFrame) -> bool:
        return self._since + 1 >= EVERY and any(True for _ in self._list_hidden(step))

    def _list_hidden(self, step: StepFrame) -> Iterator[int]:
        """Yield the objects that were out of view on the frames before, and that have views."""
        covered = step.cover.ids if step.cover is not None else ()
        tracked = set(self._tracker.ids)
        for status in self._objects:
            memory = self._memory.get(status.id)
            is_known = memory is not None and len(memory.gallery) > 0
            # the robot is in front of a covered object, so it is not elsewhere
            if status.frames_since_seen >= HIDDEN_FRAMES and is_known and status.id in tracked - set(covered):
                yield status.id

    def _propose(self, step: StepFrame, object_id: int) -> Decoded | None:
        """Return masks by a click where the frame resembles an object most; None if no place does."""
        memory = self._memory.get(object_id)
        assert memory is not None  # `_list_hidden` has chosen it
        top = step.features.top
        channels, height, width = top.shape[1:]
        cells = top[0].float().reshape(channels, -1).T
        cells = F.normalize(cells - cells.mean(dim=0), dim=1)
        views = F.normalize(memory.gallery.views[:, :channels].to(top.device), dim=1)
        likeness = (cells @ views.T).amax(dim=1)
        likeness = likeness.masked_fill(self._find_covered(step, (height, width)), -1.0)
        best = int(likeness.argmax())
        if float(likeness[best]) < MIN_PEAK:
            return None
        scale = self._tracker.model.image_size / width
        point = torch.tensor([[best % width + 0.5, best // width + 0.5]]) * scale
        return self._tracker.propose_click(step.features, point)

    def _find_covered(self, step: StepFrame, size: tuple[int, int]) -> Tensor:
        """Return which cells [h * w] tracked objects in view, or the robot, cover."""
        tracks = step.tracks
        inside = ((tracks.logits > 0) & tracks.visible[:, None, None]).any(dim=0)
        share = F.interpolate(inside[None, None].float(), size=size, mode="area").flatten()
        return share > COVERED

    def _find(self, step: StepFrame, decoded: Decoded, hidden: Sequence[int]) -> tuple[int, int] | None:
        """Return the index of the mask that is a hidden object, and its id; None if none is."""
        overlaps = measure_overlaps(step, decoded.logits)
        best: tuple[float, int, Verdict] | None = None
        for index, arrival in enumerate(describe_arrivals(step, decoded)):
            if arrival is None or overlaps[index] > MAX_OVERLAP:
                continue
            verdict = self._memory.judge(arrival, hidden)
            if verdict.kind in ("known", "ambiguous") and (best is None or verdict.similarity > best[0]):
                best = verdict.similarity, index, verdict
        if best is None:
            return None
        _, index, verdict = best
        report(step, verdict, self._memory)
        return (index, verdict.ids[0]) if verdict.kind == "known" else None


def is_visible(step: StepFrame, object_id: int) -> bool:
    """Return True if the tracker has found an object on this frame itself."""
    if object_id not in step.tracks.ids:
        return False
    row = step.tracks.ids.index(object_id)
    return bool(step.tracks.visible[row] & (step.tracks.logits[row] > 0).any())


def measure_overlaps(step: StepFrame, logits: Tensor) -> list[float]:
    """Return the share of each of K masks [K, h, w] that objects in view cover."""
    tracks = step.tracks
    inside = ((tracks.logits > 0) & tracks.visible[:, None, None]).any(dim=0)
    masks = (logits > 0).flatten(1).float()
    shares = masks @ inside.flatten().float() / masks.sum(dim=1).clamp(min=1)
    return list(map(float, shares.tolist()))


def describe_arrivals(step: StepFrame, decoded: Decoded) -> list[Arrival | None]:
    """Return each of K masks as something that came into view; None for an empty one."""
    logits = decoded.logits.float()
    features = describe_features(step.features.top, logits).cpu()
    host = logits.cpu().numpy()
    arrivals: list[Arrival | None] = []
    for index in range(len(host)):
        mask = rasterize(host[index], step.scaling.frame_size)
        if not mask.crop.size:
            arrivals.append(None)
            continue
        view = make_views(features[index : index + 1], [describe_colours(step.image, mask)])[0]
        arrivals.append(Arrival(view, step.frame.capture_ns, mask.box))
    return arrivals


def report(step: StepFrame, verdict: Verdict, memory: ObjectMemory) -> None:
    """Add an event for an object that is known again, or for something that may be any of several."""
    if verdict.kind == "ambiguous":
        step.events.append(ObjectEvent(AMBIGUOUS, verdict.ids[0], {"ids": list(verdict.ids)}))
        return
    remembered = memory.get(verdict.ids[0])
    away_ns = 0
    if remembered is not None and remembered.sighting is not None:
        away_ns = max(0, step.frame.capture_ns - remembered.sighting.capture_ns)
    step.events.append(ObjectEvent(RECALLED, verdict.ids[0], {"absent_s": round(away_ns / NANOSECONDS, 3)}))
