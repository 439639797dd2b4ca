"""Doors for someone standing in a checkout: scenes, scores, benchmarks, pages. Not installed with the package."""
