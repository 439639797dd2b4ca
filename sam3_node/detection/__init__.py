"""Finding objects by name."""
