"""Recordings. MCAP files hold the wire's own messages."""

from .frames import FrameWriter, Pose, read_frames, read_poses, read_truth
from .masks import MaskBagWriter, read_masks
from .recording import Recording

__all__ = [
    "FrameWriter",
    "MaskBagWriter",
    "Pose",
    "Recording",
    "read_frames",
    "read_masks",
    "read_poses",
    "read_truth",
]
