"""Plays a stranger: types the commands of both tutorials in order, in an empty folder, on the bundled recording."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("mcap")
pytest.importorskip("starlette")
pytest.importorskip("scipy")

from sam3_node.bags import LabelledClip
from sam3_node.bags.native.reader import TABLETOP
from sam3_node.calibration import load_calibration
from sam3_node.wire.images import decode_depth
from tests.support.paths import ROOT
from tests.support.processes import PATIENCE_S, Process

CAMERAS, STAND_IN = re.compile(r"webcam:0|realsense\b"), "scene:tabletop --camera.loop"
STAYS, ENDS = "leave it running", re.compile(r"# Ctrl-C in the terminal of (sam3-node \w+)")


def follow(page: str, folder: Path) -> dict[str, str]:
    """Write the files of a page into a folder and type its commands. Return the output of those that end by themselves.

    Sockets lie in the folder, and the hub of weights is out of reach.
    """
    text = (ROOT / "docs" / page).read_text()
    assert STAND_IN in text, "the page says what stands in for the camera"
    sockets = {name: f"ipc://{folder}/{name}" for name in ("frames", "masks", "control")}
    environment = os.environ | {f"SAM3_TRANSPORT__{name}".upper(): socket for name, socket in sockets.items()}
    environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "SAM3_CONSOLE__BIND": "127.0.0.1:0"}
    client = f"PerceptionClient({sockets['masks']!r}, {sockets['control']!r}, "
    printed: dict[str, str] = {}
    running: dict[str, Process] = {}

    def type_in(line: str) -> None:
        if ended := ENDS.fullmatch(line):
            running[ended[1]].process.send_signal(signal.SIGINT)
            assert running[ended[1]].process.wait(PATIENCE_S) == 0
            return
        words = shlex.split(CAMERAS.sub(STAND_IN, line), comments=True)
        program = [sys.executable, *(("-m", "sam3_node") if words[0] == "sam3-node" else ()), *words[1:]]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(program, cwd=folder, env=environment, text=True, **pipes)
        if STAYS in line:
            running[" ".join(words[:2])] = stays = ends.enter_context(Process(process))
            stays.next_line()
        else:
            printed[" ".join(words[:3])] = process.communicate(timeout=PATIENCE_S)[0]
            assert process.returncode == 0, (line, printed)

    with ExitStack() as ends:
        for language, body in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            if language in ("python", "toml"):
                (folder / body.split()[1]).write_text(body.replace("PerceptionClient(", client))
            for line in body.splitlines() if language == "sh" else ():
                type_in(line)
    return printed


def test_the_first_mask(tmp_path: Path) -> None:
    printed = follow("first-mask.md", tmp_path)
    assert printed["sam3-node object add"] == "1\n"
    assert "red mug" in printed["sam3-node object list"]
    assert re.fullmatch(
        r"red mug: [1-9]\d* pixels, \d+ ms old, sure: (True|False)\n", printed["python mug.py"]
    )
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert files > {"mug.mp4", "pick.mcap", "out/pick/masks.json", "out/pick/overlay-cam0.mp4"}


def test_the_grasp_pose(tmp_path: Path) -> None:
    *rows, width = follow("grasp-pose.md", tmp_path)["python grasp.py"].splitlines()
    pose = np.array([[float(number) for number in row.strip(" []").split()] for row in rows])
    recording = LabelledClip.load(TABLETOP)
    mug = next(number for number, label in recording.labels.items() if label == "red mug")
    v, u = np.nonzero(recording.truth(0)[mug])
    depth = recording.frames[0].depth
    assert depth is not None
    z = decode_depth(depth)[v, u] * depth.scale_m
    seen = np.stack([(u - 319.5) / 577.3 * z, (v - 239.5) / 577.3 * z, z, np.ones_like(z)])
    middle = (load_calibration(tmp_path / "table.toml").base_from_camera() @ seen).mean(axis=1)[:3]
    assert np.linalg.norm(pose[:3, 3] - middle) < 0.05
    assert pose[:3, :3] @ pose[:3, :3].T == pytest.approx(np.eye(3), abs=0.01)
    assert pose[:3, 2] == pytest.approx([0, 0, -1])
    assert 0.05 < float(width.split()[1]) < 0.2
