"""Masks at the size of a policy, compared with Pillow's nearest pixel and with openpi's images with margins."""

from __future__ import annotations

import numpy as np
import pytest

from sam3_node.client.observations import ObjectSlots
from sam3_node.client.observations.slots import fit_mask
from sam3_node.types import Mask
from tests.support.observations import make_frame, make_instance

SIZES = [((481, 643), (224, 224)), ((96, 128), (96, 128)), ((37, 53), (64, 200)), ((723, 1281), (240, 320))]
"""Sizes at which no centre of a pixel lies on an edge, where rounding would decide."""


def random_mask(size: tuple[int, int], seed: int = 0) -> Mask:
    rng = np.random.default_rng(seed)
    full = np.zeros(size, np.bool_)
    top, left = size[0] // 4, size[1] // 3
    full[top:-3, left:-5] = rng.random((size[0] - top - 3, size[1] - left - 5)) < 0.5
    return Mask.from_full(full)


@pytest.mark.parametrize(("frame", "size"), SIZES)
def test_stretched_masks_equal_those_of_pillow(frame: tuple[int, int], size: tuple[int, int]) -> None:
    image = pytest.importorskip("PIL.Image")
    mask = random_mask(frame)
    fitted = fit_mask(mask, size)
    assert fitted is not None
    expected = image.fromarray(mask.full().astype(np.uint8) * 255).resize(size[::-1], image.NEAREST)
    np.testing.assert_array_equal(fitted.mask, np.asarray(expected) > 0)


@pytest.mark.parametrize(("frame", "size"), SIZES)
def test_padded_masks_equal_those_of_openpi(frame: tuple[int, int], size: tuple[int, int]) -> None:
    image_tools = pytest.importorskip("openpi_client.image_tools")
    image = pytest.importorskip("PIL.Image")
    mask = random_mask(frame)
    fitted = fit_mask(mask, size, "pad")
    assert fitted is not None
    pixels = np.repeat(mask.full()[..., np.newaxis].astype(np.uint8) * 255, 3, axis=2)
    expected = image_tools.resize_with_pad(pixels, *size, method=image.NEAREST)
    np.testing.assert_array_equal(fitted.mask, expected[..., 0] > 0)


def test_a_padded_box_is_where_the_mask_is() -> None:
    fitted = fit_mask(make_instance(1, "a", (0, 0, 128, 96)).mask, (200, 64), "pad")
    assert fitted is not None
    assert fitted.box == (0, 76, 64, 124)
    rows, columns = np.nonzero(fitted.mask)
    assert (rows.min(), rows.max() + 1, columns.min(), columns.max() + 1) == (76, 124, 0, 64)


@pytest.mark.parametrize("fit", ["stretch", "pad"])
def test_a_mask_of_one_pixel_stays_visible(fit: str) -> None:
    for x, y in ((0, 0), (127, 95), (64, 31), (33, 70)):
        fitted = fit_mask(make_instance(1, "a", (x, y, x + 1, y + 1)).mask, (12, 9), fit)  # type: ignore[arg-type]
        assert fitted is not None
        assert fitted.mask.sum() == 1
        (row,), (column,) = np.nonzero(fitted.mask)
        assert fitted.box[1] - 1 < row < fitted.box[3]
        assert fitted.box[0] - 1 < column < fitted.box[2]


def test_an_empty_mask_is_not_visible() -> None:
    assert fit_mask(Mask.empty((96, 128)), (12, 9)) is None


def test_boxes_are_in_pixels_of_the_masks() -> None:
    slots = ObjectSlots(["a"], (48, 32))
    boxes = slots.observe(make_frame(make_instance(1, "a", (16, 32, 48, 64)))).boxes
    assert not boxes.any()  # stale
    fresh = slots.observe(now_ns=make_frame().capture_ns).boxes
    np.testing.assert_allclose(fresh, [[4, 16, 12, 32]])
