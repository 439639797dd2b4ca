"""Writes recordings of this package as LeRobot datasets of version 3.0, which lerobot's own loader opens."""
