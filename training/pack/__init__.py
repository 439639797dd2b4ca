"""Training data of nano in one file, for a machine that only trains."""
