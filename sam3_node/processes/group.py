"""Start what a profile names as one group: `python -m sam3_node.processes.group PROFILE.toml`.

When one process ends for good, or on SIGINT and SIGTERM, all are taken down.
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
VERBS = {"node": ("run", NODE_READY), "watch": ("watch", WATCH_READY), "record": ("record", RECORD_READY)}


def processes_of(settings: Settings, profile: Path) -> list[Process]:
    """The processes that `settings.group` names, each a verb of the command line on the same profile.

    Raises SettingsError when there are more cameras than frame endpoints, two of one name, or a watcher or
    recorder that would take messages away from their reader.
    """
    _check_readers(settings)
    cameras = settings.group.cameras or (settings.camera,)
    _check_cameras(cameras, settings.transport.frames)
    found: list[Process] = []
    for verb in settings.group.processes:
        if verb == "camera":
            found += [_camera(settings, profile, index, camera) for index, camera in enumerate(cameras)]
        else:
            found.append(_verb(settings, profile, verb, *VERBS[verb], {}))
    return found


def _check_readers(settings: Settings) -> None:
    readers = [verb for verb in settings.group.processes if verb in ("watch", "record")]
    if settings.transport.delivery == "every" and readers:
        raise SettingsError(
            f"group.processes: expected no {readers[0]} where transport.delivery is 'every', found it: each message "
            "goes to one reader, and it would take them away from node and policy; leave it out"
        )


def _check_cameras(cameras: Sequence[CameraSettings], endpoints: Sequence[str]) -> None:
    names = [camera.name for camera in cameras]
    if len(set(names)) < len(names):
        raise SettingsError(f"cameras of one group need different names, found {', '.join(names)}")
    if len(cameras) > len(endpoints):
        raise SettingsError(
            f"{len(cameras)} cameras need as many endpoints in transport.frames, found {len(endpoints)}"
        )


def _camera(settings: Settings, profile: Path, index: int, camera: CameraSettings) -> Process:
    """A camera's own section and endpoint reach its process through the environment."""
    environment = {"SAM3_TRANSPORT__FRAMES": settings.transport.frames[index]}
    if settings.group.cameras:
        environment["SAM3_CAMERA"] = camera.model_dump_json()
    name = camera.name if settings.group.cameras else "camera"
    return _verb(settings, profile, name, "camera", CAMERA_READY, environment)


def _verb(
    settings: Settings, profile: Path, name: str, verb: str, ready: str, environment: dict[str, str]
) -> Process:
    command = (sys.executable, "-m", "sam3_node", verb, "--profile", str(profile))
    return Process(name, command, ready, environment, settings.group.restart)


def run_group(processes: Sequence[Process], stop: threading.Event, grace_s: float = 3.0) -> dict[str, int]:
    """Start all, wait until one ends for good or `stop` is set, take all down; exit codes by name."""
    with Group(grace_s=grace_s, echo=_print_line) as group:
        for process in processes:
            group.start(process)
        announced = False
        while not stop.is_set() and not group.poll(0.2):
            if not announced and group.ready:
                announced = True
                _print_line(f"group up: {', '.join(process.name for process in processes)}")
        for name, code in group.codes.items():
            _print_line(f"{name} ended with {describe_exit(code)}; taking the group down")
        return group.stop()


def _print_line(line: str) -> None:
    print(line, flush=True)


def exit_code_of(codes: dict[str, int]) -> int:
    """One exit code for a group: 0 when each ended well or by SIGTERM, else the first bad one."""
    bad = [code for code in codes.values() if code not in (0, -signal.SIGTERM)]
    return (bad[0] if bad[0] > 0 else 128 - bad[0]) if bad else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The door of launch/start: one argument, the profile."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) != 1 or given[0].startswith("-"):
        print("usage: launch/start PROFILE.toml (such as launch/demo.toml)", file=sys.stderr)
        return 0 if given in (["-h"], ["--help"]) else 2
    try:
        profile = Path(given[0]).resolve()
        settings = load_settings(profile)
        processes = processes_of(settings, profile)
        return exit_code_of(run_group(processes, stop_on_signals(), settings.group.grace_s))
    except Sam3NodeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
