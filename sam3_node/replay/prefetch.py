"""Reading and decoding ahead of the model, in threads, so that the model never waits while anything is ready."""

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
    """The actions of a source in their order, colour decoded to bgr8. To be iterated once; a context manager.

    A thread reads `actions`, `threads` others decode, until `most_frames` frames or `most_bytes` of pixels wait (a
    single frame may be larger). A frame that does not decode is passed on as it is. What the source raises is raised
    after all that came before it.
    """

    def __init__(
        self,
        actions: Iterable[Action],
        threads: int = THREADS,
        most_frames: int = MAX_FRAMES,
        most_bytes: int = MAX_BYTES,
    ) -> None:
        self._actions = actions
        self._most_frames, self._most_bytes = most_frames, most_bytes
        self._waiting: deque[tuple[int, Future[Action] | Action]] = deque()
        self._held = self._bytes = 0
        self._changed = threading.Condition()
        self._ended = self._closed = False
        self._failure: BaseException | None = None
        self._pool = ThreadPoolExecutor(threads, "decode")
        self._reader = threading.Thread(target=self._read, name="read ahead", daemon=True)
        self._reader.start()

    def __iter__(self) -> Iterator[Action]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended)
                if not self._waiting:
                    break
                size, item = self._waiting.popleft()
            yield item.result() if isinstance(item, Future) else item
            with self._changed:
                self._held -= 1
                self._bytes -= size
                self._changed.notify_all()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop reading and decoding; what waits is gone. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._reader.join()
        self._pool.shutdown(cancel_futures=True)
        self._waiting.clear()

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
        """Whether there is more to be read."""
        size = _size(action)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_room(size))
            if self._closed:
                return False
            self._held += 1
            self._bytes += size
            item = action if isinstance(action, Edit) else self._pool.submit(_decoded, action)
            self._waiting.append((size, item))
            self._changed.notify_all()
        return True

    def _has_room(self, size: int) -> bool:
        return not self._held or (self._held < self._most_frames and self._bytes + size <= self._most_bytes)


def _size(action: Action) -> int:
    return 0 if isinstance(action, Edit) else action.frame.width * action.frame.height * 3


def _decoded(step: Step) -> Action:
    return step._replace(frame=decoded(step.frame))


def decoded(frame: Frame) -> Frame:
    """The frame with its colour as bgr8; as it is where it does not decode, so that its step fails as it would have."""
    try:
        return replace(frame, encoding="bgr8", colour=encode_image(decode_image(frame), "bgr8"))
    except Exception:
        return frame
