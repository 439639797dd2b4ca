"""Writes recordings of this package as LeRobot datasets of version 3.0, or 2.1 with what GR00T reads."""
