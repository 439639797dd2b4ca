"""Follow objects in object crops as well: cut-outs of the frame that keep each object at its first position and size.

Weights whose input is small see little of a small object, and the memory of SAM 2 compares positions, so that an object
that comes nearer resembles its memories less and less. A crop is a square around the object that goes with it. The
encoder sees it as an image of its own, and it has a memory of its own, which begins with the object's first mask.

A crop that follows the mask of its own drifts with it: a mask that grows makes the crop grow, and with it the next
mask. So the crop moves with the pixels alone: corners within the last mask are followed by sparse optical flow (Lucas
and Kanade), forward and back, and a similarity transform of those that return to where they were moves and scales it.

The masks of frame and crop are averaged where they agree. Where they do not, the one with the better score stands,
and a crop that is overruled for some frames begins again from the frame's mask. The tracker's memory is not touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import torch
from msgspec import Meta
from torch import Tensor

from ..geometry import shrink
from ..models import Features, TrackerModel
from ..schema.state import Count, Flags, Id, Number, Pixels, SavedPart, SavedState, Size, Time
from ..types import Image, Mask
from .memory import MemoryBank, MemoryState, SelectionRule
from .propagation import MemoryPropagation
from .tracks import Track, Tracks, split_tracks

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]

MAX_CROPS = 4
"""Objects of one camera that have an object crop. Each takes about as long as a frame with one object."""
WIDTH = 2.5
"""Side of a crop, as a multiple of the longer side of the object's first box."""
MAX_WIDTH = 1.5
"""Largest side of an object's first crop, as a multiple of the frame's side."""
MIN_SIZE_PX = 12.0
"""Smallest object size in pixels from which a crop's side is computed. A smaller object gets the crop of this size."""
MAX_SIZE = 3.0
"""Largest object size from which a crop's side is computed, as a multiple of the frame's longer side."""
AGREED_IOU = 0.5
"""IoU of the masks from frame and crop, from which on their logits are averaged. Below it, the mask with the better
score is used."""
OUTSIDE_LOGIT = -10.0
"""Mask logit of pixels outside of the crop: surely background."""
MOST_OVERRULED = 3
"""Frames in a row on which the frame's mask is used instead of the crop's, after which the crop begins anew from it."""
# optical flow
FLOW_SIDE = 640
"""Longer side in pixels to which a frame is scaled down for optical flow. A larger image takes longer."""
CORNERS = 120
"""Corners of the last mask that are followed at most."""
CORNER_QUALITY = 0.01
"""Smallest quality of a corner, as a share of the best one's: `qualityLevel` of OpenCV's goodFeaturesToTrack."""
CORNER_DISTANCE_PX = 3
"""Smallest distance in pixels between two corners."""
FLOW_WINDOW_PX = 21
"""Side in pixels of the patch that optical flow compares around a corner."""
FLOW_LEVELS = 4
"""Levels of the image pyramid of optical flow."""
MIN_CORNERS = 6
"""Corners that must be found again, and that must agree with the estimated motion. With fewer, the crop stays where it
is."""
RETURNED_PX = 1.0
"""Distance in pixels up to which a corner that is followed forward and back has returned to where it was. Others are
dropped."""
INLIER_PX = 3.0
"""Distance in pixels from the estimated motion up to which a corner agrees with it."""
INLIER_SHARE = 0.4
"""Share of the corners that must agree with the estimated motion."""
SCALE_LIMITS = (0.85, 1.18)
"""Smallest and largest factor by which a crop may change its size from one frame to the next."""


@dataclass(frozen=True, slots=True)
class CropRegion:
    """A rectangle in whole pixels of a frame, which may reach beyond it."""

    left: int
    top: int
    width: int
    height: int

    def overlaps(self, shape: tuple[int, ...]) -> bool:
        """Return True if a part of a frame of this shape lies in the region."""
        return -self.height < self.top < shape[0] and -self.width < self.left < shape[1]

    def crop(self, image: Image) -> Image:
        """Return the image in the region; beyond the frame, its border is repeated."""
        seen = image[self._rows(image.shape), self._columns(image.shape)]
        if seen.shape[:2] == (self.height, self.width):
            return np.ascontiguousarray(seen)
        bordered = cv2.copyMakeBorder(seen, *self._missing(image.shape), cv2.BORDER_REPLICATE)
        return np.asarray(bordered, np.uint8)

    def crop_mask(self, mask: Bools) -> Bools:
        """Return the part of a mask in the region; beyond the frame there is nothing."""
        seen = mask[self._rows(mask.shape), self._columns(mask.shape)]
        missing = self._missing(mask.shape)
        return np.pad(seen, (missing[:2], missing[2:]))

    def paste(self, low: Logits, canvas: Logits) -> None:
        """Write logits [h, w] of the region into those of a frame."""
        high = cv2.resize(low, (self.width, self.height), interpolation=cv2.INTER_LINEAR)
        top, _, left, _ = self._missing(canvas.shape)
        part = canvas[self._rows(canvas.shape), self._columns(canvas.shape)]
        part[:] = high[top : top + part.shape[0], left : left + part.shape[1]]

    def average(self, low: Logits, canvas: Logits) -> None:
        """Average logits [h, w] of the region with those of a frame, where they overlap."""
        pasted = canvas.copy()
        self.paste(low, pasted)
        canvas += pasted
        canvas *= 0.5

    def _rows(self, shape: tuple[int, ...]) -> slice:
        return _clip(self.top, self.height, shape[0])

    def _columns(self, shape: tuple[int, ...]) -> slice:
        return _clip(self.left, self.width, shape[1])

    def _missing(self, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Return the rows above and below, and the columns left and right, that lie beyond the frame."""
        rows = self._rows(shape)
        columns = self._columns(shape)
        # a region that lies beyond the frame shows its border alone
        above = min(max(rows.start - self.top, 0), self.height - (rows.stop - rows.start))
        before = min(max(columns.start - self.left, 0), self.width - (columns.stop - columns.start))
        below = self.height - above - (rows.stop - rows.start)
        after = self.width - before - (columns.stop - columns.start)
        return above, below, before, after


def _clip(start: int, length: int, size: int) -> slice:
    """Return the part of a span that lies in 0..size; at least one pixel."""
    first = min(max(start, 0), size - 1)
    return slice(first, max(min(start + length, size), first + 1))


class Motion(NamedTuple):
    """The similarity transform of an object's pixels from one frame to the next."""

    matrix: Floats
    """[2, 3], of pixels of the frame"""

    @property
    def scale(self) -> float:
        """Return the factor by which the object has grown."""
        return math.hypot(self.matrix[0, 0], self.matrix[1, 0])


def measure_motion(before: Image, now: Image, mask: Bools) -> Motion | None:
    """Follow corners within a mask from one grey image to the next; None if too few of them move alike.

    The mask [h, w] may be larger than the images.
    """
    scale = before.shape[1] / mask.shape[1]
    within = cv2.resize(mask.astype(np.uint8), before.shape[::-1], interpolation=cv2.INTER_NEAREST)
    corners = cv2.goodFeaturesToTrack(before, CORNERS, CORNER_QUALITY, CORNER_DISTANCE_PX, mask=within)
    if corners is None or len(corners) < MIN_CORNERS:
        return None
    size = (FLOW_WINDOW_PX, FLOW_WINDOW_PX)
    there, found, _ = cv2.calcOpticalFlowPyrLK(before, now, corners, None, winSize=size, maxLevel=FLOW_LEVELS)
    back, returned, _ = cv2.calcOpticalFlowPyrLK(now, before, there, None, winSize=size, maxLevel=FLOW_LEVELS)
    near = np.linalg.norm((back - corners)[:, 0], axis=1) < RETURNED_PX
    kept = near & (found[:, 0] > 0) & (returned[:, 0] > 0)
    if kept.sum() < MIN_CORNERS:
        return None
    matrix, inliers = cv2.estimateAffinePartial2D(
        corners[kept, 0] / scale,
        there[kept, 0] / scale,
        ransacReprojThreshold=INLIER_PX / scale,
        maxIters=200,
    )
    if matrix is None or inliers.sum() < MIN_CORNERS or inliers.mean() < INLIER_SHARE:
        return None
    return Motion(np.asarray(matrix, np.float64))


class Followed(SavedState):
    """An object that has a crop."""

    row: Annotated[int, Meta(ge=0, lt=MAX_CROPS)]
    """of the crops' memory"""
    frame: Time
    """the tracker's step on which `mask` was found"""
    mask: Flags
    """[H, W], the last one that was shown"""
    centre: tuple[Number, Number]
    """of the crop, (x, y) in pixels"""
    size: Size
    """of the object, in pixels"""
    widths: tuple[Size, Size]
    """of the crop, as multiples of `size`"""
    overruled: Count = 0
    """frames in a row on which the frame's mask stood against the crop's"""

    @classmethod
    def begin(cls, row: int, frame: int, mask: Bools) -> Followed:
        """Begin with a mask, which is not empty."""
        x0, y0, x1, y1 = Mask.from_full(mask).box
        size = max(float(max(x1 - x0, y1 - y0)), MIN_SIZE_PX)
        height, width = mask.shape
        widths = min(WIDTH, MAX_WIDTH * width / size), min(WIDTH, MAX_WIDTH * height / size)
        return cls(row, frame, mask, ((x0 + x1) / 2, (y0 + y1) / 2), size, widths)

    def is_stale(self, image: Image, frame: int) -> bool:
        """Return True if the last mask is not of the frame before this one, of another size, or if the crop left it."""
        is_next = self.frame == frame - 1 and self.mask.shape == image.shape[:2]
        return not is_next or not self.region().overlaps(image.shape)

    def region(self) -> CropRegion:
        """Return the crop's region, around the centre."""
        # also of a saved state whose figures are out of all proportion
        size = min(self.size, MAX_SIZE * max(self.mask.shape))
        width, height = (max(round(min(share, WIDTH) * size), 1) for share in self.widths)
        x, y = self.centre
        return CropRegion(round(x - width / 2), round(y - height / 2), width, height)

    def move(self, motion: Motion) -> None:
        """Move and scale the crop as the pixels of the object have moved."""
        height, width = self.mask.shape
        x, y = motion.matrix @ (*self.centre, 1.0)
        self.centre = min(max(float(x), 0.0), float(width)), min(max(float(y), 0.0), float(height))
        grown = self.size * min(max(motion.scale, SCALE_LIMITS[0]), SCALE_LIMITS[1])
        self.size = min(max(grown, MIN_SIZE_PX), MAX_SIZE * max(height, width))


class CropResult(NamedTuple):
    """What object crops have changed on a frame."""

    tracks: Tracks
    masks: dict[int, Mask]
    """by object: masks at the frame's size, finer than the logits of `tracks`"""


class ObjectCropsState(SavedState):
    """What `ObjectCrops` keeps."""

    frame: Time
    grey: Pixels | None
    image: Pixels | None
    bank: MemoryState
    followed: Annotated[dict[Id, Followed], Meta(max_length=MAX_CROPS)]
    most: Count = MAX_CROPS


class ObjectCrops(SavedPart[ObjectCropsState]):
    """The object crops of up to MAX_CROPS objects of one camera."""

    STATE = ObjectCropsState

    def __init__(self, model: TrackerModel, bank_size: int, rule: SelectionRule) -> None:
        self._model = model
        self._bank = MemoryBank(model, MAX_CROPS, bank_size, rule)
        self._propagation = MemoryPropagation(model, self._bank)
        self._followed: dict[int, Followed] = {}
        self._grey: Image | None = None
        self._image: Image | None = None
        """The last frame, on which a prompt may begin a crop."""
        self._frame = 0
        """The tracker's step of `_image` and `_grey`."""
        self._most = MAX_CROPS
        """The largest number of crops on that step."""

    def __contains__(self, object_id: int) -> bool:
        return object_id in self._followed

    def __len__(self) -> int:
        return len(self._followed)

    @property
    def nbytes(self) -> int:
        """Device memory in bytes. It never changes."""
        return self._bank.nbytes

    def forget(self, object_id: int) -> None:
        """Close an object's crop, if it has one; a new one begins with its next mask."""
        followed = self._followed.pop(object_id, None)
        if followed is not None:
            self._bank.clear(followed.row)

    def forget_all(self) -> None:
        """Close all crops."""
        for object_id in list(self._followed):
            self.forget(object_id)
        self._grey = self._image = None

    @torch.inference_mode()
    def begin(self, frame: int, object_id: int, logits: Tensor) -> None:
        """Begin an object's crop anew with the mask of a prompt, logits [h, w], on the last frame.

        On another frame, or if no crop was followed there, it begins with the object's next mask.
        """
        self.forget(object_id)
        if self._image is not None and frame == self._frame and len(self) < self._most:
            self._begin(self._image, frame, object_id, logits)

    @torch.inference_mode()
    def step(
        self,
        image: Image,
        frame: int,
        tracks: Tracks,
        was_prompted: Callable[[int], bool],
        most: int = MAX_CROPS,
    ) -> CropResult:
        """Follow the objects of a frame in their crops, and begin crops of those that have none, up to `most` crops.

        frame: the tracker's step. `was_prompted` says whether an object's mask was given on this frame. Where there are
        more objects, those with the smallest masks have crops: the frame shows least of them.
        """
        now = _make_grey(image)
        before = self._grey
        if before is None or self._frame != frame - 1 or before.shape != now.shape:
            before = None
        self._grey = now
        self._image = image
        self._frame = frame
        for object_id in self._followed.keys() - set(tracks.ids):
            self.forget(object_id)
        self._most = most
        chosen = self._choose(tracks, most)
        for object_id in self._followed.keys() - chosen:
            self.forget(object_id)
        changed: dict[int, Track] = {}
        masks: dict[int, Mask] = {}
        columns = (tracks.logits, tracks.scores, tracks.visible, tracks.presence, tracks.pointers)
        for object_id, *values in zip(tracks.ids, *columns, strict=True):
            if object_id not in chosen:
                continue
            track = Track(*values)
            followed = self._followed.get(object_id)
            # a crop that has missed a frame does not know where it is, and a prompt replaces what was known
            if followed is not None and (followed.is_stale(image, frame) or was_prompted(object_id)):
                self.forget(object_id)
                followed = None
            if followed is None or before is None:
                self.forget(object_id)
                self._begin(image, frame, object_id, track.logits)
            else:
                found = self._follow(image, frame, followed, track, before, now)
                if found is not None:
                    changed[object_id], masks[object_id] = found
                if followed.overruled >= MOST_OVERRULED:
                    self.forget(object_id)
                    self._begin(image, frame, object_id, track.logits)
        return CropResult(_replace_tracks(tracks, changed), masks)

    def _choose(self, tracks: Tracks, most: int) -> set[int]:
        """Return the objects that have crops on this frame: those that have one, then the smallest masks."""
        if len(tracks.ids) <= most:
            return set(tracks.ids)
        areas = (tracks.logits > 0).sum(dim=(1, 2)).tolist()
        by_area = dict(zip(tracks.ids, areas, strict=True))
        # an object without a mask keeps its crop, but cannot begin one
        known = [i for i in tracks.ids if i in self._followed or by_area[i]]
        known.sort(key=lambda i: (i not in self._followed, by_area[i]))
        return set(known[:most])

    def _begin(self, image: Image, frame: int, object_id: int, logits: Tensor) -> None:
        """Begin a crop with an object's mask, unless that is empty, or all crops are taken."""
        free = set(range(MAX_CROPS)) - {followed.row for followed in self._followed.values()}
        mask = _enlarge(logits, image.shape) > 0
        if not free or not mask.any():
            return
        followed = self._followed[object_id] = Followed.begin(min(free), frame, mask)
        region = followed.region()
        side = (self._model.image_size, self._model.image_size)
        covered = cv2.resize(region.crop_mask(mask).astype(np.float32), side, interpolation=cv2.INTER_AREA)
        inside = covered >= min(0.5, float(covered.max()))
        prompt = torch.from_numpy(inside).to(self._model.device, torch.float32)[None, None]
        features = self._encode(image, region)
        prompted = self._propagation.decode_mask(features, prompt)
        self._propagation.start(features, followed.row, frame, frame, prompted)

    def _follow(
        self, image: Image, frame: int, followed: Followed, track: Track, before: Image, now: Image
    ) -> tuple[Track, Mask] | None:
        """Follow an object in its crop; return its track and mask, None where the frame's mask stands."""
        last = followed.mask
        motion = measure_motion(before, now, last) if last.any() else None
        if motion is not None:
            followed.move(motion)
        region = followed.region()
        features = self._encode(image, region)
        rows = np.array([followed.row], dtype=np.int64)
        decoded = self._propagation.follow(features, rows, frame, np.zeros(1, np.bool_), None)
        seen = split_tracks(decoded, 1)[0]
        low = seen.logits.float().cpu().numpy()
        canvas = np.full(image.shape[:2], OUTSIDE_LOGIT, np.float32)
        region.paste(low, canvas)
        whole = _enlarge(track.logits, image.shape)
        inside = whole > 0
        near = canvas > 0
        followed.frame = frame
        if not inside.any() and not near.any():
            followed.mask = inside
            return None
        if _iou(inside, near) >= AGREED_IOU:
            region.average(low, whole)
            followed.mask = whole > 0
            followed.overruled = 0
            return _show(track, whole), Mask.from_full(followed.mask)
        if seen.score < track.score:
            followed.mask = inside
            followed.overruled += bool(inside.any())
            return None
        followed.mask = near
        followed.overruled = 0
        return _show(seen, canvas), Mask.from_full(near)

    def _encode(self, image: Image, region: CropRegion) -> Features:
        return self._model.encode(self._model.preprocess(region.crop(image)))


def suits(model: TrackerModel, image: Image) -> bool:
    """Return True if object crops may show the model more than the frame does: its input is smaller than the frame."""
    return not model.why_not_crops() and max(image.shape[:2]) > model.image_size


def _make_grey(image: Image) -> Image:
    """Return a grey image of at most FLOW_SIDE pixels a side."""
    return shrink(np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2GRAY), np.uint8), FLOW_SIDE)


def _enlarge(logits: Tensor, shape: tuple[int, ...]) -> Logits:
    """Return logits [h, w] at the size of a frame of this shape."""
    low = logits.float().cpu().numpy()
    return np.asarray(cv2.resize(low, (shape[1], shape[0]), interpolation=cv2.INTER_LINEAR), np.float32)


def _show(track: Track, canvas: Logits) -> Track:
    """Return a track whose logits are those of a canvas at the frame's size."""
    side = track.logits.shape[::-1]
    low = cv2.resize(np.maximum(canvas, OUTSIDE_LOGIT), (side[0], side[1]), interpolation=cv2.INTER_AREA)
    return track._replace(logits=torch.from_numpy(low).to(track.logits))


def _replace_tracks(tracks: Tracks, changed: dict[int, Track]) -> Tracks:
    """Return tracks in which some are others."""
    if not changed:
        return tracks
    columns = (tracks.logits, tracks.scores, tracks.visible, tracks.presence, tracks.pointers)
    kept = zip(tracks.ids, map(Track, *columns), strict=True)
    rows = [changed.get(object_id, track) for object_id, track in kept]
    logits, scores, visible, presence, pointers = (torch.stack(column) for column in zip(*rows, strict=True))
    return replace(
        tracks, logits=logits, scores=scores, visible=visible, presence=presence, pointers=pointers
    )


def _iou(mask: Bools, other: Bools) -> float:
    """Return the IoU of masks [h, w]; 1 if both are empty."""
    either = np.count_nonzero(mask | other)
    return np.count_nonzero(mask & other) / either if either else 1.0
