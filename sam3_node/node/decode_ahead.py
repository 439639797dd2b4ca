"""Decoding ahead: while a step runs on a GPU, a thread decodes and uploads the frame that will be next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ..perception.prepared_frame import PreparedFrame
from ..types import Closeable, Frame

POLL_MS = 20

Peek = Callable[[Frame | None, int], Frame | None]
Prepare = Callable[[Frame], PreparedFrame]


class DecodeAhead(Closeable):
    """Prepares the frame that waits to be taken next, in a thread, while a step runs.

    Frames are not taken early: if a newer frame replaces one that is prepared, the newer one is prepared, too, and the
    other is forgotten. So the newest frame wins, and ages are as they were.
    """

    def __init__(self, peek: Peek, prepare: Prepare) -> None:
        self._peek, self._prepare = peek, prepare
        self._changed = threading.Condition()
        self._stepping = self._closed = False
        self._busy_with: Frame | None = None
        self._prepared: PreparedFrame | None = None
        self._thread = threading.Thread(target=self._work, name="decode-ahead", daemon=True)
        self._thread.start()

    @contextmanager
    def during_step(self) -> Iterator[None]:
        """Prepare frames within the block."""
        self._set_stepping(True)
        try:
            yield
        finally:
            self._set_stepping(False)

    def take(self, frame: Frame) -> PreparedFrame | None:
        """Return what is prepared of a frame that was taken, and wait if it is in work; None if there is nothing."""
        with self._changed:
            self._changed.wait_for(lambda: self._busy_with is not frame)
            prepared, self._prepared = self._prepared, None
        return prepared if prepared is not None and prepared.frame is frame else None

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _set_stepping(self, stepping: bool) -> None:
        with self._changed:
            self._stepping = stepping
            self._changed.notify_all()

    def _work(self) -> None:
        seen: Frame | None = None
        while self._wait_for_step():
            frame = self._peek(seen, POLL_MS)
            if frame is not None:
                seen = frame
                self._prepare_frame(frame)

    def _wait_for_step(self) -> bool:
        """Wait until a step runs. Return False if this was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._stepping or self._closed)
            return not self._closed

    def _prepare_frame(self, frame: Frame) -> None:
        with self._changed:
            self._busy_with = frame
        prepared = None
        with suppress(Exception):  # its step will fail in the same way, and say why
            prepared = self._prepare(frame)
        with self._changed:
            self._busy_with, self._prepared = None, prepared
            self._changed.notify_all()
