"""The episode that is open: requests begin and end it, and events mark it in the recording."""

from __future__ import annotations

import time

from msgspec.structs import asdict

from ..errors import RequestError
from ..schema.replies import EndedEpisode, EpisodeReply


class Episodes:
    """Counts the episodes of this run of the node. One is open at a time."""

    def __init__(self) -> None:
        self._next = 0
        self._open: EpisodeReply | None = None

    @property
    def open(self) -> EpisodeReply | None:
        """The open episode; None if none is open."""
        return self._open

    def begin(self, task: str | None) -> EpisodeReply:
        """Begin an episode, and return it. Raises RequestError if one is open."""
        if self._open is not None:
            raise RequestError(
                f"begin_episode: expected no open episode, found episode {self._open.episode}; end it with "
                "end_episode first"
            )
        self._open = EpisodeReply(episode=self._next, task=task or "", begun_ns=time.time_ns())
        self._next += 1
        return self._open

    def end(self, keep: bool) -> EndedEpisode:
        """End the open episode, and return it with `ended_ns` and `keep`. Raises RequestError if none is open."""
        if self._open is None:
            raise RequestError(
                "end_episode: expected an open episode, found none; begin one with begin_episode"
            )
        ended = EndedEpisode(**asdict(self._open), ended_ns=time.time_ns(), keep=keep)
        self._open = None
        return ended
