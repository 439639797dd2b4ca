"""The rights of the owner of a key: the operations of its role, and how many requests and connections."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import NamedTuple

from ..errors import BusyError, ForbiddenError
from .guard import MAX_CONNECTIONS
from .keys import MAX_KEYS, Key

BURST_S = 2.0
"""Seconds of its rate that a key may use at once."""


class Cap(NamedTuple):
    """Shares of a server that keys of a role have."""

    requests_per_s: float
    bytes_per_s: float
    """of one key, over all its connections"""
    connections: int
    """Open connections of the socket, of whatever role, up to which another of this role is admitted. So the others
    keep at least the rest."""


CAPS = {
    "reader": Cap(50, 1e6, MAX_CONNECTIONS // 2),
    "operator": Cap(500, 32e6, MAX_CONNECTIONS * 3 // 4),
    "node": Cap(500, 32e6, MAX_CONNECTIONS),
}


class _Budget:
    """The requests and bytes that a key may still send. They grow at the rates of `cap`, up to BURST_S of them."""

    def __init__(self, cap: Cap) -> None:
        self._cap = cap
        self._requests, self._bytes = cap.requests_per_s * BURST_S, cap.bytes_per_s * BURST_S
        self._updated_s = time.monotonic()

    def spend(self, size: int) -> bool:
        """Take one request of `size` bytes. Return False if there is not enough; a full budget suffices for any."""
        now_s = time.monotonic()
        passed_s, self._updated_s = now_s - self._updated_s, now_s
        requests, size_limit = self._cap.requests_per_s * BURST_S, self._cap.bytes_per_s * BURST_S
        self._requests = min(requests, self._requests + passed_s * self._cap.requests_per_s)
        self._bytes = min(size_limit, self._bytes + passed_s * self._cap.bytes_per_s)
        if self._requests < 1 or self._bytes < min(size, size_limit):
            return False
        self._requests -= 1
        self._bytes -= size
        return True


class Rights:
    """The rights of keys at one server. Readers may request `reader_ops` only."""

    def __init__(self, reader_ops: Collection[str]) -> None:
        self._reader_ops = frozenset(reader_ops)
        self._budgets: dict[str, _Budget] = {}  # by public key

    def spend(self, key: Key | None, size: int) -> None:
        """Take a request of `size` bytes from the budget of a key.

        Raises ForbiddenError for a key that is no longer authorised, and BusyError for one that sends too much.
        """
        cap = CAPS.get(key.role) if key is not None else None
        if key is None or cap is None:
            raise ForbiddenError("expected an authorised key, found one that was revoked")
        if len(self._budgets) > MAX_KEYS:
            self._budgets.clear()
        budget = self._budgets.setdefault(key.public, _Budget(cap))
        if not budget.spend(size):
            raise BusyError(
                f"the key {key} sends too much: expected at most {cap.requests_per_s:.0f} requests and"
                f" {cap.bytes_per_s:.0f} bytes a second; wait for replies before sending more"
            )

    def check(self, key: Key, op: str) -> None:
        """Raise ForbiddenError if the role of a key does not permit an operation."""
        if key.role == "reader" and op not in self._reader_ops:
            wanted = op or "a large request"
            allowed = ", ".join(sorted(self._reader_ops)) or "nothing"
            raise ForbiddenError(
                f"expected a key of role operator for {wanted!r}, found {key}, which may request {allowed}"
            )
