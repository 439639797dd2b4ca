"""Messages of wire version 1 as bytes. Unpacking returns a message or raises WireError, for any input."""

from .codec import Fields, pack, unpack
from .control import (
    CAUGHT_UP,
    DROPPED,
    EVENTS_TOPIC,
    FAILED,
    GRASPED,
    INTERNAL_ERROR,
    REGROUPED,
    RELEASED,
    RESTORED,
    SERVED,
    Event,
    Failure,
    Reply,
    Request,
    pack_event,
    pack_reply,
    pack_request,
    unpack_event,
    unpack_reply,
    unpack_request,
)
from .images import decode_depth, decode_image, encode_depth, encode_image
from .masks import decode_mask, encode_mask
from .messages import (
    BEAT_TOPIC,
    FRAMES_ROOT,
    JOINTS_ROOT,
    MASKS_ROOT,
    MAX_EPOCH,
    POSES_ROOT,
    ROBOT_ROOTS,
    find_camera,
    frame_topic,
    joints_topic,
    masks_topic,
    pack_frame,
    pack_masks,
    pack_pose,
    pose_topic,
    robot_topic,
    unpack_frame,
    unpack_masks,
    unpack_pose,
)
