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
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            process.send_signal(number)
            assert process.communicate(timeout=120)[0] == "stopped\n"
            assert process.returncode == 0
