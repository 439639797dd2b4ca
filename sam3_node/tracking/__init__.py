"""Promptable tracking of many objects with a bounded memory."""

from .slots import ObjectPrompt
from .tracker import Tracker
from .tracks import Track, Tracks

__all__ = ["ObjectPrompt", "Track", "Tracker", "Tracks"]
