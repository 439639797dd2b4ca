"""Sets what the libraries below torch read from the environment when they load. Values that a user has set stay."""

import os

SPINS = 10_000
"""Turns of an idle thread at a barrier before it sleeps. Threads that spin longer take processor time from cameras;
threads that sleep at once (OMP_WAIT_POLICY=PASSIVE) make two threads no faster than one."""
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
