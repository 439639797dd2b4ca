"""Training of the bundled nano tracker: `python -m tools.train_nano`."""
