"""Masks without the robot's pixels, and objects under it that wait until it has gone."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sam3_node.calibration import Calibration
from sam3_node.detection.detectors import prepare_prompts
from sam3_node.errors import CalibrationError
from sam3_node.geometry import rigid, rotation_from_vector
from sam3_node.models import TrackerModel
from sam3_node.perception.checkpoint import pack_state, unpack_state
from sam3_node.perception.pipeline import Pipeline
from sam3_node.perception.robot import RobotPixels, RobotStage
from sam3_node.perception.spatial import SpatialStage
from sam3_node.settings import DetectorSettings, RobotSettings, SpatialSettings, TrackerSettings
from sam3_node.types import Frame, JointState, Mask, MaskFrame, RobotState
from sam3_node.wire import encode_image
from tests.support import coloured_blocks
from tests.support.coloured_blocks import HEIGHT, PERIOD_NS, WIDTH, ColourDetector

WIDE, SIDE, EVERY, LOST_S = 90, 50, 3, 0.4
LOST_FRAMES = int(LOST_S * 1e9 / PERIOD_NS)
PLACE = (130, 90)
AWAY = -200.0
HAND_EYE = {"kind": "eye_to_hand", "translation_m": (0.0, 0.0, 0.0), "rotation_vector_rad": (0.0, 0.0, 0.0)}
PINHOLE = {
    "width_px": WIDTH,
    "height_px": HEIGHT,
    "fx_px": 300.0,
    "fy_px": 300.0,
    "cx_px": 160.0,
    "cy_px": 120.0,
}


class Plate:
    """A robot of one joint, `slide`: the column of the image where its plate begins."""

    def place(self, positions: Mapping[str, float]) -> Any:
        if "slide" not in positions:
            raise CalibrationError(f"expected the joint slide, found {list(positions)}")
        return np.eye(4) * positions["slide"]

    def draw(self, camera_from_link: Any, view: Any, depth: Any = None, margin_m: float = 0.0) -> Any:
        return plate(float(camera_from_link[0, 0]))


def plate(x: float) -> np.ndarray:
    inside = np.zeros((HEIGHT, WIDTH), bool)
    inside[60:200, max(0, round(x)) : max(0, round(x) + WIDE)] = True
    return inside


def stage() -> RobotStage:
    body: Any = Plate()
    return RobotStage(body, RobotSettings())


class World:
    """Frames of blocks with the plate in front of them."""

    def __init__(self, nano: TrackerModel, exclude: bool = True, hand_eye: bool = True) -> None:
        self.detector, self.seq = ColourDetector(), 0
        calibration = Calibration(intrinsics=PINHOLE, hand_eye=HAND_EYE if hand_eye else None)
        settings = TrackerSettings(max_objects=4, exclude_robot=exclude)
        finds = DetectorSettings(every=EVERY, max_lost_s=LOST_S)
        spatial = SpatialStage(SpatialSettings(), calibration)
        self.pipeline = Pipeline(nano, settings, "cam0", self.detector, finds, spatial, stage())

    def ask(self, *names: str) -> None:
        self.pipeline.set_prompts(prepare_prompts(self.detector, names, 0.5))

    def frame(self, blocks: dict[tuple[int, int], str], x: float, colour: tuple[int, int, int]) -> Frame:
        self.seq += 1
        drawn = coloured_blocks.frame(self.seq, blocks)
        image = np.frombuffer(drawn.colour, np.uint8).reshape(HEIGHT, WIDTH, 3).copy()
        image[plate(x)] = colour
        return replace(drawn, colour=encode_image(image, "bgr8"))

    def step(
        self,
        blocks: dict[tuple[int, int], str],
        x: float = AWAY,
        colour: tuple[int, int, int] = (200, 200, 200),
        joints: Mapping[str, float] | None = None,
    ) -> MaskFrame:
        state = JointState("robot", 0, {"slide": x} if joints is None else joints)
        frame = self.frame(blocks, x, colour)
        return self.pipeline.step(
            frame, find_robot=lambda _: RobotState(None, state if state.positions else None)
        )


@pytest.fixture
def world(nano: TrackerModel) -> World:
    return World(nano)


def test_masks_and_messages_leave_out_the_robot(world: World) -> None:
    world.ask("red")
    for _ in range(EVERY + 1):
        world.step({PLACE: "red"})
    masks = world.step({PLACE: "red"}, 60)
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
    world.ask("red")
    for _ in range(2 * EVERY):
        (found,) = world.step({PLACE: "red"}).instances
    for x in range(0, 105, 15):  # the plate comes slowly
        for partly in world.step({PLACE: "red"}, x - 10).instances:
            assert (partly.area == 0) is (partly.state == "occluded")
    before = world.pipeline.state()["tracker"]["bank"]
    for _ in range(3 * LOST_FRAMES):
        masks = world.step({PLACE: "red"}, 105)
        if exclude:
            (hidden,) = masks.instances
            assert (hidden.id, hidden.state, hidden.hidden_by, hidden.area) == (
                found.id,
                "occluded",
                "robot",
                0,
            )
    if not exclude:
        assert found.id not in [instance.id for instance in masks.instances]
        return
    assert pack_state({"bank": world.pipeline.state()["tracker"]["bank"]}) == pack_state({"bank": before})
    (back,) = world.step({PLACE: "red"}).instances
    assert (back.id, back.state, back.hidden_by) == (found.id, "tracked", None)
    assert back.area > 0.8 * SIDE**2


def test_a_thing_that_the_robot_has_moved_is_found_beside_it(world: World) -> None:
    world.ask("red")
    for _ in range(2 * EVERY):
        (found,) = world.step({PLACE: "red"}).instances
    world.step({PLACE: "red"}, 105)
    for _ in range(2 * EVERY):
        (moved,) = world.step({(230, 90): "red"}, 105).instances
    assert (moved.id, moved.state) == (found.id, "tracked")
    assert moved.box[0] > 215


def test_a_detection_of_the_robot_is_dropped(world: World) -> None:
    world.ask("red")
    for _ in range(2 * EVERY):
        assert world.step({}, 100, coloured_blocks.COLOURS["red"]).instances == ()


@pytest.mark.parametrize(
    ("hand_eye", "joints", "problem"),
    [(True, {}, "expected joints"), (True, {"j1": 0.0}, "the joint slide"), (False, None, "hand_eye")],
)
def test_without_joints_or_calibration_nothing_is_excluded(
    nano: TrackerModel, hand_eye: bool, joints: dict[str, float] | None, problem: str
) -> None:
    world = World(nano, hand_eye=hand_eye)
    world.ask("red")
    for _ in range(2 * EVERY):
        masks = world.step({}, 100, coloured_blocks.COLOURS["red"], joints)
    assert (masks.robot_mask, masks.joints) == (None, None)
    assert len(masks.instances) == 1
    assert problem in str(world.pipeline.spatial.problem)


def see(x: float, right_m: float = 0.0, turned_rad: float = 0.0) -> RobotPixels:
    camera = rigid(rotation_from_vector((0.0, turned_rad, 0.0)), (right_m, 0.0, 0.0))
    return RobotPixels(JointState("robot", 0, {"slide": x}), plate(x), camera)


def block(x: int, y: int = 90) -> Mask:
    full = np.zeros((HEIGHT, WIDTH), bool)
    full[y : y + SIDE, x : x + SIDE] = True
    return Mask.from_full(full)


def test_an_arm_that_comes_slowly_covers_the_whole_place() -> None:
    robot, covered = stage(), []
    robot.observe(1, block(100), see(AWAY))
    for left in range(0, 70, 2):
        seen = see(left - WIDE + 100)
        covered.append(bool(robot.find_covered(seen)))
        visible = block(100).without(seen.inside)
        if visible.area and not covered[-1]:
            robot.observe(1, visible, seen)
    assert covered == [left > SIDE / 2 for left in range(0, 70, 2)]
    other = stage()
    other.restore(unpack_state(pack_state(robot.state())))
    assert other.find_covered(see(120 - WIDE)) == robot.find_covered(see(120 - WIDE)) == frozenset()
    assert other.find_covered(see(130 - WIDE)) == frozenset({1})
    robot.remove(1)
    assert not robot.find_covered(see(100))


def test_a_thing_that_moves_with_the_arm_leaves_its_place() -> None:
    robot = stage()
    robot.observe(1, block(0), see(AWAY))
    for x in range(0, 200, 5):  # pushed: the arm's edge is over a fifth of it
        seen = see(x + 10 - WIDE)
        assert not robot.find_covered(seen)
        robot.observe(1, block(x).without(seen.inside), seen)


@pytest.mark.parametrize(("right_m", "turned_rad"), [(0.05, 0.0), (0.0, 0.1)])
def test_a_camera_that_has_moved_looks_at_another_place(right_m: float, turned_rad: float) -> None:
    robot = stage()
    robot.observe(1, block(120), see(AWAY))
    assert robot.find_covered(see(100, right_m / 5, turned_rad / 5)) == {1}
    assert not robot.find_covered(see(100, right_m, turned_rad))
    robot.observe(1, block(60).without(plate(100)), see(100, right_m, turned_rad))  # not what it hides at 120
    assert not robot.find_covered(see(100, right_m, turned_rad))


def test_a_place_is_forgotten_while_the_robot_is_not_known() -> None:
    robot = stage()
    robot.observe(1, block(120), see(AWAY))
    robot.observe(1, block(30), None)
    assert not robot.find_covered(see(100))


def test_boxes_are_the_robots_where_it_fills_most_of_them() -> None:
    seen = see(100)
    assert seen.covers((110.0, 70.0, 150.0, 100.0))
    assert not seen.covers((60.0, 70.0, 139.0, 100.0))
    assert seen.covers((60.0, 70.0, 141.0, 100.0))
    assert not seen.covers((-30.0, -20.0, -5.0, -1.0))
