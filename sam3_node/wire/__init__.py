"""Messages of wire version 1 as bytes. Unpacking returns a message or raises WireError, for any input."""

from .codec import MAX_INT, VERSION, Fields, Limits, pack, unpack
from .control import (
    INTERNAL_ERROR,
    Failure,
    Reply,
    Request,
    pack_reply,
    pack_request,
    unpack_reply,
    unpack_request,
)
from .events import (
    CAUGHT_UP,
    DROPPED,
    EVENTS_TOPIC,
    FAILED,
    RESTORED,
    SERVED,
    Event,
    pack_event,
    unpack_event,
)
from .frames import pack_frame, unpack_frame
from .images import decode_depth, decode_image, encode_depth, encode_image
from .masks import decode_mask, encode_mask
from .messages import DEPTH_FIELDS, MAX_EPOCH, pack_masks, read_shed, shed_fields, unpack_masks
from .poses import POSES_ROOT, pack_pose, pose_fields, pose_topic, read_pose, unpack_pose
from .topics import BEAT_TOPIC, FRAMES_ROOT, MASKS_ROOT, frame_topic, masks_topic

__all__ = [
    "BEAT_TOPIC",
    "CAUGHT_UP",
    "DEPTH_FIELDS",
    "DROPPED",
    "EVENTS_TOPIC",
    "FAILED",
    "FRAMES_ROOT",
    "INTERNAL_ERROR",
    "MASKS_ROOT",
    "MAX_EPOCH",
    "MAX_INT",
    "POSES_ROOT",
    "RESTORED",
    "SERVED",
    "VERSION",
    "Event",
    "Failure",
    "Fields",
    "Limits",
    "Reply",
    "Request",
    "decode_depth",
    "decode_image",
    "decode_mask",
    "encode_depth",
    "encode_image",
    "encode_mask",
    "frame_topic",
    "masks_topic",
    "pack",
    "pack_event",
    "pack_frame",
    "pack_masks",
    "pack_pose",
    "pack_reply",
    "pack_request",
    "pose_fields",
    "pose_topic",
    "read_pose",
    "read_shed",
    "shed_fields",
    "unpack",
    "unpack_event",
    "unpack_frame",
    "unpack_masks",
    "unpack_pose",
    "unpack_reply",
    "unpack_request",
]
