"""Positions, extents and nearest points of surfaces whose truth is known."""

import numpy as np
import numpy.typing as npt
import pytest

from sam3_node.geometry import DepthMap, RayMap
from sam3_node.perception.surfaces import Surfaces, measure_surfaces
from sam3_node.types import Intrinsics, Mask

SIZE = (480, 640)
CAMERA = Intrinsics(600.0, 600.0, 319.5, 239.5)
RAYS = RayMap().rays(CAMERA, SIZE)
ROWS, COLUMNS = np.indices(SIZE)
TABLE_M = 1.2
Bools = npt.NDArray[np.bool_]


def box(x0: int, y0: int, x1: int, y1: int) -> Bools:
    return (x0 <= COLUMNS) & (x1 > COLUMNS) & (y0 <= ROWS) & (y1 > ROWS)


def scene(inside: Bools, depth_m: float | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.where(inside, depth_m, TABLE_M)


def truth(inside: Bools, depth_m: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    z = depth_m[inside]
    return np.append(RAYS[:, inside] * z, z[None], axis=0).mean(axis=1)


def measure(depth_m: npt.NDArray[np.float64], *masks: Bools) -> Surfaces:
    depth = np.round(depth_m * 1000).astype(np.uint16)
    return measure_surfaces([Mask.from_full(mask) for mask in masks], DepthMap(depth, 0.001, RAYS, 600.0))


def find(inside: Bools, depth_m: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    surfaces = measure(depth_m, inside)
    assert surfaces.indices == [0]
    return surfaces.positions_m[0]


def test_a_plate_has_its_position_extent_and_nearest_point() -> None:
    inside = box(200, 150, 320, 210)
    depth = scene(inside, 0.9)
    surfaces = measure(depth, inside)
    assert surfaces.shares == [1.0]
    position = surfaces.positions_m[0]
    assert np.linalg.norm(position - truth(inside, depth)) < 0.001
    assert surfaces.extents_m[0] == pytest.approx((0.18, 0.09, 0.0), abs=0.006)
    assert np.linalg.norm(surfaces.centres_m[0] - position) < 0.003
    assert abs(surfaces.axes[0, 0, 0]) > 0.999
    assert np.linalg.det(surfaces.axes[0]) == pytest.approx(1.0)
    assert surfaces.nearest_m[0, 2] == pytest.approx(0.9)
    assert np.all(np.linalg.eigvalsh(surfaces.covariances_m2[0]) > 0)


@pytest.mark.parametrize("leak_m", [TABLE_M, 0.6], ids=["table behind", "neighbour in front"])
def test_a_mask_that_leaks_is_not_dragged(leak_m: float) -> None:
    inside = box(200, 150, 320, 210)
    depth = scene(inside, 0.9)
    depth[box(320, 150, 350, 210)] = leak_m
    leaky = box(200, 150, 350, 210)
    position = find(leaky, depth)
    assert np.linalg.norm(position - truth(inside, depth)) < 0.006
    naive = truth(leaky, depth)
    assert np.linalg.norm(naive - truth(inside, depth)) > 0.03


def test_flying_pixels_at_the_rim_are_ignored() -> None:
    inside = box(200, 150, 260, 210)
    depth = scene(inside, 0.9)
    rim = inside & ~box(202, 152, 258, 208)
    exact = truth(inside, depth)
    depth[rim] = 1.05
    surfaces = measure(depth, inside)
    assert np.linalg.norm(surfaces.positions_m[0] - exact) < 0.001
    assert surfaces.points_m[0][:, 2].max() < 0.91


def test_the_inner_wall_of_a_vessel_belongs_to_it() -> None:
    inside = box(200, 150, 320, 250)
    depth = scene(inside, 0.9)
    depth[box(200, 150, 320, 190)] = 0.96
    assert np.linalg.norm(find(inside, depth) - truth(inside, depth)) < 0.002


def test_a_thin_object_keeps_its_few_pixels() -> None:
    inside = box(200, 150, 203, 350)
    depth = scene(inside, 0.9)
    assert np.linalg.norm(find(inside, depth) - truth(inside, depth)) < 0.001


def test_missing_depth_gives_a_share_and_no_surface() -> None:
    inside = box(200, 150, 260, 210)
    depth = scene(inside, 0.9)
    depth[inside] = 0
    surfaces = measure(depth, inside)
    assert (surfaces.shares, surfaces.indices, surfaces.positions_m.shape) == ([0.0], [], (0, 3))
    depth[box(200, 150, 230, 210)] = 0.9
    surfaces = measure(depth, box(235, 150, 260, 210), inside, box(0, 0, 1, 1))
    assert surfaces.indices == [1]
    assert surfaces.shares[1] == pytest.approx(0.5, abs=0.05)


def test_surfaces_do_not_depend_on_the_masks_beside_them() -> None:
    random = np.random.default_rng(1)
    masks = [box(200, 150, 320, 250), box(5, 5, 8, 400), box(310, 150, 420, 210), box(0, 0, 2, 2)]
    depth = random.choice([0.0, 0.9, 0.905, 0.96, TABLE_M], SIZE, p=[0.2, 0.3, 0.3, 0.1, 0.1])
    together = measure(depth, *masks)
    assert together.indices == [0, 1, 2]
    names = "positions_m", "centres_m", "nearest_m", "extents_m", "axes", "covariances_m2", "points_m"
    for index in together.indices:
        alone = measure(depth, masks[index])
        for name in names:
            assert np.array_equal(getattr(alone, name)[0], getattr(together, name)[index]), name


def test_hostile_depths_raise_nothing() -> None:
    random = np.random.default_rng(0)
    for inside in (box(0, 0, 640, 480), box(5, 5, 7, 400), box(3, 3, 6, 6)):
        measure(random.uniform(0, 65.5, SIZE), inside, ~inside)
        measure(random.choice([0.0, 0.001, 65.535], SIZE), inside, ~inside)


def test_a_scale_that_makes_kilometres_mixes_no_masks() -> None:
    depth = np.full(SIZE, 60_000, np.uint16)
    depth[:, 320:] = 50_000
    masks = [Mask.from_full(box(10, 10, 60, 60)), Mask.from_full(box(400, 10, 450, 60))]
    found = measure_surfaces(masks, DepthMap(depth, 1.0, RAYS, 600.0))
    assert found.positions_m[:, 2] == pytest.approx([60_000, 50_000])


def test_rays_follow_the_lens() -> None:
    lens = Intrinsics(600.0, 610.0, 320.0, 240.0, "brown_conrady", (0.1, -0.05, 0.001, 0.0, 0.0))
    rays = RayMap()
    first = rays.rays(lens, (48, 64))
    assert first.shape == (2, 48, 64)
    assert rays.rays(lens, (48, 64)) is first
    assert rays.rays(CAMERA, (48, 64)) is not first
