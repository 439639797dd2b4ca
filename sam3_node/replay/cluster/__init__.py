"""Replay of many recordings at once, on workers of a Ray cluster or of this machine."""
