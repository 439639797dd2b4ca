"""A file for each family of trackers: how its weights are read, and what its masks are worth. `registry` lists them."""
