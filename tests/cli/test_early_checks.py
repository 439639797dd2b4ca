"""Errors that need no torch come before it is imported, which takes seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

from sam3_node.bags.native.reader import TABLETOP
from tests.support.refuses import mentions

SCRIPT = """
import sys
from sam3_node.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print(sorted({"torch", "transformers"} & set(sys.modules)))
sys.exit(code)
"""
MJCF = "<mujoco model='arm'/>"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Return places: of nothing, of a file that is neither a recording nor a URDF, and of results."""
    wrong = tmp_path / "arm.xml"
    wrong.write_text(MJCF)
    return {"NONE": str(tmp_path / "none"), "WRONG": str(wrong), "OUT": str(tmp_path / "out")}


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
    words = [{**files, "BAG": str(TABLETOP)}.get(word, word) for word in command.split()]
    if words[0] == "run":
        # other nodes may have the usual ones
        words += ["--transport.masks", "tcp://127.0.0.1:0", "--transport.control", "tcp://127.0.0.1:0"]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert mentions(done.stderr, named), done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert not Path(files["OUT"]).exists()
