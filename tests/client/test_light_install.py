"""The light installation: `pip install .` gives the client with four packages; the command names its extra."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from sam3_node.transport import ControlServer, MaskPublisher
from sam3_node.wire import Reply, Request
from tests.support.paths import ROOT
from tests.support.transport_peer import make_masks

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TCP = "tcp://127.0.0.1:*"
LIGHT = ["pyzmq", "msgpack", "numpy", "zstandard"]
HEAVY = ["torch", "transformers", "scipy", "cv2", "pydantic", "pydantic_settings", "packaging"]
POLICY = """
import json, sys
from sam3_node.client import PerceptionClient
imported = [name for name in ("numpy", "asyncio", "concurrent.futures", "ssl", *{heavy}) if name in sys.modules]
with PerceptionClient({masks!r}, {control!r}, timeout_ms=60_000) as node:
    print(json.dumps(imported), flush=True)
    added = node.add_object(box=(1, 2, 30, 20), label="cup").id
    found = node.wait_for("cup", 60_000)
    print(json.dumps([added, found.masks.seq, found.instance.mask.area, int(found.instance.mask.full().sum())]))
import asyncio
from sam3_node.client import AsyncPerceptionClient

async def main():
    async with AsyncPerceptionClient({masks!r}, {control!r}, timeout_ms=60_000) as node:
        print(json.dumps([await node.status(), (await node.latest(60_000)).seq]))

asyncio.run(main())
print(json.dumps([name for name in {heavy} if name in sys.modules]))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `pip install --target` makes it: this package and the four that it needs, as links."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sam3_node").symlink_to(ROOT / "sam3_node")
    for name in LIGHT:
        files = importlib.metadata.files(name)
        assert files
        for top in {file.parts[0] for file in files} - {".."}:
            (folder / top).symlink_to(Path(str(files[0].locate())).parents[len(files[0].parts) - 1] / top)
    return folder


def start(site: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start Python with the packages of `site` alone: -S leaves out those that are installed."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SAM3_"))
    }
    return subprocess.Popen(
        [sys.executable, "-S", *arguments],
        env=environment | {"PYTHONPATH": str(site)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def fail(site: Path, *arguments: str) -> str:
    """Return what a program that fails writes to stderr."""
    with start(site, *arguments) as process:
        error = process.communicate(timeout=120)[1]
    assert process.returncode
    return error


def answer(request: Request) -> Reply:
    return Reply(request.id, {"id": 7, "camera": "cam0"} if request.op == "add_object" else "fine")


def test_four_packages_are_required_and_every_extra_has_the_rest() -> None:
    assert sorted(line.partition(">")[0] for line in PROJECT["dependencies"]) == sorted(LIGHT)
    extras = PROJECT["optional-dependencies"]
    heavy = {"pydantic-settings", "opencv-python", "packaging", "tqdm"}
    assert {line.partition(">")[0] for line in extras["cli"]} == heavy

    def includes_cli(extra: str) -> bool:
        named = [
            line[len("sam3-node[") :].partition("]")[0]
            for line in extras[extra]
            if line.startswith("sam3-node[")
        ]
        inner = {name for names in named for name in names.split(",")}
        return extra == "cli" or "cli" in inner or any(map(includes_cli, inner))

    # for the environment of a policy, and a compiler, which is beside `node`
    assert [extra for extra in extras if not includes_cli(extra)] == ["gym", "lerobot-policy", "triton"]


def test_a_policy_needs_no_other_package(site: Path) -> None:
    with ControlServer(TCP, answer) as control, MaskPublisher(TCP) as masks:
        code = POLICY.format(heavy=HEAVY, masks=masks.endpoint, control=control.endpoint)
        with start(site, "-c", code) as policy:
            while policy.poll() is None:
                masks.send(make_masks(1))
                time.sleep(0.02)
            out, error = policy.communicate()
    assert policy.returncode == 0, error
    imported, seen, again, heavy = map(json.loads, out.splitlines())
    area = make_masks(1).instances[0].mask.area
    assert (imported, heavy) == ([], [])
    assert (seen, again) == ([7, 1, area, area], ["fine", 1])


@pytest.mark.parametrize("command", ["run", "doctor"])
def test_the_command_names_the_extra(site: Path, command: str) -> None:
    error = fail(site, "-m", "sam3_node", command)
    assert "Traceback" not in error
    assert "Cameras and commands need pip install 'sam3-node[cli]'" in error
    assert "need the extras 'node,bags'" in error


def test_a_group_names_the_extra(site: Path) -> None:
    error = fail(site, "-m", "sam3_node.processes", str(ROOT / "launch" / "demo.toml"))
    assert error.startswith("launch/start: error: pydantic"), error
    assert "Cameras and commands need pip install 'sam3-node[cli]'" in error
    assert len(error.splitlines()) == 1


def test_a_group_without_the_package_says_how_to_install_it(tmp_path: Path) -> None:
    launcher = tmp_path / "checkout" / "launch" / "start"  # a checkout without `.venv`
    launcher.parent.mkdir(parents=True)
    launcher.write_bytes((ROOT / "launch" / "start").read_bytes())
    done = subprocess.run(
        [sys.executable, "-S", launcher, "demo.toml"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.endswith("run make demo, or in a checkout pip install '.[node,bags,console]'\n")
    assert len(done.stderr.splitlines()) == 1


def test_what_needs_opencv_names_the_extra(site: Path) -> None:
    code = (
        "import numpy as np\n"
        "from sam3_node.wire import encode_image\n"
        "encode_image(np.zeros((4, 4, 3), np.uint8), 'jpeg')"
    )
    assert "MissingExtraError: cv2 is not installed; it comes with the extra 'cli'" in fail(site, "-c", code)
