"""Promptable tracking of many objects with a bounded memory."""

from .objects import ObjectPrompt
from .tracker import Tracker, Tracks

__all__ = ["ObjectPrompt", "Tracker", "Tracks"]
