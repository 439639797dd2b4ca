"""Sets what the libraries below torch read from the environment when they load. Values that a user has set stay."""

import os

SPINS = 3_000
"""Turns of an idle thread at a barrier before it sleeps. Threads that spin longer take processor time from cameras, and
from one another where processors are busy; those that sleep sooner wake late. Median step of nano with two threads on
two cores, one object at 15 Hz, alone: 36 ms with 3,000 turns, 44 with 10,000, 47 with 1,000 and 62 with 0 (5 paired
runs of 3 s, 3 of 6 s for 0; other work on the machine). Beside two busy processes: 53 and 126 with 3,000, up to 240
with 10,000, 79 and 88 with 1,000."""
PRIMITIVES = 256
"""Compiled operations that oneDNN keeps, one for each shape. A step with a detector uses about 80."""
COMPUTATIONS = 128
"""Compiled operations that torch keeps beside them, of each kind. With 1024, the default of both, each number of an
exemplar's boxes added to a node's memory, up to 0.6 GB."""


def prepare_torch() -> None:
    """Set the variables. Call this before torch is imported."""
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(PRIMITIVES))
    os.environ.setdefault("LRU_CACHE_CAPACITY", str(COMPUTATIONS))
