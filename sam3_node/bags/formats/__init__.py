"""Readers of recordings that other programs wrote, and of MCAP files in general."""
