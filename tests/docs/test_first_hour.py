"""Plays a stranger on the bundled recording: types the commands of both tutorials, and runs the examples."""

import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("mcap")
pytest.importorskip("starlette")
pytest.importorskip("scipy")

from sam3_node.bags import LabelledClip
from sam3_node.bags.native.reader import TABLETOP
from sam3_node.calibration import load_calibration
from sam3_node.cli.main import main
from sam3_node.transport import FrameSubscriber
from sam3_node.visualization import VideoWriter
from sam3_node.wire.images import decode_depth, decode_image
from tests.support.node_rig import Rig
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.policy_servers import graspgen_pack, graspgen_unpack, serve
from tests.support.processes import ForkedProcess, Process, fork_command, run_command
from tests.support.repeats import if_pages_changed

typed = if_pages_changed()

CAMERAS = re.compile(r"webcam:0|realsense\b")
STAND_IN = "scene:tabletop --camera.loop"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HTTPS_PROXY": "http://127.0.0.1:9"}
"""Environment in which no hub of weights is within reach: a new Python reads the first, a forked one the second."""
STAYS = "leave it running"
ENDS = re.compile(r"# Ctrl-C in the terminal of (sam3-node \w+)")


def follow(page: str, folder: Path) -> dict[str, str]:
    """Write the files of a page into a folder and type its commands. Return the output of those that end by themselves.

    Sockets lie in the folder, and the hub of weights is out of reach.
    """
    text = (ROOT / "docs" / page).read_text()
    assert STAND_IN in text, "the page says what stands in for the camera"
    sockets = {name: f"ipc://{folder}/{name}" for name in ("frames", "masks", "control")}
    environment = os.environ | {f"SAM3_TRANSPORT__{name}".upper(): socket for name, socket in sockets.items()}
    environment |= {**OFFLINE, "PYTHONPATH": str(ROOT), "SAM3_CONSOLE__BIND": "127.0.0.1:0"}
    client = f"PerceptionClient({sockets['masks']!r}, {sockets['control']!r}, "
    printed: dict[str, str] = {}
    running: dict[str, Process] = {}

    def type_in(line: str) -> None:
        if ended := ENDS.fullmatch(line):
            running[ended[1]].process.send_signal(signal.SIGINT)
            assert running[ended[1]].process.wait(PATIENCE_S) == 0
            return
        words = shlex.split(CAMERAS.sub(STAND_IN, line), comments=True)
        if STAYS in line:
            name = " ".join(words[:2])
            log = folder / f"{words[1]}.log"
            running[name] = ends.enter_context(
                Process(fork_command(words[1:], environment, log, folder), log)
            )
            running[name].next_line()
            return
        if words[0] == "sam3-node":
            done = run_command(words[1:], environment, folder)
        else:
            program = [sys.executable, *words[1:]]
            done = subprocess.run(program, cwd=folder, env=environment, text=True, capture_output=True)
        assert done.returncode == 0, (line, done)
        printed[" ".join(words[:3])] = done.stdout

    with ExitStack() as ends:
        for language, body in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            if language in ("python", "toml"):
                (folder / body.split()[1]).write_text(body.replace("PerceptionClient(", client))
            for line in body.splitlines() if language == "sh" else ():
                type_in(line)
    return printed


@typed
def test_the_first_mask(tmp_path: Path) -> None:
    printed = follow("first-mask.md", tmp_path)
    assert printed["sam3-node object add"] == "1\n"
    assert "red mug" in printed["sam3-node object list"]
    assert re.fullmatch(
        r"red mug: [1-9]\d* pixels, \d+ ms old, sure: (True|False)\n", printed["python mug.py"]
    )
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert files > {"mug.mp4", "pick.mcap", "out/pick/masks.json", "out/pick/overlay-cam0.mp4"}


@typed
def test_the_grasp_pose(tmp_path: Path) -> None:
    *rows, width = follow("grasp-pose.md", tmp_path)["python grasp.py"].splitlines()
    pose = np.array([[float(number) for number in row.strip(" []").split()] for row in rows])
    recording = LabelledClip.load(TABLETOP)
    mug = next(number for number, label in recording.labels.items() if label == "red mug")
    v, u = np.nonzero(recording.truth(0)[mug])
    depth = recording.frames[0].depth
    z = decode_depth(depth)[v, u] * depth.scale_m
    seen = np.stack([(u - 319.5) / 577.3 * z, (v - 239.5) / 577.3 * z, z, np.ones_like(z)])
    middle = (load_calibration(tmp_path / "table.toml").base_from_camera() @ seen).mean(axis=1)[:3]
    assert np.linalg.norm(pose[:3, 3] - middle) < 0.05
    assert pose[:3, :3] @ pose[:3, :3].T == pytest.approx(np.eye(3), abs=0.01)
    assert pose[:3, 2] == pytest.approx([0, 0, -1], abs=0.05)  # against the normal of the table
    assert 0.05 < float(width.split()[-2]) < 0.2


def example(name: str, *arguments: object) -> str:
    """Run an example, and return what it prints."""
    words = [str(ROOT / "examples" / f"{name}.py"), *map(str, arguments)]
    process = ForkedProcess(play_example, words, os.environ | OFFLINE)
    with process.stdout:
        printed = process.stdout.read()
    assert process.wait(PATIENCE_S) == 0, printed
    return printed


def play_example(*words: str) -> None:
    """Run an example: the main function of a process. The commands that it starts run in that process, too."""

    start = subprocess.run

    def run(command: Sequence[str], **options: Any) -> object:
        if list(command[:3]) != [sys.executable, "-m", "sam3_node"]:
            return start(command, **options)
        assert main(command[3:]) == 0
        return None

    sys.argv = list(words)
    with mock.patch("subprocess.run", run):
        runpy.run_path(words[0], run_name="__main__")


def plan_at_the_middle(message: bytes) -> bytes:
    """Answer as a GraspGen server whose only grasp is at the middle of the points."""
    pose = np.eye(4, dtype=np.float32)
    pose[:3, 3] = graspgen_unpack(message)["point_cloud"].mean(axis=0)
    return graspgen_pack({"grasps": pose[np.newaxis], "confidences": np.ones(1, np.float32)})


def test_the_examples_of_a_live_node(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.node(
            MODEL__NAME="nano", SPATIAL__CALIBRATION=str(ROOT / "examples/table.toml"), SPATIAL__TABLE="true"
        )
        rig.start("camera", "scene:tabletop", CAMERA__LOOP="true", CAMERA__ENCODING="jpeg")
        added = example("add_object", rig.masks, rig.control)
        assert re.fullmatch(r"object 1: [1-9]\d+ pixels on frame \d+, doubtful: (True|False)\n", added)
        assert "  1 red mug tracked" in example("subscribe", rig.masks, rig.control)
        grasp = example("grasp_point", "red mug", rig.masks, rig.control)
        place = [float(number) for number in re.findall(r"[xyz] (-?\d\.\d+)", grasp)]
        assert place == pytest.approx([0.163, 0.04, 0.095], abs=0.03)  # as docs/grasp-pose.md
        with serve(plan_at_the_middle) as server, rig.client() as client:
            found = client.grasps(1, server=server, max_age_ms=PATIENCE_S * 1000)
            scene = client.planning_scene(container=True)
        assert found.base_from_gripper[0, :3, 3] == pytest.approx(place, abs=0.05)
        # the mug stands on the table, and nothing encloses it
        assert scene.table is not None
        assert (scene.frame, scene.container, scene.held) == ("base", None, ())
        assert [*(box.id for box in scene.objects), *scene.unseen] == [1]


def test_the_examples_of_frames_and_recordings(tmp_path: Path) -> None:
    printed = example("compare_replays", TABLETOP, "211,285,346,427", tmp_path, 4)
    assert re.fullmatch(r"object 1: mean IoU \d\.\d+ over 4 frames, least .+\n", printed.splitlines(True)[-1])
    endpoint = f"ipc://{tmp_path}/frames"
    with VideoWriter(tmp_path / "video.mp4", 10) as video:
        for _ in range(30):
            video.write(np.full((48, 64, 3), 90, np.uint8))
    with FrameSubscriber([endpoint]) as frames, ThreadPoolExecutor(1) as thread:
        printing = thread.submit(example, "publish_webcam", tmp_path / "video.mp4", endpoint)
        taken = frames.take(round(PATIENCE_S * 1000))
        assert (taken.frame.camera, decode_image(taken.frame).shape) == ("webcam", (48, 64, 3))
        assert printing.result() == "published 30 frames\n"
