"""Rendered tabletop manipulation clips with labels, for training and for testing; run as `python -m tools.scenes`."""
