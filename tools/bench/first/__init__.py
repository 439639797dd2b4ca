"""Sections of tools.bench.gpu_first, the first minutes on a new GPU."""
