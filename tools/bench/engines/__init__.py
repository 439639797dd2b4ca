"""Benchmarks of the engines: their stages, their precision, their builds."""
