"""Benchmarks of time and memory: one frame, one process, one deployment."""
