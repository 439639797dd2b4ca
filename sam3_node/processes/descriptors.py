"""File descriptors of this process: a higher limit, and a warning before they run out."""

from __future__ import annotations

import logging
import os
import resource

MAX_DESCRIPTORS = 65536
NEARLY_FULL = 0.8

log = logging.getLogger(__name__)


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard limit, at most MAX_DESCRIPTORS. Return the limit in force.

    Each connection of a peer takes a descriptor. At the usual limit of 1024, many peers would lock out a camera.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.warning("the limit of open files stays at %d: %s", soft, error)
        return soft
    return wanted


def warn_if_descriptors_run_out() -> bool:
    """Log a warning and return True if more than 80 % of the allowed files are open. Needs /proc."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        count = len(os.listdir("/proc/self/fd"))
    except OSError:
        return False
    if limit == resource.RLIM_INFINITY or count <= NEARLY_FULL * limit:
        return False
    log.warning(
        "%d of %d files are open: beyond the limit no peer can connect; find who holds the connections"
        " (ss -tnp), or raise the limit (ulimit -n)",
        count,
        limit,
    )
    return True
