"""Conversion of stop signals to an event."""

from __future__ import annotations

import os
import signal
import threading


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set; the signals have no other effect.

    A thread sets the event, because a signal handler runs in the main thread, which may hold the event's lock then.
    """
    stop = threading.Event()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)

    def set_after_signal() -> None:
        os.read(reader, 1)
        stop.set()

    threading.Thread(target=set_after_signal, name="signals", daemon=True).start()
    return stop
