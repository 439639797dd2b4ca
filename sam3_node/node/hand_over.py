"""Hand a node's work over to a successor, so that two nodes never work with the same epochs.

1. `hand_over`: this node pauses, and the successor fetches its state.
2. `confirm_hand_over`: the successor has the state on disk. This node deletes its own snapshot, never works with these
   epochs again, and only then answers. The successor publishes with these epochs only after this answer.

If the successor is silent for `confirm_s`, this node keeps serving with the same ids, and refuses a later confirmation.
A successor that gets no answer cannot know which of the two has happened, so it begins new epochs.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..errors import BusyError, RequestError
from ..schema.replies import LastHandOver

HandOverStage = Literal["waiting", "confirmed", "expired", "cancelled", "taken_back"]
"""waiting: for the successor. confirmed: the ids are the successor's. expired, cancelled: this node works on with the
same ids. taken_back: it was resumed, after a confirmation with new ids."""
UNKNOWN = "unknown"
"""State of a hand-over that this process does not know."""


@dataclass(slots=True)
class _HandOver:
    successor: str
    token: str
    snapshot: int
    was_paused: bool
    began_ns: int = field(default_factory=time.time_ns)
    heard_s: float = field(default_factory=time.monotonic)
    """monotonic time of the successor's last request"""


class HandOverState:
    """The last hand-over of a node, and how many ended in which way.

    One thread calls the methods that change it; any thread may call `explain` and `describe`, and read attributes.
    """

    def __init__(self, confirm_s: float) -> None:
        self.stage: HandOverStage | None = None
        """Stage of the last hand-over; None if there was none."""
        self.outcomes: Mapping[str, int] = dict.fromkeys(
            ("confirmed", "expired", "cancelled", "taken_back"), 0
        )
        self._confirm_s = confirm_s
        self._last: _HandOver | None = None

    @property
    def waits(self) -> bool:
        """True while the successor has not confirmed."""
        return self.stage == "waiting"

    @property
    def is_over(self) -> bool:
        """True once the ids are the successor's."""
        return self.stage == "confirmed"

    @property
    def has_expired(self) -> bool:
        """True if the successor has been silent for too long."""
        last = self._last
        return last is not None and self.waits and time.monotonic() - last.heard_s > self._confirm_s

    @property
    def was_paused(self) -> bool:
        """True if the node was paused before the last hand-over."""
        return self._last is not None and self._last.was_paused

    def begin(self, successor: str, token: str, snapshot: int, was_paused: bool) -> None:
        """Note that the state was given away as the snapshot with a number."""
        self._last = _HandOver(successor, token, snapshot, was_paused)
        self.stage = "waiting"

    def note_request(self) -> None:
        """Note that the successor goes on reading."""
        if self._last is not None:
            self._last.heard_s = time.monotonic()

    def end(self, stage: HandOverStage) -> None:
        """Note how the hand-over has ended, or that the node has reclaimed its work."""
        self.stage = stage
        # replaced, not changed: another thread may be reading it
        self.outcomes = {**self.outcomes, stage: self.outcomes[stage] + 1}

    def find_state(self, token: str) -> str:
        """Return the state of the hand-over with this token."""
        if self._last is None or self._last.token != token:
            return UNKNOWN
        return self.stage or UNKNOWN

    def find_snapshot(self, token: str) -> int | None:
        """Return the snapshot of the hand-over that waits, if it has this token."""
        # once the hand-over has ended, its state is old: a request with the same token must not get it again
        if self._last is None or self.find_state(token) != "waiting":
            return None
        return self._last.snapshot

    def check_idle(self) -> None:
        """Raise BusyError while the successor has not confirmed, and RequestError once the ids are the successor's."""
        reason = self.explain()
        if reason is not None:
            kind = BusyError if self.waits else RequestError
            raise kind(f"expected a node that works, found that {reason}")

    def explain(self) -> str | None:
        """Return why the node is paused, and what to do; None if no hand-over is the reason."""
        last = self._last
        if last is None or not (self.waits or self.is_over):
            return None
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(last.began_ns / 1e9))
        if self.waits:
            return (
                f"this node has handed its state to {last.successor} at {when} and waits for its confirmation: without"
                f" one for {self._confirm_s:g} s, it works on"
            )
        return (
            f"this node was handed over to {last.successor} at {when}: use that node, and stop this process; if that"
            " node is lost, sam3-node resume lets this one work on with new ids"
        )

    def describe(self) -> LastHandOver | None:
        """Return the last hand-over for the status; None if there was none."""
        last = self._last
        if last is None:
            return None
        return {"to": last.successor, "token": last.token, "state": self.stage, "began_ns": last.began_ns}
