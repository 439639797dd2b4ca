"""Process groups: several processes that start, run and stop together."""
