"""Trackers with transformers' SAM 3 and SAM 2 weights, split into stages with plain tensor signatures."""

from .checkpoints import load_tracker
from .sam.stages import Features
from .sam.tracker_model import TrackerModel

__all__ = ["Features", "TrackerModel", "load_tracker"]
