"""The archives of a release, and what they install: the client with four packages; the command names its extra."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sam3_node.transport import MaskPublisher
from sam3_node.transport.control_server import ControlServer
from sam3_node.wire import Reply, Request
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.refuses import mentions
from tests.support.repeats import WHOLE
from tests.support.transport_peer import make_masks

BUILD = "import sys, setuptools.build_meta as build; getattr(build, f'build_{sys.argv[1]}')(sys.argv[2])"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TCP = "tcp://127.0.0.1:*"
LIGHT = ["pyzmq", "msgpack", "msgspec", "numpy", "zstandard"]
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
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the source archive of this checkout, by their last suffix."""
    source = tmp_path_factory.mktemp("source")
    built = tmp_path_factory.mktemp("built")
    shutil.copytree(
        ROOT / "sam3_node", source / "sam3_node", ignore=shutil.ignore_patterns("__pycache__", ".*")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for kind in ("sdist", "wheel"):
        subprocess.run(
            [sys.executable, "-c", BUILD, kind, built], cwd=source, check=True, capture_output=True
        )
    return {path.suffix: path for path in built.iterdir()}


@pytest.fixture(scope="module")
def site(archives: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `pip install --target` makes it: the wheel, and the four packages that it needs as links."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(archives[".whl"]).extractall(folder)
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
        error = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode
    return error


def answer(request: Request) -> Reply:
    return Reply(request.id, {"id": 7, "camera": "cam0"} if request.op == "add_object" else "fine")


def test_four_packages_are_required_and_every_extra_has_the_rest() -> None:
    assert sorted(line.partition(">")[0] for line in PROJECT["dependencies"]) == sorted(LIGHT)
    extras = PROJECT["optional-dependencies"]
    heavy = {"pydantic-settings", "opencv-python-headless", "packaging", "tqdm", "shtab"}
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
    assert [extra for extra in extras if not includes_cli(extra)] == [
        "gym",
        "lerobot-policy",
        "triton",
        "docs",
    ]


def test_both_archives_have_every_file_of_the_package(archives: dict[str, Path]) -> None:
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "sam3_node").rglob("*") if path.is_file()}
    files = {name for name in files if "/." not in name and "__pycache__" not in name}
    wheel = zipfile.ZipFile(archives[".whl"]).namelist()
    with tarfile.open(archives[".gz"]) as archive:
        source = {name.partition("/")[2] for name in archive.getnames()}
    assert {name for name in wheel if name.startswith("sam3_node/")} == files <= source
    assert f"version: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize(
    "suffix",
    [
        ".whl",
        pytest.param(".gz", marks=pytest.mark.skipif(not WHOLE, reason="WHOLE_TESTS=1 installs it, too")),
    ],
)
def test_the_client_alone_brings_four_packages(
    archives: dict[str, Path], suffix: str, tmp_path: Path
) -> None:
    python = tmp_path / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    pip = [sys.executable, "-m", "pip", "--python", python]
    reach = [*pip, "download", "-q", "--no-deps", "-d", tmp_path / "reached", "msgpack"]
    if (reached := subprocess.run(reach, capture_output=True, text=True)).returncode:
        pytest.skip(f"pip reaches no registry: {reached.stderr.splitlines()[-1]}")
    subprocess.run([*pip, "install", "-q", archives[suffix]], check=True)
    listed = json.loads(subprocess.check_output([*pip, "list", "--format=json"]))
    assert {package["name"] for package in listed} == {"sam3-node", *LIGHT}
    subprocess.run([python, "-c", "from sam3_node.client import PerceptionClient"], check=True, cwd=tmp_path)


def requirements_of(lines: list[str]) -> Iterator[Requirement]:
    for requirement in map(Requirement, lines):
        for extra in requirement.extras if requirement.name == PROJECT["name"] else ():
            yield from requirements_of(PROJECT["optional-dependencies"][extra])
        yield requirement


def test_the_lock_has_all_that_is_required() -> None:
    locked = dict(
        re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    )
    for requirement in requirements_of([*PROJECT["dependencies"], "sam3-node[dev]"]):
        name = requirement.name.lower().replace("_", "-")
        assert name == PROJECT["name"] or requirement.specifier.contains(locked[name]), requirement


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


def test_help_and_doctor_work_without_the_extra(site: Path) -> None:
    for arguments in (("--help",), ("doctor",)):
        with start(site, "-m", "sam3_node", *arguments) as process:
            out, error = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, error) == (0, ""), arguments
        assert "client" in out


def test_the_command_names_the_extra(site: Path) -> None:
    error = fail(site, "-m", "sam3_node", "run")
    assert "Traceback" not in error
    assert mentions(error, "pip install 'sam3-node[cli]'")
    assert mentions(error, "'node,bags'")


def test_a_group_names_the_extra(site: Path) -> None:
    error = fail(site, "-m", "sam3_node.processes", str(ROOT / "launch" / "demo.toml"))
    assert error.startswith("launch/start: error: pydantic"), error
    assert mentions(error, "pip install 'sam3-node[cli]'")
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
        timeout=PATIENCE_S,
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
    assert mentions(fail(site, "-c", code), "MissingExtraError", "cv2", "'cli'")


def test_type_checkers_find_an_editable_install(tmp_path: Path) -> None:
    """They read the paths of .pth files, and run no import hooks."""
    pytest.importorskip("setuptools")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    package = tmp_path / "sam3_node"
    package.mkdir()
    (package / "__init__.py").touch()
    build = "import sys; from setuptools.build_meta import build_editable; build_editable(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, "."], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (path,) = (name for name in files.namelist() if name.endswith(".pth"))
        assert files.read(path).decode().split() == [str(tmp_path)]
