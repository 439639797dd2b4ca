"""Detectors that find objects by name."""
