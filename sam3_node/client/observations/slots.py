"""Objects by name in a fixed number of slots, at the size that a policy takes.

All observations are made of this form. Masks are sampled by the nearest pixel.

`ObjectSlots` decides which object is in which slot, and remembers it. `SlotObservation` is the contents of the slots at
one moment, with the age of each and the doubt about it. The forms for policies only arrange its arrays.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np
import numpy.typing as npt

from ...errors import NodeRestarted, PolicyError, WireError
from ...types import NANOSECONDS, Image, Instance, Mask, MaskFrame
from ..mask_reader import describe_rivals

Fit = Literal["stretch", "pad"]
"""stretch: the frame fills the size. pad: in proportion, in the middle, with margins."""
ANY = "*"
"""Name of a slot for an object of any label."""
FLAGS = ("usable", "tracked", "visible", "doubtful", "stale")
FIELDS = (*FLAGS, "confidence", "age_s", "x0", "y0", "x1", "y1")
"""Elements of each slot in `SlotObservation.vector`. Flags are 0 or 1, the box is in fractions of width and height."""
MAX_AGE_S = 60.0
"""Seconds that stand for a greater age, and for one that is not known."""
CLOCK_TOLERANCE_S = 0.1
"""Seconds by which the node's clock may be ahead of the policy's."""
MAX_READS = 64
"""Masks that one read takes at most. A flood must not keep the policy from its step."""
COLOURS = np.array(
    [(255, 60, 60), (60, 220, 60), (80, 120, 255), (255, 210, 0), (0, 220, 220), (230, 60, 230)], np.float32
)
"""RGB of the overlay's slots."""


class Fitted(NamedTuple):
    """A mask bool [height, width] with at least one pixel, and its box (x0, y0, x1, y1) in pixels, not rounded."""

    mask: npt.NDArray[np.bool_]
    box: tuple[float, float, float, float]


def fit_mask(mask: Mask, size: tuple[int, int], fit: Fit = "stretch") -> Fitted | None:
    """Sample a mask to `size` (height, width). Returns None for an empty one.

    If no sampled pixel is inside, the one nearest to the middle of the mask's pixels is set. "pad" has the margins of
    openpi's `resize_with_pad` and tf.image.resize_with_pad.
    """
    if not mask.area:
        return None
    # the frame's place in the image, and the pixel of the frame that each pixel there shows
    (top, bottom), (left, right) = _place_frame(mask.size, size, fit)
    x0, y0, x1, y1 = mask.box
    rows = _sample(mask.size[0], bottom - top)
    columns = _sample(mask.size[1], right - left)
    # only the crop of the mask is decoded, so only the samples within its box are looked at
    first, last = np.searchsorted(rows, (y0, y1))
    begin, end = np.searchsorted(columns, (x0, x1))
    image = np.zeros(size, np.bool_)
    inside = mask.crop[np.ix_(rows[first:last] - y0, columns[begin:end] - x0)]
    image[top + first : top + last, left + begin : left + end] = inside
    scale_y = (bottom - top) / mask.size[0]
    scale_x = (right - left) / mask.size[1]
    # a small object may lie between all samples: a policy must see it all the same
    if not inside.any():
        pixels = np.argwhere(mask.crop)
        y, x = pixels[len(pixels) // 2]
        image[top + int((y0 + y + 0.5) * scale_y), left + int((x0 + x + 0.5) * scale_x)] = True
    box = (left + x0 * scale_x, top + y0 * scale_y, left + x1 * scale_x, top + y1 * scale_y)
    return Fitted(image, box)


def _place_frame(
    frame: tuple[int, int], size: tuple[int, int], fit: Fit
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (top, bottom) and (left, right) of the frame in an image of `size`."""
    if fit == "stretch":
        return (0, size[0]), (0, size[1])
    # the side that fills the image, and equal margins at the other; rounded as openpi and tensorflow do
    ratio = max(frame[0] / size[0], frame[1] / size[1])
    height = max(1, int(frame[0] / ratio))
    width = max(1, int(frame[1] / ratio))
    top = (size[0] - height) // 2
    left = (size[1] - width) // 2
    return (top, top + height), (left, left + width)


def _sample(source: int, target: int) -> npt.NDArray[np.intp]:
    """Return the source pixel at the centre of each target pixel."""
    return ((2 * np.arange(target) + 1) * source // (2 * target)).astype(np.intp)


class MaskFeed(Protocol):
    """A PerceptionClient, or another source of masks."""

    def latest(self, timeout_ms: int | None = None) -> MaskFrame | None:
        """Return the newest masks that were not returned before, or None."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotObservation:
    """The objects in N slots at one moment, of one camera, at a size of (H, W) pixels. The arrays may be modified.

    A policy should act on an object only if it is `usable`; `refusal` says why it is not. A stale mask is blank.
    """

    names: tuple[str, ...]
    """label that each slot is for"""
    masks: npt.NDArray[np.bool_]
    """[N, H, W]; True inside the object; a visible object has at least one pixel"""
    boxes: npt.NDArray[np.float32]
    """[N, 4]; x0, y0, x1, y1 in pixels of `masks`, x1 and y1 exclusive; zeros where `visible` is False"""
    ids: npt.NDArray[np.int64]
    """[N]; id of the object that is tracked; 0 for an empty slot"""
    visible: npt.NDArray[np.bool_]
    """[N]; True if the object was in view on a frame that is not stale"""
    doubtful: npt.NDArray[np.bool_]
    """[N]; True if the node marks the mask or its name doubtful, or the object is tentative: found by name and not
    confirmed"""
    stale: npt.NDArray[np.bool_]
    """[N]; True if `ages_s` exceeds `max_age_s`. Of an empty slot: not even its absence is known any more"""
    confidences: npt.NDArray[np.float32]
    """[N]; probability in 0..1 that the mask is right; 0 without a mask, or from a node that does not send it"""
    ages_s: npt.NDArray[np.float32]
    """[N]; seconds since the capture of the frame that the slot's contents are from, 0..MAX_AGE_S; MAX_AGE_S also
    before the first masks, and if that frame seems to lie in the future, because the clocks of the machines differ"""
    max_age_s: float
    without_slot: int = 0
    """Number of tracked objects that a slot is for by name, but none was left"""
    restarts: int = 0
    """Number of times that object ids have begun again; the ids before are void"""
    camera: str | None = None
    """None before the first masks"""
    seq: int | None = None
    """of the newest frame; None before the first masks"""
    rivals: Mapping[str, str] = field(default_factory=dict)
    """What to say of each name that more than `most` sure objects have."""
    name_confidences: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """[N]; probability in 0..1 that the name is right; 1 where a user gave it, or the node does not send it"""

    def __repr__(self) -> str:
        objects = []
        for name, number in zip(self.names, self.ids.tolist(), strict=True):
            objects.append(f"{name!r} object {number}" if number else f"{name!r} empty")
        return f"SlotObservation({self.camera} #{self.seq}: {', '.join(objects)})"

    @property
    def usable(self) -> npt.NDArray[np.bool_]:
        """[N]; True if a policy may act on the mask: visible, fresh, not doubtful, and without `rivals`."""
        alone: npt.NDArray[np.bool_] = np.array([name not in self.rivals for name in self.names])
        return alone & self.visible & ~self.doubtful

    @property
    def tracked(self) -> npt.NDArray[np.bool_]:
        """[N]; False for an empty slot."""
        return self.ids > 0

    def refusal(self, *names: str) -> str | None:
        """Return why a policy should not act on all objects of these names, or None if it may.

        Of several slots of one name, one usable is enough. The default is all names. Raises PolicyError for a name
        that no slot has.
        """
        usable = self.usable
        # of two slots for the same name, one that can be used is enough
        for name in names or dict.fromkeys(self.names):
            slots = [slot for slot, known in enumerate(self.names) if known == name]
            if not slots:
                raise PolicyError(f"expected a name of a slot, {', '.join(self.names)}; found {name!r}")
            if not usable[slots].any():
                return f"{name}: " + "; ".join(dict.fromkeys(self._describe(slot) for slot in slots))
        return None

    def _describe(self, slot: int) -> str:
        # from the most general reason to the most special one
        if self.seq is None:
            return "no masks have come yet"
        if self.stale[slot]:
            age = f"{self.ages_s[slot]:.2f} s"
            if self.ages_s[slot] >= MAX_AGE_S:
                age = f"{MAX_AGE_S:.0f} s or more, or of a clock that differs"
            return f"stale: {age} old, more than {self.max_age_s:g} s"
        if not self.tracked[slot]:
            return "not tracked"
        if not self.visible[slot]:
            return "not in view"
        if not self.doubtful[slot]:
            return self.rivals[self.names[slot]]
        sure = ""
        if slot < len(self.name_confidences) and self.name_confidences[slot] < 1:
            sure = f", of its name {self.name_confidences[slot]:.2f}"
        return f"doubtful: confidence {self.confidences[slot]:.2f}{sure}, or not confirmed yet"

    def vector(self) -> npt.NDArray[np.float32]:
        """Return float32 [N * len(FIELDS)]: the FIELDS of each slot, one slot after the other."""
        height, width = self.masks.shape[1:]
        columns = [*(getattr(self, flag) for flag in FLAGS), self.confidences, self.ages_s]
        edges = self.boxes / np.array([width, height, width, height], np.float32)
        return np.concatenate([np.stack(columns, axis=1), edges], axis=1).astype(np.float32).ravel()

    def pictures(self, name: str = "objects") -> dict[str, Image]:
        """Return the masks as images uint8 [H, W, 3], for policies that take images only: `name`_0, `name`_1 …

        There are ceil(N / 3). The channels of image k are the masks of slots 3k, 3k + 1 and 3k + 2: 255 inside, 0
        outside.
        """
        images = np.zeros((-(-len(self.names) // 3), *self.masks.shape[1:], 3), np.uint8)
        for slot, mask in enumerate(self.masks):
            images[slot // 3, ..., slot % 3][mask] = 255
        return {f"{name}_{index}": image for index, image in enumerate(images)}

    def overlay(self, image: Image, strength: float = 0.5) -> Image:
        """Return a copy of an image, uint8 [H, W, 3] in RGB order, with the usable masks tinted in colours of slots.

        It is for policies that take camera images only. Raises PolicyError for an image of another size.
        """
        expected = (*self.masks.shape[1:], 3)
        if image.dtype != np.uint8 or image.shape != expected:
            raise PolicyError(
                f"image: expected uint8 {expected}, found {image.dtype} {image.shape}; give the slots the images' size"
            )
        # a copy: the camera's image belongs to the caller
        tinted = image.copy()
        for slot in np.flatnonzero(self.usable):
            mask = self.masks[slot]
            tint = COLOURS[slot % len(COLOURS)] * np.float32(strength)
            tinted[mask] = tinted[mask] * np.float32(1 - strength) + tint
        return tinted


@dataclass(slots=True)
class _Slot:
    """The object that a slot holds, and the frame that this is known from."""

    instance: Instance | None = None
    fitted: Fitted | None = None
    """the mask and its box; None if it is empty"""
    origin_ns: int | None = None
    """Unix time of the frame's capture; None before the first masks"""


class ObjectSlots:
    """Slots for the objects of one camera by name. It is not thread-safe.

    Each of `names` is the label of an object; a name that is given twice is for two such objects, and "*" for any
    label. An object stays in its slot as long as the node tracks it. New ones take the first empty slot of their name,
    those with lower ids first. With `most`, one number or one for each of some names, no mask of a name is usable
    while more than that many sure objects have it; `refusal` says which. Masks are sampled to `size` (height, width):
    over the whole of it, or with `fit="pad"` in proportion, with equal margins. Contents older than `max_age_s`
    seconds are stale. `camera` names the camera; the default is the first whose masks come.
    """

    def __init__(
        self,
        names: Sequence[str],
        size: tuple[int, int],
        *,
        max_age_s: float = 0.5,
        fit: Fit = "stretch",
        camera: str | None = None,
        most: Mapping[str, int] | int | None = None,
    ) -> None:
        # a mistake here would otherwise show as a policy that never acts
        if isinstance(names, str) or not names:
            raise PolicyError(f"names: expected a list of at least one label, found {names!r}")
        if len(size) != 2 or min(size) < 1:
            raise PolicyError(f"size: expected (height, width) of at least 1, found {size!r}")
        if fit not in get_args(Fit):
            raise PolicyError(f"fit: expected one of {', '.join(get_args(Fit))}; found {fit!r}")
        if not 0 < max_age_s < MAX_AGE_S:
            raise PolicyError(
                f"max_age_s: expected seconds above 0 and below {MAX_AGE_S:g}, found {max_age_s!r}"
            )
        # plain tuples and numbers: the arguments may be lists of a configuration file
        self.names = tuple(names)
        self.size = (int(size[0]), int(size[1]))
        self.fit = fit
        self.max_age_s = float(max_age_s)
        self.camera = camera
        self.most = _check_most(most, self.names)
        self.restarts = 0
        self._slots = [_Slot() for _ in self.names]
        self._newest: MaskFrame | None = None
        self._without_slot = 0

    def read(self, client: MaskFeed, timeout_ms: int = 0) -> SlotObservation:
        """Take the newest masks that a client has, and return the contents of the slots.

        Waits up to `timeout_ms` for masks. When none come, the contents stay, and grow older. Masks of other
        cameras, and masks whose pixels are damaged, are passed over. When object ids have begun again, all slots are
        empty and `restarts` has grown.
        """
        # wait for the first masks only; then take what else waits, so that the newest are in the slots
        deadline_s = time.monotonic() + timeout_ms / 1000
        for _ in range(MAX_READS):
            left_ms = max(0, round(1000 * (deadline_s - time.monotonic())))
            try:
                masks = client.latest(left_ms)
            except NodeRestarted as restart:
                if self.camera not in (None, restart.camera):
                    # the restart of another camera does not concern these slots
                    continue
                self.forget()
                break
            if masks is None:
                break
            if self.camera in (None, masks.camera):
                with suppress(WireError):
                    self._take(masks)
                    deadline_s = 0.0  # what else waits
        return self.observe()

    def observe(self, masks: MaskFrame | None = None, now_ns: int | None = None) -> SlotObservation:
        """Take these masks, if any, and return the contents of the slots at the Unix time `now_ns`, by default now.

        Raises PolicyError for masks of another camera, and WireError for damaged pixels; nothing is changed then.
        """
        if masks is not None:
            self._take(masks)
        if now_ns is None:
            now_ns = time.time_ns()
        ages_s = np.array([_compute_age_s(slot.origin_ns, now_ns) for slot in self._slots], np.float32)
        stale = ages_s > self.max_age_s
        # an empty slot keeps these values
        count = len(self._slots)
        masks_of_slots = np.zeros((count, *self.size), np.bool_)
        boxes = np.zeros((count, 4), np.float32)
        ids = np.zeros(count, np.int64)
        visible = np.zeros(count, np.bool_)
        doubtful = np.zeros(count, np.bool_)
        confidences = np.zeros(count, np.float32)
        name_confidences = np.ones(count, np.float32)
        for index, slot in enumerate(self._slots):
            # a stale mask stays blank: a policy that does not look at the flags must not act on it
            if slot.fitted is not None and not stale[index]:
                masks_of_slots[index] = slot.fitted.mask
                boxes[index] = slot.fitted.box
                visible[index] = True
            # id and doubt stay, however old they are
            if slot.instance is not None:
                ids[index] = slot.instance.id
                doubtful[index] = slot.instance.doubtful or slot.instance.state == "tentative"
                confidences[index] = slot.instance.confidence or 0
                if slot.instance.name_confidence is not None:
                    name_confidences[index] = slot.instance.name_confidence
        newest = self._newest
        return SlotObservation(
            names=self.names,
            masks=masks_of_slots,
            boxes=boxes,
            ids=ids,
            visible=visible,
            doubtful=doubtful,
            stale=stale,
            confidences=confidences,
            ages_s=ages_s,
            max_age_s=self.max_age_s,
            without_slot=self._without_slot,
            restarts=self.restarts,
            camera=self.camera,
            seq=None if newest is None else newest.seq,
            rivals={} if newest is None else self._find_rivals(newest),
            name_confidences=name_confidences,
        )

    def _find_rivals(self, masks: MaskFrame) -> dict[str, str]:
        """Return what to say of each name that more sure objects have than `most`."""
        # only sure objects count: a doubtful one is not usable anyway
        rivals = {}
        for name, most in self.most.items():
            sure = [item for item in masks.instances if item.label == name and item.is_sure]
            if len(sure) > most:
                rivals[name] = describe_rivals(name, sure, most, masks.camera)
        return rivals

    def forget(self) -> None:
        """Empty all slots, because object ids have begun again."""
        self.restarts += 1
        self._slots = [_Slot() for _ in self.names]
        self._newest = None
        self._without_slot = 0

    def _take(self, masks: MaskFrame) -> None:
        if self.camera not in (None, masks.camera):
            raise PolicyError(
                f"expected masks of camera {self.camera}, found {masks.camera}; use ObjectSlots for each camera"
            )
        wanted = [item.mask for item in masks.instances if ANY in self.names or item.label in self.names]
        for mask in wanted:
            _ = mask.crop  # decoded now: damage raises WireError before anything is changed
        # ids of another epoch are those of other objects
        if self._newest is not None and self._newest.epoch != masks.epoch:
            self.forget()
        self.camera = masks.camera
        self._newest = masks
        held: Sequence[int] = masks.shed.held if masks.shed is not None else ()
        # objects keep their slots; the others look for an empty one, lower ids first
        waiting = {instance.id: instance for instance in sorted(masks.instances, key=lambda item: item.id)}
        for name, slot in zip(self.names, self._slots, strict=True):
            if slot.instance is not None and slot.instance.id in held:
                continue  # not tracked on this frame: what is known of it is as old as it is
            instance = waiting.get(slot.instance.id) if slot.instance is not None else None
            if instance is not None and name in (instance.label, ANY):
                del waiting[instance.id]
            else:  # it is gone, or was renamed
                instance = None
            self._fill(slot, instance, masks)
        self._without_slot = sum(not self._place(instance, masks) for instance in waiting.values())

    def _place(self, instance: Instance, masks: MaskFrame) -> bool:
        """Put a new object into the first empty slot of its name, else of any. Return False if none is left for it."""
        # a slot of its own name comes first, so that a slot for any label stays free for others
        wanted = [name for name in (instance.label, ANY) if name in self.names]
        for name in wanted:
            for index, slot in enumerate(self._slots):
                if self.names[index] == name and slot.instance is None:
                    self._fill(slot, instance, masks)
                    return True
        # an object that no slot is for is none that lacks a slot
        return not wanted

    def _fill(self, slot: _Slot, instance: Instance | None, masks: MaskFrame) -> None:
        # an empty slot also has a time: since then the object is known to be gone
        slot.instance = instance
        slot.origin_ns = masks.age_origin_ns
        slot.fitted = None
        if instance is not None:
            slot.fitted = fit_mask(instance.mask, self.size, self.fit)


def _check_most(most: Mapping[str, int] | int | None, names: Sequence[str]) -> dict[str, int]:
    """Return the largest number of objects for each name that has one."""
    if isinstance(most, int):
        limits = {name: most for name in names if name != ANY}
    else:
        limits = dict(most or {})
    # a limit of a name that no slot has would never apply
    for name, limit in limits.items():
        if name not in names or name == ANY:
            raise PolicyError(f"most: expected limits of names of slots, {', '.join(names)}; found {name!r}")
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise PolicyError(f"most: expected whole numbers of at least 1, found {limit!r} for {name!r}")
    return limits


def _compute_age_s(origin_ns: int | None, now_ns: int) -> float:
    if origin_ns is None:
        return MAX_AGE_S
    age_s = (now_ns - origin_ns) / NANOSECONDS
    if age_s < -CLOCK_TOLERANCE_S:  # the clocks differ, so the age is not known
        return MAX_AGE_S
    return min(max(age_s, 0.0), MAX_AGE_S)
