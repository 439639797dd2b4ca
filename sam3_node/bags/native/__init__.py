"""Recording format of this package: reader and writer."""
