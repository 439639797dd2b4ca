"""Make and check weights of SAM 3.1."""
