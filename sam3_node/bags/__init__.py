"""Recordings: `open_bag` reads any robot's; this package's own are MCAP files that hold the wire's messages."""

from .bag import Bag, open_bag
from .native.frames import FrameWriter, Pose, read_frames, read_poses, read_truth
from .native.labelled_clip import LabelledClip
from .native.masks import MaskBagWriter, read_masks

__all__ = [
    "Bag",
    "FrameWriter",
    "LabelledClip",
    "MaskBagWriter",
    "Pose",
    "open_bag",
    "read_frames",
    "read_masks",
    "read_poses",
    "read_truth",
]
