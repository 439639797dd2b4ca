"""Context managers for tests of hostile bytes: they expect a WireError and a limit on memory."""

from __future__ import annotations

import gc
import resource
import tracemalloc
from contextlib import contextmanager

import pytest

from sam3_node.errors import WireError

MEGABYTE = 1 << 20


@contextmanager
def limited_memory(megabytes=2):
    """Fail if Python, or anything else in the process, allocates more memory in the block.

    The garbage collector is off, because it could run finalisers of earlier tests, which allocate memory.
    """
    gc.disable()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
        assert peak < megabytes * MEGABYTE, f"{peak / MEGABYTE:.1f} MiB"
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident < 64 * 1024
    finally:
        tracemalloc.stop()
        gc.enable()


@contextmanager
def refused(match="expected", megabytes=2):
    """Expect a WireError that matches, within a limit of memory."""
    with limited_memory(megabytes), pytest.raises(WireError, match=match):
        yield
