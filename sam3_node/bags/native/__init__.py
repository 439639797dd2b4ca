"""Layout of this package's recordings: MCAP files of what cameras and node have sent.

/<camera>/image        foxglove.CompressedImage, RawImage or CompressedVideo, protobuf
/<camera>/depth        foxglove.RawImage (16UC1) or CompressedImage (16-bit png)
/<camera>/calibration  foxglove.CameraCalibration, with the first frame of the file and when it changes
/<camera>/header       the header of the frame message, msgpack; it comes after the frame's pixels
masks/<camera>         the body of a masks message, msgpack, as it arrived
/<camera>/annotations  foxglove.ImageAnnotations of the same masks
events                 the body of an event, msgpack, as it arrived
truth/<camera>         optional ground truth: the body of a masks message, an instance for each object, in view or not
poses/<frame>          the body of a pose message of the robot, msgpack, as it arrived
joints/<robot>         the body of a joints message of a robot, msgpack, as it arrived
action/<robot>         the body of an action message of a robot, msgpack, as it arrived
pose/<camera>          optional camera pose, msgpack: {v, camera, seq, camera_to_world}, the matrix row by row

Messages are logged at their arrival; publish times are times of sending. The values of metadata records are JSON.
Images are Foxglove's messages, so that its viewers show a recording; headers and masks keep the bytes of the wire, so
that a replay gets exactly the node's input.
"""

from dataclasses import dataclass

import numpy as np

from ...geometry import Array
from ...types import Buffer
from ...wire.codec import VERSION, Fields, pack, unpack, vector

LAYOUT = "sam3_node.layout"
"""Metadata record that begins a recording. It holds the layout's version."""
LAYOUT_VERSION = 1
"""Version of the layout that this package writes and reads."""
NODE = "sam3_node.node"
"""Metadata record with the node's description of itself."""
RECORDING = "sam3_node.recording"
"""Metadata record at the end of a file: what was recorded, and what was lost."""
COLOUR = "sam3_node.colour"
"""Metadata record before the first frame whose raw colour was compressed for the recording: {compression, quality,
exact}. `exact` is false if the pixels differ from what the camera sent."""
RECORDER = "sam3_node.recorder"
"""Metadata record at the beginning of files that `sam3-node record` itself made."""
RING = "sam3_node.ring"
"""Metadata record of files that a trigger caused: {trigger_ns, ring_s, dropped}. `dropped` counts earlier messages that
the recorder received and the file lacks."""
EVENTS = "events"
"""Topic of the node's events."""
MASKS_ROOT = "masks/"
"""Prefix of the topics of masks. The camera's name follows."""
TRUTH_ROOT = "truth/"
"""Prefix of the topics of true masks. The camera's name follows."""
POSE_ROOT = "pose/"
"""Prefix of the topics of camera poses. The camera's name follows."""
ROBOT_POSES_ROOT = "poses/"
"""Prefix of the topics of the robot's poses. The frame's name follows."""
JOINTS_ROOT = "joints/"
"""Prefix of the topics of joints. The robot's name follows."""
ACTIONS_ROOT = "action/"
"""Prefix of the topics of actions. The robot's name follows."""
NO_SCHEMA = 0
"""MCAP's schema id of messages that describe themselves."""


@dataclass(frozen=True, slots=True)
class Pose:
    """Pose of a camera at frame `seq`.

    `camera_to_world` is [4, 4], in metres, with the camera's axes as in OpenCV: x right, y down, z forward.
    """

    camera: str
    seq: int
    camera_to_world: Array


def pack_pose(pose: Pose) -> bytes:
    """Return the body of a pose message."""
    matrix = np.asarray(pose.camera_to_world, np.float64).reshape(16).tolist()
    return bytes(pack({"v": VERSION, "camera": pose.camera, "seq": pose.seq, "camera_to_world": matrix}))


def unpack_pose(body: Buffer) -> Pose:
    """Return the pose of such a body; WireError if it is malformed."""
    fields = Fields(unpack(body, what="pose"), "pose")
    fields.require_version()
    matrix = vector(16)(fields, "camera_to_world")
    return Pose(fields.text("camera"), fields.integer("seq"), np.array(matrix).reshape(4, 4))
