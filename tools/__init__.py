"""Doors for someone standing in a checkout: benchmarks, scenes, training. Not installed with the package."""
