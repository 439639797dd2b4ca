"""Tests of stop signals and of notices: a signal sets the event, a reason is shown once."""

import queue
import signal
import subprocess
import sys

import pytest

from sam3_node.processes import signals
from sam3_node.processes.signals import WaitingNotice
from tests.support.patience import PATIENCE_S

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
            assert process.communicate(timeout=PATIENCE_S)[0] == "stopped\n"
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
    process = subprocess.Popen([sys.executable, "-c", TWO_SIGNALS], stdout=subprocess.PIPE, text=True)
    answers = {signal.SIGUSR1: "other", signal.SIGTERM: "stopped", signal.SIGINT: "interrupted"}
    try:
        assert process.stdout.readline() == "ready\n"
        for number, answer in answers.items():
            process.send_signal(number)
            assert process.stdout.readline().strip() == answer
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "NOTICE_S", 0.02)
    monkeypatch.setattr(signals, "REPEAT_S", 0.01)


class Reasons:
    """Reasons in order, of which each is asked for once or more; the notice's questions are counted."""

    def __init__(self, *reasons: str | None) -> None:
        self._reasons = list(reasons)
        self.asked: queue.Queue[str | None] = queue.Queue()

    def __call__(self) -> str | None:
        reason = self._reasons.pop(0) if len(self._reasons) > 1 else self._reasons[0]
        self.asked.put(reason)
        return reason


def test_a_reason_is_shown_once_and_again_when_it_changes() -> None:
    reasons = Reasons("no node", "no node", "", "paused", "paused", "no node", None)
    shown = []
    with WaitingNotice(reasons, shown.append):
        while reasons.asked.get(timeout=PATIENCE_S) is not None:
            pass
    assert shown == ["no node", "paused", "no node"]


def test_after_progress_the_same_reason_is_shown_again() -> None:
    shown: queue.Queue[str] = queue.Queue()
    with WaitingNotice(lambda: "no node", shown.put) as notice:
        for _ in range(3):
            assert shown.get(timeout=PATIENCE_S) == "no node"
            notice.progress()


def test_nothing_is_shown_after_the_end() -> None:
    shown: list[str] = []
    begun = queue.Queue[None]()
    ended = queue.Queue[None]()

    def find_reason() -> str:
        begun.put(None)
        ended.get(timeout=PATIENCE_S)
        return "too late"

    with WaitingNotice(find_reason, shown.append):
        begun.get(timeout=PATIENCE_S)
    ended.put(None)
    assert shown == []
