"""Prefetching: threads read and decode frames ahead of the model, so that the model does not wait for them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from ..types import Closeable, Frame
from ..wire import decode_image, encode_image
from .actions import Action, Edit, Step

THREADS = 2
MAX_FRAMES = 32
MAX_BYTES = 256 << 20


class Prefetcher(Closeable):
    """Iterates over actions in their order, with the colour of their frames decoded to bgr8. A context manager.

    One thread reads `actions` and `threads` others decode, up to `max_frames` frames or `max_bytes` of pixels ahead
    (a single frame may be larger). A frame that cannot be decoded is passed on unchanged. An exception of the source is
    raised after all actions before it. Can be iterated over once.
    """

    def __init__(
        self,
        actions: Iterable[Action],
        threads: int = THREADS,
        max_frames: int = MAX_FRAMES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._actions = actions
        self._max_frames, self._max_bytes = max_frames, max_bytes
        self._queue: deque[tuple[int, Future[Action] | Action]] = deque()
        self._count = self._bytes = 0
        self._changed = threading.Condition()
        self._ended = self._closed = False
        self._failure: BaseException | None = None
        self._pool = ThreadPoolExecutor(threads, "decode")
        self._reader = threading.Thread(target=self._read, name="prefetch", daemon=True)
        self._reader.start()

    def __iter__(self) -> Iterator[Action]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._ended)
                if not self._queue:
                    break
                size, item = self._queue.popleft()
            yield item.result() if isinstance(item, Future) else item
            with self._changed:
                self._count -= 1
                self._bytes -= size
                self._changed.notify_all()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop reading and decoding, and discard the queue. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._reader.join()
        self._pool.shutdown(cancel_futures=True)
        self._queue.clear()

    def _read(self) -> None:
        try:
            for action in self._actions:
                if not self._add(action):
                    break
        except BaseException as error:
            self._failure = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _add(self, action: Action) -> bool:
        """Wait for space and queue the action. Return False if this was closed meanwhile."""
        size = 0 if isinstance(action, Edit) else action.frame.width * action.frame.height * 3
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_space(size))
            if self._closed:
                return False
            self._count += 1
            self._bytes += size
            item = action if isinstance(action, Edit) else self._pool.submit(_decode_step, action)
            self._queue.append((size, item))
            self._changed.notify_all()
        return True

    def _has_space(self, size: int) -> bool:
        return not self._count or (self._count < self._max_frames and self._bytes + size <= self._max_bytes)


def _decode_step(step: Step) -> Action:
    return step._replace(frame=decode_colour(step.frame))


def decode_colour(frame: Frame) -> Frame:
    """Return the frame with its colour as bgr8. A frame that cannot be decoded is returned as it is: its step fails."""
    try:
        return replace(frame, encoding="bgr8", colour=encode_image(decode_image(frame), "bgr8"))
    except Exception:
        return frame
