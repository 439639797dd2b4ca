"""Tests of the log (formats, subjects, the limit of lines of one kind) and of the limit of open files."""

import io
import json
import logging
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from sam3_node.errors import request_id
from sam3_node.processes import logs, signals
from sam3_node.processes.logs import MAX_KINDS, WINDOW_S, LogHandler, log_subject
from tests.support.refuses import mentions


class Log:
    """A logger with a handler, and what it has written. `now_s` is its time."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._stream = io.StringIO()
        self.handler = LogHandler(self._stream)
        self.logger = logging.Logger("a.b")
        self.logger.addHandler(self.handler)

    def lines(self) -> list[str]:
        return self._stream.getvalue().splitlines()

    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines()]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    log = Log()
    monkeypatch.setattr(logs.time, "monotonic", lambda: log.now_s)
    yield log
    log.handler.close()


def test_a_json_line_has_the_frame_that_it_is_about(log: Log) -> None:
    log.handler.configure("json", 0)
    log.logger.info("starts")
    with log_subject("left", 7):
        log.logger.warning("frame %d\x1b[2J of \u202e", 7)
        with log_subject("right"):
            log.logger.info("other")
        log.logger.info("again")
    first, second, third, fourth = log.objects()
    assert set(first) == {"time", "level", "logger", "message"}
    assert (first["level"], first["logger"], first["message"]) == ("info", "a.b", "starts")
    assert first["time"].endswith("Z")
    assert (second["camera"], second["seq"], second["message"]) == ("left", 7, "frame 7\x1b[2J of \u202e")
    assert "\x1b" not in log.lines()[1]
    assert (third["camera"], "seq" in third) == ("right", False)
    assert (fourth["camera"], fourth["seq"]) == ("left", 7)


def test_a_line_names_the_request_that_it_is_about(log: Log) -> None:
    for form in ("text", "json"):
        log.handler.configure(form, 0)
        with request_id("shelf-3"):
            log.logger.info("asked")
        log.logger.info("done")
    assert [line.endswith("asked [request shelf-3]") for line in log.lines()[:2]] == [True, False]
    asked, done = map(json.loads, log.lines()[2:])
    assert (asked["request_id"], "request_id" in done) == ("shelf-3", False)


def test_a_json_line_has_the_traceback(log: Log) -> None:
    log.handler.configure("json", 0)
    try:
        raise ValueError("no")
    except ValueError:
        log.logger.exception("failed")
    (found,) = log.objects()
    assert "ValueError: no" in found["error"]
    assert found["error"].startswith("Traceback")


@pytest.fixture
def _json_output() -> Iterator[None]:
    hooks = sys.excepthook, threading.excepthook
    logs.use_format("json")
    yield
    logs.use_format("text")
    sys.excepthook, threading.excepthook = hooks


@pytest.mark.usefixtures("_json_output")
def test_what_is_printed_beside_the_log_has_its_format(capsys: pytest.CaptureFixture[str]) -> None:
    logs.announce("node ready: nano")
    signals.print_notice('watch: no "camera"')
    printed = capsys.readouterr()
    ready = json.loads(printed.out)
    notice = json.loads(printed.err)
    assert (ready["level"], ready["message"]) == ("info", "node ready: nano")
    assert (notice["level"], notice["message"]) == ("warning", 'watch: no "camera"')
    # a group names the process of each line, and wraps what is no object
    for line, message in (
        (printed.out.strip(), "node ready: nano"),
        ("Segmentation fault", "Segmentation fault"),
    ):
        shown = json.loads(logs.format_line(line, process="node"))
        assert (shown["process"], shown["message"]) == ("node", message)
        assert logs.read_message(line) == message
    for odd in ("[1]", '{"message": 3}', "{", "{" * 10_000):
        assert logs.read_message(odd) == odd
        assert json.loads(logs.format_line(odd))


def test_text_is_printed_as_it_is() -> None:
    assert logs.format_line("group up") == "group up"
    assert logs.format_line("ready", process="node") == "node | ready"


def test_the_last_error_of_a_command_is_an_object_too() -> None:
    settings = ("--logging.format", "json", "--transport.control", "ipc:///no/such/folder/control")
    done = subprocess.run(
        [sys.executable, "-m", "sam3_node", "status", "--timeout", "0.1", *settings],
        capture_output=True,
        text=True,
        check=False,
    )
    last = json.loads(done.stderr.splitlines()[-1])
    assert last["level"] == "error"
    assert last["message"].startswith("sam3-node: error: ")


def test_a_subject_belongs_to_its_thread(log: Log) -> None:
    log.handler.configure("json", 0)
    with log_subject("left", 1):
        other = threading.Thread(target=lambda: log.logger.info("elsewhere"))
        other.start()
        other.join()
    assert "camera" not in log.objects()[0]


@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_of_one_kind_are_limited_and_counted(log: Log, form: Any) -> None:
    log.handler.configure(form, 3)
    for number in range(10):
        with log_subject("left", number):
            log.logger.error("frame %d failed", number)
        with log_subject("right", number):
            log.logger.error("frame %d failed", number)
    log.logger.info("another kind")
    assert len(log.lines()) == 3 + 3 + 1
    log.now_s += WINDOW_S
    log.logger.info("later")
    *_, left, right, later = log.lines()
    for line in (left, right):
        assert mentions(line, "7", "suppressed", "logging.limit", "frame %d failed")
    assert "later" in later
    if form == "json":
        found = log.objects()[-3]
        assert (found["suppressed"], found["camera"], found["level"]) == (7, "left", "error")
    log.logger.error("frame %d failed", 11)
    assert "frame 11 failed" in log.lines()[-1]


def test_what_was_suppressed_is_counted_at_the_end(log: Log) -> None:
    log.handler.configure("text", 1)
    for _ in range(3):
        log.logger.info("again")
    log.handler.close()
    assert mentions(log.lines()[-1], "2", "suppressed")
    log.handler.close()
    assert len(log.lines()) == 2


def test_many_kinds_take_bounded_memory(log: Log) -> None:
    log.handler.configure("text", 5)
    for number in range(3 * MAX_KINDS):
        log.logger.info(f"message {number}")
    assert len(log.handler._windows) == MAX_KINDS + 1
    assert len(log.lines()) == MAX_KINDS + 5


def test_without_a_limit_every_line_is_written(log: Log) -> None:
    log.handler.configure("text", 0)
    for _ in range(1000):
        log.logger.info("again")
    assert len(log.lines()) == 1000


def test_the_soft_limit_rises_to_the_hard_one(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(logs, "MAX_DESCRIPTORS", 600)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        assert logs.raise_descriptor_limit() == 600
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (600, before[1])
        assert logs.raise_descriptor_limit() == 600
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_nearly_full_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(logs, "NEARLY_FULL", 1.0)
        assert not logs.warn_if_descriptors_run_out()
        monkeypatch.setattr(logs, "NEARLY_FULL", 0.0)
        assert logs.warn_if_descriptors_run_out()
    (record,) = caplog.records
    assert f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files are open" in record.message
    assert os.listdir("/proc/self/fd")
