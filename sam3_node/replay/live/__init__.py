"""Replay through a running node: recordings pushed with back-pressure, one masks message for each frame."""
