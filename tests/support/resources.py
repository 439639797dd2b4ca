"""What a block of a test leaves behind in this process, and the memory that it takes.

Other tests ran before in the same process: what they left may end during the block, so only additions count.
"""

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.support.patience import PATIENCE_S

PAUSE_S = 0.02
"""Seconds between two looks at what is open."""

CLEAR_PEAK = "5"
"""Content of clear_refs that resets the peak of the resident memory; proc(5)."""


@contextmanager
def nothing_added() -> Iterator[None]:
    """Fail if descriptors, threads or child processes of the block are there for long after its end."""
    before = _list_open()
    yield
    end_s = time.monotonic() + PATIENCE_S
    while added := _list_open() - before:
        assert time.monotonic() < end_s, f"still there after the block: {dict(added)}"
        time.sleep(PAUSE_S)


def clear_peak_memory() -> float:
    """Forget the peak of the resident memory of this process; return what it takes now in MiB."""
    Path("/proc/self/clear_refs").write_text(CLEAR_PEAK)
    return _memory_mib("VmRSS")


def peak_memory() -> float:
    """Return the most resident memory in MiB since `clear_peak_memory`."""
    return _memory_mib("VmHWM")


def _list_open() -> Counter[Hashable]:
    gc.collect()
    return Counter([*_list_descriptors(), *threading.enumerate(), *psutil.Process().children()])


def _list_descriptors() -> Iterator[str]:
    """Yield what each descriptor refers to. A descriptor that ends meanwhile, as that of the folder, is left out."""
    for number in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue


def _memory_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024
