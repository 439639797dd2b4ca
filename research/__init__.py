"""Experiments that are not maintained."""
