"""Measures of the confidence of masks and names, on records of tracks. `training/doubt` fits it."""
