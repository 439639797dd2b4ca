"""Recorded frames in an MCAP file, each message one msgpack map, logged at its time of capture.

frame/<camera>: {header, colour, depth?}, the parts of a frame message of the wire, the header as a map.
truth/<camera>: the body of a masks message: what is really there, an instance for each object, in view or not.
pose/<camera>:  {v, camera, seq, camera_to_world}: a 4x4 matrix as 16 numbers, row by row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import BagError, WireError
from ...geometry import Array
from ...types import Frame, MaskFrame
from ...wire import VERSION, Fields, Limits, frame_topic, pack, pack_frame, pack_masks, unpack, unpack_frame
from .container import MessageWriter, read_messages
from .masks import masks_on

FRAME_ROOT, TRUTH_ROOT, POSE_ROOT = "frame/", "truth/", "pose/"
TOPICS_TOLD = 5
_LIMITS = Limits(total_bytes=1 << 30)


@dataclass(frozen=True, slots=True)
class Pose:
    """Where a camera was at frame `seq`: camera_to_world [4, 4], in metres, the camera's axes as in OpenCV
    (x right, y down, z forward)."""

    camera: str
    seq: int
    camera_to_world: Array


class FrameWriter(MessageWriter):
    """Writes frames to `path`, and beside them ground truth and camera poses."""

    def write(self, frame: Frame) -> None:
        """Append a frame; WireError where it contradicts itself."""
        topic, header, *pixels = pack_frame(frame)
        body = {
            "header": unpack(header, what="frame"),
            **dict(zip(("colour", "depth"), pixels, strict=False)),
        }
        sent_ns = frame.sent_ns or frame.capture_ns
        self.add(bytes(topic).decode(), pack(body), frame.seq, frame.capture_ns, sent_ns)

    def write_truth(self, truth: MaskFrame) -> None:
        """Append the true masks of the frame with the same camera, seq and capture_ns."""
        _, body = pack_masks(truth, "rle")
        self.add(TRUTH_ROOT + truth.camera, body, truth.seq, truth.capture_ns, truth.capture_ns)

    def write_pose(self, pose: Pose, capture_ns: int) -> None:
        """Append where the camera was when the frame of the same seq was taken."""
        matrix = np.asarray(pose.camera_to_world, np.float64).reshape(16).tolist()
        body = {"v": VERSION, "camera": pose.camera, "seq": pose.seq, "camera_to_world": matrix}
        self.add(POSE_ROOT + pose.camera, pack(body), pose.seq, capture_ns, capture_ns)


def read_frames(path: Path) -> Iterator[Frame]:
    """The frames of all cameras in a file that FrameWriter wrote, in that order, colour and depth still encoded.

    Of a damaged or truncated file every frame before the damage comes, then BagError. Raises BagError, too,
    for a file without a frame, one that cannot be read, and a message that is not a frame of the wire.
    """
    found, others = False, set[str]()
    for topic, data in read_messages(path):
        if topic.startswith(FRAME_ROOT):
            found = True
            yield _unpack(path, topic, data)
        elif len(others) < TOPICS_TOLD:
            others.add(topic)
    if not found:
        seen = f"only {', '.join(sorted(others))}" if others else "no message at all"
        raise BagError(f"{path} holds no recorded frames: expected messages on frame/<camera>, found {seen}")


def read_truth(path: Path) -> Iterator[MaskFrame]:
    """The ground truth of such a file, nothing where it has none; BagError as read_frames."""
    return masks_on(path, TRUTH_ROOT)


def read_poses(path: Path) -> Iterator[Pose]:
    """The camera poses of such a file, nothing where it has none; BagError as read_frames."""
    for topic, data in read_messages(path):
        if topic.startswith(POSE_ROOT):
            try:
                yield _unpack_pose(Fields(unpack(data, what="pose"), "pose"))
            except WireError as error:
                raise BagError(f"{path}, topic {topic}: {error}") from error


def _unpack(path: Path, topic: str, data: bytes) -> Frame:
    try:
        body = Fields(unpack(data, what="frame", limits=_LIMITS), "frame")
        parts = [frame_topic(topic.removeprefix(FRAME_ROOT)), pack(body.any("header")), body.blob("colour")]
        return unpack_frame([*parts, body.blob("depth")] if body.has("depth") else parts)
    except WireError as error:
        raise BagError(f"{path}, topic {topic}: {error}") from error


def _unpack_pose(fields: Fields) -> Pose:
    fields.require_version()
    matrix = fields.numbers("camera_to_world", 16)
    if len(matrix) != 16:
        raise fields.wrong("camera_to_world", "16 numbers")
    return Pose(fields.text("camera"), fields.integer("seq"), np.array(matrix).reshape(4, 4))
