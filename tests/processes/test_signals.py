"""Tests that a signal sets the event, even while the main thread reads it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

WAITS = """
from sam3_node.processes.signals import stop_on_signals
stop = stop_on_signals()
print("up", flush=True)
while not stop.wait(1e-6):
    pass
print("stopped", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_event_and_ends_nothing(number: signal.Signals) -> None:
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "up\n"
            process.send_signal(number)
            assert process.communicate(timeout=120)[0] == "stopped\n"
            assert process.returncode == 0


TWO_SIGNALS = """
import signal, threading
from sam3_node.processes.signals import stop_on_signals
stop = stop_on_signals(once=True)
signal.signal(signal.SIGUSR1, lambda *_: print("other", flush=True))
print("ready", flush=True)
stop.wait()
try:
    print("stopped", flush=True)
    threading.Event().wait()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_the_second_signal_interrupts_and_others_do_not_stop() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", TWO_SIGNALS],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        for number, answer in (
            (None, "ready"),
            (signal.SIGUSR1, "other"),
            (signal.SIGTERM, "stopped"),
            (signal.SIGINT, "interrupted"),
        ):
            if number is not None:
                process.send_signal(number)
            assert process.stdout.readline().strip() == answer
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
