"""Real commands beside each other: whoever is killed, hangs or is started again, nobody else ends, and masks flow."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from sam3_node.types import MaskFrame
from tests.support.node_rig import PATIENCE_S, Process, Rig, until, unworried_client
from tests.support.paths import ROOT
from tests.support.repeats import repetitions
from tests.transport.test_restart import Running, free_endpoint

HOLD_MS = 700
"""Time for which the policy keeps all its threads from running, after each masks message."""
HANG_S = 2.0
"""Longer than the silence after which readers connect again."""
VICTIMS = ["node", "camera", "record", "policy", "watch", "client"]
SCENE = "scene:shapes?width=320&height=240"


class Command:
    """A command that can be killed, stopped, and started again."""

    def __init__(self, rig: Rig, *arguments: str) -> None:
        self._rig, self._arguments = rig, arguments
        self.start()

    def start(self) -> None:
        """Start the command and wait until it is ready."""
        self.running: Process = self._rig.start(*self._arguments)

    def kill(self) -> None:
        """End the command at once."""
        self.running.kill()

    def signal(self, number: int) -> None:
        """Send a signal."""
        self.running.process.send_signal(number)

    def poll(self) -> int | None:
        """Return the exit code, None while the command runs."""
        return self.running.process.poll()

    def wait_for_line(self) -> None:
        """Wait for a line that the command prints from now on."""
        while not self.running.lines.empty():
            self.running.lines.get()
        self.running.next_line()


class Recorder(Command):
    """The command `record`, whose file grows while all is well."""

    def __init__(self, rig: Rig) -> None:
        self._files = 0
        super().__init__(rig)

    def start(self) -> None:
        self._files += 1
        self._out = self._rig.folder / f"recording{self._files}.mcap"
        self.running = self._rig.start("record", str(self._out))

    def wait_for_line(self) -> None:
        """Wait until more has been recorded."""
        begin = self._count_bytes()
        until(lambda: self._count_bytes() > begin, f"{self._out} grows")

    def _count_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._rig.folder.glob(f"{self._out.stem}*"))


class Robot:
    """A camera, a node, a watcher, a recorder, a policy that holds the interpreter, and a client of control."""

    def __init__(self, rig: Rig, stack: ExitStack) -> None:
        self.commands = {
            "camera": Command(rig, "camera", SCENE),
            "node": Command(rig, "run"),
            "watch": Command(rig, "watch"),
            "record": Recorder(rig),
        }
        self.peers = {
            "policy": Running(stack, "policy", rig.masks, HOLD_MS),
            "client": Running(stack, "asker", rig.control),
        }
        self.client = stack.enter_context(unworried_client(rig.masks, rig.control))

    def find(self, name: str) -> Command | Running:
        """Return a process by name."""
        return self.commands.get(name) or self.peers[name]

    def check(self) -> None:
        """Wait until new masks arrive and every process makes progress. Fail if one has ended."""
        seen: list[MaskFrame] = []
        until(lambda: self._takes(seen) and len(seen) > 2, "masks")
        for command in ("watch", "record"):
            self.commands[command].wait_for_line()
        self.peers["policy"].wait_for("")
        self.peers["client"].wait_for("answer")
        ended = {name: item.poll() for name, item in self.commands.items()}
        ended |= {name: item.process.poll() for name, item in self.peers.items()}
        assert not any(code is not None for code in ended.values()), ended

    def _takes(self, seen: list[MaskFrame]) -> bool:
        masks = self.client.latest(200)
        if masks is not None:
            seen.append(masks)
        return masks is not None


@pytest.fixture(scope="module")
def robot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Robot]:
    rig = Rig(tmp_path_factory.mktemp("robot"))
    endpoints = [free_endpoint() for _ in range(3)]
    rig.frames = (endpoints[0],)
    rig.masks, rig.control = endpoints[1:]
    for name, endpoint in zip(("FRAMES", "MASKS", "CONTROL"), endpoints, strict=True):
        rig.environment[f"SAM3_TRANSPORT__{name}"] = endpoint
    with ExitStack() as stack:
        stack.enter_context(rig)
        robot = Robot(rig, stack)
        robot.check()
        yield robot


@pytest.mark.parametrize("victim", VICTIMS[: repetitions(4, 6)])
def test_nobody_ends_when_a_command_is_killed_or_hangs(robot: Robot, victim: str) -> None:
    process = robot.find(victim)
    for _ in range(repetitions(1, 3)):
        process.kill()
        process.start()
        robot.check()
        process.signal(signal.SIGSTOP)
        time.sleep(HANG_S)
        process.signal(signal.SIGCONT)
        robot.check()


@contextmanager
def launched(profile: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "sam3_node.processes", str(profile)]
    with log.open("wb") as output:
        group = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT)
    try:
        yield group
    finally:
        group.send_signal(signal.SIGTERM)
        group.wait(PATIENCE_S)


def test_a_node_that_hangs_in_a_group_is_replaced(robot: Robot, tmp_path: Path) -> None:
    profile, log = tmp_path / "robot.toml", tmp_path / "log.txt"
    weights = robot.commands["node"].running.log.parent / "tiny"
    profile.write_text(
        f'[transport]\nframes = ["ipc://{tmp_path}/f"]\nmasks = "ipc://{tmp_path}/m"\n'
        f'control = "ipc://{tmp_path}/c"\n[camera]\nsource = "{SCENE}"\nfps = 10\n'
        f'[model]\nname = "{weights}"\ndevice = "cpu"\nthreads = 1\n[detector]\nkind = "none"\n'
        '[group]\nprocesses = ["camera", "node"]\nrestart = "on-failure"\nwatchdog_s = 5\n'
    )
    nodes: list[str] = []
    with (
        launched(profile, log) as group,
        unworried_client(f"ipc://{tmp_path}/m", f"ipc://{tmp_path}/c") as client,
    ):

        def masks_come(accept: Callable[[str], bool]) -> str | None:
            assert group.poll() is None, log.read_text()
            masks = client.latest(200)
            return masks.node if masks is not None and masks.node and accept(masks.node) else None

        nodes.append(until(lambda: masks_come(lambda node: True), "masks"))
        (node,) = [child for child in psutil.Process(group.pid).children() if "run" in child.cmdline()]
        os.kill(node.pid, signal.SIGSTOP)
        nodes.append(until(lambda: masks_come(lambda node: node not in nodes), "masks of another node"))
        said = log.read_text()
    assert "node has been silent for 5 s: killed" in said
    assert "camera ended" not in said
