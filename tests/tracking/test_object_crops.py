"""Object crops: their geometry, and the motion that moves them."""

import cv2
import numpy as np
import numpy.typing as npt
import pytest

from sam3_node.tracking.object_crops import MAX_WIDTH, WIDTH, CropRegion, Followed, Motion, measure_motion

SIZE = (120, 160)


def texture(seed: int = 0) -> npt.NDArray[np.uint8]:
    """Smooth noise, grey."""
    coarse = np.random.default_rng(seed).integers(0, 255, (24, 32), np.uint8)
    return np.asarray(cv2.resize(coarse, SIZE[::-1], interpolation=cv2.INTER_CUBIC), np.uint8)


def block(x0: int, y0: int, x1: int, y1: int) -> npt.NDArray[np.bool_]:
    """A mask [h, w] of a rectangle."""
    mask = np.zeros(SIZE, np.bool_)
    mask[y0:y1, x0:x1] = True
    return mask


def similarity(scale: float, x: float, y: float) -> npt.NDArray[np.float64]:
    """Scale about the middle, then shift."""
    centre = np.array([80.0, 60.0])
    return np.column_stack([scale * np.eye(2), (1 - scale) * centre + (x, y)])


@pytest.mark.parametrize(("scale", "x", "y"), [(1.0, 5.0, -3.0), (1.08, 0.0, 0.0), (0.93, -2.0, 4.0)])
def test_motion_of_pixels_is_found(scale: float, x: float, y: float) -> None:
    before = texture()
    true = similarity(scale, x, y)
    now = np.asarray(cv2.warpAffine(before, true, SIZE[::-1], borderMode=cv2.BORDER_REFLECT_101), np.uint8)
    motion = measure_motion(before, now, block(50, 35, 110, 85))
    assert motion is not None
    assert motion.scale == pytest.approx(scale, abs=0.01)
    assert motion.matrix @ (80, 60, 1) == pytest.approx(true @ (80, 60, 1), abs=0.5)


def test_motion_in_a_frame_larger_than_the_grey_image_is_in_its_pixels() -> None:
    before = texture()
    now = np.roll(before, 4, axis=1)
    large = cv2.resize(block(50, 35, 110, 85).astype(np.uint8), None, fx=2, fy=2) > 0
    motion = measure_motion(before, now, large)
    assert motion is not None
    assert motion.matrix @ (160, 120, 1) == pytest.approx((168, 120), abs=0.5)


def test_no_motion_without_texture_or_among_other_pixels() -> None:
    blank = np.full(SIZE, 90, np.uint8)
    inside = block(50, 35, 110, 85)
    assert measure_motion(blank, blank, inside) is None
    assert measure_motion(texture(0), texture(1), inside) is None


def test_a_crop_keeps_the_size_of_its_object() -> None:
    followed = Followed.begin(0, 0, block(70, 50, 90, 70))
    before = followed.region()
    assert (before.width, before.height) == (WIDTH * 20, WIDTH * 20)
    followed.move(Motion(similarity(1.1, 6.0, 2.0)))
    after = followed.region()
    assert after.width == round(1.1 * before.width)
    assert (after.left + after.width / 2, after.top + after.height / 2) == pytest.approx((86, 62), abs=1)


def test_the_crop_of_a_large_object_is_not_much_larger_than_the_frame() -> None:
    region = Followed.begin(0, 0, block(10, 10, 150, 110)).region()
    assert (region.width, region.height) == (MAX_WIDTH * 160, MAX_WIDTH * 120)


def test_a_crop_does_not_leave_the_frame_or_vanish() -> None:
    followed = Followed.begin(0, 0, block(70, 50, 90, 70))
    for _ in range(100):
        followed.move(Motion(similarity(0.85, 50.0, 50.0)))
    assert followed.centre == (160.0, 120.0)
    region = followed.region()
    assert min(region.width, region.height) >= 1
    assert region.crop(np.zeros((*SIZE, 3), np.uint8)).shape == (region.height, region.width, 3)


@pytest.mark.parametrize(
    "region",
    [
        CropRegion(20, 30, 40, 40),
        CropRegion(-25, -10, 60, 50),
        CropRegion(130, 100, 64, 64),
        CropRegion(-20, -20, 240, 200),
    ],
)
def test_what_a_crop_shows_goes_back_to_where_it_was(region: CropRegion) -> None:
    mask = block(5, 5, 155, 115)
    seen = region.crop_mask(mask)
    assert seen.shape == (region.height, region.width)
    canvas = np.full(SIZE, -10.0, np.float32)
    region.paste(np.where(seen, 1.0, -1.0).astype(np.float32), canvas)
    inside = canvas > -10
    assert ((canvas > 0) == mask)[inside].all()
    assert inside.sum() == (min(region.left + region.width, 160) - max(region.left, 0)) * (
        min(region.top + region.height, 120) - max(region.top, 0)
    )


def test_averages_reach_as_far_as_the_crop() -> None:
    canvas = np.full(SIZE, 2.0, np.float32)
    CropRegion(-10, 10, 30, 20).average(np.full((4, 4), -4.0, np.float32), canvas)
    assert (canvas[10:30, :20] == -1).all()
    canvas[10:30, :20] = 2
    assert (canvas == 2).all()
