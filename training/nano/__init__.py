"""Training of the bundled nano tracker: `python -m training.nano`."""
