"""Notices: a reason is shown once, again after it has changed or after progress, and not while things arrive."""

from __future__ import annotations

import queue

import pytest

from sam3_node.processes import signals
from sam3_node.processes.signals import WaitingNotice

PATIENCE_S = 60.0


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
    reasons, shown = Reasons("no node", "no node", "", "paused", "paused", "no node", None), []
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
    begun, ended = queue.Queue[None](), queue.Queue[None]()

    def find_reason() -> str:
        begun.put(None)
        ended.get(timeout=PATIENCE_S)
        return "too late"

    with WaitingNotice(find_reason, shown.append):
        begun.get(timeout=PATIENCE_S)
    ended.put(None)
    assert shown == []
