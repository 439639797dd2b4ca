"""Trackers with SAM's weights in transformers' layout or Meta's, split into stages with plain tensor signatures."""

from .checkpoints import load_tracker
from .sam.stages import Features
from .sam.tracker_model import TrackerModel

__all__ = ["Features", "TrackerModel", "load_tracker"]
