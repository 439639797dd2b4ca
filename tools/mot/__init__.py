"""Identities over time against ground truth."""
