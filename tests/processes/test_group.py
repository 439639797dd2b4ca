"""Tests of groups of real processes: forwarding, readiness, stopping, restarts, and no orphans."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from sam3_node.cameras import publish
from sam3_node.cli import main as cli
from sam3_node.errors import CameraError, ProcessError, SettingsError
from sam3_node.processes import supervisor
from sam3_node.processes.helpers import HELPERS_FILE, HelperState, read_helpers, write_helpers
from sam3_node.processes.logs import use_format
from sam3_node.processes.notify import Watchdog
from sam3_node.processes.supervisor import Group, Process, combine_exit_codes, list_processes, main, run_group
from sam3_node.settings import load_settings
from sam3_node.transport import FramePublisher
from tests.support.refuses import mentions, refuses
from tests.support.transport_peer import wait_until

READY_THEN_SLEEP = "print('up', flush=True)\nimport time\ntime.sleep(3600)"
ENDS_ON_SIGTERM = (
    "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n" + READY_THEN_SLEEP
)
IGNORES_SIGTERM = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY_THEN_SLEEP
ONCE = """
import pathlib, sys
flag = pathlib.Path({!r})
seen = flag.exists()
flag.touch()
sys.exit(0 if seen else 7)
"""


def python(name: str, code: str, **options: str) -> Process:
    return Process(name, (sys.executable, "-S", "-c", code), **options)  # type: ignore[arg-type]


def run_until(process: Process, codes: dict[str, int]) -> list[str]:
    """Run a process until the group has these exit codes; return its lines."""
    lines: list[str] = []
    with Group(echo=lines.append) as group:
        group.start(process)
        wait_until(lambda: group.poll(0.05) == codes)
    return lines


def test_output_is_forwarded_by_name_and_the_ready_line_is_matched() -> None:
    lines: list[str] = []
    with Group(echo=lines.append) as group:
        code = "print('noise'); print('up at tcp://127.0.0.1:7')\nimport time; time.sleep(3600)"
        group.start(python("a", code, ready=r"up at (\S+)"))
        ready = group.wait_ready("a", 20)
        assert ready.group(1) == "tcp://127.0.0.1:7"
        assert group.ready
    assert lines == ["a | noise", "a | up at tcp://127.0.0.1:7"]


def test_stop_ends_every_process_and_returns_its_code() -> None:
    with Group(echo=None) as group:
        for name in "abc":
            group.start(python(name, ENDS_ON_SIGTERM))
        for name in "abc":
            group.wait_ready(name, 20)
        assert group.stop() == {"a": 0, "b": 0, "c": 0}


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace_time() -> None:
    lines: list[str] = []
    with Group(grace_s=0.2, echo=lines.append) as group:
        group.start(python("deaf", IGNORES_SIGTERM))
        group.wait_ready("deaf", 20)
        assert group.stop() == {"deaf": -signal.SIGKILL}
    assert any(mentions(line, "0.2 s") for line in lines)


@pytest.mark.parametrize(
    ("code", "timeout_s", "field"),
    [
        ("import sys; print('no such camera'); sys.exit(3)", 20, ("3", "camera")),  # ends with its last lines
        ("import time; time.sleep(3600)", 0.2, "0.2"),
    ],
)
def test_a_process_that_is_not_ready_in_time_is_an_error(code: str, timeout_s: float, field: Any) -> None:
    with Group(echo=None) as group:
        group.start(python("bad", code, ready="never"))
        with refuses(ProcessError, field=field):
            group.wait_ready("bad", timeout_s)


def test_a_command_that_does_not_exist_and_a_repeated_name_are_errors() -> None:
    with Group(echo=None) as group:
        with refuses(ProcessError, field="/nonexistent/x"):
            group.start(Process("x", ("/nonexistent/x",)))
        group.start(python("a", ENDS_ON_SIGTERM))
        with refuses(ProcessError, field="a"):
            group.start(python("a", ENDS_ON_SIGTERM))


def test_long_and_unfinished_lines_and_bytes_that_are_not_text_are_forwarded() -> None:
    code = "import sys; o = sys.stdout.buffer; o.write(b'x' * 300000 + b'\\n\\xff end'); o.flush()"
    lines = run_until(python("a", code), {"a": 0})
    assert sum(line.count("x") for line in lines) == 300000
    assert lines[-1] == "a | � end"


def test_a_failing_process_is_restarted_and_a_clean_end_is_final(tmp_path: Path) -> None:
    code = ONCE.format(str(tmp_path / "flag"))
    lines = run_until(python("flaky", code, restart="on-failure"), {"flaky": 0})
    assert lines == ["flaky ended with exit code 7; restarting it in 0.5 s"]


LEAVES = "import time; print('up'); time.sleep(0.3); raise SystemExit(4)"
REFUSED = "import sys; print('error: no such setting'); sys.exit(2)"


@pytest.mark.parametrize(
    ("ending", "code", "options"),
    [(LEAVES, 4, {}), (REFUSED, 2, {"restart": "on-failure", "ready": "^up"})],
    ids=["when one ends", "by an error that a restart does not mend"],
)
def test_run_group_stops_all(
    ending: str, code: int, options: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    stays = python("stays", ENDS_ON_SIGTERM, **({"restart": options["restart"]} if options else {}))
    codes = run_group([stays, python("leaves", ending, **options)], threading.Event())
    assert codes["leaves"] == combine_exit_codes(codes) == code
    assert codes["stays"] in (0, -signal.SIGTERM)
    printed = capsys.readouterr().out
    assert f"leaves ended with exit code {code}; stopping the group" in printed
    assert "restarting" not in printed


def test_a_group_goes_on_without_a_helper_and_tells_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    asks = """
import os, pathlib, time
print('up', flush=True)
path = pathlib.Path(os.environ['SAM3NODE_ENDED_HELPERS'])
while not path.exists():
    time.sleep(0.02)
print('told', path.read_text(), flush=True)
"""
    # a line of a log in JSON is told by its message
    line = '{"time": "2026-01-01T00:00:00.000Z", "message": "error: no space left on device"}'
    full = f"print({line!r}, flush=True); raise SystemExit(4)"
    helper = replace(python("record", full), is_helper=True)
    codes = run_group([python("node", asks), helper], threading.Event())
    # the node's end is the group's, the helper's is not
    assert codes == {"node": 0, "record": 4}
    assert combine_exit_codes(codes) == 4
    printed = capsys.readouterr().out
    assert "record ended with exit code 4; the group goes on without it" in printed
    told = json.loads(printed.split("told")[1].splitlines()[0])
    assert told["record"]["reason"] == "ended with exit code 4: error: no space left on device"
    assert (told["record"]["is_over"], told["record"]["restarts"]) == (True, 0)
    assert "node ended with exit code 0; stopping the group" in printed


def test_a_group_of_helpers_alone_ends_with_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    helpers = [replace(python(name, "print('up')"), is_helper=True) for name in ("watch", "record")]
    assert run_group(helpers, threading.Event()) == {"watch": 0, "record": 0}


def test_recorder_watcher_and_console_of_a_profile_are_helpers(tmp_path: Path) -> None:
    profile = tmp_path / "p.toml"
    profile.write_text('[group]\nprocesses = ["camera", "node", "watch", "record", "console"]\n')
    processes = list_processes(load_settings(profile), profile)
    assert [process.name for process in processes if process.is_helper] == ["watch", "record", "console"]


def test_a_helper_that_fails_again_and_again_waits_longer_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_S", 0.01)
    monkeypatch.setattr(supervisor, "MAX_BACKOFF_S", 0.02)
    monkeypatch.setattr(supervisor, "MAX_HELPER_BACKOFF_S", 0.04)
    asks = """
import json, os, pathlib, time
print('up', flush=True)
path = pathlib.Path(os.environ['SAM3NODE_ENDED_HELPERS'])
while not path.exists() or json.loads(path.read_text())['record']['restarts'] < 4:
    time.sleep(0.02)
print('told', path.read_text(), flush=True)
"""
    full = "print('no space left', flush=True); raise SystemExit(75)"
    helper = replace(python("record", full), is_helper=True, restart="on-failure")
    run_group([python("node", asks), helper], threading.Event())
    printed = capsys.readouterr().out
    told = json.loads(printed.split("told")[1].splitlines()[0])["record"]
    assert (told["reason"], told["is_over"]) == ("ended with exit code 75: no space left", False)
    pauses = re.findall(r"restarting it in ([\d.]+) s", printed)
    assert pauses[:4] == ["0.01", "0.02", "0.04", "0.04"]


def test_what_a_supervisor_wrote_of_helpers_is_read_with_care(tmp_path: Path) -> None:
    path = tmp_path / "helpers"
    own = {HELPERS_FILE: str(path)}
    assert read_helpers({}) == read_helpers(own) == {}
    states = {"record": HelperState(3, "ended with exit code 2", True)}
    write_helpers(path, states)
    assert read_helpers(own) == states
    for damaged in (b"[1]", b"{", b"", b'{"record": 3}', b'{"record": {"restarts": -1}}', b"[" * 60_000):
        path.write_bytes(damaged)
        assert read_helpers(own) == {}


def test_run_group_ends_when_the_stop_event_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    stop = threading.Event()
    timer = threading.Timer(0.5, stop.set)
    timer.start()
    codes = run_group([python("a", ENDS_ON_SIGTERM), python("b", ENDS_ON_SIGTERM)], stop)
    assert combine_exit_codes(codes) == 0


def test_exit_codes_of_signals() -> None:
    assert combine_exit_codes({"a": 0, "b": -signal.SIGTERM}) == 0
    assert combine_exit_codes({"a": 0, "b": -signal.SIGKILL}) == 137


SUPERVISOR = """
import subprocess, sys, time
from sam3_node.processes.supervisor import Group, Process
with Group() as group:
    for name in ("a", "b"):
        group.start(Process(name, (sys.executable, "-S", "-c", {code!r})))
        print(group._children[name].popen.pid, flush=True)
    while True:
        group.poll(0.1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_no_orphan_is_left_when_the_supervisor_is_killed() -> None:
    command = [sys.executable, "-c", SUPERVISOR.format(code=IGNORES_SIGTERM)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as supervisor:
        lines = [supervisor.stdout.readline().decode() for _ in range(4)]
        pids = [int(line) for line in lines if line.strip().isdigit()]
        assert len(pids) == 2
        os.kill(supervisor.pid, signal.SIGKILL)
        wait_until(lambda: not any(_runs(pid) for pid in pids))


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def read_profile(folder: Path, text: str) -> list[Process]:
    """Return the processes of a profile with this text."""
    profile = folder / "p.toml"
    profile.write_text(text)
    return list_processes(load_settings(profile), profile)


def test_a_profile_names_the_processes(tmp_path: Path) -> None:
    profile = tmp_path / "p.toml"
    text = '[group]\nprocesses = ["camera", "node"]\nrestart = "on-failure"\n'
    camera, node = read_profile(tmp_path, text)
    assert (camera.name, camera.command[3:5]) == ("camera", ("camera", "--profile"))
    assert (node.name, node.command[3:]) == ("node", ("run", "--profile", str(profile)))
    assert node.restart == "on-failure"


TWO_CAMERAS = """
[transport]
frames = ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]
[[group.cameras]]
name = "{}"
source = "scene:shapes"
[[group.cameras]]
name = "{}"
"""


def test_several_cameras_each_get_an_endpoint_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right, node, _ = read_profile(tmp_path, TWO_CAMERAS.format("left", "right"))
    assert [left.name, right.name, node.name] == ["left", "right", "node"]
    for name, value in right.env.items():
        monkeypatch.setenv(name, value)
    settings = load_settings(tmp_path / "p.toml")
    assert settings.camera.name == "right"
    assert settings.transport.frames == ("tcp://127.0.0.1:2",)


def test_cameras_that_clash_are_refused(tmp_path: Path) -> None:
    with refuses(SettingsError, field=("different", "names")):
        read_profile(tmp_path, TWO_CAMERAS.format("same", "same"))
    with refuses(SettingsError, field=("2", "transport.frames", "1")):
        read_profile(tmp_path, TWO_CAMERAS.format("a", "b").replace(', "tcp://127.0.0.1:2"', ""))


def test_a_watcher_of_lossless_masks_is_refused(tmp_path: Path) -> None:
    text = '[transport]\ndelivery = "every"\n'
    with refuses(SettingsError, field=("group.processes", "every")):
        read_profile(tmp_path, text)
    assert len(read_profile(tmp_path, f'{text}[group]\nprocesses = ["camera", "node"]\n')) == 2


def test_main_explains_a_wrong_call(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([]) == 2
    assert mentions(capsys.readouterr().err, "PROFILE.toml")
    assert main([str(tmp_path / "none.toml")]) == 2
    assert "none.toml" in capsys.readouterr().err
    # a supervisor of a machine reads JSON, also of settings that cannot be read
    monkeypatch.setenv("SAM3_LOGGING__FORMAT", "json")
    try:
        assert main([str(tmp_path / "none.toml")]) == 2
    finally:
        use_format("text")
    assert mentions(json.loads(capsys.readouterr().err)["message"], "none.toml")


@pytest.mark.parametrize("code", [1, 3, 4, 75])
def test_other_failures_are_restarted(code: int, tmp_path: Path) -> None:
    text = ONCE.format(str(tmp_path / "flag")).replace("7)", f"{code})")
    lines = run_until(python("flaky", text, restart="on-failure", ready="never"), {"flaky": 0})
    assert lines == [f"flaky ended with exit code {code}; restarting it in 0.5 s"]


def test_a_process_that_was_ready_is_restarted_whatever_its_code(tmp_path: Path) -> None:
    """It failed while it ran; when it is refused at its next start, that is final."""
    flag = tmp_path / "flag"
    code = f"import pathlib, sys\nf = pathlib.Path({str(flag)!r})\nf.exists() or print('up')\nf.touch()\nsys.exit(2)"
    lines = run_until(python("camera", code, restart="on-failure", ready="^up"), {"camera": 2})
    assert lines == ["camera | up", "camera ended with exit code 2; restarting it in 0.5 s"]


@pytest.mark.parametrize(
    ("source", "supervised", "code"),
    [("webcam:63", True, 75), ("webcam:63", False, 2), ("bag:missing.mcap", True, 2), ("scene:no", True, 2)],
)
def test_a_camera_that_may_come_later_has_an_exit_code_of_its_own(
    source: str,
    supervised: bool,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    if supervised:
        monkeypatch.setenv("SAM3NODE_RESTARTED_BY", "sam3-node")
    assert cli.main(["camera", source, "--transport.frames", "tcp://127.0.0.1:*"]) == code
    assert "sam3-node: error:" in capsys.readouterr().err


def test_an_error_after_the_work_has_begun_may_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAM3NODE_RESTARTED_BY", "sam3-node")

    def run(source: str) -> int:
        return cli.main(["camera", source, "--transport.frames", "tcp://127.0.0.1:*"])

    def fail(*_: object, **__: object) -> None:
        Watchdog().tick()
        raise CameraError("it broke")

    monkeypatch.setattr(publish, "run_camera", fail)
    assert run("scene:shapes") == 75
    monkeypatch.undo()
    monkeypatch.setenv("SAM3NODE_RESTARTED_BY", "sam3-node")
    assert run("scene:no") == 2


def test_an_address_in_use_may_become_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere")
    with FramePublisher("tcp://127.0.0.1:*") as publisher:
        assert cli.main(["camera", "scene:shapes", "--transport.frames", publisher.endpoint]) == 75
