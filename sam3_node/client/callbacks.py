"""The thread that calls a client's callbacks, one at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

from ..types import MaskFrame

log = logging.getLogger(__name__)

OnMasks = Callable[[MaskFrame], object]
OnError = Callable[[BaseException], object]


class _Callback(NamedTuple):
    on_masks: OnMasks
    on_error: OnError | None


class CallbackThread:
    """Passes what `read` returns to every callback, in the order in which they were added, until it returns None.

    What a callback raises goes to its `on_error`, or to the log if it has none, and changes nothing else. What `read`
    raises goes to each of them, and ends the thread only if `is_over` is true then.
    """

    def __init__(self, read: Callable[[], MaskFrame | None], is_over: Callable[[], bool]) -> None:
        self._read, self._is_over = read, is_over
        self._callbacks: tuple[_Callback, ...] = ()
        self._thread = threading.Thread(target=self._run, name="sam3-node callbacks", daemon=True)

    def add(self, on_masks: OnMasks, on_error: OnError | None) -> None:
        """Call `on_masks` from the next masks on. The first one starts the thread."""
        self._callbacks = (*self._callbacks, _Callback(on_masks, on_error))
        if len(self._callbacks) == 1:
            self._thread.start()

    @property
    def is_current(self) -> bool:
        """True in the thread that calls the callbacks."""
        return threading.current_thread() is self._thread

    def join(self) -> None:
        """Wait until no callback runs any more. It returns at once in a callback."""
        if self._thread.is_alive() and not self.is_current:
            self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                masks = self._read()
            except BaseException as error:  # NodeRestarted, or what the client's on_restart has raised
                for callback in self._callbacks:
                    _report(callback, error)
                if self._is_over():
                    return
                continue
            if masks is None:
                return
            for callback in self._callbacks:
                try:
                    callback.on_masks(masks)
                except (
                    BaseException
                ) as error:  # of whatever kind: sys.exit must not end this thread in silence
                    _report(callback, error)


def _report(callback: _Callback, error: BaseException) -> None:
    """Pass an error to the callback's `on_error`, or to the log."""
    if callback.on_error is not None:
        try:
            callback.on_error(error)
            return
        except BaseException as another:
            log.error("on_error of a callback has raised", exc_info=another)
    log.error("a callback of masks: %s: %s", type(error).__name__, error, exc_info=error)
