"""Objects that the gripper holds: lifted, pushed, passed, hidden in it and released."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from sam3_node.geometry import DepthMap, RayMap, pose_of, rigid, rotation_from_vector
from sam3_node.perception.objects import Objects
from sam3_node.perception.stages.held import FindHeld
from sam3_node.perception.step import MeasuredSurface, StepFrame
from sam3_node.types import Frame, FramePose, Instance, Intrinsics, Mask, RobotState
from tests.support.saving import reload

PERIOD_NS = 66_666_667
REST = np.array([0.4, 0.1, 0.03])
"""A block on the table."""
GRASP = np.array([0.4, 0.1, 0.05])
UP = np.array([0, 0, 0.12])
ASIDE = np.array([0.2, 0.1, 0.12])
LOOKS_DOWN = rigid(rotation_from_vector((np.pi, 0, 0)), (0, 0, 1))
HIDDEN = Instance(3, "block", 0.9, "occluded", 5, 0, Mask.empty((4, 4)))
SIZES: dict[str, Any] = {"extent_m": (0.05, 0.03, 0.02), "covariance_m2": (4e-6, 0.0, 0.0, 4e-6, 0.0, 4e-6)}
SIZE = (256, 256)
EYE = np.array([0.35, 0.1, 1.0])
"""Place of the camera that has depth."""
LENS = Intrinsics(240.0, 240.0, 127.5, 127.5)


class World:
    """A gripper and one block, 5 cm long, that it may hold."""

    def __init__(self) -> None:
        self.objects = Objects(4)
        self.held = FindHeld(self.objects)
        self.mount = LOOKS_DOWN
        self.seq = 0
        self.random = np.random.default_rng(7)
        self.events: list[str] = []

    def step(self, tip: Any, block: Any = None, turn: Sequence[float] = (np.pi, 0, 0)) -> Instance:
        """Show one frame; the block is hidden if it has no position."""
        self.seq += 1
        place = rigid(rotation_from_vector(turn), tip)
        gripper = pose_of(place, "gripper", "base", self.seq * PERIOD_NS, "system")
        fields: dict[str, Any] = {}
        if block is not None:
            seen = tuple((block + self.random.normal(0, 0.002, 3)).tolist())
            fields = {"state": "tracked", "position_m": seen, "frame": "base", **SIZES}
        return self.run(replace(HIDDEN, **fields), gripper)

    def run(self, instance: Instance, gripper: FramePose | None) -> Instance:
        frame = Frame("cam0", self.seq, self.seq * PERIOD_NS, 4, 4, "bgr8", b"")
        mount = pose_of(self.mount, "camera", "base", frame.capture_ns, "system")
        step = StepFrame(frame, robot_state=RobotState(gripper), camera_pose=mount, instances=[instance])
        self.held.run(step)
        self.events += [event.op for event in step.events]
        (found,) = step.instances
        return found

    def move(self, way: Any, tip: Any, block: Any, carry: bool = True, frames: int = 15) -> Instance:
        """Move the gripper by `way`, and the block, too, if it is carried."""
        for share in np.linspace(0, 1, frames):
            found = self.step(tip + share * np.array(way), block + carry * share * np.array(way))
        return found


@pytest.fixture
def lifted() -> World:
    world = World()
    world.move(-UP, GRASP + UP, REST, carry=False)
    assert world.move(UP, GRASP, REST).held
    assert world.events == ["grasped"]
    return world


def test_a_lifted_block_is_held_until_the_gripper_leaves_it(lifted: World) -> None:
    assert lifted.move(ASIDE - UP, GRASP + UP, REST + UP).held
    assert lifted.move(-UP, GRASP + ASIDE, REST + ASIDE).held
    assert not lifted.move(UP, GRASP + ASIDE - UP, REST + ASIDE - UP, carry=False).held
    assert lifted.events == ["grasped", "released"]


def test_a_gripper_that_leaves_slowly_releases_the_block_too(lifted: World) -> None:
    assert not lifted.move(UP, GRASP + UP, REST + UP, carry=False, frames=90).held


def test_a_pushed_block_and_one_that_is_passed_are_not_held() -> None:
    world = World()
    for corner in ((0.2, 0, 0), (0.1, 0.15, 0), (-0.1, 0.1, 0)):
        world.move(corner, GRASP, REST)
    for way in (UP, ASIDE, -UP):
        world.move(way, GRASP, REST, carry=False)
    assert world.events == []


def test_a_block_whose_seen_part_changes_stays_held(lifted: World) -> None:
    for part in np.linspace(0, 0.045, 12):  # an edge comes before it while the gripper stands
        assert lifted.step(GRASP + UP, REST + UP + (part, 0, 0)).held


def test_a_hidden_block_goes_with_the_gripper_and_its_error_grows(lifted: World) -> None:
    turned = (np.pi - 0.5, 0.3, 0.2)
    tip = GRASP + ASIDE
    hidden = [lifted.step(tip, turn=turned) for _ in range(30)]
    moved = Rotation.from_rotvec(turned) * Rotation.from_rotvec((np.pi, 0, 0)).inv()
    assert hidden[-1].position_m == pytest.approx(tip + moved.apply(REST - GRASP), abs=0.005)
    assert hidden[-1].frame == "base"
    assert all(item.held for item in hidden)
    assert hidden[-1].covariance_m2 is not None
    assert hidden[-1].covariance_m2[0] == pytest.approx(4e-6 + (0.005 * 2) ** 2, rel=0.05)
    for _ in range(3):  # it was left on the way
        seen = lifted.step(tip, REST)
    assert not seen.held
    assert lifted.step(tip).position_m is None


def test_a_restored_state_continues(lifted: World) -> None:
    other = World()
    lifted.objects.last_id = 2
    lifted.objects.add(3, "block")
    other.objects.restore(reload(lifted.objects.state()))
    other.seq = lifted.seq
    first = other.step(GRASP)
    second = lifted.step(GRASP)
    assert (first.position_m, first.covariance_m2) == (second.position_m, second.covariance_m2)
    assert other.move(UP, GRASP, REST, carry=False).held is False
    lifted.objects.remove(3)
    assert not lifted.step(GRASP).held


def test_without_the_grippers_pose_nothing_is_held(lifted: World) -> None:
    assert lifted.run(HIDDEN, None) == HIDDEN


@pytest.mark.parametrize(("mount", "held"), [(np.eye(4), True), (LOOKS_DOWN, False)])
def test_down_along_z_lifts_only_on_a_base_that_may_hang(mount: Any, held: bool) -> None:
    world = World()
    world.mount = mount
    assert world.move(-UP, GRASP, REST).held is held
    assert not World().move(ASIDE * (1, 1, 0), GRASP, REST).held


class DoubtfulWorld(World):
    """A world with depth from above, and masks that are doubtful from a frame on."""

    def __init__(self) -> None:
        super().__init__()
        self.mount = rigid(rotation_from_vector((np.pi, 0, 0)), EYE)
        self.is_doubtful = False
        self.is_drawn = True
        """True if depth shows the block where its position is"""
        self.others: list[Any] = []
        """places of other things of the block's size"""
        self.leak: Any = None
        """a place that a doubtful mask shows beside the block, twice as large; its position is there"""

    def run(self, instance: Instance, gripper: FramePose | None) -> Instance:
        frame = Frame("cam0", self.seq, self.seq * PERIOD_NS, *SIZE, "bgr8", b"")
        mount = pose_of(self.mount, "camera", "base", frame.capture_ns, "system")
        image = np.full(SIZE, 1000, np.uint16)
        for place in self.others:
            draw(image, place, 1)
        inside = np.zeros(SIZE, np.uint16)
        if instance.position_m is not None:
            draw(image if self.is_drawn else inside, instance.position_m, 1)
            draw(inside, instance.position_m, 1)
        if self.leak is not None:
            draw(inside, self.leak, 1.5)
        depth = DepthMap(image, 0.001, RayMap().rays(LENS, SIZE), LENS.fx)
        step = StepFrame(
            frame, robot_state=RobotState(gripper), camera_pose=mount, intrinsics=LENS, depth=depth
        )
        if self.is_doubtful and instance.position_m is not None:
            seen = instance.position_m if self.leak is None else tuple(self.leak)
            step.doubtful = {instance.id: MeasuredSurface(seen, SIZES["covariance_m2"], SIZES["extent_m"])}
            fields: dict[str, Any] = dict.fromkeys(("position_m", "frame", "extent_m", "covariance_m2"))
            instance = replace(instance, doubtful=True, mask=Mask.from_full(inside > 0), **fields)
        step.instances = [instance]
        self.held.run(step)
        self.events += [event.op for event in step.events]
        return step.instances[0]


def draw(image: np.ndarray, place: Any, scale: float) -> None:
    """Draw a square of 5 cm, times `scale`, around a place in the base: its depth in millimetres."""
    depth_m = EYE[2] - place[2]
    x = round(LENS.cx + (place[0] - EYE[0]) * LENS.fx / depth_m)
    y = round(LENS.cy - (place[1] - EYE[1]) * LENS.fy / depth_m)
    half = round(6 * scale)
    image[y - half : y + half + 1, x - half : x + half + 1] = round(1000 * depth_m)


def halfway_to(place: Any) -> Any:
    """Return what covers a place: the middle between it and the camera."""
    return (EYE + place) / 2


def grasp_in_doubt(world: DoubtfulWorld) -> Instance:
    """Let the gripper come by sure masks, and carry the block aside by doubtful ones."""
    world.move(-UP, GRASP + UP, REST, carry=False)
    world.is_doubtful = True
    world.move(UP, GRASP, REST)
    return world.move(ASIDE - UP, GRASP + UP, REST + UP)


@pytest.mark.parametrize(
    ("others", "held"), [([], True), ([REST], False), ([halfway_to(REST)], False)], ids=str
)
def test_doubt_in_the_gripper_does_not_hide_a_lift_once_the_place_of_rest_is_empty(
    others: list[Any], held: bool
) -> None:
    """The place shows the table, the object still there, or something in front of both."""
    world = DoubtfulWorld()
    world.move(-UP, GRASP + UP, REST, carry=False)
    world.is_doubtful = True
    world.others = others
    found = world.move(UP, GRASP, REST)
    assert (found.held, found.doubtful) == (False, True)  # the block itself hides the place
    found = world.move(ASIDE - UP, GRASP + UP, REST + UP)
    assert found.held is held
    if held:
        assert found.position_m == pytest.approx(REST + ASIDE, abs=0.01)
    world.others = []
    # what was seen to stay is not held; what was covered is seen to be empty now
    assert world.step(GRASP + ASIDE, REST + ASIDE).held is (held or others[0] is not REST)


def test_a_mask_that_leaks_onto_a_shadow_does_not_hide_a_lift() -> None:
    world = DoubtfulWorld()
    world.leak = np.add(REST, (-0.15, 0.1, -0.03))
    found = grasp_in_doubt(world)
    assert found.held
    assert found.position_m == pytest.approx(REST + ASIDE, abs=0.01)
    for _ in range(20):  # the shadow is no place where the object was left
        assert world.step(GRASP + ASIDE, REST + ASIDE).held


def test_a_leak_onto_the_fingers_that_rise_is_no_lift_of_what_was_pushed_away_before() -> None:
    world = DoubtfulWorld()
    world.move(np.zeros(3), GRASP, REST)
    world.is_doubtful = True
    away = np.array([0.15, 0, 0])
    for share in np.linspace(0, 1, 10):
        world.step(GRASP + share * away, REST + share * away)
    for share in np.linspace(0, 1, 15):
        world.leak = REST + away + share * UP
        world.step(GRASP + away + share * UP, REST + away)
    assert world.events == []


def test_a_gripper_whose_place_for_the_block_is_empty_holds_it_no_more() -> None:
    world = DoubtfulWorld()
    assert grasp_in_doubt(world).held
    world.is_drawn = False
    found = [world.step(GRASP + ASIDE, REST + ASIDE).held for _ in range(3)]
    assert found == [True, True, False]
    unseen = DoubtfulWorld()
    assert grasp_in_doubt(unseen).held
    assert [unseen.step(GRASP + ASIDE).held for _ in range(3)] == [True, True, False]


def test_a_doubtful_mask_that_stays_behind_ends_the_grasp_later_than_a_sure_one() -> None:
    """Something covers the place in the gripper."""
    world = DoubtfulWorld()
    assert grasp_in_doubt(world).held
    world.others = [halfway_to(REST + ASIDE)]
    assert [world.step(GRASP + ASIDE).held for _ in range(20)] == [True] * 20
    found = [world.step(GRASP + ASIDE, REST).held for _ in range(9)]
    assert found == [True] * 8 + [False]


def test_doubtful_masks_far_from_the_gripper_and_pushed_ones_are_not_held() -> None:
    world = DoubtfulWorld()
    world.move((0, 0, 0), GRASP, REST)
    world.is_doubtful = True
    assert not world.move(ASIDE * (1, 1, 0), GRASP, REST).held
    other = DoubtfulWorld()
    far = np.add(GRASP, (0, 0.5, 0))
    other.move((0, 0, 0), far, REST)
    other.is_doubtful = True
    assert not other.move(UP, far, REST).held
    assert world.events == other.events == []
