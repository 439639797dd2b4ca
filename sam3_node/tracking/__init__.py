"""Promptable tracking of many objects with a bounded memory."""

from .slots import ObjectPrompt
from .tracker import Track, Tracker, Tracks

__all__ = ["ObjectPrompt", "Track", "Tracker", "Tracks"]
