"""The replies to the operations: a Struct each. `schema.operations` says which operation has which.

A field that is nil counts as absent. Replies of later versions may have further fields, which are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypedDict, TypeVar

import msgspec
from msgspec import Meta

from .fields import (
    Epoch,
    Finite,
    FromOne,
    Natural,
    NotNegative,
    PixelBox,
    Share,
    Side,
    Size3,
    Text,
    Vector3,
    Vector4,
    Vector6,
    to_plain,
)
from .values import FramePose, MaskMap, Plane, Priority, TrackState, Value

MAX_STRIDE = 6
"""Largest number of frames from one that an object is tracked on to the next: 6 costs 0.02 of IoU on DAVIS, 8 0.07."""
MAX_LEASE_S = 120.0
"""Seconds for which a frame may be pinned, by the camera's clock. Its features take memory of the GPU meanwhile."""

Stride = Annotated[int, Meta(ge=1, le=MAX_STRIDE)]
Lease = Annotated[float, Meta(ge=0.0, le=MAX_LEASE_S)]
PlaceState = Literal[TrackState, "lost"]
Open = Mapping[str, object]
"""A map whose contents are open: what they are depends on model, settings and version."""


class OperationReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the replies. What is not known is None, and left out of the message."""

    def to_result(self) -> dict[str, object]:
        """Return the reply as a message carries it."""
        return to_plain(self)


ReplyT = TypeVar("ReplyT", bound=OperationReply, covariant=True)


class CameraReply(OperationReply, frozen=True, kw_only=True):
    """Base of the replies about one camera."""

    camera: Text
    """that the request was applied to"""
    epoch: Epoch | None = None
    """of the camera's ids"""


class FrameReply(CameraReply, frozen=True, kw_only=True):
    """Base of the replies about one frame."""

    seq: Natural
    """of the frame"""
    age_ms: Finite | None = None
    """of the frame when the request was carried out; with lossless delivery it is absent"""


class ObjectReply(OperationReply, frozen=True, kw_only=True):
    """The object that a request was applied to."""

    id: Natural
    camera: Text
    epoch: Epoch | None = None
    """of the camera's ids"""


class PromptedObject(ObjectReply, frozen=True, kw_only=True):
    """An object that was prompted, with its mask if the prompt was for a frame that the node has."""

    seq: Natural | None = None
    """of the frame"""
    mask: MaskMap | None = None
    score: Finite | None = None
    """0..1: the IoU that the network predicts"""
    age_ms: Finite | None = None
    """of the frame when the request was carried out; with lossless delivery it is absent"""
    stride: Stride | None = None
    """frames from one to the next on which the object catches up; absent if it is 1"""


class PinnedFrame(FrameReply, frozen=True, kw_only=True):
    """A frame that is kept."""

    lease_s: Lease


class RenamedObject(ObjectReply, frozen=True, kw_only=True):
    """An object with its new label."""

    label: Text
    """as it is used"""


class PromptsReply(OperationReply, frozen=True, kw_only=True):
    """The names that are looked for."""

    prompts: tuple[Text, ...]
    """as they are used: trimmed, each once"""


class NamesReply(OperationReply, frozen=True, kw_only=True):
    """The names that the detector knows."""

    detector: Text | None = None
    """None: there is none, so no name is found"""
    is_open: bool
    """true: the detector takes any other name as well; false: it refuses all others"""
    count: Natural
    """of the names that fit, also of those that are left out"""
    names: tuple[Text, ...]


class ExemplarReply(OperationReply, frozen=True, kw_only=True):
    """The names that are looked for, and the frame of the boxes unless they are on a photo."""

    prompts: tuple[Text, ...]
    camera: Text | None = None
    epoch: Epoch | None = None
    seq: Natural | None = None
    age_ms: Finite | None = None


class NothingReply(OperationReply, frozen=True, kw_only=True):
    """Nothing but the success."""


class PausedReply(OperationReply, frozen=True, kw_only=True):
    """Whether the node is paused now."""

    paused: bool


class ListedObject(Value, frozen=True, omit_defaults=True):
    """One entry of the node's list of objects. `score` is in 0..1. `age` and `frames_since_seen` count frames."""

    id: Natural
    camera: Text
    label: Text
    state: TrackState
    score: Finite
    age: Natural
    frames_since_seen: Natural
    epoch: Epoch | None = None
    """of the camera's ids"""
    silent_s: NotNegative | None = None
    """Seconds since the last frame of the camera arrived"""
    priority: Priority = "normal"


class TrackedObject(ListedObject, frozen=True):
    """An object of the node's list, with what the newest masks that a client got say of it."""

    confidence: Share | None = None
    """Probability in 0..1 that its mask is right, in the newest masks that this client got; None if they lack it"""
    doubtful: bool = False
    """True if the mask or its name is doubtful, see `Instance.doubtful`"""
    name_confidence: Share | None = None
    """Probability in 0..1 that its label is right, in the same masks; None if they lack it"""


class ObjectsReply(OperationReply, frozen=True, kw_only=True):
    """The objects that are tracked."""

    objects: tuple[ListedObject, ...]


class ScoredMask(OperationReply, frozen=True, kw_only=True):
    """A mask, and how sure it is."""

    mask: MaskMap
    score: Finite
    """0..1: the IoU that the network predicts"""


class LabelledMask(OperationReply, frozen=True, kw_only=True):
    """A mask of a prompt or of a name."""

    label: Text
    """the name that was looked for; of a prompt empty"""
    mask: MaskMap
    score: Finite
    """0..1: of the detection, or the IoU that the network predicts"""


class SegmentReply(OperationReply, frozen=True, kw_only=True):
    """The mask of a prompt on a frame."""

    camera: Text | None = None
    epoch: Epoch | None = None
    """of the camera's ids"""
    seq: Natural
    """of the frame"""
    mask: MaskMap
    score: Finite
    """0..1: the IoU that the network predicts"""
    age_ms: Finite | None = None
    """of the frame when the request was carried out; with lossless delivery it is absent"""
    masks: tuple[ScoredMask, ...] | None = None
    """with `multimask`: all masks that may be meant, the surest first"""


class EverythingReply(OperationReply, frozen=True, kw_only=True):
    """All masks of a frame."""

    camera: Text | None = None
    epoch: Epoch | None = None
    seq: Natural
    age_ms: Finite | None = None
    masks: tuple[ScoredMask, ...]
    """the surest first"""
    note: Text | None = None
    """why there are none"""


class PhotoReply(OperationReply, frozen=True, kw_only=True):
    """The masks on a picture that was sent."""

    width: Side | None = None
    """of the picture"""
    height: Side | None = None
    masks: tuple[LabelledMask, ...]


class PointsReply(OperationReply, frozen=True, kw_only=True):
    """Points of the visible surface of an object on the latest frame."""

    id: Natural | None = None
    camera: Text | None = None
    epoch: Epoch | None = None
    seq: Natural
    frame: Text
    """of their coordinates: "base" of the robot, or "camera\""""
    points_m: bytes
    """float32 [n, 3] little-endian"""


class ObjectPlace(Value, frozen=True):
    """Where an object is, or where it was seen last: by a mask that was not doubtful.

    What is not known is None. An object that no sure mask has shown yet has no age, box and position.
    """

    camera: Text
    id: Natural
    label: Text
    state: PlaceState
    """"lost": it is tracked no longer, but remembered, and keeps its id"""
    in_view: bool
    """True if a sure mask shows it on the camera's latest frame"""
    age_s: NotNegative | None = None
    """Seconds from then to now, as far as the node knows; 0 for an object in view of a camera that sends"""
    seq: Natural | None = None
    """of the frame that showed it last"""
    capture_ns: Natural | None = None
    """of that frame, by the camera's clock"""
    box: PixelBox | None = None
    """in pixels of that frame"""
    confidence: Share | None = None
    """Probability in 0..1 that the mask was right"""
    frame: Text | None = None
    """Coordinate frame of `position_m` and `covariance_m2`: "base" of the robot, or "camera\""""
    position_m: Vector3 | None = None
    """x, y and z of its visible surface then, in metres; without depth None"""
    camera_position_m: Vector3 | None = None
    """The same in the camera's frame at that time. The camera may have moved since"""
    covariance_m2: Vector6 | None = None
    """of the position's error then: xx, xy, xz, yy, yz, zz, in square metres. It does not grow with the age"""
    size_m: NotNegative | None = None
    """Longest side of its visible surface, in metres"""
    camera_pose: FramePose | None = None
    """Pose of the camera in the base at that time"""
    held: bool = False
    """True if the gripper held it when it was seen last, or holds it hidden"""
    hidden_by: Text | None = None
    """What covered it when it went out of view, such as "robot"; None if the node does not know"""
    has_picture: bool = False
    """True if `picture` returns a picture of it"""
    silent_s: NotNegative | None = None
    """Seconds since the last frame of the camera arrived; part of `age_s`"""
    epoch: Epoch | None = None
    """of the camera's ids"""


class PlacesReply(OperationReply, frozen=True, kw_only=True):
    """Where objects are."""

    objects: tuple[ObjectPlace, ...]
    """those in view first, then those that were seen last; empty: unknown"""


class SuctionPoint(Value, frozen=True):
    """A flat place of an object's visible surface for a suction cup, in the reply's `frame`."""

    position_m: Vector3
    """its middle, in metres"""
    quaternion_xyzw: Vector4
    """rotation from the cup's axes: z ahead, against `normal`; it may turn about z as it likes"""
    normal: Vector3
    """of the surface there, of length 1, away from the object; a cup comes against it"""
    radius_m: NotNegative
    """radius of the largest disc about it within 2 mm of a plane, away from the mask's edges, up to 0.05"""


class ParallelGrip(Value, frozen=True):
    """How a parallel gripper takes an object from above, in the reply's `frame`. The visible surface decides."""

    position_m: Vector3
    """between the fingertips, in metres: up to 20 mm below the object's top, above the table"""
    quaternion_xyzw: Vector4
    """rotation from the gripper's axes: z ahead, the fingers close along y"""
    approach: Vector3
    """direction of length 1 in which the gripper comes: the gripper's z, against `up`"""
    width_m: NotNegative
    """of the object between the fingers, in metres; a lower bound where the camera does not see both sides"""


class Pick(Value, frozen=True):
    """An object that can be picked. What is not known is None."""

    id: Natural
    label: Text
    rank: FromOne
    """1: the next pick"""
    reason: Text
    """why it has this rank"""
    confidence: Share | None = None
    """probability in 0..1 that its mask is right"""
    depth_share: Share | None = None
    """share 0..1 of its mask's pixels with a depth; that of shiny and transparent things is low"""
    free_above: bool = False
    """true: nothing higher was seen beside its outline, so nothing lies on it; a taller neighbour that touches it
    makes it false"""
    free_share: Share = 0.0
    """share 0..1 of its outline beside which nothing higher was seen"""
    under: tuple[Natural, ...] = ()
    """ids of the objects that lie on it, or stand higher against it"""
    visible_share: Share | None = None
    """share 0..1 of it that is visible, at most: as if it were convex"""
    height_m: Finite | None = None
    """of its top above the table, in metres; None without a table"""
    distance_m: NotNegative | None = None
    """from the base's origin to the place where it is taken, in metres; None in the camera's frame"""
    suction: SuctionPoint | None = None
    """None: no place for a cup of `cup_radius_m`, or something in the way of a tool of 15 mm radius"""
    grip: ParallelGrip | None = None
    """None: wider than `opening_m`, too flat, or no room for the fingers"""


class RefusedObject(Value, frozen=True):
    """An object that must not be picked now."""

    id: Natural
    label: Text
    reason: Text
    """what is in the way, and what was expected"""


class PicksReply(FrameReply, frozen=True, kw_only=True):
    """The objects that can be picked, by rank, and all others with the reasons."""

    frame: Text | None = None
    """of all coordinates: "base" of the robot, or "camera"; None without depth"""
    up: Vector3 | None = None
    """direction of length 1 in which objects are lifted: the table's normal; without a table, towards the camera"""
    picks: tuple[Pick, ...]
    """the next pick first, at most `most`; empty: nothing can be picked"""
    refused: tuple[RefusedObject, ...]
    """the other objects"""
    problem: Text | None = None
    """what is wrong with the 3-D fields of the frame"""


class SceneBox(Value, frozen=True):
    """An object as a box that stands on the table, see the upright box of an instance."""

    id: Natural
    label: Text
    centre_m: Vector3
    """in metres"""
    quaternion_xyzw: Vector4
    """rotation from the box's axes to the reply's `frame`; its z is the table's normal"""
    size_m: Size3
    """its sides, in metres"""
    confidence: Share | None = None
    """probability in 0..1 that its mask is right"""


class Container(Value, frozen=True):
    """A container with a level floor and four upright walls, such as a bin, in the reply's `frame`."""

    position_m: Vector3
    """middle of its floor, inside, in metres"""
    quaternion_xyzw: Vector4
    """rotation from its axes: x along its length, z up"""
    inside_m: Size3
    """length, width and depth of its inside, in metres"""
    fill: Share | None = None
    """share 0..1 of the inside that lies under what the camera sees; None if it sees less than half of it"""


class SceneReply(FrameReply, frozen=True, kw_only=True):
    """What a motion planner needs to know of a camera's latest frame. Doubtful objects have no box."""

    frame: Text | None = None
    """of all coordinates: "base" of the robot; None without a table, which all boxes stand on"""
    table: Plane | None = None
    container: Container | None = None
    """None: not asked for, or none found"""
    objects: tuple[SceneBox, ...]
    """those that are sure and measured on this frame; none that the gripper holds"""
    unseen: tuple[Natural, ...] = ()
    """ids of the other objects that are tracked, such as hidden ones: what an earlier frame said of them may hold"""
    held: tuple[Natural, ...] = ()
    """ids of the objects that the gripper holds"""
    problem: Text | None = None
    """what is wrong with the 3-D fields of the frame"""


class PictureReply(OperationReply, frozen=True, kw_only=True):
    """The last picture of an object: a crop of a frame around it, at most 128 pixels wide and high."""

    id: Natural | None = None
    camera: Text | None = None
    epoch: Epoch | None = None
    seq: Natural
    capture_ns: Natural
    """of the frame, by the camera's clock"""
    box: PixelBox
    """that it shows, in pixels of the frame"""
    jpeg: bytes


class SnapshotReply(OperationReply, frozen=True, kw_only=True):
    """A snapshot that the node makes."""

    snapshot: Natural
    """its number"""


class SnapshotPart(OperationReply, frozen=True, kw_only=True):
    """A part of a snapshot, once it is made."""

    ready: bool
    """false while the snapshot is made; the other fields come with true"""
    size: Natural | None = None
    """of the whole, in bytes"""
    sha256: Text | None = None
    """of the whole, as 64 hex digits"""
    data: bytes | None = None
    """at most 4 MiB from `offset`; empty for a snapshot with a name"""


class RestoredReply(OperationReply, frozen=True, kw_only=True):
    """The snapshot that the node continues from."""

    sha256: Text
    """of its file"""
    saved_ns: int
    """when it was taken, in Unix time"""
    ids_continue: bool
    """false: object ids begin again"""
    cameras: tuple[Text, ...]


class HandOverReply(OperationReply, frozen=True, kw_only=True):
    """What became of a hand-over."""

    state: Text
    """`confirmed`, `expired`, `cancelled`, `taken_back`, or `unknown` to this process"""
    node: Text
    """that has handed over"""


class EpisodeReply(OperationReply, frozen=True, kw_only=True):
    """An episode."""

    episode: Natural
    """its number in this run of the node"""
    task: Text
    """what is done in it, in words"""
    begun_ns: Natural
    """Unix time"""


class EndedEpisode(EpisodeReply, frozen=True, kw_only=True):
    """An episode that has ended."""

    ended_ns: Natural
    """Unix time"""
    keep: bool
    """false: recorders discard it"""


class PromptLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the names that are looked for, by name."""

    scores: Mapping[Text, Finite]
    most: Mapping[Text, Natural]
    priorities: Mapping[Text, Priority]


class RefusedCamera(msgspec.Struct, frozen=True, kw_only=True):
    """A camera that sends, though its messages cannot be read."""

    frames: Natural
    """number of its messages"""
    last_error: Text
    endpoint: Text
    silent_s: NotNegative


class LastHandOver(TypedDict):
    """A hand-over of the node's state to another node."""

    to: Text
    token: Text
    state: Text | None
    began_ns: Natural


class SnapshotStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The snapshots of a node, and what it continued from."""

    path: Text | None
    restored: Open | None
    refused: Text | None
    """why the snapshot at the start could not be used"""
    saved: Natural
    """number of automatic ones"""
    saved_ns: Natural | None
    bytes: Natural | None
    copy_ms: NotNegative | None
    write_ms: NotNegative | None
    error: Text | None
    """why the last one could not be written"""
    handed_over: bool
    hand_over: LastHandOver | None
    """the last one: `to`, `token`, `state` and `began_ns`"""


class CameraFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The counts, rates and times of a camera. What is not known yet is null."""

    epoch: Epoch | None
    """of the camera's ids"""
    last_error_age_s: NotNegative | None
    silent_s: NotNegative | None
    """seconds since its last frame arrived"""
    received: Natural
    """frames that were stepped, failed or skipped"""
    stepped: Natural
    skipped: Natural
    failed: Natural
    too_old: Natural
    clock_ahead: Natural
    withheld: Natural
    over_budget: Natural
    """stepped frames that took longer than the budget"""
    shed_level: Natural
    last_seq: Natural | None
    last_error: Text | None
    spatial_problem: Text | None
    """why the last frame with depth has no 3-D fields, or none in the base"""
    fps: NotNegative
    masks_age_ms: Finite | None
    offset_ms: Finite | None
    """of its newest masks from the newest of all cameras, by their captures: 0 or negative"""
    arrival_p50_ms: Finite | None
    age_p50_ms: Finite | None
    age_p99_ms: Finite | None
    latency_p50_ms: Finite | None
    latency_p99_ms: Finite | None
    objects: Natural
    turned_away: Natural
    """detections without a slot"""
    recalled: Natural
    """objects that came back by their looks"""
    cached_frames: Natural
    """frames that are kept for prompts"""
    pinned_frames: Natural
    cached_bytes: Natural
    catching_up: Natural
    """objects that catch up"""
    bank_bytes: Natural


class NodeReply(OperationReply, frozen=True, kw_only=True):
    """Base of the replies about the node. What is not known is null."""

    node: Text | None = None
    """its name for its present run"""
    paused: bool
    model: Text
    can_track: bool
    has_memory: bool
    confidence_calibrated: bool
    detector: Text | None
    prompts: tuple[Text, ...]
    prompt_limits: PromptLimits
    exemplars: Mapping[Text, tuple[int, ...]]
    """for each name the labels of its boxes"""
    prompt_scores: Mapping[Text, Finite]
    """highest score of a detection of each name since it was set"""
    device: Text
    dtype: Text
    threads: Natural = 0
    """CPU threads of a step, which decide how sums are rounded; a node that chooses them tries others now and then"""
    frames_refused: Mapping[Text, RefusedCamera]
    """for each camera whose messages cannot be read"""
    cameras: Mapping[Text, CameraFigures]


class StatusReply(NodeReply, frozen=True, kw_only=True):
    """The state of the node and of each camera."""

    uptime_s: NotNegative
    stepping: bool
    rss_bytes: Natural
    device_bytes: Natural | None
    """memory of the GPU"""
    threads_reason: Text = ""
    """why the number of threads is what it is"""
    frames_rejected: Natural
    frames_last_error: Text | None
    requests_rejected: Natural
    requests_last_error: Text | None
    peers_refused: Natural
    peers_last_refusal: Text | None
    endpoints_refused: tuple[Text, ...]
    endpoints_shared: tuple[Text, ...] = ()
    """cameras whose pixels come in shared memory, not through the socket"""
    snapshot: SnapshotStatus
    episode: EpisodeReply | None
    """the open one"""
    helpers_ended: Mapping[Text, Text]
    """recorders and other helpers of its group that have ended, with the reasons"""
    helpers_restarted: Mapping[Text, Natural] = {}
    """how often helpers of its group have failed, and were started again"""


class DescriptionReply(NodeReply, frozen=True, kw_only=True):
    """What a recording needs for making the masks again."""

    settings: Open
    """all of them"""
    calibrations: tuple[Open, ...]
    name_calibration: Open | None = None
    """how sure names of the detector are, where `detector.name_calibration` says it"""
    model_digest: Text
    """SHA-256 of the weights; empty for weights that are not files"""
    detector_digest: Text
    confidence: Open
    device_name: Text
    """with its instruction set, which decides how kernels round"""
    versions: Mapping[Text, Text]
    restored: Open | None
    """the snapshot that the node continued from"""
    events: Natural
    """number of events so far"""
