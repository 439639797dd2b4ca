"""Folders that tests read."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Root of the checkout."""

SHARED = ROOT.parent / "shared"
"""Real videos, masks and weights beside the checkout. Tests that need them skip if they are absent."""
