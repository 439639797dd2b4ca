"""Replays of folders with depth: 3-D fields, or the reason in the summary."""

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from sam3_node.bags import read_masks
from sam3_node.calibration import Calibration
from sam3_node.replay.job import Job, ObjectOnFrame
from sam3_node.replay.run import PerceptionCache, run_job
from sam3_node.replay.store import Summary
from sam3_node.settings import Settings
from tests.support.live import BOX, SIZE, chosen, moving_frame
from tests.support.refuses import mentions

FRAMES = 3
PINHOLE = {"width_px": 64, "height_px": 48, "fx_px": 60.0, "fy_px": 60.0, "cx_px": 31.5, "cy_px": 23.5}


def write_folder(path: Path, depth_size: tuple[int, int] = SIZE, millimetres: int = 800) -> Path:
    (path / "depth").mkdir(parents=True)
    (path / "rgb").mkdir()
    for index in range(FRAMES):
        (path / "rgb" / f"{index}.jpg").write_bytes(bytes(moving_frame(index).colour))
        cv2.imwrite(str(path / "depth" / f"{index}.png"), np.full(depth_size, millimetres, np.uint16))
    return path


def replay(folder: Path, settings: Settings, load: PerceptionCache, **options: Any) -> Summary:
    objects = (ObjectOnFrame(box=tuple(BOX)),)  # type: ignore[arg-type]
    out = str(folder.parent / "out")
    values = chosen(settings)
    values["tracker"]["min_confidence"] = 0.0  # random weights have masks in doubt, which have no position
    return run_job(Job((str(folder),), out, objects=objects, settings=values, **options), load)


def calibration(**depth: Any) -> tuple[str, ...]:
    fields = {"intrinsics": PINHOLE, **({"depth": depth} if depth else {})}
    return (Calibration(**fields).model_dump_json(),)  # type: ignore[arg-type]


def has_positions(out: Path) -> bool:
    found = (instance for masks in read_masks(out / "masks.mcap") for instance in masks.instances)
    return any(instance.position_m is not None for instance in found)


def test_missing_intrinsics_are_named_in_the_summary(
    tmp_path: Path, settings: Settings, load: PerceptionCache
) -> None:
    summary = replay(write_folder(tmp_path / "desk"), settings, load)
    frames = f"{FRAMES} of {FRAMES} frames with depth or URDF"
    reason = f"desk: no 3-D, or not in the base, on {frames}: depth without intrinsics"
    assert any(line.startswith(reason) for line in summary.lines())
    stored = json.loads((tmp_path / "out/summary.json").read_text())
    assert any(reason in note for note in stored["notes"])
    assert json.loads((tmp_path / "out/.replay/job.json").read_text())["job"]["depth_aligned"] is False


def test_depth_of_the_images_size_gives_positions_and_a_note(
    tmp_path: Path, settings: Settings, load: PerceptionCache
) -> None:
    summary = replay(write_folder(tmp_path / "desk"), settings, load, calibrations=calibration())
    assert any(mentions(note, "aligned") for note in summary.notes)
    assert not any("no 3-D" in note for note in summary.notes)
    assert has_positions(tmp_path / "out")


@pytest.mark.parametrize("stated", ["nowhere", "job", "file"])
def test_depth_of_another_size_needs_a_statement(
    tmp_path: Path, settings: Settings, load: PerceptionCache, stated: str
) -> None:
    folder = write_folder(tmp_path / "desk", (SIZE[0] // 2, SIZE[1] // 2))
    told = calibration(**{"aligned": True} if stated == "file" else {})
    summary = replay(folder, settings, load, depth_aligned=stated == "job", calibrations=told)
    told = [note for note in summary.notes if "no 3-D" in note]
    assert has_positions(tmp_path / "out") == (stated != "nowhere")
    assert bool(told) == (stated == "nowhere")
    assert all(mentions(note, "32x24", "64x48") for note in told)


def test_depth_without_a_value_is_named_in_the_summary(
    tmp_path: Path, settings: Settings, load: PerceptionCache
) -> None:
    folder = write_folder(tmp_path / "desk", millimetres=0)
    summary = replay(folder, settings, load, calibrations=calibration())
    assert any(mentions(note, "valid") for note in summary.notes)
