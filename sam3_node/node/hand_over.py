"""The hand-over of a node's work to another node, the taker, so that two nodes never work with the same epochs.

1. `hand_over`: this node pauses, and the taker fetches its state.
2. `confirm_hand_over`: the taker has the state on disk. This node deletes its own snapshot, never works with these
   epochs again, and only then answers. The taker publishes with these epochs only after this answer.

Without a word of the taker for `confirm_s`, this node works on with the same ids, and refuses a later confirmation. A
taker that gets no answer cannot know which of the two has happened, so it begins new epochs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import BusyError, RequestError

HandOverStage = Literal["waiting", "confirmed", "expired", "cancelled", "taken_back"]
"""waiting: for the taker. confirmed: the ids are the taker's. expired, cancelled: this node works on with the same ids.
taken_back: it was resumed, after a confirmation with new ids."""
UNKNOWN = "unknown"
"""State of a hand-over that this process does not know."""


@dataclass(slots=True)
class _HandOver:
    taker: str
    token: str
    snapshot: int
    was_paused: bool
    began_ns: int
    heard_s: float
    """monotonic time of the last request of the taker"""
    state: HandOverStage = "waiting"


class HandOverState:
    """The last hand-over of a node, and how many ended in which way.

    One thread calls the methods that change it; any thread may call `explain`, `describe` and `outcomes`.
    """

    def __init__(self, confirm_s: float) -> None:
        self.outcomes: Mapping[str, int] = dict.fromkeys(
            ("confirmed", "expired", "cancelled", "taken_back"), 0
        )
        self._confirm_s = confirm_s
        self._last: _HandOver | None = None

    @property
    def waits(self) -> bool:
        """True while the taker has not confirmed."""
        return self._last is not None and self._last.state == "waiting"

    @property
    def is_over(self) -> bool:
        """True once the ids are the taker's."""
        return self._last is not None and self._last.state == "confirmed"

    @property
    def has_expired(self) -> bool:
        """True if the taker has been silent for too long."""
        return self._last is not None and self.waits and self._silent_s > self._confirm_s

    @property
    def was_paused(self) -> bool:
        """True if the node was paused before the last hand-over."""
        return self._last is not None and self._last.was_paused

    def begin(self, taker: str, token: str, snapshot: int, was_paused: bool) -> None:
        """Note that the state was given away as the snapshot with a number."""
        self._last = _HandOver(taker, token, snapshot, was_paused, time.time_ns(), time.monotonic())

    def note_request(self) -> None:
        """Note that the taker goes on reading."""
        if self._last is not None:
            self._last.heard_s = time.monotonic()

    def end(self, state: HandOverStage) -> None:
        """Note how the hand-over has ended, or that it was taken back."""
        assert self._last is not None
        self._last.state = state
        self.outcomes = {**self.outcomes, state: self.outcomes[state] + 1}

    def find_state(self, token: str) -> str:
        """Return the state of the hand-over with this token."""
        return self._last.state if self._last is not None and self._last.token == token else UNKNOWN

    def find_snapshot(self, token: str) -> int | None:
        """Return the snapshot of the hand-over that waits, if it has this token."""
        return self._last.snapshot if self._last is not None and self.find_state(token) == "waiting" else None

    def check_idle(self) -> None:
        """Raise BusyError while the taker has not confirmed, and RequestError once the ids are the taker's."""
        if self.waits:
            raise BusyError(f"expected a node that works, found that {self.explain()}")
        if self.is_over:
            raise RequestError(f"expected a node that works, found that {self.explain()}")

    def explain(self) -> str | None:
        """Return why the node is paused, and what to do; None if no hand-over is the reason."""
        last = self._last
        if last is None or last.state not in ("waiting", "confirmed"):
            return None
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(last.began_ns / 1e9))
        if last.state == "waiting":
            return (
                f"this node has handed its state to {last.taker} at {when} and waits for its confirmation: without"
                f" one for {self._confirm_s:g} s, it works on"
            )
        return (
            f"this node was handed over to {last.taker} at {when}: use that node, and stop this process; if that node"
            " is lost, sam3-node resume lets this one work on with new ids"
        )

    def describe(self) -> dict[str, Any] | None:
        """Return the last hand-over for the status; None if there was none."""
        last = self._last
        if last is None:
            return None
        return {"to": last.taker, "token": last.token, "state": last.state, "began_ns": last.began_ns}

    @property
    def _silent_s(self) -> float:
        return 0.0 if self._last is None else time.monotonic() - self._last.heard_s
