"""Tests of transforms, projection and scaling, against known values and OpenCV."""

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sam3_node import geometry as g
from sam3_node.types import Intrinsics, Mask

PINHOLE = Intrinsics(500.0, 510.0, 320.0, 240.0)
LENSES = {
    "none": PINHOLE,
    "brown 5": Intrinsics(
        535.9, 530.0, 342.3, 235.6, "brown_conrady", (-0.266, -0.0386, 0.00178, -0.00028, 0.238)
    ),
    "brown 8": Intrinsics(
        600.0, 600.0, 319.5, 239.5, "brown_conrady", (0.1, -0.2, 0.001, 0.002, 0.05, 0.02, -0.01, 0.004)
    ),
    "fisheye": Intrinsics(280.0, 281.0, 320.0, 241.0, "fisheye", (0.05, -0.02, 0.01, -0.003)),
}
numbers = st.floats(-3, 3, allow_nan=False, width=32)
vectors = st.tuples(numbers, numbers, numbers)


def points_in_view(intrinsics: Intrinsics) -> np.ndarray:
    x, y = np.meshgrid(np.linspace(30, 610, 7), np.linspace(30, 450, 6))
    rays = np.dstack(
        [(x - intrinsics.cx) / intrinsics.fx, (y - intrinsics.cy) / intrinsics.fy, np.ones_like(x)]
    )
    return (0.7 * rays).reshape(-1, 3)


def test_a_quarter_turn_about_z_takes_x_to_y() -> None:
    rotation = g.rotation_from_vector([0, 0, np.pi / 2])
    np.testing.assert_allclose(rotation @ [1, 0, 0], [0, 1, 0], atol=1e-12)
    np.testing.assert_allclose(g.quaternion_from_rotation(rotation), [0, 0, np.sqrt(0.5), np.sqrt(0.5)])


def test_transforms_compose_from_left_to_right() -> None:
    base_from_gripper = g.rigid(g.rotation_from_vector([0, 0, np.pi / 2]), [1, 0, 0])
    gripper_from_camera = g.rigid(np.eye(3), [0, 0, 0.1])
    base_from_camera = base_from_gripper @ gripper_from_camera
    np.testing.assert_allclose(g.transform_points(base_from_camera, [1, 0, 0]), [1, 1, 0.1], atol=1e-12)
    np.testing.assert_allclose(g.transform_points(base_from_camera, np.zeros((2, 3))), [[1, 0, 0.1]] * 2)


@given(vectors, vectors, vectors)
def test_inverting_undoes_a_transform(vector: tuple, translation: tuple, point: tuple) -> None:
    transform = g.rigid(g.rotation_from_vector(vector), translation)
    there = g.transform_points(transform, point)
    np.testing.assert_allclose(g.transform_points(g.invert(transform), there), point, atol=1e-9)


@given(vectors)
def test_rotation_vectors_agree_with_opencv(vector: tuple) -> None:
    rotation = g.rotation_from_vector(vector)
    np.testing.assert_allclose(rotation, cv2.Rodrigues(np.array(vector))[0], atol=1e-7)
    np.testing.assert_allclose(g.rotation_from_vector(g.vector_from_rotation(rotation)), rotation, atol=1e-7)


@given(st.tuples(numbers, numbers, numbers, numbers).filter(lambda q: np.linalg.norm(q) > 1e-3))
def test_quaternions_round_trip_up_to_sign(quaternion: tuple) -> None:
    unit = np.array(quaternion) / np.linalg.norm(quaternion)
    result = g.quaternion_from_rotation(g.rotation_from_quaternion(quaternion))
    assert abs(result @ unit) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("axis", np.eye(3).tolist())
def test_half_turns_keep_their_axis(axis: list[float]) -> None:
    rotation = g.rotation_from_vector(np.pi * np.array(axis))
    np.testing.assert_allclose(np.abs(g.vector_from_rotation(rotation)), np.pi * np.array(axis), atol=1e-7)
    np.testing.assert_array_equal(g.vector_from_rotation(np.eye(3)), np.zeros(3))


def test_projection_of_known_points() -> None:
    pixels = g.project([[0, 0, 2], [0.2, -0.1, 1]], PINHOLE)
    np.testing.assert_allclose(pixels, [[320, 240], [420, 189]])


def test_points_behind_the_camera_have_no_pixel() -> None:
    pixels = g.project([[0, 0, -1], [0, 0, 0], [0, 0, 1]], LENSES["brown 5"])
    assert np.isnan(pixels[:2]).all()
    np.testing.assert_allclose(pixels[2], [342.3, 235.6])


@pytest.mark.parametrize("name", LENSES)
def test_projection_agrees_with_opencv(name: str) -> None:
    lens = LENSES[name]
    zero = np.zeros(3)
    points = points_in_view(lens)
    camera = cv2.fisheye if lens.model == "fisheye" else cv2
    coeffs = np.array(lens.coeffs or (0.0,) * 5)
    expected = camera.projectPoints(points[:, None], zero, zero, g.camera_matrix(lens), coeffs)[0]
    np.testing.assert_allclose(g.project(points, lens), expected.reshape(-1, 2), atol=1e-6)


@pytest.mark.parametrize("name", LENSES)
def test_deprojection_undoes_projection(name: str) -> None:
    points = points_in_view(LENSES[name])
    pixels = g.project(points, LENSES[name])
    np.testing.assert_allclose(g.deproject(pixels, points[:, 2], LENSES[name]), points, atol=1e-6)
    np.testing.assert_allclose(g.deproject(pixels[0], 0.7, LENSES[name]), points[:1], atol=1e-6)


@pytest.mark.parametrize("name", LENSES)
def test_no_points_are_no_pixels(name: str) -> None:
    assert g.project(np.zeros((0, 3)), LENSES[name]).shape == (0, 2)
    assert g.deproject(np.zeros((0, 2)), 1.0, LENSES[name]).shape == (0, 3)


@pytest.mark.parametrize("name", LENSES)
def test_scaled_intrinsics_follow_the_resized_image(name: str) -> None:
    """Pixel corners keep their position in the picture: 0.5 + x scales by the ratio of the sides."""
    lens = LENSES[name]
    points = points_in_view(lens)
    small = g.scale_intrinsics(lens, (480, 640), (240, 960))
    expected = (g.project(points, lens) + 0.5) * (1.5, 0.5) - 0.5
    np.testing.assert_allclose(g.project(points, small), expected, atol=1e-6)


def test_scaling_stretches_the_frame_to_the_model() -> None:
    scaling = g.Scaling((480, 640), 240)
    np.testing.assert_allclose(scaling.to_model([[640, 480], [320, 0]]), [[240, 240], [120, 0]])
    np.testing.assert_allclose(scaling.to_model([64, 48, 128, 96]), [24, 24, 48, 48])
    np.testing.assert_allclose(scaling.to_frame([24, 24, 48, 48]), [64, 48, 128, 96])


@given(
    st.tuples(st.integers(1, 4000), st.integers(1, 4000)), st.integers(14, 1008), vectors, st.integers(1, 2)
)
def test_scaling_round_trips(size: tuple[int, int], side: int, values: tuple, pairs: int) -> None:
    pixels = np.resize(values, (3, 2 * pairs)) * 100
    scaling = g.Scaling(size, side)
    np.testing.assert_allclose(scaling.to_frame(scaling.to_model(pixels)), pixels, atol=1e-6)


def test_no_points_scale_to_none() -> None:
    assert g.Scaling((480, 640), 252).to_model(np.zeros((0, 2))).shape == (0, 2)


def test_overlaps_of_masks_are_those_of_whole_images() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        fulls = [np.zeros((30, 40), np.bool_) for _ in range(2)]
        for full in fulls:
            y, x = rng.integers(0, 20, 2)
            full[y : y + 10, x : x + 10] = rng.random((10, 10)) > 0.5
        a, b = map(Mask.from_full, fulls)
        shared = np.count_nonzero(fulls[0] & fulls[1])
        assert g.mask_intersection(a, b) == shared
        assert g.mask_iou(a, b) == shared / np.count_nonzero(fulls[0] | fulls[1])


def test_empty_masks_have_no_overlap() -> None:
    empty = Mask.empty((30, 40))
    assert g.mask_iou(empty, empty) == 0
    assert g.mask_iou(empty, Mask.from_full(np.ones((30, 40), np.bool_))) == 0


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        # a driver wraps at half a turn, or at a whole one; each result lies beside the nearer of both
        (3.1, -3.1, [3.1, 3.1207963, 3.1415927, -3.1207963, -3.1]),
        (-3.1, 3.1, [-3.1, -3.1207963, -3.1415927, 3.1207963, 3.1]),
        (6.2, 0.1, [6.2, 6.2457963, 6.2915927, 0.0542037, 0.1]),
        # no wrap: a joint, a driver that counts turns, and a number that is no angle
        (0.2, 1.2, [0.2, 0.45, 0.7, 0.95, 1.2]),
        (9.0, 9.4, [9.0, 9.1, 9.2, 9.3, 9.4]),
        (0.0, 100.0, [0.0, 25.0, 50.0, 75.0, 100.0]),
    ],
)
def test_joints_go_the_short_way(first: float, second: float, expected: list[float]) -> None:
    shares = np.linspace(0, 1, 5)
    found = g.interpolate_joints(np.full(5, first), np.full(5, second), shares)
    assert found == pytest.approx(expected, abs=1e-6)
