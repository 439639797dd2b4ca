"""A supervisor replaces a real node that hangs, and one whose GPU has failed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sam3_node.client import PerceptionClient
from sam3_node.processes.supervisor import NODE_READY, Group, Process
from sam3_node.transport import FramePublisher
from tests.support.node_frames import picture
from tests.support.node_rig import tiny_environment, until, unworried_client
from tests.support.paths import ROOT
from tests.support.repeats import repetitions

# a node whose step obeys a file: it never returns, fails as after an illegal memory access, or stops the node, which
# never ends then
OBEDIENT = """
import os, signal, sys, time, torch
from pathlib import Path
from sam3_node.node.saved_state import Snapshots
from sam3_node.perception.pipeline import Pipeline
order, step = Path(sys.argv.pop()), Pipeline.step

def obey(*args):
    what = order.read_text() if order.exists() else ""
    order.unlink(missing_ok=True)
    if what == "hang":
        time.sleep(100_000)
    if what == "fail":
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    if what == "end":
        Snapshots.close = lambda self: time.sleep(100_000)
        os.kill(os.getpid(), signal.SIGTERM)
    return step(*args)

Pipeline.step = obey
from sam3_node.__main__ import main
sys.exit(main())
"""


class Supervised:
    """A node under the supervisor of launch/start, a camera and a policy."""

    def __init__(self, folder: Path, group: Group, lines: list[str]) -> None:
        self.order, self.lines, self._group = folder / "order", lines, group
        self.frames, self.masks, self.control = (f"ipc://{folder}/{name}" for name in "fmc")
        environment = tiny_environment(folder, self.frames, self.masks, self.control)
        environment |= {
            "PYTHONPATH": str(ROOT),
            "SAM3_GROUP__HANG_STEP_S": "4",
            "SAM3_LOGGING__FORMAT": "json",
        }
        command = (sys.executable, "-c", OBEDIENT, "run", str(self.order))
        group.start(Process("node", command, NODE_READY, environment, "on-failure", watchdog_s=16.0))

    def serve(self, camera: FramePublisher, policy: PerceptionClient, seqs: Iterator[int]) -> str:
        """Send frames until masks come, and return the name of the node that made them."""

        def find() -> str | None:
            assert not self._group.poll(0.02), self.lines
            camera.send(picture(next(seqs)))
            masks = policy.latest(timeout_ms=20)
            return masks.node if masks is not None else None

        return until(find, "masks")

    def serve_again(
        self, camera: FramePublisher, policy: PerceptionClient, seqs: Iterator[int], old: str
    ) -> str:
        """Send frames until another node than `old` answers."""
        return until(lambda: (name := self.serve(camera, policy, seqs)) != old and name, "a new node")


IS_WHOLE = repetitions(0, 1) == 1
ORDERS = ("hang", "fail", "end") if IS_WHOLE else ("hang",)


@pytest.mark.skipif(sys.platform != "linux", reason="the supervisor's watchdog is tested on Linux")
def test_a_node_that_hangs_or_lost_its_gpu_is_replaced(tmp_path: Path) -> None:
    lines: list[str] = []
    with Group(echo=lines.append) as group:
        served = Supervised(tmp_path, group, lines)
        with (
            FramePublisher(served.frames) as camera,
            unworried_client(served.masks, served.control) as policy,
        ):
            seqs = iter(range(1_000_000))
            name = served.serve(camera, policy, seqs)
            for order in ORDERS:
                served.order.write_text(order)
                name = served.serve_again(camera, policy, seqs, name)
    text = "\n".join(lines)
    assert "node says that it hangs: killed" in text
    assert any("the main loop has hung" in line and "in obey" in line for line in lines), "the log says where"
    if IS_WHOLE:
        assert "the GPU has failed, and this process can use it no longer: AcceleratorError" in text
        assert "node ended with exit code 4; restarting" in text
