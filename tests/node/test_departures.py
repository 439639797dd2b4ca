"""Real commands beside each other: whoever is killed, hangs or is started again, nobody else ends, and masks flow."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from sam3_node.types import MaskFrame
from tests.support.node_rig import Rig, until, unworried_client
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.processes import Team
from tests.support.repeats import if_whole, repetitions
from tests.support.transport_peer import peer
from tools.bench.processes import free_endpoints

HOLD_MS = 700
"""Time for which the policy keeps all its threads from running, after each masks message."""
HANG_S = 2.0
"""Longer than the silence after which readers connect again."""
VICTIMS = ["node", "camera", "record", "policy", "watch", "client"]
SCENE = "scene:shapes?width=320&height=240"


class Robot(Team):
    """A camera, a node, a watcher, a recorder, a policy that holds the interpreter, and a client of control."""

    def __init__(self, rig: Rig, stack: ExitStack) -> None:
        self._rig = rig
        numbers = itertools.count()
        super().__init__(
            camera=lambda: rig.launch("camera", SCENE),
            node=lambda: rig.launch("run"),
            watch=lambda: rig.launch("watch"),
            record=lambda: rig.launch("record", str(rig.folder / f"recording{next(numbers)}.mcap")),
            policy=lambda: stack.enter_context(peer("policy", rig.masks, HOLD_MS)),
            client=lambda: stack.enter_context(peer("asker", rig.control)),
        )
        self._masks = stack.enter_context(unworried_client(rig.masks, rig.control))

    def check_progress(self) -> None:
        """Wait until new masks arrive and every process makes progress. Fail if one has ended."""
        seen: list[MaskFrame] = []
        until(lambda: self._takes(seen) and len(seen) > 2, "masks")
        recorded = self._count_bytes()
        until(lambda: self._count_bytes() > recorded, "more is recorded")
        self.check(watch="", policy="", client="answer")

    def _count_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._rig.folder.glob("recording*"))

    def _takes(self, seen: list[MaskFrame]) -> bool:
        masks = self._masks.latest(200)
        if masks is not None:
            seen.append(masks)
        return masks is not None


@pytest.fixture(scope="module")
def robot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Robot]:
    rig = Rig(tmp_path_factory.mktemp("robot"))
    endpoints = free_endpoints(3)
    rig.frames = (endpoints[0],)
    rig.masks, rig.control = endpoints[1:]
    for name, endpoint in zip(("FRAMES", "MASKS", "CONTROL"), endpoints, strict=True):
        rig.environment[f"SAM3_TRANSPORT__{name}"] = endpoint
    with ExitStack() as stack:
        stack.enter_context(rig)
        robot = Robot(rig, stack)
        robot.check_progress()
        yield robot


@pytest.mark.parametrize("victim", VICTIMS[: repetitions(4, 6)])
def test_nobody_ends_when_a_command_is_killed_or_hangs(robot: Robot, victim: str) -> None:
    for _ in range(repetitions(1, 3)):
        robot.restart(victim)
        robot.check_progress()
        robot.stop_for(victim, HANG_S)
        robot.check_progress()


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


@if_whole("test_health.py has a node that hangs in a group, test_notify.py a silent process")
def test_a_node_that_hangs_in_a_group_is_replaced(robot: Robot, tmp_path: Path) -> None:
    profile = tmp_path / "robot.toml"
    log = tmp_path / "log.txt"
    weights = robot.running["node"].log.parent / "tiny"
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
