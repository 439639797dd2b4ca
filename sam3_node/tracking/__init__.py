"""Promptable tracking of many objects with a bounded memory."""

from .tracker import Tracker
from .tracks import ObjectPrompt, Track, Tracks

__all__ = ["ObjectPrompt", "Track", "Tracker", "Tracks"]
