"""Benchmarks of the node, models, engines and replays; `tools.bench.report` turns their JSON into a page."""

import os

# Idle worker threads sleep soon, as in the node. The OpenMP library reads this when torch is imported, and every
# benchmark imports this package first.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
