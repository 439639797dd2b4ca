"""Outputs on a full disk and in a folder that cannot be written: a clear error, and what is done stays readable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("resource")

from sam3_node.errors import OutputError
from sam3_node.replay.store import FolderStore
from tests.support.paths import ROOT
from tests.support.refuses import refuses

LIMIT_BYTES = 20_000
SCRIPT = """
import resource, sys
from pathlib import Path
from sam3_node.errors import OutputError
from sam3_node.replay.outputs import write_outputs
from tests.replay.test_outputs import all_frames, all_masks, told
out, kind, limit = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
masks = lambda: (masks for _ in range(40) for masks in all_masks())
frames = lambda: (frame for _ in range(40) for frame in all_frames())
write_outputs(out, ["png"], all_masks, all_frames, told)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    write_outputs(out, [kind], masks, frames, told)
except OutputError as error:
    sys.exit(f"OutputError: {error}")
"""


@pytest.mark.parametrize("kind", ["mcap", "mcap-images", "coco", "overlay", "images"])
def test_a_full_disk_is_an_error_that_spares_what_is_there(tmp_path: Path, kind: str) -> None:
    limit = 100 if kind == "images" else LIMIT_BYTES
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), kind, str(limit)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "OutputError: cannot write" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["png"]
    assert json.loads((tmp_path / "png/left/objects.json").read_text())


def test_a_folder_below_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with refuses(OutputError, field="file/out"):
        FolderStore(tmp_path / "file/out")
    assert (tmp_path / "file").read_text() == "mine"
