"""Benchmarks of replays: rates, workers, memory and recovery."""
