"""Tells which helpers of a group have ended, by a file of the supervisor. The node's status and metrics have it.

A helper is a process without which cameras and node go on, such as a recorder on a disk that is full.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from ..files import read_regular, write_atomically

ENDED_HELPERS = "SAM3NODE_ENDED_HELPERS"
"""Variable with the path of the file, which a supervisor sets for each process of its group."""
MAX_BYTES = 65536
"""Size of the largest such file that is read."""


def write_ended(path: Path, ended: Mapping[str, str]) -> None:
    """Write the names of ended helpers, each with the reason. Raises OSError."""
    write_atomically(path, json.dumps(ended).encode())


def read_ended(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the helpers of this process's group that have ended, with the reasons; empty without a supervisor."""
    path = environment.get(ENDED_HELPERS)
    if path is None:
        return {}
    # no such file: none has ended
    try:
        ended = json.loads(read_regular(Path(path), MAX_BYTES))
    except (OSError, ValueError):
        return {}
    if not isinstance(ended, dict):
        return {}
    return {str(name): str(reason) for name, reason in ended.items()}
