"""Which object a robot picks next: what lies on what, flat places, grips, and what must not be picked."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as changed
from scipy.spatial.transform import Rotation

from sam3_node.geometry import rotation_from_quaternion
from sam3_node.perception.objects import ObjectStatus
from sam3_node.perception.picks.picking import PickLimits, Picks, PickScene, rank_picks
from sam3_node.resumable import run_to_end
from sam3_node.schema.operations import NextPick
from sam3_node.schema.replies import Pick
from sam3_node.settings import SpatialSettings
from sam3_node.types import Instance, Mask, Plane
from tests.support.box_scenes import EYE_M, SIZE, Block, Seen, draw_any_depth, see_boxes
from tests.support.measuring import Measuring
from tests.support.refuses import mentions
from tests.support.tables import each_row

CUBE = Block((0.0, 0.0, 0.03), (0.06, 0.06, 0.06))
PLATE = Block((0.0, 0.0, 0.02), (0.16, 0.12, 0.04))
ON_PLATE = Block((0.03, 0.0, 0.06), (0.05, 0.05, 0.04))


def ask(
    seen: Seen,
    instances: Sequence[Instance] | None = None,
    limits: PickLimits | None = None,
    label: str | None = None,
    age_ms: float | None = None,
    table: bool = True,
) -> Picks:
    """Return the picks of a frame whose instances are given, by default sure ones of all boxes."""
    measuring = Measuring(SpatialSettings(table=table), seen.camera)
    step = measuring.measure(seen.frame, seen.instances() if instances is None else instances, None)
    objects = [ObjectStatus(id=one.id, label=one.label) for one in step.instances]
    return run_to_end(rank_picks(PickScene.of(step), objects, limits or PickLimits(), label, age_ms))


def ids(picks: Picks) -> list[int]:
    return [pick.id for pick in picks.picks]


def only(picks: Picks) -> Pick:
    (pick,) = picks.picks
    return pick


def reason(picks: Picks, object_id: int = 1) -> str:
    (why,) = (one.reason for one in picks.refused if one.id == object_id)
    return why


def test_what_lies_on_another_comes_first_and_the_lower_one_is_refused() -> None:
    seen = see_boxes([PLATE, ON_PLATE], noise_m=0.001)
    picks = ask(seen)
    assert ids(picks) == [2]
    assert only(picks).free_above
    assert only(picks).height_m == pytest.approx(0.08, abs=0.004)
    assert mentions(reason(picks), "object 2")
    both = ask(seen, limits=PickLimits(covered=True))
    assert ids(both) == [2, 1]
    assert [pick.rank for pick in both.picks] == [1, 2]
    lower = both.picks[1]
    assert (lower.free_above, lower.under) == (False, (2,))
    assert mentions(lower.reason, "object 2")
    # the upper box hides about a sixth of the lower one
    assert 0.7 < lower.visible_share < 0.95


def test_free_objects_are_ranked_from_the_highest_and_a_label_chooses() -> None:
    low = Block((-0.12, 0.0, 0.015), (0.05, 0.05, 0.03))
    seen = see_boxes([low, CUBE], noise_m=0.001)
    picks = ask(seen)
    assert ids(picks) == [2, 1]
    assert mentions(picks.picks[1].reason, "object 2", "30 mm")
    assert ids(ask(seen, label="box 1")) == [1]
    assert ask(seen, label="mug") == picks._replace(picks=[], refused=[])


def test_a_taller_neighbour_apart_lies_on_nothing() -> None:
    tall = Block((0.10, 0.0, 0.05), (0.06, 0.06, 0.1))
    assert sorted(ids(ask(see_boxes([CUBE, tall], noise_m=0.001)))) == [1, 2]


def test_a_wall_beside_an_object_covers_nothing() -> None:
    # the wall's face is seen right beside the cube, and higher
    wall = Block((0.0, 0.034, 0.06), (0.4, 0.006, 0.12))
    seen = see_boxes([CUBE, wall], eye_m=np.array([0.0, -0.25, 0.5]), noise_m=0.001)
    assert ids(ask(seen, seen.instances()[:1])) == [1]


def test_a_thing_that_is_not_tracked_covers_what_is_under_it() -> None:
    seen = see_boxes([PLATE, ON_PLATE], noise_m=0.001)
    picks = ask(seen, seen.instances()[:1])
    assert ids(picks) == []
    assert mentions(reason(picks), "not tracked")


@each_row("tilt_deg", [0.0, 20.0, 35.0])
def test_the_suction_point_lies_on_the_surface_along_its_normal(tilt_deg: float) -> None:
    turn = Rotation.from_rotvec(np.radians([tilt_deg, 0, 0]))
    seen = see_boxes([Block((0.0, 0.0, 0.06), (0.1, 0.08, 0.04), turn)], noise_m=0.0015)
    suction = only(ask(seen)).suction
    assert suction is not None
    normal = turn.apply([0, 0, 1])
    off_m = (np.array(suction.position_m) - (0, 0, 0.06)) @ normal - 0.02
    assert abs(off_m) < 0.001
    assert np.degrees(np.arccos(min(1.0, normal @ suction.normal))) < 2
    ahead = rotation_from_quaternion(suction.quaternion_xyzw)[:, 2]
    assert -ahead == pytest.approx(suction.normal, abs=1e-4)
    # no larger than the distance from the middle to an edge, and away from it
    assert 0.02 < suction.radius_m <= 0.04


def test_a_bent_surface_has_smaller_discs_than_a_flat_one() -> None:
    # a roof of two faces at 140 degrees, as wide as a plate
    turns = [Rotation.from_rotvec(np.radians([angle, 0, 0])) for angle in (20, -20)]
    halves = [
        Block((0.0, side * -0.03, 0.03), (0.1, 0.07, 0.03), turn)
        for side, turn in zip((-1, 1), turns, strict=True)
    ]
    seen = see_boxes(halves)
    roof = Mask.from_full(seen.masks[0].full() | seen.masks[1].full())
    bent = only(ask(seen, [changed(seen.instances()[0], mask=roof)])).suction
    flat = only(ask(see_boxes([Block((0.0, 0.0, 0.03), (0.1, 0.14, 0.03))]))).suction
    assert bent is not None
    assert flat is not None
    assert bent.radius_m < 0.7 * flat.radius_m


@pytest.mark.parametrize("noise_m", [0.0, 0.002])
def test_the_grip_fits_a_box_at_each_yaw(noise_m: float) -> None:
    half = np.array([0.04, 0.025, 0.03])
    for yaw in np.linspace(0, np.pi / 2, 6, endpoint=False):
        turn = Rotation.from_rotvec([0, 0, yaw])
        box = Block((0.02, 0.0, 0.03), tuple((2 * half).tolist()), turn)
        pick = only(ask(see_boxes([box], eye_m=np.array([0.1, -0.3, 0.5]), noise_m=noise_m)))
        assert pick.grip is not None
        rotation = rotation_from_quaternion(pick.grip.quaternion_xyzw)
        # as much as the box needs between fingers that close along y
        needed_m = 2 * float(np.abs(turn.inv().apply(rotation[:, 1])) @ half)
        assert needed_m < 0.055
        assert needed_m - 0.006 < pick.grip.width_m < needed_m + 0.006
        assert pick.grip.position_m[:2] == pytest.approx(box.middle_m[:2], abs=0.004)
        assert pick.grip.position_m[2] == pytest.approx(0.04, abs=0.006)
        assert rotation[:, 2] == pytest.approx(pick.grip.approach, abs=1e-4)
        assert pick.grip.approach == pytest.approx((0, 0, -1), abs=0.02)


def test_a_gripper_needs_room_beside_the_object_and_an_opening_that_suffices() -> None:
    # another box stands 5 mm beside each of two sides of the cube, so only the other two are free
    beside = [Block((side * 0.055, 0.0, 0.03), (0.04, 0.06, 0.06)) for side in (-1, 1)]
    seen = see_boxes(
        [Block((0.0, 0.0, 0.03), (0.06, 0.07, 0.06)), *beside], eye_m=np.array([0.0, -0.02, 0.6])
    )
    grip = next(pick for pick in ask(seen).picks if pick.id == 1).grip
    assert grip is not None
    assert abs(rotation_from_quaternion(grip.quaternion_xyzw)[1, 1]) > 0.99
    assert grip.width_m == pytest.approx(0.07, abs=0.006)
    narrow = next(pick for pick in ask(seen, limits=PickLimits(opening_m=0.065)).picks if pick.id == 1)
    assert narrow.grip is None
    assert narrow.suction is not None
    neither = ask(seen, limits=PickLimits(opening_m=0.065, cup_radius_m=0.05))
    assert mentions(reason(neither), "50 mm", "fingers")


def test_nothing_is_picked_from_table_and_walls() -> None:
    wall = Block((0.0, 0.1, 0.06), (0.3, 0.006, 0.12))
    floor = Block((0.0, 0.0, 0.003), (0.3, 0.2, 0.006))
    seen = see_boxes([wall, floor], noise_m=0.0015)
    heights = seen.points_m[..., 2]
    where = {
        "table": heights < 1e-3,
        "floor": seen.masks[1].full(),
        "wall": seen.masks[0].full() & (heights > 0.03) & (heights < 0.09),
    }
    for name, inside in where.items():
        rows, columns = np.nonzero(inside)
        row, column = (round(float(np.median(one))) for one in (rows, columns))
        patch = np.zeros(SIZE, bool)
        patch[row - 25 : row + 25, column - 25 : column + 25] = True
        wrong = changed(seen.instances()[0], mask=Mask.from_full(patch & inside))
        picks = ask(seen, [wrong])
        assert ids(picks) == [], (name, picks)
        assert reason(picks)


@each_row(
    ("changes", "words"),
    [
        ({"doubtful": True, "confidence": 0.31}, ("confidence", "0.31")),
        ({"state": "occluded", "hidden_by": "robot", "mask": Mask.empty(SIZE)}, ("hidden", "robot")),
        ({"state": "tentative"}, ("tentative",)),
        ({"held": True}, ("holds",)),
    ],
)
def test_a_mask_that_is_not_sure_is_refused(changes: dict[str, Any], words: Sequence[str]) -> None:
    seen = see_boxes([CUBE])
    picks = ask(seen, [changed(seen.instances()[0], **changes)])
    assert ids(picks) == []
    assert mentions(reason(picks), *words)


def test_a_stale_mask_is_refused_and_a_fresh_one_is_not() -> None:
    seen = see_boxes([CUBE])
    picks = ask(seen, age_ms=812.4)
    assert ids(picks) == []
    assert mentions(reason(picks), "500 ms", "812")
    assert ids(ask(seen, age_ms=499)) == [1]
    assert ids(ask(seen, age_ms=812.4, limits=PickLimits(max_age_ms=1000))) == [1]


def test_an_object_without_an_instance_on_the_frame_is_refused() -> None:
    seen = see_boxes([CUBE])
    step = Measuring(SpatialSettings(table=True), seen.camera).measure(seen.frame, seen.instances(), None)
    objects = [ObjectStatus(id=1, label="box 1"), ObjectStatus(id=9, label="new")]
    picks = run_to_end(rank_picks(PickScene.of(step), objects, PickLimits()))
    assert ids(picks) == [1]
    assert mentions(reason(picks, 9), "no mask")


def test_depth_that_lacks_is_told() -> None:
    seen = see_boxes([CUBE])
    bare = seen._replace(frame=changed(seen.frame, depth=None))
    picks = ask(bare)
    assert (ids(picks), picks.frame, picks.up) == ([], None, None)
    assert mentions(reason(picks), "depth")
    assert seen.frame.depth is not None
    units = np.frombuffer(seen.frame.depth.data, "<u2").reshape(SIZE).copy()
    units[seen.masks[0].full() & (np.random.default_rng(0).random(SIZE) < 0.7)] = 0
    shiny = changed(seen.frame, depth=changed(seen.frame.depth, data=units.tobytes()))
    picks = ask(seen._replace(frame=shiny))
    assert ids(picks) == []
    assert mentions(reason(picks), "shiny", "transparent", "50%")


def test_reach_is_the_distance_from_the_base() -> None:
    seen = see_boxes([CUBE])
    pick = only(ask(seen))
    assert pick.distance_m == pytest.approx(0.06, abs=0.01)
    picks = ask(seen, limits=PickLimits(reach_m=0.03))
    assert ids(picks) == []
    assert mentions(reason(picks), "0.03", "0.06")


def test_without_a_table_up_is_towards_the_camera() -> None:
    seen = see_boxes([CUBE], eye_m=EYE_M, is_calibrated=False)
    picks = ask(seen)
    assert (picks.frame, picks.up) == ("camera", (0.0, 0.0, -1.0))
    pick = only(picks)
    assert (pick.height_m, pick.distance_m) == (None, None)
    assert pick.suction is not None
    assert pick.suction.normal[2] < -0.9
    based = ask(see_boxes([CUBE]), table=False)
    assert based.frame == "base"
    assert based.up == pytest.approx((0, -0.17, 0.98), abs=0.03)


def test_a_box_that_reaches_beyond_the_picture_has_no_grip() -> None:
    seen = see_boxes([Block((0.31, 0.0, 0.03), (0.1, 0.06, 0.06))])
    assert seen.masks[0].box[2] == SIZE[1]
    assert all(pick.grip is None for pick in ask(seen, limits=PickLimits(covered=True)).picks)


def test_an_empty_scene_has_no_picks() -> None:
    assert ask(see_boxes([]), []).picks == []
    picks = run_to_end(rank_picks(PickScene(), [ObjectStatus(id=1, label="box")], PickLimits()))
    assert (picks.picks, len(picks.refused)) == ([], 1)


def test_limits_come_from_the_request() -> None:
    assert PickLimits.of(NextPick()) == PickLimits()
    given = PickLimits.of(NextPick(cup_radius_m=0.02, reach_m=0.8, covered=True))
    assert given == PickLimits()._replace(cup_radius_m=0.02, reach_m=0.8, covered=True)


@pytest.mark.parametrize("seed", range(60))
def test_depths_and_masks_of_any_kind_have_an_answer(seed: int) -> None:
    """A camera may send depths of any scale, and masks may be thin, sparse or the whole picture."""
    random = np.random.default_rng(seed)
    depth = draw_any_depth(random, seed, noise_mm=3)
    size = depth.image.shape
    single = np.zeros(size, np.bool_)
    single[tuple(random.integers(0, size))] = True
    fulls = [single, np.ones(size, np.bool_), random.random(size) < 0.3]
    instances = [
        Instance(number, "thing", 0.9, "tracked", 3, 0, Mask.from_full(full), confidence=0.9)
        for number, full in enumerate(fulls, start=1)
        if full.any()
    ]
    table = Plane((0.0, 0.0, 1.0), float(random.normal(0, 0.5)), 0.001) if seed % 2 else None
    scene = PickScene(1, 0, instances, depth, None, table)
    objects = [ObjectStatus(one.id, "thing") for one in instances]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run_to_end(rank_picks(scene, objects, PickLimits(covered=True)))
    assert len(found.picks) + len(found.refused) == len(instances)
    for pick in found.picks:
        for place in (pick.suction, pick.grip):
            assert place is None or np.isfinite(place.position_m).all()
