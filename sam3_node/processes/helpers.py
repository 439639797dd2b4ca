"""Tells how the helpers of a group do, by a file of the supervisor. The node's status and metrics have it.

A helper is a process without which cameras and node go on, such as a recorder on a disk that is full.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import WireError
from ..files import read_regular, write_atomically
from ..schema.fields import Natural, convert, decode_json

HELPERS_FILE = "SAM3NODE_ENDED_HELPERS"
"""Variable with the path of the file, which a supervisor sets for each process of its group."""
MAX_BYTES = 65536
"""Size of the largest such file that is read."""


@dataclass(frozen=True, slots=True)
class HelperState:
    """How a helper does: how often it was started again, why it ended last, and whether it has ended for good.

    `written` are the bytes that a recorder has written; None for any other helper.
    """

    restarts: Natural = 0
    reason: str = ""
    is_over: bool = False
    written: Natural | None = None


def write_helpers(path: Path, states: Mapping[str, HelperState]) -> None:
    """Write the states of helpers that have ended at least once, or have written something. Raises OSError."""
    write_atomically(path, json.dumps({name: asdict(state) for name, state in states.items()}).encode())


def read_helpers(environment: Mapping[str, str] = os.environ) -> dict[str, HelperState]:
    """Return the states of the helpers of this process's group that have one; empty without a supervisor."""
    path = environment.get(HELPERS_FILE)
    if path is None:
        return {}
    # no such file: none has ended
    try:
        return convert(decode_json(read_regular(Path(path), MAX_BYTES), path), dict[str, HelperState], path)
    except (OSError, WireError):
        return {}
