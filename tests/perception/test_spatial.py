"""3-D fields of instances: in the camera's frame, in the robot's base, and absent where something lacks."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sam3_node.calibration import Calibration
from sam3_node.geometry import rigid, rotation_from_quaternion, transform_points
from sam3_node.models import TrackerModel
from sam3_node.perception.checkpoint import pack_state, unpack_state
from sam3_node.perception.objects import Objects
from sam3_node.perception.perception import Perception
from sam3_node.perception.stages.spatial import VelocityFilters
from sam3_node.perception.step import StepFrame
from sam3_node.settings import Settings, SpatialSettings
from sam3_node.types import Frame, FramePose, Instance, Intrinsics, Mask
from sam3_node.wire import encode_depth
from tests.support.measuring import Measuring
from tests.support.saving import reload

SIZE = (120, 160)
CAMERA = Intrinsics(150.0, 150.0, 79.5, 59.5)
PINHOLE = {"width_px": 160, "height_px": 120, "fx_px": 150.0, "fy_px": 150.0, "cx_px": 79.5, "cy_px": 59.5}
QUATERNION = (0.5, -0.5, 0.5, 0.5)
GRIPPER = FramePose("gripper", "base", 7, (0.5, 0.1, 0.4), QUATERNION)


def calibration(kind: str = "eye_in_hand", **changes: Any) -> Calibration:
    hand_eye = {"kind": kind, "translation_m": (0.0, 0.05, 0.1), "rotation_vector_rad": (0.1, 0.2, 0.3)}
    return Calibration(**{"intrinsics": PINHOLE, "hand_eye": hand_eye, **changes})


def instance(mask: Mask | None = None) -> Instance:
    inside = np.zeros(SIZE, bool)
    inside[40:80, 50:110] = True
    return Instance(3, "mug", 0.9, "tracked", 5, 0, mask or Mask.from_full(inside))


def make_frame(size: tuple[int, int] = SIZE, aligned: bool = True, seq: int = 0, **changes: Any) -> Frame:
    depth = encode_depth(np.full(size, 800, np.uint16), "z16", 0.001, aligned)
    frame = Frame("cam0", seq, 7 + seq * 33_000_000, 160, 120, "bgr8", b"", depth=depth, intrinsics=CAMERA)
    return replace(frame, **changes)


def measure(
    frame: Frame, found: Calibration | None = None, pose: FramePose | None = None, points: int = 0
) -> Instance:
    return Measuring(SpatialSettings(points=points), found).measure(frame, [instance()], pose).instances[0]


def test_positions_are_in_the_camera_without_a_calibration() -> None:
    found = measure(make_frame(), points=50)
    assert found.frame == "camera"
    assert found.position_m == pytest.approx((0.0, 0.0, 0.8), abs=1e-5)
    assert (found.camera_position_m, found.velocity_mps) == (None, None)
    assert found.depth_share == 1.0
    assert np.frombuffer(found.points_m, "<f4").reshape(-1, 3).shape == (50, 3)


@pytest.mark.parametrize("kind", ["eye_in_hand", "eye_to_hand"])
def test_positions_are_in_the_base_through_hand_eye_and_pose(kind: str) -> None:
    file = calibration(kind)
    stage = Measuring(calibration=file)
    step = stage.measure(make_frame(), [instance()], GRIPPER)
    gripper = rigid(rotation_from_quaternion(QUATERNION), GRIPPER.position_m)
    base_from_camera = file.base_from_camera(gripper)
    expected = transform_points(base_from_camera, (0.0, 0.0, 0.8))
    found = step.instances[0]
    assert found.frame == "base"
    assert found.position_m == pytest.approx(expected, abs=1e-5)
    assert found.camera_position_m == pytest.approx((0.0, 0.0, 0.8), abs=1e-5)
    assert step.camera_pose is not None
    assert step.camera_pose.position_m == pytest.approx(base_from_camera[:3, 3])
    listed = stage.points(3, 20)
    assert (listed.seq, listed.frame, listed.points_m.shape) == (0, "base", (20, 3))
    assert np.abs(listed.points_m.mean(axis=0) - expected).max() < 0.05
    many = stage.points(3, 2000)
    assert len(many.points_m) == 2000
    assert stage.points(9, 20) is None
    # however few are asked for
    for count in range(1, 6):
        few = stage.points(3, count)
        assert few is not None
        assert 1 <= len(few.points_m) <= count


def test_the_error_of_hand_eye_widens_that_of_a_position_also_under_a_doubtful_mask() -> None:
    covariance_m2 = np.diag([4e-6, 4e-6, 9e-6, 0.0, 0.0, 0.0])
    record = {
        "date": "2026-01-01T00:00:00Z",
        "method": "test",
        "views": 12,
        "leave_one_out_mm": 1.0,
        "leave_one_out_deg": 0.1,
        "position_95_mm": 1.0,
        "rotation_95_deg": 0.1,
        "covariance": covariance_m2.tolist(),
    }
    file = calibration()
    assert file.hand_eye is not None
    measured = calibration(hand_eye=file.hand_eye.model_dump() | {"measured": record})
    gripper = rigid(rotation_from_quaternion(QUATERNION), GRIPPER.position_m)
    turn = file.base_from_camera(gripper)[:3, :3]
    added = (turn @ covariance_m2[:3, :3] @ turn.T)[np.triu_indices(3)]

    sure = [
        Measuring(calibration=each).measure(make_frame(), [instance()], GRIPPER) for each in (file, measured)
    ]
    before, after = (step.instances[0].covariance_m2 for step in sure)
    assert np.subtract(after, before) == pytest.approx(added)

    unsure = replace(instance(), doubtful=True)
    doubted = [
        Measuring(calibration=each).measure(make_frame(), [unsure], GRIPPER) for each in (file, measured)
    ]
    before, after = (step.doubtful[3].covariance_m2 for step in doubted)
    assert np.subtract(after, before) == pytest.approx(added)


def test_without_the_gripper_positions_stay_in_the_camera() -> None:
    step = Measuring(calibration=calibration()).measure(make_frame(), [instance()], None)
    assert step.instances[0].frame == "camera"
    assert step.camera_pose is None
    assert step.lacks_robot
    assert "no pose of the gripper" in str(step.problem)


@pytest.mark.parametrize(
    ("frame", "problem"),
    [
        (make_frame(depth=None), None),
        (make_frame(intrinsics=None), "depth without intrinsics"),
        (make_frame(aligned=False), "aligned to colour"),
        (make_frame(size=(100, 160)), "aspect ratio"),
        (make_frame(intrinsics=replace(CAMERA, cx=159.5, cy=119.5)), "intrinsics of another size"),
    ],
)
def test_what_lacks_gives_absent_fields(frame: Frame, problem: str | None) -> None:
    step = Measuring().measure(frame, [instance()], None)
    (found,) = step.instances
    assert (found.position_m, found.frame, found.depth_share) == (None, None, None)
    assert (problem or "None") in str(step.problem)


def test_an_empty_mask_and_unknown_depth_give_no_position() -> None:
    unknown = encode_depth(np.zeros(SIZE, np.uint16), "z16", 0.001, True)
    hidden = replace(instance(Mask.empty(SIZE)), id=4)
    step = Measuring().measure(make_frame(depth=unknown), [instance(), hidden], None)
    assert [(item.position_m, item.depth_share) for item in step.instances] == [(None, 0.0), (None, None)]
    assert "without any valid value" in str(step.problem)


def test_a_doubtful_mask_gives_neither_position_nor_points() -> None:
    stage = Measuring()
    sure = instance()
    doubtful = replace(instance(), id=4, doubtful=True)
    found = stage.measure(make_frame(), [sure, doubtful], None).instances
    assert [(item.position_m is None, item.depth_share) for item in found] == [(False, 1.0), (True, None)]
    assert stage.points(3, 10) is not None
    assert stage.points(4, 10) is None


def test_depth_of_another_size_is_resampled_and_the_file_has_the_scale() -> None:
    assert measure(make_frame(size=(60, 80))).position_m == pytest.approx((0.0, 0.0, 0.8), abs=1e-5)
    scaled = measure(make_frame(), calibration(depth={"scale_m": 0.0005}))
    assert scaled.position_m == pytest.approx((0.0, 0.0, 0.4), abs=1e-5)


def test_intrinsics_of_a_region_may_have_their_centre_outside() -> None:
    for changed in (replace(CAMERA, cx=-40.0), replace(CAMERA, cx=200.0, cy=30.0)):
        assert measure(make_frame(intrinsics=changed)).position_m is not None


def test_the_file_states_that_depth_is_aligned() -> None:
    stated = calibration(hand_eye=None, depth={"aligned": True})
    assert measure(make_frame(aligned=False), stated).position_m == pytest.approx((0.0, 0.0, 0.8), abs=1e-5)
    step = Measuring(calibration=stated).measure(
        make_frame(size=(100, 160), aligned=False), [instance()], None
    )
    assert "aspect ratio" in str(step.problem)


def test_velocities_outlive_the_object_for_a_while() -> None:
    stage = Measuring()
    for seq in range(4):
        stage.measure(make_frame(seq=seq), [instance()], None)
    (hidden,) = stage.measure(make_frame(seq=9), [instance(Mask.empty(SIZE))], None).instances
    assert (hidden.frame, hidden.position_m) == ("camera", None)
    assert hidden.velocity_mps == pytest.approx((0.0, 0.0, 0.0), abs=1e-3)
    assert hidden.velocity_age_s == pytest.approx(0.198)


NOISE = np.eye(3)[None] * 1e-6
MS = 1_000_000


def feed(filters: VelocityFilters, count: int, speed_mps: float, noise_m: float = 0.0) -> None:
    random = np.random.default_rng(1)
    for step in range(count):
        position = np.array([speed_mps * step / 30, 0.0, 0.8]) + noise_m * random.normal(size=3)
        filters.observe([3], step * 1000 * MS // 30, "base", position[None], NOISE)


def test_a_uniform_motion_gives_its_velocity() -> None:
    filters = VelocityFilters(Objects(4))
    feed(filters, 30, 0.3, noise_m=0.001)
    found = filters.velocity(3, 29 * 1000 * MS // 30)
    frame, velocity, age_s = found
    assert (frame, age_s) == ("base", 0.0)
    assert velocity == pytest.approx([0.3, 0.0, 0.0], abs=0.06)


def test_a_velocity_needs_three_positions_and_grows_old() -> None:
    filters = VelocityFilters(Objects(4))
    feed(filters, 2, 0.3)
    assert filters.velocity(3, 40 * MS) is None
    feed(filters, 4, 0.3)
    assert filters.velocity(4, 100 * MS) is None
    found = filters.velocity(3, 600 * MS)
    assert found[2] == pytest.approx(0.5)
    assert filters.velocity(3, 1200 * MS) is None


@pytest.mark.parametrize(
    ("stamp_ns", "frame"), [(99 * MS, "base"), (5000 * MS, "base"), (133 * MS, "camera")]
)
def test_older_late_and_other_positions_start_anew(stamp_ns: int, frame: str) -> None:
    filters = VelocityFilters(Objects(4))
    feed(filters, 4, 0.3)
    filters.observe([3], stamp_ns, frame, np.zeros((1, 3)), NOISE)
    assert filters.velocity(3, stamp_ns) is None


def test_a_restored_filter_goes_on_bit_for_bit() -> None:
    objects = Objects(4)
    others = Objects(4)
    filters = VelocityFilters(objects)
    other = VelocityFilters(others)
    objects.add(3, "mug")
    feed(filters, 9, 0.3, noise_m=0.001)
    others.restore(reload(objects.state()))
    for item in (filters, other):
        item.observe([3], 333 * MS, "base", np.array([[0.1, 0.0, 0.8]]), NOISE)
    first = filters.velocity(3, 333 * MS)
    second = other.velocity(3, 333 * MS)
    assert np.array_equal(first.mps, second.mps)
    objects.remove(3)
    assert filters.velocity(3, 333 * MS) is None


@pytest.mark.parametrize(
    ("scale_m", "units", "wrong"),
    [
        (0.001, 700, None),
        (1.0, 700, "depth of 700 m"),
        (0.00001, 700, "depth of 0.007 m"),
        # tenths of a millimetre, and whole metres
        (0.001, 7200, "depth of 7 m"),
        (1.0, 1, "depth in steps of 1 m"),
    ],
)
def test_a_wrong_unit_of_depth_is_reported(scale_m: float, units: int, wrong: str | None) -> None:
    step = measure_square(scale_m, 120.0, units)
    assert (step.problem is None) if wrong is None else (wrong in str(step.problem))
    assert wrong is None or "scale_m" in str(step.problem)
    assert step.instances[0].position_m is not None


def test_an_object_larger_than_a_camera_can_see_is_reported() -> None:
    assert "object 1" in str(measure_square(0.001, 3.0).problem)


def measure_square(scale_m: float, focal_px: float, units: int = 700) -> StepFrame:
    """Measure a square mask on an even depth."""
    depth = encode_depth(np.full((120, 160), units, np.uint16), "z16", scale_m, True)
    lens = Intrinsics(focal_px, focal_px, 79.5, 59.5)
    frame = Frame("cam0", 0, 1, 160, 120, "bgr8", b"", depth=depth, intrinsics=lens)
    square = Mask.from_full(np.pad(np.ones((60, 60), bool), ((30, 30), (50, 50))))
    return Measuring().measure(frame, [Instance(1, "", 1.0, "tracked", 0, 0, square)], None)


def make_perception(nano: TrackerModel, *cameras: str) -> Perception:
    """Return a perception with a calibration for each of these names; the empty name is no camera's."""
    perception = Perception(Settings(), nano, None)
    perception.calibrations = tuple(calibration("eye_to_hand", camera=camera) for camera in cameras)
    return perception


def find_frame(perception: Perception, camera: str) -> tuple[str | None, str | None]:
    """Return the frame of the position of an object of a camera, and its problem."""
    step = StepFrame(make_frame(), instances=[instance()])
    spatial = perception.serve(camera).spatial
    for stage in (spatial.depth, *spatial.list_after_depth()):
        stage.run(step)
    return step.instances[0].frame, step.problem


def test_a_calibration_without_a_camera_s_name_serves_one_camera(nano: TrackerModel) -> None:
    perception = make_perception(nano, "")
    assert find_frame(perception, "left") == ("base", None)
    for _ in range(2):
        frame, problem = find_frame(perception, "right")
        assert frame == "camera"
        assert "camera right" in str(problem)
        assert "serves left" in str(problem)
    perception.drop("right")
    assert find_frame(perception, "left") == ("base", None)


def test_other_calibrations_serve_the_first_camera_after_them(nano: TrackerModel) -> None:
    perception = make_perception(nano, "")
    assert find_frame(perception, "left") == ("base", None)
    perception.drop("left")
    # a job that reuses the model brings files of its own
    perception.calibrations = (calibration("eye_to_hand", camera=""),)
    assert find_frame(perception, "right") == ("base", None)


def test_a_restart_lets_the_calibration_serve_another_camera(nano: TrackerModel) -> None:
    perception = make_perception(nano, "")
    assert find_frame(perception, "left") == ("base", None)
    perception.drop("left")
    perception.forget_things()
    assert find_frame(perception, "right") == ("base", None)


def test_a_state_tells_which_camera_the_nameless_calibration_serves(nano: TrackerModel) -> None:
    perception = make_perception(nano, "")
    for camera in ("left", "right"):
        perception.serve(camera)
    perception.drop("left")
    state = perception.state()
    other = make_perception(nano, "")
    other.serve("somewhere")
    other.restore(unpack_state(pack_state(state)))
    # the camera that the calibration serves may come back later than the others
    assert find_frame(other, "right")[0] == "camera"
    assert find_frame(other, "left") == ("base", None)


def test_a_state_without_the_owner_is_restored(nano: TrackerModel) -> None:
    perception = make_perception(nano, "")
    perception.serve("left")
    perception.serve("right")
    state = unpack_state(pack_state(perception.state()))
    # earlier versions did not save it
    del state["nameless_owner"]
    other = make_perception(nano, "")
    other.serve("right")
    other.restore(state)
    assert find_frame(other, "left") == ("base", None)
    assert find_frame(other, "right")[0] == "camera"


def test_a_restored_camera_with_a_file_of_its_own_leaves_the_other_file(nano: TrackerModel) -> None:
    perception = make_perception(nano, "")
    perception.serve("left")
    other = make_perception(nano, "left", "")
    other.restore(unpack_state(pack_state(perception.state())))
    assert find_frame(other, "left") == ("base", None)
    assert find_frame(other, "right") == ("base", None)


def test_a_camera_that_no_calibration_names_is_reported(nano: TrackerModel) -> None:
    perception = make_perception(nano, "wrist", "")
    assert find_frame(perception, "wrist") == ("base", None)
    assert find_frame(perception, "overhead") == ("base", None)
    frame, problem = find_frame(make_perception(nano, "wrist"), "overhead")
    assert (frame, "are for wrist" in str(problem)) == ("camera", True)
    assert find_frame(make_perception(nano), "overhead") == ("camera", None)
