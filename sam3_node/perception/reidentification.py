"""Search one frame for objects by their appearance, and describe what is there by embeddings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import RequestError
from ..geometry import DepthMap, Scaling, matrix_of, transform_points
from ..models import Features
from ..models.sam.stages import Decoded
from ..tracking import Tracker
from ..tracking.appearance import COLOURS, Gallery, describe_colours, describe_features, make_embeddings
from ..types import Box, FramePose, Image, Mask
from ..wire import AMBIGUOUS
from .catch_up import CachedFrame
from .object_memory import (
    MARGIN,
    Candidate,
    IdentityVerdict,
    LastSighting,
    ObjectMemory,
    SimilarityLimits,
    measure_overlap_of_boxes,
)
from .output_masks import rasterize
from .step import BASE, CAMERA, ObjectEvent, StepFrame
from .surfaces import measure_surfaces

MIN_PEAK = 0.5
"""Cosine between the features at a location and a stored embedding, below which the location is not prompted."""
REGION_SHARE = 0.8
"""Share of the peak's cosine down to which connected cells belong to the same region."""
MAX_REGIONS = 5
"""Regions of a frame that are prompted and compared for a request that searches one frame, such as `add_like`."""
MIN_CELLS = 0.75
"""Cells of the coarsest feature map that a mask must cover to have an appearance. A smaller mask would have the
features of what surrounds it."""
COVERED = 0.3
"""Share of a cell that tracked objects cover, above which the cell is not searched."""


class LikeRegion(NamedTuple):
    """A region of a frame, in parts of its width and height."""

    peak: tuple[float, float]
    """where it resembles something most"""
    box: tuple[float, float, float, float]
    """around the region that resembles it"""


class AppearanceFrame(NamedTuple):
    """One frame, as far as the comparison of appearances needs it."""

    features: Features
    image: Image
    scaling: Scaling
    capture_ns: int
    covered: Tensor
    """bool [h, w] of a mask's size: where objects in view are"""
    seq: int = 0
    depth: DepthMap | None = None
    """None also where depth is read after the tracker, which is so without a robot"""
    camera_pose: FramePose | None = None
    """in the base"""

    @classmethod
    def from_step(cls, step: StepFrame, out_of_view: Collection[int] = ()) -> AppearanceFrame:
        """Build it from a step whose objects are tracked. Masks of those in `out_of_view` cover nothing."""
        tracks = step.tracks
        present = torch.tensor(
            [i not in out_of_view for i in tracks.ids], dtype=torch.bool, device=tracks.logits.device
        )
        inside = (tracks.logits > 0) & (tracks.visible & present)[:, None, None]
        frame = step.frame
        covered = inside.any(dim=0)
        appearance = cls(step.features, step.image, step.scaling, frame.capture_ns, covered, frame.seq)
        return appearance._replace(depth=step.depth, camera_pose=step.camera_pose)

    @classmethod
    def from_cached(cls, cached: CachedFrame, image: Image, tracker: Tracker) -> AppearanceFrame:
        """Build it from a cached frame and its image."""
        device = tracker.model.device
        covered = torch.zeros(tracker.model.mask_size, dtype=torch.bool, device=device)
        for logits in cached.logits.values():
            covered |= logits.to(device) > 0
        features = cached.features_on(device)
        return cls(features, image, cached.scaling, cached.capture_ns, covered)

    def list_regions(self, gallery: Gallery, most: int) -> list[LikeRegion]:
        """Return up to `most` regions that resemble a gallery, the best first.

        No region is covered, and none is next to a better one.
        """
        top = self.features.top
        channels, height, width = top.shape[1:]
        # embeddings of other features are not comparable
        if gallery.embeddings.shape[1] != channels + COLOURS:
            return []
        cells = top[0].float().reshape(channels, -1).T
        cells = F.normalize(cells - cells.mean(dim=0), dim=1)
        embeddings = F.normalize(gallery.embeddings[:, :channels].to(top.device), dim=1)
        likeness = (cells @ embeddings.T).amax(dim=1)
        share = F.interpolate(self.covered[None, None].float(), size=(height, width), mode="area")
        likeness = likeness.masked_fill(share.flatten() > COVERED, -1.0).reshape(height, width)
        # a peak is the best cell of its neighbours
        peaks = F.max_pool2d(likeness[None, None], 3, stride=1, padding=1)[0, 0] == likeness
        values, order = likeness.masked_fill(~peaks, -1.0).flatten().topk(min(most, height * width))
        best = [
            cell for value, cell in zip(values.tolist(), order.tolist(), strict=True) if value >= MIN_PEAK
        ]
        if not best:
            return []
        host = likeness.cpu().numpy()
        return [_measure_region(host, cell // width, cell % width) for cell in best]

    def propose(
        self, tracker: Tracker, regions: Sequence[LikeRegion], sides: Sequence[tuple[float, float] | None]
    ) -> Decoded:
        """Return the masks that regions may mean: by a click, by the region's box, and by a box of `sides` around it.

        Sides are parts of the frame's width and height, for each region; None: not known.
        """
        size = tracker.model.image_size
        peaks = [region.peak for region in regions]
        clicked = tracker.propose_clicks(self.features, torch.tensor(peaks) * size)
        boxes = [region.box for region in regions]
        for region, known in zip(regions, sides, strict=True):
            if known is not None:
                x = (region.box[0] + region.box[2]) / 2
                y = (region.box[1] + region.box[3]) / 2
                boxes.append((x - known[0] / 2, y - known[1] / 2, x + known[0] / 2, y + known[1] / 2))
        boxed = tracker.propose(self.features, torch.tensor(boxes).clamp(0, 1) * size)
        return Decoded(*(torch.cat(pair) for pair in zip(clicked, boxed, strict=True)))

    def describe(self, decoded: Decoded) -> list[Candidate | None]:
        """Return each of K masks as a candidate; None for one that is too small."""
        logits = decoded.logits.float()
        inside = (logits > 0).flatten(1)
        shared = (inside & self.covered.flatten()).sum(dim=1) / inside.sum(dim=1).clamp(min=1)
        features = describe_features(self.features.top, logits).cpu()
        # the features of a smaller thing are those of what is around it
        least_px = MIN_CELLS * inside.shape[1] / self.features.top[0, 0].numel()
        is_large = (inside.sum(dim=1) >= least_px).tolist()
        host = logits.cpu().numpy()
        candidates: list[Candidate | None] = []
        for index, overlap in enumerate(shared.tolist()):
            mask = rasterize(host[index], self.scaling.frame_size)
            if not mask.crop.size or not is_large[index]:
                candidates.append(None)
                continue
            embedding = make_embeddings(features[index : index + 1], [describe_colours(self.image, mask)])[0]
            candidates.append(Candidate(embedding, self.capture_ns, mask.box, overlap, self._measure(mask)))
        return candidates

    def _measure(self, mask: Mask) -> LastSighting | None:
        """Return the position and the size of what a mask shows; None without depth there."""
        if self.depth is None:
            return None
        surfaces = measure_surfaces([mask], self.depth)
        if not surfaces.indices:
            return None
        x, y, z = surfaces.positions_m[0].tolist()
        frame = CAMERA
        if self.camera_pose is not None:
            x, y, z = transform_points(matrix_of(self.camera_pose), [x, y, z]).tolist()
            frame = BASE
        size_m = float(surfaces.extents_m[0].max())
        return LastSighting(
            self.seq, self.capture_ns, mask.box, None, frame, position_m=(x, y, z), size_m=size_m
        )


class Found(NamedTuple):
    """What is most similar to a gallery on a frame."""

    similarity: float
    decoded: Decoded
    choice: int
    """index of the mask in `decoded`"""
    box: Box


def _measure_region(likeness: npt.NDArray[np.float32], row: int, column: int) -> LikeRegion:
    """Return the region of a peak of likeness [h, w] of cells."""
    height, width = likeness.shape
    _, labels = cv2.connectedComponents((likeness >= REGION_SHARE * likeness[row, column]).astype(np.uint8))
    rows, columns = np.nonzero(labels == labels[row, column])
    return LikeRegion(
        ((column + 0.5) / width, (row + 0.5) / height),
        (
            float(columns.min()) / width,
            float(rows.min()) / height,
            float(columns.max() + 1) / width,
            float(rows.max() + 1) / height,
        ),
    )


def find_like(scene: AppearanceFrame, tracker: Tracker, gallery: Gallery, limits: SimilarityLimits) -> Found:
    """Return what surely has the appearance of a gallery on a frame.

    Raises RequestError if nothing has, or if several things at different locations do.
    """
    if not len(gallery):
        raise RequestError(
            "add_like: expected an object that was in view by a sure mask, found one whose appearance is not known; "
            "add it by a prompt"
        )
    found = []
    for region in scene.list_regions(gallery, MAX_REGIONS):
        decoded = scene.propose(tracker, [region], [None])
        for index, candidate in enumerate(scene.describe(decoded)):
            if candidate is not None and candidate.overlap <= COVERED:
                similarity = float(gallery.compare(candidate.embedding[None])[0])
                found.append(Found(similarity, decoded, index, candidate.box))
    found.sort(key=lambda each: each.similarity, reverse=True)
    if not found or found[0].similarity < limits.sure:
        best = f"{found[0].similarity:.2f}" if found else "none"
        raise RequestError(
            f"add_like: expected something with a likeness of at least {limits.sure} on the latest frame, found "
            f"{best}; move the camera so that it shows the object, or add it by a prompt"
        )
    first, *others = found
    elsewhere = [each for each in others if measure_overlap_of_boxes(each.box, first.box) == 0]
    rivals = [each for each in elsewhere if each.similarity > first.similarity - MARGIN]
    if rivals:
        raise RequestError(
            "add_like: expected one thing that looks like the object, found several on the latest frame; add the right "
            "one by a prompt"
        )
    return first


def report(step: StepFrame, verdict: IdentityVerdict, memory: ObjectMemory) -> None:
    """Add an event for something that may be any of several objects; note how long one that is known again was away.

    Its return is told once a mask of it is not doubtful: what is found is sometimes another thing.
    """
    if verdict.kind == "ambiguous":
        step.events.append(ObjectEvent(AMBIGUOUS, verdict.ids[0], {"ids": list(verdict.ids)}))
    elif verdict.kind == "known":
        known = memory.require(verdict.ids[0])
        # it may be found once more before a mask of it is sure
        if known.found_ns is None:
            now_ns = step.frame.capture_ns
            known.found_ns = now_ns
            known.absent_ns = 0 if known.sighting is None else max(0, now_ns - known.sighting.capture_ns)
