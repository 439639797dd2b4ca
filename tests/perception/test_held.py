"""Objects that the gripper holds: lifted, pushed, passed, hidden in it and released."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from sam3_node.geometry import pose_of, rigid, rotation_from_vector
from sam3_node.perception.checkpoint import pack_state, unpack_state
from sam3_node.perception.objects import Objects
from sam3_node.perception.stages.held import FindHeld
from sam3_node.perception.step import DoubtfulPlace, StepFrame
from sam3_node.perception.surfaces import DepthMap
from sam3_node.types import Frame, FramePose, Instance, Intrinsics, Mask, RobotState

PERIOD_NS = 66_666_667
REST = np.array([0.4, 0.1, 0.03])
"""A block on the table."""
GRASP = np.array([0.4, 0.1, 0.05])
UP = np.array([0, 0, 0.12])
ASIDE = np.array([0.2, 0.1, 0.12])
LOOKS_DOWN = rigid(rotation_from_vector((np.pi, 0, 0)), (0, 0, 1))
HIDDEN = Instance(3, "block", 0.9, "occluded", 5, 0, Mask.empty((4, 4)))
SIZES: dict[str, Any] = {"extent_m": (0.05, 0.03, 0.02), "covariance_m2": (4e-6, 0.0, 0.0, 4e-6, 0.0, 4e-6)}


RAYS = np.zeros((2, 64, 64), np.float32)


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
    other.objects.restore(unpack_state(pack_state(lifted.objects.state())))
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
    """A world whose masks are doubtful from a frame on. `depth_m` is that of all pixels, from above."""

    def __init__(self) -> None:
        super().__init__()
        self.is_doubtful = False
        self.depth_m = 0.97

    def run(self, instance: Instance, gripper: FramePose | None) -> Instance:
        frame = Frame("cam0", self.seq, self.seq * PERIOD_NS, 64, 64, "bgr8", b"")
        mount = pose_of(self.mount, "camera", "base", frame.capture_ns, "system")
        depth = DepthMap(np.full((64, 64), round(1000 * self.depth_m), np.uint16), 0.001, RAYS, 60.0)
        lens = Intrinsics(60.0, 60.0, 5.0, 31.5)
        step = StepFrame(
            frame, robot_state=RobotState(gripper), camera_pose=mount, intrinsics=lens, depth=depth
        )
        if self.is_doubtful and instance.position_m is not None:
            place = DoubtfulPlace(instance.position_m, SIZES["covariance_m2"], SIZES["extent_m"])
            step.doubtful = {instance.id: place}
            fields: dict[str, Any] = dict.fromkeys(("position_m", "frame", "extent_m", "covariance_m2"))
            instance = replace(instance, doubtful=True, **fields)
        step.instances = [instance]
        self.held.run(step)
        self.events += [event.op for event in step.events]
        return step.instances[0]


@pytest.mark.parametrize(("depth_m", "held"), [(1.0, True), (0.97, False), (0.5, False)])
def test_doubt_in_the_gripper_does_not_hide_a_lift_once_the_place_of_rest_is_empty(
    depth_m: float, held: bool
) -> None:
    """The place shows the table, the object still there, or something in front of both."""
    world = DoubtfulWorld()
    world.move(-UP, GRASP + UP, REST, carry=False)
    world.is_doubtful = True
    world.depth_m = depth_m
    found = world.move(UP, GRASP, REST)
    assert (found.held, found.doubtful) == (held, True)
    found = world.move(ASIDE - UP, GRASP + UP, REST + UP)
    assert found.held is held
    if held:
        assert found.position_m == pytest.approx(REST + ASIDE, abs=0.01)
    world.depth_m = 1.0  # the place is seen to be empty
    assert world.step(GRASP + ASIDE, REST + ASIDE).held


def test_a_doubtful_mask_that_stays_behind_ends_the_grasp_later_than_a_sure_one() -> None:
    world = DoubtfulWorld()
    world.move(-UP, GRASP + UP, REST, carry=False)
    world.is_doubtful = True
    world.depth_m = 1.0
    assert world.move(UP, GRASP, REST).held
    found = [world.step(GRASP + ASIDE, REST).held for _ in range(9)]
    assert found == [True] * 8 + [False]


def test_doubtful_masks_far_from_the_gripper_and_pushed_ones_are_not_held() -> None:
    world = DoubtfulWorld()
    world.move((0, 0, 0), GRASP, REST)
    world.is_doubtful = True
    world.depth_m = 1.0
    assert not world.move(ASIDE * (1, 1, 0), GRASP, REST).held
    other = DoubtfulWorld()
    far = np.add(GRASP, (0, 0.5, 0))
    other.move((0, 0, 0), far, REST)
    other.is_doubtful = True
    other.depth_m = 1.0
    assert not other.move(UP, far, REST).held
    assert world.events == other.events == []
