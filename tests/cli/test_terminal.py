"""Text of other processes on a terminal."""

from __future__ import annotations

import pytest

from sam3_node.cli.main import main
from sam3_node.cli.progress import printable
from sam3_node.errors import RequestError
from sam3_node.transport import ControlClient


def test_escape_sequences_and_directions_are_replaced() -> None:
    assert printable("mug\x1b[2J\u202egum\r\x07 \u4e2d\u6587\n") == "mug?[2J?gum?? \u4e2d\u6587?"
    assert printable("two\nlines\r", line_feeds=True) == "two\nlines?"


def test_an_error_of_the_node_cannot_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RequestError("no\x1b]0;title\x07 object")

    monkeypatch.setattr(ControlClient, "call", fail)
    assert main(["object", "list"]) == 2
    assert capsys.readouterr().err == "sam3-node: error: no?]0;title? object\n"


def test_a_label_of_the_node_cannot_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {
        "id": 1,
        "camera": "c\x1b[1m",
        "label": "cup\x1b[31m\u202e",
        "state": "tracked",
        "score": 0.5,
        "age": 1,
    }
    monkeypatch.setattr(
        ControlClient, "call", lambda *_, **__: {"objects": [{**found, "frames_since_seen": 0}]}
    )
    assert main(["object", "list"]) == 0
    assert capsys.readouterr().out.split()[:3] == ["c?[1m", "1", "cup?[31m?"]
