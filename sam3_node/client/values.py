"""Check what users give, and turn replies into the values that users see; fetch snapshots."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

from msgspec.structs import asdict, replace

from ..errors import BusyError, PolicyError, RequestError, SnapshotError, WireError
from ..schema.operations import HandOver, MakeSnapshot, Operation, ReadSnapshot
from ..schema.replies import (
    EverythingReply,
    ListedObject,
    ObjectPlace,
    PhotoReply,
    PictureReply,
    PointsReply,
    PromptedObject,
    ReplyT,
    SegmentReply,
    TrackedObject,
)
from ..transport import ControlClient
from ..types import Box, Mask, MaskFrame
from ..types import lazy_numpy as np
from ..wire.frame_prompt import FramePrompt, describe_clipping
from ..wire.masks import open_mask
from ..wire.messages import POINT_BYTES, check_quaternion

MaskLike: TypeAlias = "Mask | np.typing.NDArray[np.bool_ | np.integer[Any]]"
Points: TypeAlias = "Sequence[tuple[float, float]] | np.typing.NDArray[np.floating[Any]]"
PixelBox: TypeAlias = "Sequence[float] | np.typing.NDArray[np.floating[Any]]"

MAX_BYTES = 4 << 30
"""Size of the largest snapshot that is fetched."""
WAIT_S = 60.0
"""Longest time for which a node may pack and write."""
POLL_S = 0.02
"""Time between two questions for a snapshot that is not ready."""
log = logging.getLogger(__name__)


class LastPicture(NamedTuple):
    """The last picture of an object: a crop of a frame around it, at most 128 pixels wide and high."""

    seq: int
    capture_ns: int
    """of the frame, by the camera's clock"""
    box: Box
    """that it shows, in pixels of the frame"""
    jpeg: bytes


class Segmentation(NamedTuple):
    """The mask of a prompt on frame `seq` of `camera`. `score` is in 0..1: the IoU that the network predicts."""

    seq: int
    score: float
    mask: Mask
    age_ms: float | None = None
    """Age of the frame in milliseconds when the node carried out the request; None with lossless delivery"""
    camera: str | None = None
    epoch: int | None = None
    """of the camera's ids at that time"""
    candidates: tuple[Segmentation, ...] = ()
    """All masks that may be meant, by falling score, if they were asked for; `choice` counts them"""
    note: str = ""
    """What is odd about the prompt: of a box that reaches beyond the frame the part inside was used; fractions of the
    frame mark its first pixel"""


class PhotoMask(NamedTuple):
    """A mask on a picture that was sent. `label` is the name that was looked for, or "" for a prompt."""

    label: str
    score: float
    """0..1: of the detection, or the IoU that the network predicts"""
    mask: Mask


class AddedObject(NamedTuple):
    """A new object. `id` is unique for each `camera` as long as `epoch` stays the same.

    `segmentation` is set if the prompt named a frame by `seq`.
    """

    id: int
    camera: str
    segmentation: Segmentation | None
    epoch: int | None = None
    note: str = ""
    """See Segmentation. Without `seq`, it is known from the newest masks that this client got"""


Answer = TypeVar("Answer", Segmentation, AddedObject)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SurfacePoints:
    """Points of the visible surface of an object on frame `seq`."""

    seq: int
    frame: str
    """"camera" or "base\""""
    points_m: np.typing.NDArray[np.float32]
    """[n, 3]"""

    def __repr__(self) -> str:
        return f"SurfacePoints({len(self.points_m)} points in frame {self.frame!r}, seq {self.seq})"


class Grasps(NamedTuple):
    """Grasps of an object in the robot's base, the most confident first."""

    base_from_gripper: np.typing.NDArray[np.float64]
    """[M, 4, 4]: poses of the gripper, in metres; z is ahead, and the fingers close along x"""
    confidences: np.typing.NDArray[np.float64]
    """[M]: the planner's own, in 0..1"""
    masks: MaskFrame
    """of the frame that the points are from: `capture_ns` is the stamp, `is_stale` compares the age"""


@dataclass(frozen=True, slots=True)
class MasksOfCameras:
    """The newest masks of several cameras."""

    masks: Mapping[str, MaskFrame]
    """by camera"""

    @property
    def spread_ms(self) -> float:
        """Milliseconds between the first and the last capture. For a clock other than "system", the arrival counts."""
        times_ns = [masks.age_origin_ns for masks in self.masks.values()]
        return (max(times_ns, default=0) - min(times_ns, default=0)) / 1e6


def make_prompt(
    points: Points | None = None,
    labels: Sequence[int] | None = None,
    box: PixelBox | None = None,
    mask: MaskLike | None = None,
) -> FramePrompt:
    """Return a prompt. Raises RequestError for values that no frame can have."""
    marks = [int(label) for label in labels] if labels is not None else None
    full = mask if mask is None or isinstance(mask, Mask) else _to_mask(mask)
    # the same check that the node makes: a wrong prompt is refused here, with the same error
    prompt = FramePrompt(points, marks, box, full)
    if prompt.box is not None:
        _check_sides(prompt.box.tolist())
    if hint := describe_fractions(prompt):
        log.warning("%s", hint)
    return prompt


def describe_fractions(prompt: FramePrompt) -> str:
    """Return a hint for points or a box within the first pixel, which are probably fractions of the frame; else ""."""
    marked = [part for part in (prompt.points, prompt.box) if part is not None]
    # the first pixel may be meant, so this is no error
    if not marked or not all(((part >= 0) & (part <= 1)).all() for part in marked):
        return ""
    return (
        "the prompt marks only the first pixel: expected pixels of the camera's frame; if these are fractions, "
        "multiply them by its width and height"
    )


def check_begins(
    points: Points | None, labels: Sequence[int] | None, box: PixelBox | None, mask: MaskLike | None = None
) -> None:
    """Raise RequestError for a prompt of points outside the object alone. They can only correct a mask."""
    if points is not None and labels is not None and box is None and mask is None and not any(labels):
        raise RequestError(
            "points: expected a point inside the object, or a box, beside the points outside it, found none"
        )


def check_names(names: Sequence[str], what: str, example: str = '["cam0"]') -> list[str]:
    """Return the names as a list. Raises RequestError for a bare text, whose letters would be taken for names."""
    # a text is a sequence of texts: its letters would be looked for
    if isinstance(names, str | bytes | bytearray | Mapping) or not isinstance(names, Iterable):
        raise RequestError(f"{what}: expected a list of texts such as {example}, found {_describe(names)}")
    found = list(names)
    for name in found:
        check_label(name, what)
    return found


def check_label(label: str, what: str = "label") -> None:
    """Raise RequestError for anything but text."""
    if not isinstance(label, str):
        raise RequestError(f"{what}: expected text, found {_describe(label)}")


def check_limits(limits: Mapping[str, T] | None, what: str) -> dict[str, T] | None:
    """Return limits by name, None without any. Raises RequestError for anything but a map."""
    if not limits:
        return None
    if not isinstance(limits, Mapping):
        raise RequestError(f'{what}: expected a map such as {{"red mug": 1}}, found {_describe(limits)}')
    return dict(limits)


def _describe(value: object) -> str:
    kind = "text" if isinstance(value, str) else type(value).__name__
    return f"the {kind} {value!r:.80}"


def _check_sides(box: list[float]) -> None:
    """Raise RequestError for a box smaller than a pixel, whose values are probably shares of the frame."""
    # numbers in 0..1 are the usual mistake: shares of the frame in the place of pixels
    x0, y0, x1, y1 = box
    if x1 - x0 < 1 or y1 - y0 < 1:
        are_fractions = all(0 <= value <= 1 for value in box)
        hint = "multiply the fractions by its width and height" if are_fractions else "mark a larger part"
        raise RequestError(
            f"box: expected pixels (x0, y0, x1, y1) of the camera's frame, at least 1 wide and high, found {box}; "
            f"{hint}"
        )


def _to_mask(full: np.typing.NDArray[Any]) -> Mask:
    full = np.asarray(full)
    # other numbers may be ids of many objects, or probabilities: which of them are inside is not known
    is_flags = full.dtype == np.bool_
    if full.dtype.kind in "iu":
        is_flags = any(np.isin(full, (0, inside)).all() for inside in (1, 255))
    if full.ndim != 2 or not is_flags:
        values = ""
        if not is_flags and full.size:
            values = f" with values from {full.min()} to {full.max()}"
        raise RequestError(
            "mask: expected [height, width] of bool, of 0 and 1, or of 0 and 255, "
            f"found {full.dtype} {list(full.shape)}{values}"
        )
    return Mask.from_full(full.astype(np.bool_))


def add_note(
    answer: Answer, prompt: FramePrompt, box: PixelBox | None, size: tuple[int, int] | None
) -> Answer:
    """Return an answer with a note on its prompt: one of fractions, or a box that reaches beyond the frame.

    `size` is the frame's (height, width). A clipped box is logged here; fractions were logged before the request.
    """
    note = describe_clipping(box, size)
    if note:
        log.warning("%s", note)
    return answer._replace(note=note or describe_fractions(prompt))


def read_added(reply: PromptedObject) -> AddedObject:
    """Return the new object of a reply."""
    segmentation = read_segmentation(reply) if reply.mask is not None else None
    return AddedObject(reply.id, reply.camera, segmentation, reply.epoch)


def read_segmentation(reply: PromptedObject | SegmentReply) -> Segmentation:
    """Return the mask of a reply, with the others that may be meant."""
    if reply.mask is None or reply.seq is None or reply.score is None:
        raise WireError("reply: expected 'mask', 'seq' and 'score', found less")
    candidates: tuple[Segmentation, ...] = ()
    if isinstance(reply, SegmentReply) and reply.masks is not None:
        candidates = tuple(read_segmentations(reply))
    return Segmentation(
        seq=reply.seq,
        score=reply.score,
        mask=open_mask(reply.mask, "reply: mask"),
        age_ms=reply.age_ms,
        camera=reply.camera,
        epoch=reply.epoch,
        candidates=candidates,
    )


class Segmentations(list[Segmentation]):
    """The masks in one reply. `note` says why there are none."""

    note: str = ""


def read_segmentations(reply: SegmentReply | EverythingReply) -> Segmentations:
    """Return the masks of a reply, each with the frame of the reply."""
    masks = Segmentations(
        Segmentation(
            seq=reply.seq,
            score=one.score,
            mask=open_mask(one.mask, "reply: mask"),
            age_ms=reply.age_ms,
            camera=reply.camera,
            epoch=reply.epoch,
        )
        for one in reply.masks or ()
    )
    if isinstance(reply, EverythingReply):
        masks.note = reply.note or ""
    return masks


def read_photo_masks(reply: PhotoReply) -> list[PhotoMask]:
    """Return the masks on a picture in a reply."""
    return [PhotoMask(one.label, one.score, open_mask(one.mask, "reply: mask")) for one in reply.masks]


def read_points(reply: PointsReply) -> SurfacePoints:
    """Return the points of a reply."""
    if len(reply.points_m) % POINT_BYTES:
        raise WireError(f"points: expected {POINT_BYTES} bytes for each point, found {len(reply.points_m)}")
    points_m = np.frombuffer(reply.points_m, "<f4").reshape(-1, 3)
    return SurfacePoints(reply.seq, reply.frame, points_m)


def find_frame(newest: MaskFrame | None, seq: int) -> MaskFrame | None:
    """Return the masks of frame `seq`, or newer ones if only these came; None while neither has come."""
    if newest is None or newest.seq < seq:
        return None
    # a newer frame may have come while the reply was on its way: the masks before it are kept with it
    before = newest.before
    if newest.seq > seq and before is not None and before.seq == seq:
        return before
    return newest


def check_graspable(id: int, surface: SurfacePoints, masks: MaskFrame | None, max_age_ms: float) -> MaskFrame:
    """Return the masks of the frame of points. Raises PolicyError if no gripper should act on the object there."""
    # the first reason that holds, from what can be cured by waiting to what needs the user
    if masks is None or masks.seq != surface.seq:
        reason = f"masks of its frame {surface.seq} have not come; try again"
    elif not any(item.id == id and item.is_sure and item.area for item in masks.instances):
        reason = "it is hidden, doubtful or not confirmed; hold still"
    elif masks.is_stale(max_age_ms):
        reason = f"its mask is {masks.age_ms:.0f} ms old; hold still"
    elif surface.frame != "base":
        reason = "its points are in the camera's frame; start the node with spatial.calibration that has a hand_eye"
    else:
        return masks
    raise PolicyError(
        f"grasps: expected a sure mask of object {id} in the base, at most {max_age_ms:g} ms old: {reason}"
    )


def with_doubt(listed: ListedObject, masks: MaskFrame | None) -> TrackedObject:
    """Return an object with the confidence that masks of its camera have for it."""
    tracked = TrackedObject(**asdict(listed))
    # ids of another epoch are those of other objects
    # the node's list has no confidence: the newest masks of the same epoch do
    if masks is None or masks.epoch != tracked.epoch:
        return tracked
    names = set(TrackedObject.__struct_fields__).difference(ListedObject.__struct_fields__)
    seen = next((item for item in masks.instances if item.id == tracked.id), tracked)
    return replace(tracked, **{name: getattr(seen, name) for name in names})


def check_places(places: Iterable[ObjectPlace]) -> list[ObjectPlace]:
    """Return the places of objects. Raises WireError for a pose of a camera that is none."""
    for place in places:
        if place.camera_pose is not None:
            check_quaternion(place.camera_pose.quaternion_xyzw)
    return list(places)


def read_picture(reply: PictureReply) -> LastPicture:
    """Return the picture of a reply."""
    return LastPicture(reply.seq, reply.capture_ns, reply.box, reply.jpeg)


def check_target(name_or_id: int | str) -> None:
    """Raise RequestError for anything but a name or an id."""
    if isinstance(name_or_id, bool) or not isinstance(name_or_id, int | str):
        raise RequestError(
            f"name_or_id: expected the name of an object, or its id, found {_describe(name_or_id)}"
        )


class SnapshotInfo(NamedTuple):
    """A snapshot that a node has made."""

    size: int
    """in bytes"""
    sha256: str
    """of the file, as 64 hex digits"""


def make_snapshot(control: ControlClient, name: str) -> SnapshotInfo:
    """Let the node write a snapshot with a name, and wait until it is on disk.

    Raises RequestError for a name that cannot be used, and SnapshotError if it cannot be written.
    """
    number = control.ask(MakeSnapshot(name=name)).snapshot
    size, sha256, _ = _read(control, number, 0)
    return SnapshotInfo(size, sha256)


def fetch_snapshot(control: ControlClient, request: MakeSnapshot | HandOver | None = None) -> bytes:
    """Return the bytes of a new snapshot; with a request HandOver, the node pauses in the same moment.

    Raises SnapshotError if it is too large, or does not arrive as it was sent.
    """
    number = _ask_patiently(control, request or MakeSnapshot()).snapshot
    data = bytearray()
    while True:
        size, sha256, part = _read(control, number, len(data))
        # the node may be another program, or damaged: its snapshot must not fill the memory
        if size > MAX_BYTES or len(data) + len(part) > size:
            raise SnapshotError(f"expected a snapshot of at most {MAX_BYTES} bytes, found one of {size}")
        data += part
        if not part or len(data) == size:
            break
    import hashlib  # here, because it slows the start of a client

    # what was read in parts must be the file that the node has packed
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise SnapshotError(
            f"expected a snapshot with SHA-256 {sha256}, found {len(data)} bytes with {found}; try again"
        )
    return bytes(data)


def _ask_patiently(control: ControlClient, operation: Operation[ReplyT]) -> ReplyT:
    """Send a request; again while the node makes another snapshot."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            return control.ask(operation)
        # the node makes one snapshot at a time
        except BusyError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(POLL_S)


def _read(control: ControlClient, number: int, offset: int) -> tuple[int, str, bytes]:
    """Return the size and digest of a snapshot, and a part of it, once it is packed."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        reply = control.ask(ReadSnapshot(snapshot=number, offset=offset))
        # the node packs in a thread while it goes on to step frames
        if reply.ready:
            if reply.size is None or reply.sha256 is None or reply.data is None:
                raise WireError("read_snapshot: expected 'size', 'sha256' and 'data', found less")
            return reply.size, reply.sha256, reply.data
        if time.monotonic() > deadline_s:
            raise SnapshotError(
                f"expected the node to pack its snapshot within {WAIT_S:g} s; look at its log"
            )
        time.sleep(POLL_S)
