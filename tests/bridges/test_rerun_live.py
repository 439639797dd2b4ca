"""Tests of `sam3-node bridge rerun` as a process, with a real camera and node."""

import signal
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest

from tests.bridges.conftest import NAME
from tests.support.console_rig import ConsoleRig, is_in_view, true_mask
from tests.support.node_rig import until
from tests.support.rrd_files import count_rows, read_rrd, rerun_program
from tests.support.tabletop import iou
from tools.bench.processes import free_ports

pytest.importorskip("rerun", reason="the extra rerun is not installed")
MIN_IOU = 0.5  # the limit of the bundled weights
IMAGE = "/cameras/cam0/image"
BOXES = f"{IMAGE}/boxes"


def named(row: dict[str, Any]) -> list[int]:
    """Return the class ids of the mugs among the boxes of a frame."""
    labels = row["Boxes2D:labels"]
    ids = row["Boxes2D:class_ids"]
    return [found for label, found in zip(labels, ids, strict=True) if NAME in label]


def drawn(row: dict[str, Any]) -> npt.NDArray[np.uint8]:
    """Return the image of class ids of a frame of 640 x 480."""
    return np.frombuffer(row["SegmentationImage:buffer"][0], np.uint8).reshape(480, 640)


def test_the_file_has_the_pictures_and_the_masks_on_their_objects(rig: ConsoleRig, tmp_path: Path) -> None:
    path = tmp_path / "live.rrd"
    process = rig.launch("bridge", "rerun", str(path))
    assert process.next_line() == f"bridge: rerun to {path}"

    def mugs() -> list[int]:
        rows = read_rrd(path, BOXES)[BOXES] if count_rows(path, BOXES) else {}
        return [number for number, row in rows.items() if named(row) and is_in_view(number, NAME)]

    until(lambda: len(mugs()) > 2, "frames with the mug in view")
    assert process.terminate() == 0
    assert process.next_line().startswith("bridge: showed ")
    entities = read_rrd(path)
    best = max(
        iou(drawn(entities[f"{IMAGE}/masks"][number]) == found, true_mask(number, NAME).full())
        for number in mugs()
        for found in named(entities[BOXES][number])
    )
    assert best >= MIN_IOU
    blob = entities[IMAGE][mugs()[0]]["EncodedImage:blob"][0]
    assert cv2.imdecode(np.frombuffer(blob, np.uint8), cv2.IMREAD_COLOR).shape == (480, 640, 3)
    assert entities["/latency/cam0/total"]


def test_a_signal_ends_it_while_the_viewer_hangs(rig: ConsoleRig, tmp_path: Path) -> None:
    port = free_ports(1)[0]
    path = tmp_path / "viewer.rrd"
    with rerun_program(port, path) as viewer:
        process = rig.launch("bridge", "rerun", f"rerun+http://127.0.0.1:{port}/proxy")
        process.next_line()
        until(lambda: count_rows(path, BOXES), "what the viewer has")
        viewer.process.send_signal(signal.SIGSTOP)
        assert process.terminate() == 0
