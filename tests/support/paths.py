"""Places that tests read from."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""

SHARED = ROOT.parent / "shared"
"""Real videos, masks and weights beside the checkout; a test that needs them skips where they are absent."""
