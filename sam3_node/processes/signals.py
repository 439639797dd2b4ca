"""Signals that only set a flag."""

from __future__ import annotations

import os
import signal
import threading


def stop_on_signals() -> threading.Event:
    """An event that SIGTERM and SIGINT set, and nothing else.

    A thread sets it: a handler runs in the main thread, which may hold the event's own lock at that moment.
    """
    stop = threading.Event()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)

    def set_after_a_signal() -> None:
        os.read(reader, 1)
        stop.set()

    threading.Thread(target=set_after_a_signal, name="signals", daemon=True).start()
    return stop
