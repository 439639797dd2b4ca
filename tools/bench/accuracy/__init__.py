"""Benchmarks of what the masks, tracks and detections are worth against ground truth or a reference."""
