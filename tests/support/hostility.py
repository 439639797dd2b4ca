"""What hostile bytes must meet: a WireError, and little memory taken."""

from __future__ import annotations

import gc
import resource
import tracemalloc
from contextlib import contextmanager

import pytest

from sam3_node.errors import WireError

MEGABYTE = 1 << 20


@contextmanager
def little_memory(megabytes=2):
    """Fails where Python, or anything else in the process, took more meanwhile.

    Without the garbage collector, which would finish what earlier tests left, with what memory that takes.
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
    with little_memory(megabytes), pytest.raises(WireError, match=match):
        yield
