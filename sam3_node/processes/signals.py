"""Conversion of stop signals to an event."""

from __future__ import annotations

import os
import signal
import threading

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def stop_on_signals(once: bool = False) -> threading.Event:
    """Return an event that SIGTERM and SIGINT set; the signals have no other effect.

    With `once`, this is so for the first signal. A second one interrupts the main thread (KeyboardInterrupt).

    A thread sets the event, because a signal handler runs in the main thread, which may hold the event's lock then.
    """
    stop = threading.Event()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in STOP_SIGNALS:
        signal.signal(number, _arm_interrupt if once else lambda *_: None)

    def set_after_signal() -> None:
        while os.read(reader, 1)[0] not in STOP_SIGNALS:
            pass  # other signals that have a handler wake this thread, too
        stop.set()

    threading.Thread(target=set_after_signal, name="signals", daemon=True).start()
    return stop


def _arm_interrupt(*_: object) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler)
