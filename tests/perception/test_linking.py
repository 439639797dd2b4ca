"""Identity across cameras on synthetic scenes: who is linked, who is not, and how stable the links are."""

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from sam3_node.perception.linking import CameraObject, LinkRules, WorldLinker
from sam3_node.types import Instance, Mask, MaskFrame
from tests.support.repeats import repetitions
from tests.support.saving import reload

Point = tuple[float, float, float]
MS = 1_000_000
MASK = Mask.from_full(np.ones((2, 2), np.bool_))
RULES = LinkRules(max_distance_m=0.05)
SIZE = (0.1, 0.1, 0.1)


def thing(
    object_id: int,
    position_m: Point | None = (0.0, 0.0, 0.0),
    label: str = "mug",
    extent_m: Point | None = SIZE,
    **changes: object,
) -> Instance:
    fields = {"frame": "base", **changes}
    state = fields.pop("state", "tracked")
    return Instance(
        object_id, label, 1.0, state, 9, 0, MASK, position_m=position_m, extent_m=extent_m, **fields
    )  # type: ignore[arg-type]


def frame(camera: str, time_ms: float, instances: Iterable[Instance]) -> MaskFrame:
    return MaskFrame(camera, int(time_ms), int(time_ms * MS), 2, 2, instances=tuple(instances))


def world_ids(masks: MaskFrame) -> list[int | None]:
    return [instance.world_id for instance in masks.instances]


class Scene:
    """Cameras that take turns, 30 ms apart."""

    def __init__(self, rules: LinkRules = RULES) -> None:
        self.linker = WorldLinker(rules)
        self.time_ms = 0.0

    def turn(self, **cameras: Sequence[Instance]) -> dict[str, list[int | None]]:
        """Observe one frame of each camera. Return the world ids of each."""
        found = {}
        for camera, instances in cameras.items():
            self.time_ms += 30
            found[camera] = world_ids(self.linker.observe(frame(camera, self.time_ms, instances)))
        return found

    def turns(self, count: int, **cameras: Sequence[Instance]) -> dict[str, list[int | None]]:
        """Observe several equal turns. Return the world ids of the last."""
        return [self.turn(**cameras) for _ in range(count)][-1]


def test_near_objects_of_equal_label_and_size_become_one() -> None:
    scene = Scene()
    left = [thing(5)]
    right = [thing(9, (0.03, 0.0, 0.0), extent_m=(0.1, 0.05, 0.1))]
    assert scene.turn(left=left, right=right) == {"left": [1], "right": [2]}
    assert scene.turns(4, left=left, right=right) == {"left": [1], "right": [1]}


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(thing(9, label="bottle"), id="another label"),
        pytest.param(thing(9, (0.06, 0.0, 0.0)), id="too far"),
        pytest.param(thing(9, extent_m=(0.5, 0.1, 0.1)), id="another size"),
    ],
)
def test_objects_that_differ_stay_two(other: Instance) -> None:
    assert Scene().turns(20, left=[thing(5)], right=[other]) == {"left": [1], "right": [2]}


@pytest.mark.parametrize(
    "silent",
    [
        pytest.param(thing(9, None, extent_m=None), id="no position"),
        pytest.param(thing(9, frame="camera"), id="a position in the camera's frame"),
        pytest.param(thing(9, frame=None), id="a position in no frame"),
        pytest.param(thing(9, doubtful=True), id="a doubtful mask"),
        pytest.param(thing(9, state="occluded"), id="not in view"),
        pytest.param(thing(9, state="tentative"), id="not confirmed"),
    ],
)
def test_an_object_without_a_sure_position_in_base_has_no_id(silent: Instance) -> None:
    assert Scene().turns(20, left=[thing(5)], right=[silent]) == {"left": [1], "right": [None]}


def test_unknown_sizes_do_not_hinder_a_link() -> None:
    found = Scene().turns(5, left=[thing(5, extent_m=None)], right=[thing(9)])
    assert found == {"left": [1], "right": [1]}


def test_objects_of_one_camera_are_never_one() -> None:
    twins = [thing(1), thing(2)]
    assert Scene().turns(20, left=twins) == {"left": [1, 2]}
    found = Scene().turns(20, left=twins, right=[thing(3)])
    assert len(set(found["left"])) == 2
    assert found["right"][0] in found["left"]


def test_a_link_needs_several_observations_in_a_row() -> None:
    scene = Scene()
    near = [thing(9)]
    far = [thing(9, (0.2, 0.0, 0.0))]
    for _ in range(10):
        assert scene.turn(left=[thing(5)], right=far) == {"left": [1], "right": [2]}
        assert scene.turn(left=[thing(5)], right=near) == {"left": [1], "right": [2]}


def test_positions_of_different_times_are_not_compared() -> None:
    linker = WorldLinker(RULES)
    for turn in range(20):
        left = linker.observe(frame("left", turn * 2000, [thing(5)]))
        right = linker.observe(frame("right", turn * 2000 + 1000, [thing(9)]))
    assert world_ids(left) != world_ids(right)


def test_neighbours_are_told_apart_by_the_smallest_sum_of_distances() -> None:
    # both of each camera are within reach of both of the other
    left = [thing(1, (0.00, 0.0, 0.0)), thing(2, (0.03, 0.0, 0.0))]
    right = [thing(1, (0.035, 0.0, 0.0)), thing(2, (0.005, 0.0, 0.0))]
    found = Scene().turns(10, left=left, right=right)
    assert found["left"] == found["right"][::-1]


def test_a_good_pair_is_not_given_up_for_two_bad_ones() -> None:
    # a and b are at the same place; c and d are at the edge of the reach of the other one
    left = [thing(1, (0.0, 0.0, 0.0)), thing(2, (0.049, 0.0, 0.0))]
    right = [thing(1, (0.0, 0.0, 0.0)), thing(2, (-0.049, 0.0, 0.0))]
    found = Scene().turns(10, left=left, right=right)
    assert found["left"][0] == found["right"][0]
    assert found["left"][1] != found["right"][1]


def test_four_cameras_agree_on_one_id() -> None:
    cameras = {name: [thing(n + 1, (0.01 * n, 0.0, 0.0))] for n, name in enumerate("abcd")}
    assert Scene().turns(10, **cameras) == {name: [1] for name in "abcd"}


def test_a_hidden_object_keeps_its_id_and_a_removed_one_loses_it() -> None:
    scene = Scene()
    scene.turns(5, left=[thing(5)], right=[thing(9)])
    hidden = [thing(9, None, extent_m=None, state="occluded")]
    assert scene.turns(50, left=[thing(5, (1.0, 0.0, 0.0))], right=hidden)["right"] == [1]
    scene.turn(left=[thing(5)], right=[])
    # the same thing, found again by the right camera: linked through the left one
    assert scene.turns(5, left=[thing(5)], right=[thing(10)]) == {"left": [1], "right": [1]}


def test_ids_are_never_given_again() -> None:
    scene = Scene()
    assert scene.turn(left=[thing(1)])["left"] == [1]
    scene.turn(left=[])
    assert scene.turn(left=[thing(2)])["left"] == [2]
    scene.linker.drop("left")
    assert scene.turn(left=[thing(1)])["left"] == [3]
    assert list(scene.linker._ids.items()) == [(("left", 1), 3)], "the object that left is forgotten"


def test_a_short_contradiction_changes_nothing_and_a_long_one_ends_the_link() -> None:
    scene = Scene()
    scene.turns(5, left=[thing(5)], right=[thing(9)])
    moved = [thing(9, (0.3, 0.0, 0.0))]
    for _ in range(10):
        assert scene.turns(RULES.contradictions - 2, left=[thing(5)], right=moved)["right"] == [1]
        assert scene.turn(left=[thing(5)], right=[thing(9)])["right"] == [1]
    found = scene.turns(10, left=[thing(5)], right=moved)
    assert found["left"] != found["right"]
    assert scene.turns(10, left=[thing(5)], right=[thing(9)]) == {"left": [1], "right": [1]}


def test_a_link_bears_more_noise_than_its_beginning() -> None:
    scene = Scene()
    scene.turns(5, left=[thing(5)], right=[thing(9)])
    assert scene.turns(50, left=[thing(5)], right=[thing(9, (0.09, 0.0, 0.0))])["right"] == [1]


def test_a_link_holds_while_a_thing_moves_fast() -> None:
    # a thing at 1.5 m/s; the cameras are 100 ms apart, so they see it at places that differ by 15 cm
    linker = WorldLinker(RULES)

    def turn(time_ms: float, speed_m_s: float) -> tuple[list[int | None], list[int | None]]:
        left, right = (
            world_ids(linker.observe(frame(camera, at_ms, [thing(1, (speed_m_s * at_ms / 1000, 0.0, 0.0))])))
            for camera, at_ms in (("left", time_ms), ("right", time_ms + 100))
        )
        return left, right

    assert [turn(time_ms, 0.0) for time_ms in range(0, 2000, 200)][-1] == ([1], [1])
    assert [turn(time_ms, 1.5) for time_ms in range(2000, 6000, 200)][-1] == ([1], [1])


def test_of_three_cameras_the_one_that_disagrees_leaves() -> None:
    scene = Scene()
    scene.turns(10, a=[thing(1)], b=[thing(1)], c=[thing(1)])
    found = scene.turns(10, a=[thing(1)], b=[thing(1)], c=[thing(1, (0.5, 0.0, 0.0))])
    assert found["a"] == found["b"] == [1]
    assert found["c"] not in ([1], [None])


def make_random_scene(seed: int, turns: int, noise_m: float) -> list[tuple[MaskFrame, list[int]]]:
    """Return frames of three cameras on eight things that move, each frame with the true things of its instances.

    Objects are lost and found again with new ids; positions have noise; half of the things have the same label.
    """
    random = np.random.default_rng(seed)
    # at least three times the reach apart, so that the truth can be known
    places = 0.2 * np.array(list(itertools.product(range(4), range(2), [0])), float)
    drift = random.normal(0, 0.01, (8, 3))
    labels = ["mug" if n % 2 else f"thing {n}" for n in range(8)]
    ids: dict[str, dict[int, int]] = {camera: {} for camera in "abc"}
    counters = {camera: itertools.count(1) for camera in "abc"}
    frames = []
    for turn in range(turns):
        for index, camera in enumerate("abc"):
            time_ms = 40 * turn + 13 * index
            seen = ids[camera]
            for n in range(8):
                if n not in seen and random.random() < 0.3:
                    seen[n] = next(counters[camera])
                elif n in seen and random.random() < 0.005:
                    del seen[n]
            moved = places + drift * math.sin(time_ms / 2000)
            positions = moved + random.normal(0, noise_m, moved.shape)
            instances = [
                thing(
                    object_id, tuple(positions[n].tolist()), labels[n], tuple(random.uniform(0.07, 0.13, 3))
                )
                for n, object_id in seen.items()
            ]
            frames.append((frame(camera, time_ms, instances), list(seen)))
    return frames


@pytest.mark.parametrize("seed", range(repetitions(3, 20)))
def test_things_of_a_random_scene_are_never_mixed_up(seed: int) -> None:
    frames = make_random_scene(seed, turns=150, noise_m=0.008)
    linker = WorldLinker(RULES)
    owners = {}
    agreeing = 0
    pairs = 0
    latest: dict[tuple[str, int], int | None] = {}
    for masks, truth in frames:
        for world_id, n in zip(world_ids(linker.observe(masks)), truth, strict=True):
            assert owners.setdefault(world_id, n) == n, "one id for two things"
            latest[masks.camera, n] = world_id
        for n in truth:
            others = [
                latest[camera, n] for camera in "abc" if camera != masks.camera and (camera, n) in latest
            ]
            pairs += len(others)
            agreeing += sum(latest[masks.camera, n] == other for other in others)
    assert agreeing > 0.9 * pairs


def test_a_restored_linker_goes_on_as_the_first() -> None:
    frames = [masks for masks, _ in make_random_scene(seed=7, turns=60, noise_m=0.02)]
    linker = WorldLinker(RULES)
    whole = [world_ids(linker.observe(masks)) for masks in frames]
    for cut in (1, 50, 100, 150):
        first = WorldLinker(RULES)
        second = WorldLinker(RULES)
        for masks in frames[:cut]:
            first.observe(masks)
        second.restore(reload(first.state()))
        assert [world_ids(second.observe(masks)) for masks in frames[cut:]] == whole[cut:]
        assert second.state() == linker.state()


def test_nothing_else_of_the_masks_changes() -> None:
    masks = frame("left", 1, [thing(5), thing(6, None)])
    found = WorldLinker(RULES).observe(masks)
    assert found.key == masks.key
    assert [instance.id for instance in found.instances] == [5, 6]
    assert all(instance.mask is MASK for instance in found.instances)


def test_an_object_that_is_back_has_its_world_id() -> None:
    scene = Scene()
    assert scene.turns(2, left=[thing(5), thing(6, (1.0, 0.0, 0.0))])["left"] == [1, 2]
    scene.turns(3, left=[thing(6, (1.0, 0.0, 0.0))])
    restored = WorldLinker(RULES)
    restored.restore(reload(scene.linker.state()))
    for linker in (scene.linker, restored):
        back = linker.observe(frame("left", 900, [thing(5, (0.4, 0.0, 0.0)), thing(6, (1.0, 0.0, 0.0))]))
        assert world_ids(back) == [1, 2]


def test_a_camera_that_is_served_anew_gives_its_objects_new_world_ids() -> None:
    scene = Scene()
    scene.turn(left=[thing(5)])
    scene.turn(left=[])
    scene.linker.drop("left")
    assert scene.turn(left=[thing(5)])["left"] == [2]


def test_an_object_joined_by_its_looks_has_the_world_id_until_its_place_contradicts() -> None:
    scene = Scene()
    scene.turn(left=[thing(5)])
    scene.linker.join(CameraObject("left", 5), CameraObject("right", 9))
    near = [thing(9, (0.02, 0.0, 0.0))]
    far = [thing(9, (0.5, 0.0, 0.0))]
    assert scene.turn(left=[thing(5)], right=near) == {"left": [1], "right": [1]}
    assert scene.turns(RULES.contradictions + 1, left=[thing(5)], right=far) == {"left": [1], "right": [2]}
    # what is not known has nothing to join
    scene.linker.join(CameraObject("left", 77), CameraObject("right", 78))
    assert scene.turn(right=[thing(78, (0.5, 0.5, 0.0))])["right"] == [3]
