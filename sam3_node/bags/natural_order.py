"""File names in the order that people count in."""

from __future__ import annotations

import re
from pathlib import Path


def natural_order(path: Path) -> tuple[tuple[int, str], ...]:
    """A key to sort by: `bag_2` comes before `bag_10`."""
    return tuple(
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)
    )
