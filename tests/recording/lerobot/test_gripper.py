"""The robot in the masks for GR00T: its gripper and its arm, against rays that are cast at its boxes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sam3_node.bags import RecordingWriter
from sam3_node.calibration import load_calibration
from sam3_node.geometry import pose_of
from sam3_node.recording.lerobot.conversion import convert_recordings
from sam3_node.recording.lerobot.gripper import GripperFinder
from sam3_node.recording.lerobot.groot import ARM, GRIPPER
from sam3_node.settings import LeRobotSettings
from sam3_node.types import NANOSECONDS, Frame, Instance, JointState, Mask, MaskFrame
from sam3_node.wire import pack_masks
from tests.support import pick_cell
from tests.support.pick_cell import HEIGHT, WIDTH, Cell

pytest.importorskip("yourdfpy", reason="needs the extra robot")
BEGIN_NS = 1_760_000_000 * NANOSECONDS


def cast(cell: Cell, places: list[Any], half: Any) -> np.ndarray:
    """Return the pixels of boxes of the gripper."""
    ways = [pick_cell._cast_box(cell._rays, np.add(cell.tip, place), half)[0] for place in places]
    return np.isfinite(ways).any(axis=0).reshape(HEIGHT, WIDTH)


def write_cell(path: Path, cell: Cell, robot: np.ndarray) -> Mask:
    """Write a recording of the cell at rest, with the masks of its robot and of an object before its palm."""
    camera = pose_of(pick_cell.base_from_camera(), "camera", "base", 0, "system")
    full = np.zeros((HEIGHT, WIDTH), np.bool_)
    rows, columns = robot.nonzero()
    full[rows.min() : rows.min() + 6, columns.min() : columns.max()] = True
    held = Mask.from_full(full)
    with RecordingWriter(path) as writer:
        for seq in range(4):
            time_ns = BEGIN_NS + seq * NANOSECONDS // 10
            grey = bytes(WIDTH * HEIGHT)
            writer.write_frame(Frame("front", seq, time_ns, WIDTH, HEIGHT, "mono8", grey), time_ns)
            masks = MaskFrame(
                "front",
                seq,
                time_ns,
                WIDTH,
                HEIGHT,
                instances=(Instance(1, "cup", 0.9, "tracked", 1, 0, held),),
                camera_pose=camera,
                joints=JointState("robot", time_ns, cell.joints()),
                robot_mask=Mask.from_full(robot),
            )
            writer.write_masks(pack_masks(masks)[1], masks, time_ns)
    return held


def test_masks_tell_gripper_arm_and_objects_apart(tmp_path: Path) -> None:
    calibration, urdf = pick_cell.write_files(tmp_path)
    assert load_calibration(calibration).camera == ""
    cell = Cell()
    sides = [(side * cell.opening, 0, pick_cell.FINGER_UP) for side in (-1, 1)]
    fingers = cast(cell, sides, pick_cell.FINGER)
    robot = fingers | cast(cell, [(0, 0, pick_cell.PALM_UP)], pick_cell.PALM)
    held = write_cell(tmp_path / "cell.mcap", cell, robot)

    found = {}
    for name, gripper in (("whole", None), ("parts", GripperFinder(urdf, "", [calibration]))):
        folder = tmp_path / name
        options = LeRobotSettings(version="2.1")
        assert convert_recordings([tmp_path / "cell.mcap"], options, folder, print, gripper).appended == 1
        with np.load(next(folder.rglob("*.npz"))) as arrays:
            found[name] = arrays["arr_0"][0]
    # an object was seen, so that it is before the robot; without a URDF all of the robot is the arm
    for regions in found.values():
        assert ((regions == 1) == held.full()).all()
        assert (np.isin(regions, (ARM, GRIPPER)) == (robot & ~held.full())).all()
    assert not (found["whole"] == GRIPPER).any()
    expected = fingers & robot & ~held.full()
    gripper = found["parts"] == GRIPPER
    assert np.count_nonzero(gripper & expected) > 0.9 * np.count_nonzero(gripper | expected)
