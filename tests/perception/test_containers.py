"""The inside of a bin and its fill, from the depth of one frame, and the planning scene around it."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as changed
from scipy.spatial.transform import Rotation

from sam3_node.geometry import rotation_from_quaternion
from sam3_node.perception.picks.picking import PickScene
from sam3_node.perception.picks.scene import describe_container, list_boxes
from sam3_node.schema.replies import Container
from sam3_node.settings import SpatialSettings
from sam3_node.types import FramePose, Plane
from tests.support.box_scenes import Block, Seen, draw_any_depth, see_boxes
from tests.support.measuring import Measuring

INSIDE_M = (0.30, 0.20, 0.10)
WALL_M = 0.008
EYE_M = np.array([0.02, -0.08, 0.75])
MIDDLE_M = np.array([0.03, 0.02])


def make_bin(yaw_deg: float = 20.0) -> list[Block]:
    """Return the walls of a bin that stands on the table, which is its floor."""
    turn = Rotation.from_rotvec([0, 0, np.radians(yaw_deg)])
    length, width, depth = INSIDE_M
    walls = []
    for side in (-0.5, 0.5):
        walls.append(((side * (length + WALL_M), 0.0), (WALL_M, width + 2 * WALL_M, depth)))
        walls.append(((0.0, side * (width + WALL_M)), (length, WALL_M, depth)))
    return [
        Block((*(turn.apply([*at, 0.0])[:2] + MIDDLE_M).tolist(), depth / 2), sides, turn)
        for at, sides in walls
    ]


def see(boxes: Sequence[Block], noise_m: float = 0.001) -> tuple[Seen, PickScene]:
    """Return a frame of boxes, and the scene of its last step with sure instances of all of them."""
    seen = see_boxes(boxes, eye_m=EYE_M, gaze_m=(*MIDDLE_M, 0.03), noise_m=noise_m)
    step = Measuring(SpatialSettings(table=True), seen.camera).measure(seen.frame, seen.instances(), None)
    return seen, PickScene.of(step)


def find(boxes: Sequence[Block], given: Sequence[float] = (), **options: Any) -> Container | None:
    return describe_container(see(boxes, **options)[1], given)


@pytest.mark.parametrize(("yaw_deg", "noise_m"), [(0.0, 0.0), (20.0, 0.001), (70.0, 0.002)])
def test_an_empty_bin_has_its_inside_and_no_fill(yaw_deg: float, noise_m: float) -> None:
    found = find(make_bin(yaw_deg), noise_m=noise_m)
    assert found is not None
    assert found.inside_m == pytest.approx(INSIDE_M, abs=0.012)
    assert found.position_m == pytest.approx((*MIDDLE_M, 0.0), abs=0.006)
    rotation = rotation_from_quaternion(found.quaternion_xyzw)
    ahead = Rotation.from_rotvec([0, 0, np.radians(yaw_deg)]).apply([1, 0, 0])
    assert abs(rotation[:, 0] @ ahead) > np.cos(np.radians(3))
    assert rotation[2, 2] == pytest.approx(1, abs=0.01)
    assert found.fill is not None
    assert found.fill < 0.06


def test_things_inside_fill_it_and_do_not_change_it() -> None:
    turn = Rotation.from_rotvec([0, 0, np.radians(20)])
    length, width, depth = INSIDE_M
    # half of the floor is covered to half of the depth, from wall to wall
    offset = turn.apply([length / 4, 0, 0])[:2] + MIDDLE_M
    heap = Block((*offset.tolist(), depth / 4), (length / 2, width, depth / 2), turn)
    # and a bottle stands out of it
    bottle = Block((*(MIDDLE_M - offset + MIDDLE_M).tolist(), 0.08), (0.03, 0.03, 0.16))
    filled = find([*make_bin(), heap])
    both = find([*make_bin(), heap, bottle])
    for found in (filled, both):
        assert found is not None
        assert found.inside_m == pytest.approx(INSIDE_M, abs=0.012)
    assert filled is not None
    assert filled.fill == pytest.approx(0.25, abs=0.05)


def test_a_table_without_a_rim_has_no_container() -> None:
    length, width, depth = INSIDE_M
    block = Block((*MIDDLE_M.tolist(), depth / 2), (length, width, depth))
    # a block has no inside, and three walls enclose nothing
    assert find([block]) is None
    assert find(make_bin()[:3]) is None


def test_a_container_that_is_given_is_filled_by_what_is_seen() -> None:
    length, width, depth = INSIDE_M
    block = Block((*MIDDLE_M.tolist(), depth / 4), (length, width, depth / 2))
    given = (*MIDDLE_M.tolist(), 0.0, 90.0, width, length, depth)
    found = find([block], given)
    assert found is not None
    assert found.inside_m == (width, length, depth)
    assert found.position_m[:2] == pytest.approx(tuple(MIDDLE_M))
    assert found.fill == pytest.approx(0.5, abs=0.05)
    # it is there as well where no camera sees it
    blind = describe_container(PickScene(), given)
    assert blind is not None
    assert (blind.inside_m, blind.fill) == ((width, length, depth), None)
    assert describe_container(PickScene(), ()) is None


def test_boxes_of_the_scene_are_those_of_sure_objects_that_nobody_holds() -> None:
    seen = see_boxes([Block((x, 0.0, 0.03), (0.06, 0.06, 0.06)) for x in (-0.15, 0.0, 0.15)])
    sure, doubtful, held = seen.instances()
    instances = [sure, changed(doubtful, doubtful=True), changed(held, held=True)]
    step = Measuring(SpatialSettings(table=True), seen.camera).measure(seen.frame, instances, None)
    kept = [changed(one, held=one.id == held.id) for one in step.instances]
    scene = PickScene(instances=kept)
    (box,) = list_boxes(scene)
    assert (box.id, box.label) == (sure.id, sure.label)
    assert box.centre_m == pytest.approx((-0.15, 0.0, 0.03), abs=0.004)
    assert box.size_m == pytest.approx((0.06, 0.06, 0.06), abs=0.008)


@pytest.mark.parametrize("seed", range(40))
def test_depths_of_any_kind_have_an_answer(seed: int) -> None:
    """A camera may send depths of any scale, and stand anywhere."""
    random = np.random.default_rng(seed)
    depth = draw_any_depth(random, seed, noise_mm=30)
    pose = FramePose("camera", "base", 0, (0.1, 0.2, 0.9), (1.0, 0.0, 0.0, 0.0))
    table = Plane((0.0, 0.0, 1.0), float(random.normal(0, 0.5)), 0.001)
    scene = PickScene(1, 0, (), depth, pose, table)
    for given in ((), (0.1, 0.2, 0.0, 30.0, 0.3, 0.2, 1e-4), (0.0, 0.0, 0.0, 0.0, 1e-6, 1e6, 1e6)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = describe_container(scene, given)
        if given:
            assert found is not None
        if found is not None:
            assert np.isfinite([*found.position_m, *found.inside_m, *found.quaternion_xyzw]).all()
            assert min(found.inside_m) > 0 or given
