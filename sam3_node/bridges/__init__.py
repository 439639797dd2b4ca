"""Bridges: live masks and frames in other systems' forms."""
