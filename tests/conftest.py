"""Shared by all tests: one thread a process, since tests start several processes on few cores."""

import os

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
