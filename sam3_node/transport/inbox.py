"""What a receiver thread hands to its consumer: bounded, fair among keys, pollable by a file descriptor."""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """At most `capacity` items, taken in the order in which their keys arrived.

    An item whose key already waits replaces the one there and keeps its place in the order: with one key per
    camera each camera has one slot, and all have their turn. Any other item waits for room.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: dict[Hashable, T] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._reader, self._writer = os.pipe()

    def put(self, key: Hashable, item: T, timeout_ms: int) -> bool:
        """Store an item; False when there was no room for its key in time, or the inbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_room(key), timeout_ms / 1000)
            if self._closed or not self._has_room(key):
                return False
            if not self._items:
                os.write(self._writer, b"\0")
            self._items[key] = item
            self._changed.notify_all()
            return True

    def take(self, timeout_ms: int | None) -> T | None:
        """The item whose turn it is; None when none came in time (None: no limit) or the inbox is closed."""
        timeout_s = None if timeout_ms is None else timeout_ms / 1000
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._items), timeout_s)
            if self._closed or not self._items:
                return None
            item = self._items.pop(next(iter(self._items)))
            if not self._items:
                os.read(self._reader, 1)
            self._changed.notify_all()
            return item

    def discard(self, key: Hashable) -> None:
        """Drop what waits under a key, if anything does."""
        with self._changed:
            if self._items.pop(key, None) is not None:
                if not self._items and not self._closed:
                    os.read(self._reader, 1)
                self._changed.notify_all()

    def fileno(self) -> int:
        """A descriptor that is readable exactly while an item waits, and once the inbox is closed."""
        return self._reader

    def close(self) -> None:
        """Discard what waits, and wake everybody who waits. Idempotent."""
        with self._changed:
            self._closed = True
            if not self._items:
                os.write(self._writer, b"\0")
            self._items.clear()
            self._changed.notify_all()

    def release(self) -> None:
        """Give the descriptor back, after `close`."""
        os.close(self._writer)
        os.close(self._reader)

    def _has_room(self, key: Hashable) -> bool:
        return key in self._items or len(self._items) < self._capacity
