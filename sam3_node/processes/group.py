"""Start the processes of a profile as one group: `python -m sam3_node.processes.group PROFILE.toml`.

When a process ends for good, or on SIGINT or SIGTERM, the group stops all processes.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from ..errors import Sam3NodeError, SettingsError
from ..settings import CameraSettings, Settings, load_settings
from .signals import stop_on_signals
from .supervisor import Group, Process, describe_exit

CAMERA_READY = r"^camera \S+ publishing on (\S+)"
NODE_READY = r"^node ready: .* masks on (\S+), control on (\S+)"
WATCH_READY = r"^watch masks from"
RECORD_READY = r"^record frames from"
CONSOLE_READY = r"^console at "
COMMANDS = {
    "node": ("run", NODE_READY),
    "watch": ("watch", WATCH_READY),
    "record": ("record", RECORD_READY),
    "console": ("console", CONSOLE_READY),
}


def list_processes(settings: Settings, profile: Path) -> list[Process]:
    """Return the processes of `settings.group`. Each is a command of `sam3-node` with the same profile.

    Raises SettingsError when there are more cameras than frame endpoints, when two cameras have the same name, or when
    a watcher or recorder would take messages from their only reader.
    """
    _check_readers(settings)
    cameras = settings.group.cameras or (settings.camera,)
    _check_cameras(cameras, settings.transport.frames)
    processes: list[Process] = []
    for name in settings.group.processes:
        if name == "camera":
            processes += [_make_camera(settings, profile, *indexed) for indexed in enumerate(cameras)]
        else:
            processes.append(_make_process(settings, profile, name, *COMMANDS[name], {}))
    return processes


def _check_readers(settings: Settings) -> None:
    readers = [name for name in settings.group.processes if name in ("watch", "record", "console")]
    if settings.transport.delivery == "every" and readers:
        raise SettingsError(
            f"group.processes: expected no {readers[0]} with transport.delivery = 'every', found it: each message "
            f"goes to one reader, and {readers[0]} would take messages from node and policy; remove it"
        )


def _check_cameras(cameras: Sequence[CameraSettings], endpoints: Sequence[str]) -> None:
    names = [camera.name for camera in cameras]
    if len(set(names)) < len(names):
        raise SettingsError(f"cameras of one group need different names, found {', '.join(names)}")
    if len(cameras) > len(endpoints):
        raise SettingsError(
            f"{len(cameras)} cameras need as many endpoints in transport.frames, found {len(endpoints)}"
        )


def _make_camera(settings: Settings, profile: Path, index: int, camera: CameraSettings) -> Process:
    """Create a camera process. It reads its section and endpoint from the environment."""
    environment = {"SAM3_TRANSPORT__FRAMES": settings.transport.frames[index]}
    if settings.group.cameras:
        environment["SAM3_CAMERA"] = camera.model_dump_json()
    name = camera.name if settings.group.cameras else "camera"
    return _make_process(settings, profile, name, "camera", CAMERA_READY, environment)


def _make_process(
    settings: Settings, profile: Path, name: str, command: str, ready: str, environment: dict[str, str]
) -> Process:
    command_line = (sys.executable, "-m", "sam3_node", command, "--profile", str(profile))
    group = settings.group
    return Process(name, command_line, ready, environment, group.restart, group.watchdog_s)


def run_group(processes: Sequence[Process], stop: threading.Event, grace_s: float = 3.0) -> dict[str, int]:
    """Run all processes until one ends for good or `stop` is set, then stop all. Return the exit codes by name."""
    with Group(grace_s=grace_s, echo=print_line) as group:
        for process in processes:
            group.start(process)
        announced = False
        while not stop.is_set() and not group.poll(0.2):
            if not announced and group.ready:
                announced = True
                print_line(f"group up: {', '.join(process.name for process in processes)}")
        for name, code in group.codes.items():
            print_line(f"{name} ended with {describe_exit(code)}; stopping the group")
        return group.stop()


def print_line(line: str) -> None:
    """Print a line and flush it."""
    print(line, flush=True)


def combine_exit_codes(codes: dict[str, int]) -> int:
    """Return 0 if each process ended with 0 or by SIGTERM, else the first other exit code."""
    failures = [code for code in codes.values() if code not in (0, -signal.SIGTERM)]
    return (failures[0] if failures[0] > 0 else 128 - failures[0]) if failures else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of launch/start. Its one argument is the profile."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if len(words) != 1 or words[0].startswith("-"):
        print("usage: launch/start PROFILE.toml (such as launch/demo.toml)", file=sys.stderr)
        return 0 if words in (["-h"], ["--help"]) else 2
    try:
        profile = Path(words[0]).resolve()
        settings = load_settings(profile)
        processes = list_processes(settings, profile)
        return combine_exit_codes(run_group(processes, stop_on_signals(), settings.group.grace_s))
    except Sam3NodeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
