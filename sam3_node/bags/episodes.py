"""Selection of episodes in a dataset: `PATH#episode=3`, `#episode=2-5`, and `#fps=50` where a file has no times."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ..errors import BagError

MAX_FPS = 1000.0
_EXPECTED = "expected #episode=3, #episode=2-5, #fps=50 or both joined by & after the path"
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


class Selection(NamedTuple):
    """A dataset's path, the first and last number of the chosen episodes, and a rate that the user gave, in Hz."""

    path: Path
    first: int = 0
    last: int | None = None
    fps: float | None = None

    def has(self, episode: int) -> bool:
        """Return True if the episode is chosen."""
        return self.first <= episode and (self.last is None or episode <= self.last)

    @property
    def is_whole(self) -> bool:
        """True if all episodes are chosen."""
        return self.first == 0 and self.last is None


def split_selection(path: Path) -> Selection:
    """Split a path from the selection behind its last #. Raises BagError for a selection of another form.

    A path that exists as it is has none, and what is behind a # without `=` belongs to the name.
    """
    name, mark, text = path.name.rpartition("#")
    if not mark or "=" not in text or path.exists():
        return Selection(path)
    selection = Selection(path.with_name(name))
    for part in text.split("&"):
        key, _, value = part.partition("=")
        found = _RANGE.fullmatch(value)
        if key == "episode" and found:
            first = int(found[1])
            selection = selection._replace(first=first, last=int(found[2] or first))
        elif key == "fps" and _is_rate(value):
            selection = selection._replace(fps=float(value))
        else:
            raise BagError(f"{path}: {_EXPECTED}, found {part!r:.60}")
    return selection


def _is_rate(text: str) -> bool:
    return re.fullmatch(r"\d{1,4}(\.\d{1,6})?", text) is not None and 0 < float(text) <= MAX_FPS
