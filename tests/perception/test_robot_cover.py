"""Masks without the robot's pixels, and objects under it that wait until it has gone."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sam3_node.detection.detectors import prepare_prompts
from sam3_node.errors import CalibrationError
from sam3_node.geometry import DepthMap, rigid, rotation_from_vector
from sam3_node.models import TrackerModel
from sam3_node.perception.objects import Objects
from sam3_node.perception.pipeline import Pipeline, Surroundings
from sam3_node.perception.stages.robot import Places
from sam3_node.perception.step import StepFrame
from sam3_node.robot.pixels import RobotPixels
from sam3_node.settings import DetectorSettings, RobotSettings, SpatialSettings, TrackerSettings
from sam3_node.types import JointState, Mask, MaskFrame, RobotState
from sam3_node.wire import decode_image, encode_image
from tests.support import coloured_blocks
from tests.support.calibration_scenes import calibrated
from tests.support.coloured_blocks import HEIGHT, PERIOD_NS, WIDTH, ColourDetector
from tests.support.saving import pack, reload

WIDE = 90
SIDE = 50
EVERY = 3
LOST_S = 0.4
LOST_FRAMES = int(LOST_S * 1e9 / PERIOD_NS)
PLACE = (130, 90)
AWAY = -200.0


class Plate:
    """A robot of one joint, `slide`: the column of the image where its plate begins."""

    def place(self, positions: Mapping[str, float]) -> Any:
        if "slide" not in positions:
            raise CalibrationError(f"expected the joint slide, found {list(positions)}")
        return np.eye(4) * positions["slide"]

    def draw(self, camera_from_link: Any, view: Any, depth: Any = None, margin_m: float = 0.0) -> Any:
        return plate(float(camera_from_link[0, 0]))

    def describe_lacking(self, positions: Mapping[str, float]) -> str | None:
        return None

    def describe_strangers(self, positions: Mapping[str, float]) -> str | None:
        return None


def rectangle(x: float, y: int, width: int, height: int) -> np.ndarray:
    inside = np.zeros((HEIGHT, WIDTH), bool)
    inside[y : y + height, max(0, round(x)) : max(0, round(x) + width)] = True
    return inside


def plate(x: float) -> np.ndarray:
    return rectangle(x, 60, WIDE, 140)


def block(x: int) -> Mask:
    return Mask.from_full(rectangle(x, 90, SIDE, SIDE))


def places(place: int | None = None, objects: Objects | None = None) -> Places:
    """Return the places of objects, of which object 1 was seen at a place."""
    known = Places(Objects(4) if objects is None else objects)
    if place is not None:
        known.observe(1, block(place), see(AWAY))
    return known


class World:
    """Frames of blocks with the plate in front of them."""

    def __init__(self, nano: TrackerModel, exclude: bool = True, hand_eye: bool = True) -> None:
        self.detector = ColourDetector()
        self.seq = 0
        calibration = calibrated((HEIGHT, WIDTH), 300.0, "eye_to_hand" if hand_eye else None)
        settings = TrackerSettings(max_objects=4, exclude_robot=exclude)
        finds = DetectorSettings(every=EVERY, max_lost_s=LOST_S)
        body: Any = Plate()
        surroundings = Surroundings(SpatialSettings(), calibration, body, RobotSettings())
        self.pipeline = Pipeline(nano, settings, "cam0", self.detector, finds, surroundings)
        self.pipeline.set_prompts(prepare_prompts(self.detector, ("red",), 0.5))

    def step(
        self,
        place: tuple[int, int] | None,
        x: float = AWAY,
        joints: Mapping[str, float] | None = None,
        count: int = 1,
    ) -> MaskFrame:
        """Show frames with a red block at a place; without one, the plate is red."""
        positions = {"slide": x} if joints is None else joints
        robot = RobotState(None, JointState("robot", 0, positions) if positions else None)
        for _ in range(count):
            self.seq += 1
            drawn = coloured_blocks.frame(self.seq, {place: "red"} if place else {})
            image = decode_image(drawn).copy()
            image[plate(x)] = (200, 200, 200) if place else coloured_blocks.COLOURS["red"]
            frame = replace(drawn, colour=encode_image(image, "bgr8"))
            masks = self.pipeline.step(StepFrame(frame, robot_state=robot))
        return masks


@pytest.fixture
def world(nano: TrackerModel) -> World:
    return World(nano)


def test_masks_and_messages_leave_out_the_robot(world: World) -> None:
    world.step(PLACE, count=EVERY + 1)
    masks = world.step(PLACE, 60)
    (found,) = masks.instances
    assert found.state == "tracked"
    assert found.area > 0.7 * 30 * SIDE
    assert not (found.mask.full() & plate(60)).any()
    assert masks.robot_mask is not None
    assert np.array_equal(masks.robot_mask.full(), plate(60))
    assert masks.joints is not None
    assert masks.joints.positions == {"slide": 60}
    assert "robot" in masks.stages_us


@pytest.mark.parametrize("exclude", [True, False])
def test_an_object_under_the_robot_waits_for_it(nano: TrackerModel, exclude: bool) -> None:
    world = World(nano, exclude)
    (found,) = world.step(PLACE, count=2 * EVERY).instances
    for x in range(0, 105, 15):  # the plate comes slowly
        for partly in world.step(PLACE, x - 10).instances:
            assert (partly.area == 0) is (partly.state == "occluded")
    before = pack(world.pipeline.prompting.tracker.state().bank)
    for _ in range(3 * LOST_FRAMES):
        masks = world.step(PLACE, 105)
        if exclude:
            (hidden,) = masks.instances
            assert (hidden.id, hidden.state, hidden.area) == (found.id, "occluded", 0)
            assert hidden.hidden_by == "robot"
    if not exclude:
        assert found.id not in [instance.id for instance in masks.instances]
        return
    assert pack(world.pipeline.prompting.tracker.state().bank) == before
    (back,) = world.step(PLACE).instances
    assert (back.id, back.state, back.hidden_by) == (found.id, "tracked", None)
    assert back.area > 0.8 * SIDE**2


def test_a_thing_that_the_robot_has_moved_is_found_beside_it(world: World) -> None:
    (found,) = world.step(PLACE, count=2 * EVERY).instances
    world.step(PLACE, 105)
    (moved,) = world.step((230, 90), 105, count=2 * EVERY).instances
    assert (moved.id, moved.state) == (found.id, "tracked")
    assert moved.box[0] > 215


def test_a_detection_of_the_robot_is_dropped(world: World) -> None:
    for _ in range(2 * EVERY):
        assert world.step(None, 100).instances == ()


@pytest.mark.parametrize(
    ("hand_eye", "joints", "problem"),
    [(True, {}, "expected joints"), (True, {"j1": 0.0}, "the joint slide"), (False, None, "hand_eye")],
)
def test_without_joints_or_calibration_nothing_is_excluded(
    nano: TrackerModel, hand_eye: bool, joints: dict[str, float] | None, problem: str
) -> None:
    world = World(nano, hand_eye=hand_eye)
    masks = world.step(None, 100, joints, count=2 * EVERY)
    assert (masks.robot_mask, masks.joints) == (None, None)
    assert len(masks.instances) == 1
    assert problem in str(world.pipeline.problem)


def see(x: float, right_m: float = 0.0, turned_rad: float = 0.0) -> RobotPixels:
    camera = rigid(rotation_from_vector((0.0, turned_rad, 0.0)), (right_m, 0.0, 0.0))
    return RobotPixels(JointState("robot", 0, {"slide": x}), plate(x), camera)


def test_an_arm_that_comes_slowly_covers_the_whole_place() -> None:
    objects = Objects(4)
    others = Objects(4)
    objects.add(1, "block")
    robot = places(100, objects)
    covered = []
    for left in range(0, 70, 2):
        seen = see(left - WIDE + 100)
        covered.append(bool(robot.find_covered(seen)))
        visible = block(100).without(seen.inside)
        if visible.area and not covered[-1]:
            robot.observe(1, visible, seen)
    assert covered == [left > SIDE / 2 for left in range(0, 70, 2)]
    other = places(objects=others)
    others.restore(reload(objects.state()))
    assert other.find_covered(see(120 - WIDE)) == robot.find_covered(see(120 - WIDE)) == frozenset()
    assert other.find_covered(see(130 - WIDE)) == frozenset({1})
    objects.remove(1)
    assert not robot.find_covered(see(100))


def test_a_thing_that_moves_with_the_arm_leaves_its_place() -> None:
    robot = places(0)
    for x in range(0, 200, 5):  # pushed: the arm's edge is over a fifth of it
        seen = see(x + 10 - WIDE)
        assert not robot.find_covered(seen)
        robot.observe(1, block(x).without(seen.inside), seen)


@pytest.mark.parametrize(("right_m", "turned_rad"), [(0.05, 0.0), (0.0, 0.1)])
def test_a_camera_that_has_moved_looks_at_another_place(right_m: float, turned_rad: float) -> None:
    robot = places(120)
    assert robot.find_covered(see(100, right_m / 5, turned_rad / 5)) == {1}
    assert not robot.find_covered(see(100, right_m, turned_rad))
    robot.observe(1, block(60).without(plate(100)), see(100, right_m, turned_rad))  # not what it hides at 120
    assert not robot.find_covered(see(100, right_m, turned_rad))


def test_a_place_is_forgotten_while_the_robot_is_not_known() -> None:
    robot = places(120)
    robot.observe(1, block(30), None)
    assert not robot.find_covered(see(100))


def test_boxes_are_the_robots_where_it_fills_most_of_them() -> None:
    boxes = ((110, 70, 150, 100), (60, 70, 139, 100), (60, 70, 141, 100), (-30, -20, -5, -1))
    assert [see(100).covers(box) for box in boxes] == [True, False, True, False]


OBJECT_M = 0.70
TABLE_M = 0.80
ARM_M = 0.50


@pytest.mark.parametrize(
    ("arm_m", "open_m", "is_hidden"),
    [(ARM_M, OBJECT_M, True), (ARM_M, TABLE_M, False), (0.9, OBJECT_M, False), (0.0, 0.0, True)],
)
def test_depth_says_whether_an_object_can_be_behind_the_robot(
    arm_m: float, open_m: float, is_hidden: bool
) -> None:
    """The arm is in front and the object there or gone, the arm is behind, or depth is not known."""
    objects = Objects(4)
    known = places(objects=objects)
    known.observe(1, block(100), see(AWAY), make_depth(see(AWAY), ARM_M, OBJECT_M))
    robot = see(133 - WIDE)  # over two thirds of the block
    assert known.find_covered(robot) == frozenset({1})
    assert known.find_covered(robot, make_depth(robot, arm_m, open_m)) == frozenset({1} if is_hidden else ())
    objects.add(1, "block")
    other_objects = Objects(4)
    other = places(objects=other_objects)
    other_objects.restore(reload(objects.state()))
    assert other.find_covered(robot, make_depth(robot, ARM_M, TABLE_M)) == frozenset()


def make_depth(robot: RobotPixels, arm_m: float, place_m: float) -> DepthMap:
    """Return a depth of the table, of the block's place, and of the robot before them."""
    z = np.full((HEIGHT, WIDTH), 1000 * TABLE_M)
    block(100).paint(z, 1000 * place_m)
    z[robot.inside] = 1000 * arm_m
    return DepthMap(z.round().astype(np.uint16), 0.001, np.zeros((2, HEIGHT, WIDTH), np.float32), 300.0)
