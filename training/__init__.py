"""Trains the bundled weights and fits the bundled confidence. Nothing else in the checkout needs it."""
