"""Promptable tracking of many objects with a bounded memory."""

from .slots import ObjectPrompt, Track, Tracks
from .tracker import Tracker

__all__ = ["ObjectPrompt", "Track", "Tracker", "Tracks"]
