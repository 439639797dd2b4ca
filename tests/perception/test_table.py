"""The table's plane in the robot's base, and the heights and upright boxes of objects on it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from sam3_node.perception.stages.table import describe_on, fit_plane
from sam3_node.robot.pixels import RobotPixels
from sam3_node.settings import SpatialSettings
from sam3_node.types import NANOSECONDS, Frame, FramePose, Instance, JointState, Mask, Plane
from sam3_node.wire import encode_depth
from tests.support.calibration_scenes import calibrated
from tests.support.measuring import Measuring

SIZE = (120, 160)
HOME = FramePose("gripper", "base", 0, (0, 0, 1.0), (0, 0, 0, 1))
AWAY = (0.3, 0.0, 1.0)
SQUARE = Mask.from_full(np.pad(np.ones((30, 40), bool), ((45, 45), (60, 60))))
LOOKS_DOWN = (np.pi, 0, 0)
LOOKS_ALONG_Z = (0, 0, 0)
LOOKS_ALONG_Y = (-np.pi / 2, 0, 0)


def stage(table: bool = True, turn: Sequence[float] = LOOKS_DOWN) -> Measuring:
    """Return the stages of a camera on a gripper that looks along the base's -z, or as its `turn` says."""
    return Measuring(SpatialSettings(table=table), calibrated(SIZE, 150.0, "eye_in_hand", turn))


def look(depth_mm: Any, at_s: float = 0.0, block_mm: float | None = None, noise: int = 0) -> Frame:
    """Return a frame with this depth, and a block as near as `block_mm` under SQUARE."""
    image = depth_mm + np.random.default_rng(noise).normal(0, 2.0 * (noise > 0), SIZE)
    if block_mm is not None:
        SQUARE.paint(image, block_mm)
    depth = encode_depth(image.round().astype(np.uint16), "z16", 0.001, True)
    return Frame("cam0", 0, round(at_s * NANOSECONDS), 160, 120, "bgr8", b"", depth=depth)


def measure(spatial: Measuring, frame: Frame, pose: FramePose = HOME, robot: Any = None) -> tuple[Any, Any]:
    block = Instance(1, "block", 0.9, "tracked", 5, 0, SQUARE)
    seen = None if robot is None else RobotPixels(JointState("robot", 0, {}), robot, np.eye(4))
    step = spatial.measure(frame, [block], replace(pose, stamp_ns=frame.capture_ns), robot=seen)
    (measured,) = step.instances
    return step.table, measured


@pytest.mark.parametrize("tilt", [0.0, 0.3])
def test_the_plane_is_found_among_noise_a_wall_and_things(tilt: float) -> None:
    random = np.random.default_rng(5)
    table = np.column_stack([random.uniform(-0.4, 0.4, (500, 2)), random.normal(0, 0.003, 500)])
    things = random.uniform((-0.4, -0.4, 0.03), (0.4, 0.4, 0.2), (200, 3))
    wall = np.column_stack([random.uniform(-0.4, 0.4, 600), np.full(600, 0.6), random.uniform(0, 0.6, 600)])
    turn = Rotation.from_rotvec([tilt, 0, 0])
    found = fit_plane(turn.apply(np.concatenate([wall, table, things])), np.full(1300, 1.0))
    assert found is not None
    assert np.degrees(np.arccos(turn.apply([0, 0, 1]) @ found.normal)) < 0.2
    assert abs(found.offset_m) < 0.001
    assert found.rms_m == pytest.approx(0.003, rel=0.2)


def test_a_wall_alone_and_few_points_are_no_table() -> None:
    wall = np.random.default_rng(5).uniform((-1, 1, -1), (1, 1.002, 1), (500, 3))
    assert fit_plane(wall, np.ones(500)) is None
    assert fit_plane(wall[:50, [0, 2, 1]], np.ones(50)) is None


def test_a_nearer_table_outweighs_the_floor_and_masks_and_robot_do_not_count() -> None:
    depth_mm = np.full(SIZE, 1600.0)
    depth_mm[:, :50] = 800
    robot = np.zeros(SIZE, bool)
    robot[:, 70:] = True
    table, _ = measure(stage(), look(depth_mm))
    assert table.offset_m == pytest.approx(1 - 0.8)
    depth_mm[robot] = 500
    table, _ = measure(stage(), look(depth_mm, block_mm=300), robot=robot)
    assert table.offset_m == pytest.approx(1 - 0.8)


def test_the_block_has_its_heights_and_a_collision_object_down_to_the_table() -> None:
    table, block = measure(stage(), look(800, block_mm=700, noise=1))
    assert np.subtract((*table.normal, table.offset_m), (0, 0, 1, 0.2)) == pytest.approx(0, abs=0.002)
    assert block.heights_m == pytest.approx((0.1, 0.1), abs=0.01)
    message = block.collision_object()
    (solid,) = message["primitives"]
    (pose,) = message["primitive_poses"]
    assert (message["header"], message["id"], solid["type"]) == ({"frame_id": "base"}, "object_1", 1)
    turn = Rotation.from_quat([pose["orientation"][axis] for axis in "xyzw"])
    corners = np.array(np.meshgrid(*[(-0.5, 0.5)] * 3)).reshape(3, -1).T * solid["dimensions"]
    inside = turn.apply(corners) + [pose["position"][axis] for axis in "xyz"]
    assert inside.min(axis=0) == pytest.approx((-0.093, -0.07, 0.2), abs=0.012)
    assert inside.max(axis=0) == pytest.approx((0.093, 0.07, 0.3), abs=0.012)


@pytest.mark.parametrize("yaw", [0.2, 0.8, 1.4])
def test_the_box_of_a_turned_block_is_the_blocks(yaw: float) -> None:
    random = np.random.default_rng(3)
    sides = np.array([0.2, 0.1, 0.06])
    tilted = Rotation.from_rotvec([0.2, -0.1, 0])
    placed = tilted * Rotation.from_rotvec([0, 0, yaw])
    points = placed.apply(random.uniform(-0.5, 0.5, (20000, 3)) * sides + [0.3, 0.1, 0.08])
    normal = tilted.apply([0, 0, 1])
    box = describe_on(Plane(tuple(normal.tolist()), 0.02, 0.001), points)
    rotation = Rotation.from_quat(box["upright_quaternion_xyzw"])
    assert box["heights_m"] == pytest.approx((0.03, 0.09), abs=0.002)
    assert rotation.apply([0, 0, 1]) == pytest.approx(normal, abs=1e-5)
    local = rotation.inv().apply(points - np.array(box["upright_centre_m"])) / box["upright_size_m"]
    assert np.abs(local).max() < 0.52
    assert box["upright_size_m"][2] == pytest.approx(0.09, abs=0.002)
    assert np.prod(box["upright_size_m"][:2]) == pytest.approx(0.2 * 0.1, rel=0.06)
    assert placed.apply([0.3, 0.1, 0.065]) == pytest.approx(box["upright_centre_m"], abs=0.003)


def test_the_table_stays_while_the_camera_stands_and_is_measured_each_second() -> None:
    spatial = stage()
    moved = replace(HOME, position_m=AWAY)
    # depth in mm, time in s; at 2.2 s nothing is seen
    steps = [(800, 0, HOME, 0.2), (750, 0.9, HOME, 0.2), (750, 1.1, HOME, 0.25), (0, 2.2, HOME, 0.25)]
    for depth_mm, at_s, pose, offset_m in [*steps, (790, 2.5, moved, 0.25), (790, 3.3, moved, 0.21)]:
        assert measure(spatial, look(depth_mm, at_s), pose)[0].offset_m == pytest.approx(offset_m)
    assert measure(spatial, look(0, 4.4))[0] is None
    frame = look(800, 5.5)
    table = spatial.measure(frame, [], replace(HOME, stamp_ns=frame.capture_ns)).table  # without objects
    assert table is not None
    assert table.offset_m == pytest.approx(0.2)


def tilted(angle_deg: float) -> np.ndarray:
    """Depth in mm of a plane that is turned about the image's vertical, 0.8 m away in the middle."""
    slope = np.tan(np.radians(angle_deg)) * (np.arange(SIZE[1]) - 79.5) / 150.0
    return np.broadcast_to(800.0 / (1.0 - slope), SIZE)


def test_a_fixed_camera_that_was_knocked_is_told_by_its_table() -> None:
    fixed = Measuring(SpatialSettings(table=True), calibrated(SIZE, 150.0, "eye_to_hand", LOOKS_DOWN))

    def problem_of(rig: Measuring, depth_mm: Any, at_s: float) -> str | None:
        step = rig.measure(look(depth_mm, at_s, noise=1), [], None)
        assert step.table is not None
        return step.problem

    assert problem_of(fixed, 800, 1) is None
    assert "turned by about 4 degrees" in str(problem_of(fixed, tilted(4), 3))
    # what is kept of the time before goes on after a restart
    restarted = Measuring(SpatialSettings(table=True), calibrated(SIZE, 150.0, "eye_to_hand", LOOKS_DOWN))
    restarted.restore(fixed.state())
    assert "turned by about 4 degrees" in str(problem_of(restarted, tilted(4), 5))
    assert problem_of(restarted, 800, 7) is None
    # nothing level is in view: the last one stays, but not without a word
    wall = tilted(60)
    assert problem_of(restarted, wall, 9) is None
    assert "found none for more than 5 s" in str(problem_of(restarted, wall, 13))
    assert problem_of(restarted, 800, 15) is None


@pytest.mark.parametrize("angle_deg", [8, 25])
def test_a_table_that_is_not_level_in_the_base_is_told_from_the_start(angle_deg: int) -> None:
    step = stage().measure(look(tilted(angle_deg), noise=1), [], HOME)
    assert step.table is not None
    assert f"tilted by about {angle_deg} degrees" in str(step.problem)


def test_a_restored_stage_continues_bit_for_bit_and_off_means_absent() -> None:
    spatial = stage()
    other = stage()
    measure(spatial, look(800, noise=1))
    spatial.objects.add(1, "block")
    other.restore(spatial.state())
    for at_s in (0.5, 1.5):
        frame = look(801, at_s, block_mm=700, noise=2)
        assert measure(spatial, frame) == measure(other, frame)
    off = stage(table=False)
    off.restore(spatial.state())
    table, block = measure(off, look(800))
    assert (table, block.heights_m, block.collision_object()) == (None, None, None)


def test_on_a_base_that_hangs_up_is_the_cameras_side_of_the_table() -> None:
    table, block = measure(stage(turn=LOOKS_ALONG_Z), look(800, block_mm=700, noise=1))
    assert (*table.normal, table.offset_m) == pytest.approx((0, 0, -1, -1.8), abs=0.002)
    assert block.heights_m == pytest.approx((0.1, 0.1), abs=0.01)
    assert block.upright_size_m[2] == pytest.approx(0.1, abs=0.01)
    assert block.upright_centre_m[2] == pytest.approx(1.75, abs=0.01)
    up = Rotation.from_quat(block.upright_quaternion_xyzw).apply([0, 0, 1])
    assert up == pytest.approx((0, 0, -1), abs=0.005)


def test_a_base_on_a_wall_has_no_table_and_that_is_reported() -> None:
    spatial = stage(turn=LOOKS_ALONG_Y)
    frame = look(800, block_mm=700, noise=1)
    block = Instance(1, "block", 0.9, "tracked", 5, 0, SQUARE)
    step = spatial.measure(frame, [block], HOME)
    assert step.table is None
    assert "tilted by about 90 degrees" in str(step.problem)
    assert step.instances[0].collision_object() is None
    assert step.instances[0].position_m is not None


def test_a_wall_is_no_reason_to_forget_the_table() -> None:
    spatial = stage()
    assert measure(spatial, look(800))[0] is not None
    turned = replace(HOME, quaternion_xyzw=(np.sin(np.pi / 4), 0, 0, np.cos(np.pi / 4)))
    assert measure(spatial, look(800, 1.5), turned)[0] is None
    assert measure(spatial, look(800, 3.0))[0].offset_m == pytest.approx(0.2)


@pytest.mark.parametrize(("top_m", "side_m"), [(0.1, 0.1), (-0.03, 0.05), (0.0, 0.001)])
def test_no_box_is_flat_and_none_hangs_from_the_table(top_m: float, side_m: float) -> None:
    random = np.random.default_rng(3)
    points = np.column_stack([random.uniform(-0.05, 0.05, (500, 2)), np.linspace(-0.05, 0.0, 500)])
    points[:, 2] = top_m + points[:, 2] * (side_m > 0.01)
    size_m = describe_on(Plane((0.0, 0.0, 1.0), 0.0, 0.001), points)["upright_size_m"]
    assert size_m[2] == pytest.approx(side_m, rel=0.03)


def test_an_object_metres_below_the_base_is_told_as_a_wrong_unit_of_depth() -> None:
    block = Instance(1, "block", 0.9, "tracked", 5, 0, SQUARE)
    step = stage().measure(look(4500), [block], HOME)
    assert "object 1 about 4 m below it; are scale_m of depth" in str(step.problem)


def test_a_line_of_points_has_a_solid_box() -> None:
    points = np.zeros((500, 3))
    points[:, 0] = np.linspace(0.0, 0.1, 500)
    size_m = describe_on(Plane((0.0, 0.0, 1.0), 0.0, 0.001), points)["upright_size_m"]
    assert min(size_m) == pytest.approx(0.001, abs=1e-5)
    assert max(size_m) == pytest.approx(0.1, rel=0.03)


def test_the_box_of_a_held_object_is_the_object_alone() -> None:
    points = np.random.default_rng(3).uniform((-0.02, -0.02, 0.3), (0.02, 0.02, 0.36), (2000, 3))
    box = describe_on(Plane((0.0, 0.0, 1.0), 0.0, 0.001), points, is_held=True)
    assert box["heights_m"] == pytest.approx((0.3, 0.36), abs=0.002)
    assert box["upright_size_m"][2] == pytest.approx(0.06, abs=0.002)
    assert box["upright_centre_m"][2] == pytest.approx(0.33, abs=0.002)


def test_a_block_that_the_gripper_lifts_has_no_box_down_to_the_table() -> None:
    spatial = Measuring(SpatialSettings(table=True), calibrated(SIZE, 150.0, "eye_to_hand", LOOKS_DOWN))
    for number in range(31):
        top_m = 0.1 + 0.005 * max(0, number - 10)
        frame = look(800, 0.1 * number, block_mm=800 - 1000 * top_m, noise=number + 1)
        _, block = measure(spatial, frame, replace(HOME, position_m=(0, 0, top_m)))
        if number == 10:
            assert block.upright_size_m[2] == pytest.approx(0.1, abs=0.01)
    assert block.held
    assert block.heights_m == pytest.approx((0.2, 0.2), abs=0.01)
    assert block.upright_size_m[2] < 0.02
