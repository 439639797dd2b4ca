"""Errors that need no torch come before it is imported, which takes seconds."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.bags.native.reader import TABLETOP
from tests.support.paths import ROOT
from tests.support.refuses import mentions

SERVER = """
import json, os, sys, traceback
from sam3_node.cli.main import main

def run(order):
    for name, descriptor in (("out", 1), ("errors", 2)):
        os.dup2(os.open(order[name], os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
    sys.path[:] = order["path"]
    assert not set(order["hidden"]) & set(sys.modules)
    sys.modules |= dict.fromkeys(order["hidden"])
    try:
        code = main(order["words"])
    except SystemExit as end:
        code = end.code
    print(json.dumps(sorted({"torch", "transformers"} & set(sys.modules))))
    return code or 0

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = run(json.loads(line))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""A process that has imported the command line, and runs each command in a fork of its own."""
MJCF = "<mujoco model='arm'/>"


ENDPOINTS = ("--transport.masks", "tcp://127.0.0.1:0", "--transport.control", "tcp://127.0.0.1:0")
"""Endpoints of a node that no other node has."""


@pytest.fixture(scope="module")
def light() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SERVER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=ROOT, **pipes) as server:  # type: ignore[call-overload]
        yield server
        server.stdin.close()


Failing = Callable[..., str]
"""Runs a command without some modules; returns its error, which must come before torch and any result."""


@pytest.fixture
def fail_early(light: subprocess.Popen[str], files: dict[str, str], tmp_path: Path) -> Failing:
    def fail(command: str, hidden: str = "") -> str:
        words = [files.get(word, word) for word in command.split()]
        if words[0] == "run":
            words += ENDPOINTS
        out = tmp_path / "stdout"
        errors = tmp_path / "stderr"
        # packages that the test has put in the path are those of the command, too
        order = {"words": words, "hidden": hidden.split(), "path": list(filter(None, sys.path))}
        order |= {"out": str(out), "errors": str(errors)}
        assert light.stdin
        assert light.stdout
        print(json.dumps(order), file=light.stdin, flush=True)
        code = int(light.stdout.readline())
        assert code == 2, errors.read_text()
        loaded = set(json.loads(out.read_text().splitlines()[-1]))
        assert not loaded - set(hidden.split()), loaded
        assert not Path(files["OUT"]).exists()
        return errors.read_text()

    return fail


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Return places: of nothing, of a file that is neither a recording nor a URDF, and of results."""
    wrong = tmp_path / "arm.xml"
    wrong.write_text(MJCF)
    standins = tmp_path / "packages"
    standins.mkdir()
    return {
        "NONE": str(tmp_path / "none"),
        "WRONG": str(wrong),
        "OUT": str(tmp_path / "out"),
        "BAG": str(TABLETOP),
        "URDF": str(TABLETOP.with_suffix(".urdf")),
        "VIDEO": str(write_video(tmp_path / "grey.mp4")),
        "STANDINS": str(standins),
    }


def write_video(path: Path) -> Path:
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 10, (64, 48))
    for _ in range(3):
        writer.write(np.zeros((48, 64, 3), np.uint8))
    writer.release()
    return path


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("run --nosuch=1", "--nosuch"),
        ("run --model.name nanno", "did you mean nano?"),
        ("run --model.name NONE", "config.json"),
        ("run --robot.urdf NONE", "robot.urdf"),
        ("run --robot.urdf WRONG", "MuJoCo"),
        ("run --spatial.calibration NONE", "none"),
        ("run --detector.kind nosuch", "detector.kind"),
        ("replay NONE -o OUT --prompt mug", "no file"),
        ("replay WRONG -o OUT --prompt mug", "another file"),
        ("replay BAG -o OUT --prompt mug --model.name nanno", "did you mean nano?"),
        ("replay BAG -o OUT --prompt mug --robot.urdf WRONG", "MuJoCo"),
        ("replay BAG -o OUT --prompt mug --outputs gif", "gif"),
        ("replay BAG -o OUT --prompt mug --calibration NONE", "none"),
        ("replay BAG -o OUT --prompt mug --price-per-hour 1", "--ray"),
        ("replay BAG -o OUT --prompt mug --compare", "--as-recorded"),
        ("replay BAG -o OUT --objects NONE", "none"),
    ],
)
def test_what_is_wrong_is_told_before_torch_is_imported(
    fail_early: Failing, command: str, named: str
) -> None:
    done = fail_early(command)
    assert mentions(done, named), done


@pytest.mark.parametrize(
    ("hidden", "command", "extra"),
    [
        ("transformers", "run", "node"),
        ("opentelemetry", "run --monitoring.otlp_endpoint http://127.0.0.1:9", "otel"),
        ("opentelemetry.exporter", "run --monitoring.otlp_endpoint http://127.0.0.1:9", "otel"),
        ("yourdfpy", "run --robot.urdf URDF", "robot"),
        ("trimesh", "replay BAG -o OUT --prompt mug --robot.urdf URDF", "robot"),
        ("mcap", "replay BAG -o OUT --prompt mug", "bags"),
        ("av", "replay VIDEO -o OUT --prompt mug", "bags"),
        ("fsspec", "replay s3://bucket/a.mcap -o OUT --prompt mug", "cloud"),
        ("fsspec", "replay BAG -o s3://bucket/out --prompt mug", "cloud"),
        ("ray", "replay BAG -o OUT --prompt mug --ray local", "cloud"),
        ("modelopt", "calibrate fp8 BAG -o OUT", "quantize"),
        ("requests", "calibrate fp8 BAG -o OUT", "quantize"),
        ("onnx", "engine build --engine.kind tensorrt", "onnx"),
        ("onnxscript", "engine export-triton -o OUT", "onnx"),
        ("transformers", "engine list", "node"),
        ("transformers", "tune", "node"),
        ("safetensors", "weights convert WRONG -o OUT", "node"),
        ("transformers", "vocabulary build mug --encoder WRONG -o OUT", "node"),
    ],
)
def test_a_missing_extra_is_told_before_torch_is_imported(
    files: dict[str, str],
    fail_early: Failing,
    monkeypatch: pytest.MonkeyPatch,
    hidden: str,
    command: str,
    extra: str,
) -> None:
    # it may be missing here, which a build of engines would tell first
    (Path(files["STANDINS"]) / "tensorrt_rtx.py").touch()
    monkeypatch.syspath_prepend(files["STANDINS"])
    told = fail_early(command, hidden)
    assert mentions(told, f"'sam3-node[{extra}]'"), told


@pytest.mark.parametrize("places", ["s3://bucket/a.mcap -o OUT", "BAG BAG -o simplecache::s3://bucket/out"])
def test_a_missing_package_of_a_protocol_is_told_before_torch_is_imported(
    fail_early: Failing, places: str
) -> None:
    told = fail_early(f"replay {places} --prompt mug", "s3fs")
    assert mentions(told, "s3fs", "'cloud'"), told


@pytest.mark.parametrize(
    ("hidden", "command", "named"),
    [
        ("", "calibrate fp8 NONE -o OUT", "no file"),
        ("av", "calibrate fp8 VIDEO -o OUT", "'sam3-node[bags]'"),
        ("", "engine check WRONG", "another file"),
    ],
)
def test_a_source_of_images_is_looked_at_before_torch_is_imported(
    files: dict[str, str],
    fail_early: Failing,
    monkeypatch: pytest.MonkeyPatch,
    hidden: str,
    command: str,
    named: str,
) -> None:
    for module in ("modelopt", "requests"):
        # they may be missing here, which the command would tell first
        if importlib.util.find_spec(module) is None:
            (Path(files["STANDINS"]) / f"{module}.py").touch()
    monkeypatch.syspath_prepend(files["STANDINS"])
    told = fail_early(command, hidden)
    assert mentions(told, named), told
