"""Errors that need no torch come before it is imported, which takes seconds."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.bags.native.reader import TABLETOP
from tests.support.refuses import mentions

SCRIPT = """
import sys
sys.modules |= dict.fromkeys(filter(None, sys.argv[1].split()))
from sam3_node.cli.main import main
try:
    code = main(sys.argv[2:])
except SystemExit as end:
    code = end.code
print(sorted({"torch", "transformers"} & set(sys.modules)))
sys.exit(code)
"""
MJCF = "<mujoco model='arm'/>"


ENDPOINTS = ("--transport.masks", "tcp://127.0.0.1:0", "--transport.control", "tcp://127.0.0.1:0")
"""Endpoints of a node that no other node has."""


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
    files: dict[str, str], command: str, named: str
) -> None:
    done = fail_early(files, command)
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
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch, hidden: str, command: str, extra: str
) -> None:
    # it may be missing here, which a build of engines would tell first
    (Path(files["STANDINS"]) / "tensorrt_rtx.py").touch()
    monkeypatch.syspath_prepend(files["STANDINS"])
    told = fail_early(files, command, hidden)
    assert mentions(told, f"'sam3-node[{extra}]'"), told


@pytest.mark.parametrize("places", ["s3://bucket/a.mcap -o OUT", "BAG BAG -o simplecache::s3://bucket/out"])
def test_a_missing_package_of_a_protocol_is_told_before_torch_is_imported(
    files: dict[str, str], places: str
) -> None:
    told = fail_early(files, f"replay {places} --prompt mug", "s3fs")
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
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch, hidden: str, command: str, named: str
) -> None:
    for module in ("modelopt", "requests"):
        # they may be missing here, which the command would tell first
        if importlib.util.find_spec(module) is None:
            (Path(files["STANDINS"]) / f"{module}.py").touch()
    monkeypatch.syspath_prepend(files["STANDINS"])
    told = fail_early(files, command, hidden)
    assert mentions(told, named), told


def fail_early(files: dict[str, str], command: str, hidden: str = "") -> str:
    """Run a command without some modules. Return its error, which must come before torch and any result."""
    words = [files.get(word, word) for word in command.split()]
    if words[0] == "run":
        words += ENDPOINTS
    # packages that the test has put in the path are those of the command, too
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = [sys.executable, "-c", SCRIPT, hidden, *words]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 2, done.stderr
    loaded = set(done.stdout.splitlines()[-1].strip("[]").replace("'", "").split(", "))
    assert not loaded - {"", *hidden.split()}, loaded
    assert not Path(files["OUT"]).exists()
    return done.stderr
