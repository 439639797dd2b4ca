"""The path of an operator with six foreign recordings, one of them bad: a plan, two runs on Ray with kills, the bill.

The recordings are made by rosbags, mcap-protobuf-support, mcap-ros2-support, lerobot and PyAV.
"""

import json
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import av
import numpy as np
import psutil
import pytest

from sam3_node.bags import open_bag, read_masks
from sam3_node.cli import main as cli
from sam3_node.replay.cluster import scheduler
from sam3_node.replay.shards import ShardLimits
from sam3_node.settings import Settings
from tests.support import mcap_files, ros_recordings
from tests.support.live import chosen
from tests.support.paths import ROOT
from tests.support.processes import ForkedProcess, until
from tests.support.refuses import mentions
from tests.support.threads import in_thread

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(1200)

FRAMES = 500
"""Frames of each of the first two recordings: one of them lasts while a lost worker is replaced."""
MCAP_FRAMES = 80
"""Frames of each of the next two."""
SHARDS = ShardLimits(frames=20)
"""Shards so short that a lost worker costs little work."""
TOLD_SOON = {"RAY_health_check_initial_delay_ms": "0", "RAY_health_check_period_ms": "500"}
"""Environment in which Ray finds out in seconds that a node has ended. By itself it takes twenty."""
LOOK_S = 0.1
"""Time between two looks at the processes of workers."""
SLACK_S = 3.0
"""Time by which the bill of five workers may differ from what is seen of their processes: 5 % of a minute."""
PRICE = 36.0
GOOD = ("a", "b", "c", "d", "e")


def write_cut_video(path: Path) -> None:
    """Write an H.264 video of a camera that lost its power: its index, which is written last, is missing."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=25)
        stream.width = 64
        stream.height = 48
        stream.pix_fmt = "yuv420p"
        for level in range(25):
            image = np.full((48, 64, 3), 5 * level, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="bgr24")))
        file.mux(stream.encode(None))
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(b"moov")])


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("foreign")
    paths = [folder / name for name in ("a.bag", "b", "c.mcap", "d.mcap", "e", "f.mp4")]
    ros1, ros2, foxglove, mcap_ros2, lerobot, video = paths
    ros_recordings.write_ros1(ros1, FRAMES)
    ros_recordings.write_ros2(ros2, FRAMES)
    mcap_files.write_protobuf(foxglove, mcap_files.rgbd(MCAP_FRAMES, compressed=True))
    mcap_files.write_ros2(mcap_ros2, mcap_files.rgbd(MCAP_FRAMES))
    shutil.copytree(ROOT / "tests/data/lerobot/v3.0", lerobot)
    write_cut_video(video)
    return paths


@pytest.fixture(scope="module")
def command(
    recordings: list[Path], settings: Settings, tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """Return the arguments of the replay, without how it runs."""
    fields = [(section, *item) for section, values in chosen(settings).items() for item in values.items()]
    options = [f"--{section}.{name}={value}" for section, name, value in fields]
    out = tmp_path_factory.mktemp("results") / "out"
    return ["replay", *map(str, recordings), "-o", str(out), "--box", "8,6,24,18", *options]


@dataclass
class WorkerTime:
    """The time of a worker's process: first and last seen."""

    process: psutil.Process
    first_s: float
    last_s: float


class WorkerWatch:
    """Measures how long the workers of drivers live, by their processes, independently of the bill."""

    def __init__(self) -> None:
        self.driver: psutil.Process | None = None
        self._workers: dict[int, WorkerTime] = {}

    def watch(self, over: threading.Event) -> None:
        """Look at the processes until `over` is set: the work of a thread."""
        while not over.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        now_s = time.monotonic()
        for process in self._list_children():
            with suppress(psutil.Error):
                # Ray names the process when its actor exists
                if process.name() == "ray::Worker":
                    self._workers.setdefault(process.pid, WorkerTime(process, now_s, now_s))
        for worker in self.alive():
            worker.last_s = now_s

    def _list_children(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            if self.driver is not None:
                return self.driver.children(recursive=True)
        return []

    def alive(self) -> list[WorkerTime]:
        """Return the workers that live."""
        return [worker for worker in list(self._workers.values()) if is_alive(worker.process)]

    @property
    def seconds(self) -> float:
        """Time of all workers together."""
        return sum(worker.last_s - worker.first_s for worker in list(self._workers.values()))


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def drive(*arguments: str) -> None:
    """Run the command with short shards. Its output goes to the log of its process."""
    os.dup2(2, 1)
    with patch.object(scheduler, "run_many", partial(scheduler.run_many, limits=SHARDS)):
        sys.exit(cli.main(arguments))


@contextmanager
def driver(
    arguments: Sequence[str], watch: WorkerWatch, log: Path, **environment: str
) -> Iterator[ForkedProcess]:
    """Start the command as a process. At the end, kill what is left of it and of its Ray."""
    process = ForkedProcess(drive, arguments, os.environ | {"PYTHONPATH": str(ROOT)} | environment, log)
    watch.driver = psutil.Process(process.pid)
    family: list[psutil.Process] = []
    try:
        yield process
    finally:
        with suppress(psutil.Error):
            family = watch.driver.children(recursive=True)
        process.kill()
        process.wait()
        for one in family:
            with suppress(psutil.Error):
                one.kill()


def wait_for_bill(
    process: ForkedProcess, out: Path, accept: Callable[[dict[str, Any]], object], what: str
) -> dict[str, Any]:
    """Return the first bill that is accepted. Fail if the driver ends before."""

    def find() -> dict[str, Any] | None:
        time.sleep(LOOK_S / 2)
        assert process.poll() is None, f"the driver has ended before {what}"
        with suppress(FileNotFoundError):
            bill: dict[str, Any] = json.loads((out / "bill.json").read_text())
            if accept(bill):
                return bill
        return None

    return until(find, what)


def count_running(bill: dict[str, Any]) -> int:
    return sum(bag["state"] == "running" for bag in bill["bags"])


def count_losses(bill: dict[str, Any]) -> int:
    return sum(bag["losses"] for bag in bill["bags"])


def are_busy(bill: dict[str, Any], run: int, losses: int) -> bool:
    """Return True if two workers of this run have a task, after this number of losses."""
    return bill["runs"] == run and count_running(bill) == 2 and count_losses(bill) == losses


def test_the_plan_names_the_bad_recording_and_writes_nothing(
    command: list[str], recordings: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, "--dry-run", "--price-per-hour", str(PRICE)]) == 1
    plan = capsys.readouterr().out
    lines = plan.splitlines()
    assert [line.partition(":")[0] for line in lines if line.startswith("/")] == list(map(str, recordings))
    (bad,) = [line for line in lines if ": bad: " in line]
    assert mentions(bad, "f.mp4")
    assert mentions(
        plan,
        "6 recordings",
        "1 of them bad",
        f"{2 * (FRAMES + MCAP_FRAMES) + 30} frames",
        "3 joints",
        "price",
    )
    assert not Path(command[command.index("-o") + 1]).exists()


def test_kills_cost_no_frame_and_the_bill_is_the_time_of_all_workers(
    command: list[str], recordings: list[Path], tmp_path: Path
) -> None:
    out = Path(command[command.index("-o") + 1])
    whole = [*command, "--ray", "local", "--workers", "2", "--price-per-hour", str(PRICE)]
    watch = WorkerWatch()
    with in_thread(watch.watch):
        # the first run loses a worker, and then its driver
        with driver(whole, watch, tmp_path / "first.log") as process:
            wait_for_bill(process, out, lambda bill: are_busy(bill, 1, 0), "two workers")
            watch.alive()[0].process.kill()
            saved = wait_for_bill(
                process, out, lambda bill: are_busy(bill, 1, 1), "a new worker after the lost one"
            )
            wait_for_bill(process, out, lambda bill: bill["held_s"] > saved["held_s"], "the next bill")
            process.kill()
            process.wait()
            until(lambda: not watch.alive(), "the end of the driver's workers")
        left = json.loads((out / "bill.json").read_text())
        orphans = count_running(left)
        assert orphans >= 1

        # the same command continues; a spot machine is taken away
        before = count_losses(left) + orphans
        with driver(whole, watch, tmp_path / "second.log") as process:
            wait_for_bill(
                process, out, lambda bill: are_busy(bill, 2, before), "two workers of the second run"
            )
            watch.alive()[0].process.terminate()
            assert process.wait() == 1, (tmp_path / "second.log").read_text()
        until(lambda: not watch.alive(), "the end of all workers")

    # one recording is bad, and the others are complete
    bill = json.loads((out / "bill.json").read_text())
    states = {Path(bag["bag"]).name: bag["state"] for bag in bill["bags"]}
    assert states.pop("f.mp4") == "failed"
    assert set(states.values()) == {"done"}
    for path, name in zip(recordings, GOOD, strict=False):
        with open_bag(path) as bag:
            recorded = Counter((frame.camera, frame.seq, frame.capture_ns) for frame in bag)
        masks = read_masks(out / name / "masks.mcap")
        assert Counter((found.camera, found.seq, found.capture_ns) for found in masks) == recorded
        assert set(recorded.values()) == {1}

    # every loss is counted, and every second
    assert count_losses(bill) == before + 1
    assert bill["runs"] == 2
    assert bill["held_s"] == pytest.approx(watch.seconds, rel=0.05, abs=SLACK_S)
    assert bill["cost"] == pytest.approx(bill["held_s"] / 3600 * PRICE, abs=1e-5)
    assert sum(bag["worker_s"] for bag in bill["bags"]) <= bill["held_s"] + 1
    assert mentions((tmp_path / "second.log").read_text(), "lost", "of 2 runs")


def test_a_ray_that_has_ended_ends_the_command(command: list[str], tmp_path: Path) -> None:
    """Ray itself would wait for ever for another machine."""
    here = list(command)
    out = here[here.index("-o") + 1] = str(tmp_path / "out")
    here += ["--ray", "local", "--workers", "1"]
    with driver(here, WorkerWatch(), tmp_path / "log", **TOLD_SOON) as process:
        wait_for_bill(process, Path(out), count_running, "a worker")
        (raylet,) = [
            one for one in psutil.Process(process.pid).children(recursive=True) if one.name() == "raylet"
        ]
        raylet.kill()
        assert process.wait() == 2
    log = (tmp_path / "log").read_text()
    assert mentions(log, "sam3-node: error", "Ray", "the same command continues")
