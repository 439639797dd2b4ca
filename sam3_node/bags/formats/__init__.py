"""Readers of recordings that other programs wrote."""
