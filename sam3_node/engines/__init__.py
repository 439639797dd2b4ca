"""Engines: the stages of a tracker, exported, quantised, built, and compared before they serve."""
