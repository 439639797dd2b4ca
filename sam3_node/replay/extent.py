"""How long a recording is, where its index tells."""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from pathlib import Path

from ..errors import require


def messages_on(paths: Sequence[Path], topics: Collection[str]) -> int | None:
    """How many messages MCAP files hold on these topics; None where one of them has no index or is another file."""
    counts = [_messages_on(path, topics) for path in paths]
    return None if not counts or None in counts else sum(count or 0 for count in counts)


def _messages_on(path: Path, topics: Collection[str]) -> int | None:
    reader = require("mcap.reader", "bags")
    damages = (require("mcap.exceptions", "bags").McapError, struct.error, ValueError, LookupError, OSError)
    try:
        with path.open("rb") as file:
            summary = reader.SeekingReader(file).get_summary()
    except damages:
        return None
    if summary is None or summary.statistics is None:
        return None
    counts = summary.statistics.channel_message_counts
    return sum(
        counts.get(number, 0) for number, channel in summary.channels.items() if channel.topic in topics
    )
