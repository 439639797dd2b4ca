"""Engines: a model's stages, exported, quantised, built, stored, and validated before they serve."""
