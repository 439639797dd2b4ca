"""Recordings: `open_bag` reads any robot's, `RecordingWriter` and `RecordingReader` this package's own."""

from .bag import Bag, open_bag
from .native import Pose
from .native.reader import LabelledClip, RecordingReader, read_masks
from .native.writer import RecordingWriter

__all__ = ["Bag", "LabelledClip", "Pose", "RecordingReader", "RecordingWriter", "open_bag", "read_masks"]
