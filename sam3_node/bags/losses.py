"""What a reader could not read, as one sentence for its user."""

from __future__ import annotations


class Losses:
    """Collects reasons; those about single messages or files are counted, and the first of each place is told."""

    def __init__(self) -> None:
        self._reasons: list[str] = []
        self._counts: dict[str, int] = {}
        self._first: dict[str, str] = {}

    def add(self, reason: str | None) -> None:
        """Take note of a loss; of the same one only once, and of None not at all."""
        if reason is not None and reason not in self._reasons:
            self._reasons.append(reason)

    def skip(self, place: str, reason: object) -> None:
        """Take note that one thing at `place` (a topic, a folder) was passed over."""
        self._counts[place] = self._counts.get(place, 0) + 1
        self._first.setdefault(place, str(reason))

    def text(self) -> str | None:
        """All of them, None where nothing was lost."""
        skipped = [
            f"{count} of {place} passed over, the first because: {self._first[place]}"
            for place, count in self._counts.items()
        ]
        return "; ".join([*self._reasons, *skipped]) or None
