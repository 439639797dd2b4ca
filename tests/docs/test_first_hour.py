"""Plays a stranger: types the commands of both tutorials in order, in an empty folder, on the bundled recording."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
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

STAND_IN = "scene:tabletop --camera.loop"
CAMERAS = re.compile(r"webcam:0|realsense\b")
STAYS, ENDS = "leave it running", re.compile(r"# Ctrl-C in the terminal of (sam3-node \w+)")


class Stranger:
    """A user with a page, an empty folder and no network, whose sockets lie in that folder."""

    def __init__(self, page: str, folder: Path) -> None:
        self.text, self.folder = (ROOT / "docs" / page).read_text(), folder
        self.running: dict[str, Process] = {}
        self.masks, self.control = f"ipc://{folder}/masks", f"ipc://{folder}/control"
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "SAM3_TRANSPORT__FRAMES": f"ipc://{folder}/frames",
            "SAM3_TRANSPORT__MASKS": self.masks,
            "SAM3_TRANSPORT__CONTROL": self.control,
            "SAM3_CONSOLE__BIND": "127.0.0.1:0",
            "SAM3_MODEL__THREADS": "1",
        }

    def follow(self) -> dict[str, str]:
        """Write the files of the page and type its commands. Return what each printed, without those that stay."""
        printed = {}
        client = f"PerceptionClient({self.masks!r}, {self.control!r}, "
        for language, body in re.findall(r"^```(\w+)\n(.*?)^```$", self.text, re.DOTALL | re.MULTILINE):
            if language in ("python", "toml"):
                (self.folder / body.split()[1]).write_text(body.replace("PerceptionClient(", client))
            for line in body.splitlines() if language == "sh" else ():
                if ended := ENDS.fullmatch(line):
                    self.end(ended[1])
                elif STAYS in line:
                    self.start(line)
                else:
                    printed[" ".join(self.words(line)[:3])] = self.run(line)
        return printed

    def words(self, line: str) -> list[str]:
        assert STAND_IN in self.text, "the page says what stands in for the camera"
        return shlex.split(CAMERAS.sub(STAND_IN, line), comments=True)

    def popen(self, line: str) -> subprocess.Popen[str]:
        name, *words = self.words(line)
        program = [sys.executable, "-m", "sam3_node"] if name == "sam3-node" else [sys.executable]
        return subprocess.Popen(
            [*program, *words],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, line: str) -> str:
        process = self.popen(line)
        printed = process.communicate(timeout=PATIENCE_S)[0]
        assert process.returncode == 0, (line, printed)
        return printed

    def start(self, line: str) -> None:
        name = " ".join(self.words(line)[:2])
        self.running[name] = Process(self.popen(line))
        self.running[name].next_line()

    def end(self, name: str) -> None:
        process = self.running[name].process
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0


@pytest.fixture
def follow(tmp_path: Path) -> Iterator[Callable[[str], dict[str, str]]]:
    strangers: list[Stranger] = []

    def follow(page: str) -> dict[str, str]:
        strangers.append(Stranger(page, tmp_path))
        return strangers[-1].follow()

    yield follow
    for process in strangers[-1].running.values():
        process.kill()


def test_the_first_mask(follow: Callable[[str], dict[str, str]], tmp_path: Path) -> None:
    printed = follow("first-mask.md")
    assert printed["sam3-node object add"] == "1\n"
    assert "red mug" in printed["sam3-node object list"]
    assert re.fullmatch(
        r"red mug: [1-9]\d* pixels, \d+ ms old, sure: (True|False)\n", printed["python mug.py"]
    )
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert files > {"mug.mp4", "pick.mcap", "out/pick/masks.json", "out/pick/overlay-cam0.mp4"}


def test_the_grasp_pose(follow: Callable[[str], dict[str, str]], tmp_path: Path) -> None:
    *rows, width = follow("grasp-pose.md")["python grasp.py"].splitlines()
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
