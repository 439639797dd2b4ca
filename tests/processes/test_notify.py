"""Tests of the watchdog: what a process reports, and the replacement of a silent one, with real processes."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sam3_node.processes import notify, supervisor
from sam3_node.processes.notify import BYTES, NotifySocket, Watchdog
from sam3_node.processes.supervisor import Group, Process, list_processes
from sam3_node.settings import load_settings
from tests.processes.test_group import ENDS_ON_SIGTERM, python
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.refuses import mentions
from tests.support.repeats import repetitions
from tests.support.transport_peer import wait_until

WATCHDOG_S = 3.0
ROUNDS = repetitions(1, 5)

ALIVE = """
import os, time
from sam3_node.processes.notify import Watchdog
watchdog = Watchdog({hang_s}, os.environ)
assert "NOTIFY_SOCKET" not in os.environ
watchdog.tick()
print("up", os.getpid(), flush=True)
time.sleep(3600)
"""


class Listener:
    """A notify socket, and the datagrams that come."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.settimeout(PATIENCE_S)

    def next(self) -> str:
        return self._socket.recv(100).decode()

    def wait_for(self, state: str) -> None:
        while self.next() != state:
            pass

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Listener, str]]:
    """Open a notify socket by a path or an abstract name; return it and the value of NOTIFY_SOCKET."""
    if request.param == "path":
        name = f"{tmp_path}/notify"
        address = name
    else:
        name = f"sam3-test-{os.getpid()}"
        address = f"\0{name}"
        name = f"@{name}"
    listener = Listener(address)
    yield listener, name
    listener.close()


def test_a_process_reports_that_it_is_alive_ready_and_stopping(place: tuple[Listener, str]) -> None:
    listener, name = place
    environment = {
        "NOTIFY_SOCKET": name,
        "WATCHDOG_USEC": "20000",
        "WATCHDOG_PID": str(os.getpid()),
        "A": "b",
    }
    with Watchdog(60.0, environment) as watchdog:
        assert environment == {"A": "b"}
        assert listener.next() == "WATCHDOG=1"
        watchdog.tick()
        listener.wait_for("READY=1")
        watchdog.tick()
        assert [listener.next() for _ in range(3)] == ["WATCHDOG=1"] * 3
    listener.wait_for("STOPPING=1")


def test_a_loop_that_hangs_asks_to_be_replaced_and_one_that_waits_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listener = Listener(f"{tmp_path}/n")
    with Watchdog(600.0, {"NOTIFY_SOCKET": f"{tmp_path}/n", "WATCHDOG_USEC": "20000"}) as watchdog:
        watchdog.tick()
        listener.wait_for("READY=1")
        assert listener.next() == "WATCHDOG=1"
        assert not watchdog.hangs
        watchdog.begin(0.0)  # it lasts too long at once
        assert watchdog.hangs
        listener.wait_for("WATCHDOG=trigger")
        assert [listener.next() for _ in range(3)] == ["WATCHDOG=trigger"] * 3
        watchdog.wait()
        assert not watchdog.hangs
        listener.wait_for("WATCHDOG=1")
    (said,) = caplog.messages
    assert mentions(said, "hung")
    assert "test_a_loop_that_hangs_asks" in said, "where the loop is"
    listener.close()


def test_time_in_which_the_whole_process_did_not_run_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("sam3_node.processes.notify.time.monotonic", lambda: now_s)
    watchdog = Watchdog(10.0)
    watchdog.tick()
    now_s = 1500.0
    assert watchdog.hangs
    watchdog._resumed_s = 1500.0  # as the thread finds when its wait took much longer than it should have
    assert not watchdog.hangs
    now_s = 1510.0
    assert watchdog.hangs


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"NOTIFY_SOCKET": "/no/such/socket", "WATCHDOG_USEC": "1000"},
        {"NOTIFY_SOCKET": "/no/such/socket", "WATCHDOG_USEC": "soon"},
        {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"},
    ],
)
def test_without_a_supervisor_nothing_happens(environment: dict[str, str]) -> None:
    with Watchdog(1.0, environment) as watchdog:
        watchdog.tick()
        watchdog.wait()


def test_what_a_recorder_has_written_is_counted_over_restarts(tmp_path: Path) -> None:
    with NotifySocket(tmp_path / "socket") as heard:
        told = [f"{BYTES.decode()}{count}" for count in ("x", "-1", "9" * 50)]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            for state in told:
                sender.sendto(state.encode(), str(tmp_path / "socket"))
        heard.read()
        assert heard.written is None
        for written in (10, 70):
            Watchdog(1.0, dict(heard.environment(0.0))).count_bytes(written)
        heard.restart()
        assert heard.written == 70
        Watchdog(1.0, dict(heard.environment(0.0))).count_bytes(5)
        heard.read()
        assert heard.written == 75


def test_a_supervisor_hears_kicks_only(tmp_path: Path) -> None:
    with NotifySocket(tmp_path / "n") as reports:
        environment = dict(reports.environment(0.1))
        assert environment == {"NOTIFY_SOCKET": f"{tmp_path}/n", "WATCHDOG_USEC": "100000"}
        sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        assert not reports.triggered
        for states, is_watched in (("READY=1", False), ("STATUS=x\nWATCHDOG=1", True), ("STOPPING=1", True)):
            sender.sendto(states.encode(), f"{tmp_path}/n")
            reports.read()
            assert (reports.silent_s > 0) == is_watched
        for forget in (reports.forgive, reports.restart):
            sender.sendto(b"WATCHDOG=trigger", f"{tmp_path}/n")
            reports.read()
            assert reports.triggered
            forget()
            assert not reports.triggered
        sender.close()
    assert not (tmp_path / "n").exists()


def alive(name: str, hang_s: float = 600.0, **options: object) -> Process:
    code = ALIVE.format(hang_s=hang_s)
    given = {"ready": r"up (\d+)", "restart": "on-failure", "watchdog_s": WATCHDOG_S} | options
    return Process(name, (sys.executable, "-c", code), env={"PYTHONPATH": str(ROOT)}, **given)  # type: ignore[arg-type]


def pids(lines: list[str], name: str) -> list[int]:
    return [int(line.split()[-1]) for line in lines if line.startswith(f"{name} | up")]


def child_of(group: Group, name: str) -> Any:
    """Return a member of the group, which signals and reports reach."""
    return group._children[name]


def until(group: Group, condition: Callable[[], object]) -> None:
    """Wait for a condition while all members of the group live."""

    def holds() -> object:
        assert not group.poll(0.05)
        return condition()

    wait_until(holds, PATIENCE_S)


def test_a_stopped_process_is_replaced_and_the_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/of/another/supervisor")
    lines: list[str] = []
    with Group(echo=lines.append) as group:
        group.start(alive("hung"))
        group.start(alive("well"))
        group.start(python("silent", ENDS_ON_SIGTERM, watchdog_s=WATCHDOG_S))  # type: ignore[arg-type]
        for name in ("hung", "well", "silent"):
            group.wait_ready(name, PATIENCE_S)
        for count in range(2, ROUNDS + 2):
            os.kill(pids(lines, "hung")[-1], signal.SIGSTOP)
            until(group, lambda count=count: len(pids(lines, "hung")) == count)
        assert len(pids(lines, "well")) == 1
        assert lines.count("hung has been silent for 3 s: killed") == ROUNDS
        assert sum("hung ended with SIGKILL; restarting" in line for line in lines) == ROUNDS
    assert not any(mentions(line, "well", "silent") or "silent has been" in line for line in lines)


def sleep_machine(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let this time pass for the supervisor while nobody runs."""
    later = SimpleNamespace(**{**vars(time), "monotonic": lambda: time.monotonic() + seconds})
    monkeypatch.setattr(notify, "time", later)
    monkeypatch.setattr(supervisor, "time", later)


def test_a_supervisor_that_did_not_run_kills_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    with Group(echo=lines.append) as group:
        group.start(alive("well"))
        reports = child_of(group, "well").reports
        until(group, lambda: reports.silent_s > 0)
        child_of(group, "well").signal(signal.SIGSTOP)
        reports.read()
        sleep_machine(monkeypatch, 1000.0)
        assert reports.silent_s > WATCHDOG_S
        assert not group.poll(0.0)
        assert 0 < reports.silent_s < WATCHDOG_S
        child_of(group, "well").signal(signal.SIGCONT)
    assert not any("killed" in line for line in lines)


def test_a_loop_that_hangs_is_a_failure_that_ends_the_group() -> None:
    lines: list[str] = []
    with Group(echo=lines.append) as group:
        group.start(alive("hung", hang_s=0.0, restart="never"))
        wait_until(lambda: group.poll(0.05) == {"hung": -signal.SIGKILL}, PATIENCE_S)
    assert "hung says that it hangs: killed" in lines


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("notify.CLOSE_S = 0.5; watchdog.begin_close()", "says that it hangs"),
        ("watchdog.close()", "has been silent for 3 s"),
    ],
    ids=["while it closes", "after it has closed"],
)
def test_a_process_that_hangs_at_its_end_is_replaced(end: str, said: str) -> None:
    ending = f"from sam3_node.processes import notify; {end}; time.sleep(600)"
    code = ALIVE.format(hang_s=600.0).replace("time.sleep(3600)", ending)
    lines: list[str] = []
    with Group(echo=lines.append) as group:
        group.start(replace(alive("ending"), command=(sys.executable, "-c", code)))
        until(group, lambda: len(pids(lines, "ending")) == 2)
    assert f"ending {said}: killed" in lines


def test_a_camera_that_is_stopped_is_replaced(tmp_path: Path) -> None:
    profile = tmp_path / "p.toml"
    profile.write_text(
        f'[transport]\nframes = ["ipc://{tmp_path}/f"]\n[camera]\nsource = "scene:shapes"\n'
        '[group]\nprocesses = ["camera"]\nrestart = "on-failure"\nwatchdog_s = 3\n'
    )
    (camera,) = list_processes(load_settings(profile), profile)
    assert camera.watchdog_s == 3.0
    lines: list[str] = []
    with Group(echo=lines.append) as group:
        group.start(camera)
        group.wait_ready("camera", PATIENCE_S)
        until(group, lambda: child_of(group, "camera").reports.silent_s > 0)  # type: ignore[union-attr]
        child_of(group, "camera").signal(signal.SIGSTOP)
        until(group, lambda: sum("publishing on" in line for line in lines) == 2)
    assert "camera has been silent for 3 s: killed" in lines
