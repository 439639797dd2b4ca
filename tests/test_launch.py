"""Tests of launch/: valid profiles, systemd units with real commands, and start and stop of a group."""

import configparser
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from sam3_node.addresses import split_address
from sam3_node.processes.supervisor import list_processes
from sam3_node.settings import load_settings
from sam3_node.transport.security import is_local
from tests.support.command_line import command_parser
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.refuses import mentions
from tests.support.tables import each_row

LAUNCH = ROOT / "launch"

PROFILE = """
[transport]
frames = ["ipc://{folder}/frames"]
masks = "ipc://{folder}/masks"
control = "ipc://{folder}/control"
[camera]
fps = 10
[model]
threads = 1
[group]
processes = [{processes}]
"""


PROFILES = sorted(LAUNCH.glob("*.toml"))


@each_row("profile", PROFILES, ids=lambda path: path.stem)
def test_every_profile_validates_and_names_processes(profile: Path) -> None:
    assert list_processes(load_settings(profile), profile)


@each_row("profile", PROFILES, ids=lambda path: path.stem)
def test_every_profile_is_in_the_tables_of_profiles(profile: Path) -> None:
    assert f"| `{profile.name}` |" in (LAUNCH / "README.md").read_text()
    assert f"| `launch/{profile.name}` |" in (ROOT / "docs" / "profiles.md").read_text()


@each_row("profile", PROFILES, ids=lambda path: path.stem)
def test_every_profile_fits_together(profile: Path) -> None:
    """Settings that contradict each other would only be refused, or ignored, on the machine of the profile."""
    settings = load_settings(profile)
    transport = settings.transport
    tracker = settings.tracker
    assert tracker.max_cameras >= len(transport.frames), "each camera needs a slot"
    assert tracker.selection == "confident" or tracker.bank_size <= 7, "more memory is useless"
    for endpoint in (*transport.frames, transport.masks, transport.control):
        assert transport.keys or is_local(endpoint), "another address than loopback needs keys"
    if transport.keys:
        assert len(transport.camera_keys) == len(transport.frames)
    model = settings.model
    engine = settings.engine
    if model.device == "cuda":
        options = model.dtype, model.compile, engine.read_kernel, engine.graphs, engine.precision
        assert set(options) == {"auto"}, "defaults or a tuning decide"
    assert split_address(settings.health.bind) or profile.stem == "demo", (
        "what runs for months can be asked for its health"
    )


COMMAND = r"sam3-node ((?:object )?[a-z]+ [^`\n]+?)(?: {2,}|`|$)"


def commands() -> list[str]:
    """Return every command line in launch/ and calibration/."""
    files = [*LAUNCH.glob("*.toml"), *LAUNCH.rglob("*.md"), *(ROOT / "calibration").glob("*.md")]
    return [command for file in files for command in re.findall(COMMAND, file.read_text(), re.MULTILINE)]


@each_row("command", commands())
def test_every_command_is_parsed(command: str) -> None:
    assert command_parser().parse_args(shlex.split(command)).run


UNITS = sorted((LAUNCH / "systemd").glob("*.service"))


def read_unit(unit: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit.read_text())
    return parser


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_every_unit_is_watched_bounded_and_started_again(unit: Path) -> None:
    parser = read_unit(unit)
    service = parser["Service"]
    assert parser["Unit"]["StartLimitIntervalSec"] == "0"
    assert (service["Type"], service["Restart"], service["WatchdogSignal"]) == (
        "notify",
        "on-failure",
        "SIGKILL",
    )
    assert float(service["WatchdogSec"]) + float(service["RestartSec"]) < 15, (
        "a hung process is replaced in 20 s"
    )
    assert (service["UMask"], service["ProtectHome"]) == ("0077", "yes")
    assert service["RestartPreventExitStatus"] == "2", "wrong settings are the same at the next start"
    assert {"MemoryMax", "LimitNOFILE"} <= set(service)


def test_the_unit_may_write_the_snapshot_that_the_docs_name() -> None:
    service = read_unit(LAUNCH / "systemd" / "sam3-node.service")["Service"]
    (path,) = re.findall(r'^path = "(/run/\S+)"', (ROOT / "docs/hand-over.md").read_text(), re.MULTILINE)
    assert Path(path).parent == Path("/run", service["RuntimeDirectory"])
    assert service["RuntimeDirectoryPreserve"] == "yes", "a restart would delete it"


@pytest.mark.parametrize("name", ["camera", "node"])
def test_units_of_several_robots_share_nothing_that_one_of_them_writes(name: str) -> None:
    """An instance is the unit of one robot, with a profile and a folder of its own, and half of the machine."""
    alone = read_unit(LAUNCH / "systemd" / f"sam3-{name}.service")["Service"]
    each = read_unit(LAUNCH / "systemd" / f"sam3-{name}@.service")["Service"]
    differing = {key for key in alone.keys() | each.keys() if alone.get(key) != each.get(key)}
    assert differing <= {"ExecStart", "RuntimeDirectory", "CPUQuota", "MemoryMax"}
    assert each["ExecStart"].endswith("/%i.toml")
    assert each.get("RuntimeDirectory", "%i").endswith("%i")
    assert int(each["MemoryMax"].removesuffix("%")) * 2 <= int(alone["MemoryMax"].removesuffix("%"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_every_unit_is_valid(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/sam3-node/.venv/bin/sam3-node", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert unit.name not in done.stdout + done.stderr, "unknown keys are warnings only"


@pytest.mark.parametrize(
    ("unit", "command"),
    [
        ("sam3-camera.service", "camera"),
        ("sam3-camera@.service", "camera"),
        ("sam3-node.service", "run"),
        ("sam3-node@.service", "run"),
    ],
)
def test_every_unit_starts_a_real_command(unit: str, command: str) -> None:
    words = read_unit(LAUNCH / "systemd" / unit)["Service"]["ExecStart"].split()
    assert words[1:3] == [command, "--profile"]
    help_text = subprocess.run(
        [sys.executable, "-m", "sam3_node", command, "--help"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert help_text.returncode == 0
    assert "--profile" in help_text.stdout


@contextmanager
def started(profile: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """Run launch/start until its group is up. Yield it and the processes that it started."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, LAUNCH / "start", profile], stdout=subprocess.PIPE, text=True, env=environment
    ) as starter:
        try:
            for line in starter.stdout:
                if line.startswith("group up"):
                    break
            yield starter, psutil.Process(starter.pid).children()
        finally:
            starter.kill()


def have_ended(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=PATIENCE_S)[1]


def write_profile(folder: Path, *processes: str) -> Path:
    path = folder / "profile.toml"
    path.write_text(PROFILE.format(folder=folder, processes=", ".join(f'"{name}"' for name in processes)))
    return path


def read_until(starter: subprocess.Popen[str], condition: Callable[[str], bool]) -> str:
    deadline = time.monotonic() + PATIENCE_S
    for line in starter.stdout:
        if condition(line):
            return line
        assert time.monotonic() < deadline, f"the line did not come in time; the last: {line}"
    return ""


def test_start_runs_camera_node_and_watcher_and_stops_them(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with started(write_profile(tmp_path, "camera", "node", "watch")) as (starter, processes):
        assert len(processes) == 3
        assert read_until(starter, lambda line: line.startswith("watch | cam0 #"))
        settings = {process.environ().get("PYTORCH_ALLOC_CONF") for process in processes}
        assert settings == {os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")}
        starter.send_signal(signal.SIGTERM)
        rest = starter.communicate(timeout=PATIENCE_S)[0]
        assert starter.returncode == 0
        assert mentions(rest, "watch |", "summary")
        assert have_ended(processes)


def test_the_end_of_one_process_ends_the_group_with_its_exit_code(tmp_path: Path) -> None:
    with started(write_profile(tmp_path, "camera", "watch")) as (starter, processes):
        processes[0].kill()
        rest = starter.communicate(timeout=PATIENCE_S)[0]
        assert mentions(rest, "camera", "SIGKILL")
        assert starter.returncode == 128 + signal.SIGKILL
        assert have_ended(processes)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_killing_start_leaves_no_orphan(tmp_path: Path) -> None:
    with started(write_profile(tmp_path, "camera", "watch")) as (starter, processes):
        starter.kill()
        assert have_ended(processes)


def test_a_profile_that_does_not_validate_is_explained(tmp_path: Path) -> None:
    profile = tmp_path / "profile.toml"
    profile.write_text('[group]\nprocesses = ["kamera"]\n')
    done = subprocess.run([LAUNCH / "start", profile], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert "group.processes" in done.stderr
    assert "kamera" in done.stderr


def test_a_setting_that_only_a_process_can_check_ends_the_group(tmp_path: Path) -> None:
    profile = write_profile(tmp_path, "camera", "watch")
    profile.write_text(
        profile.read_text().replace("[camera]", '[camera]\nsource = "bag:missing.mcap"')
        + 'restart = "on-failure"\n'
    )
    done = subprocess.run(
        [sys.executable, LAUNCH / "start", profile], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 2
    assert f"found no file at {tmp_path}/missing.mcap" in done.stdout
    assert mentions(done.stdout, "camera", "exit code 2")
    assert "restarting" not in done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_names_missing_programs(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 && exit 0\nexit 1\n')
    old.chmod(0o755)
    for python, message in ((old, "found Python 3.9.2"), (tmp_path / "none", "apt-get install python3")):
        command = ["make", "-C", str(ROOT), "lint", f"PYTHON={python}", f"VENV={tmp_path}/venv"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode != 0
        assert message in done.stderr
