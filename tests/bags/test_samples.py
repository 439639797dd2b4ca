"""Intrinsics of an image by its CameraInfo: raw and rectified, binned, cut out and resized."""

from dataclasses import replace

import pytest

from sam3_node.bags.samples import CameraInfo
from sam3_node.errors import BagError
from sam3_node.types import Intrinsics
from tests.support.refuses import refuses
from tests.support.tables import each_row

K = Intrinsics(120.0, 121.0, 64.0, 48.0, "brown_conrady", (-0.2, 0.05, 0.0, 0.0, 0.0))
P = Intrinsics(100.0, 101.0, 60.0, 44.0)
INFO = CameraInfo(K, P, (128, 96))


def pinhole(lens: Intrinsics | None) -> tuple[float, float, float, float] | None:
    return lens and (lens.fx, lens.fy, lens.cx, lens.cy)


def test_raw_images_have_k_and_rectified_ones_p() -> None:
    assert INFO.fit((128, 96), False) == K
    assert INFO.fit((128, 96), True) == P


def test_rectified_images_without_p_have_k_without_distortion() -> None:
    assert replace(INFO, projection=None).fit((128, 96), True) == Intrinsics(120.0, 121.0, 64.0, 48.0)


def test_a_camera_that_was_never_calibrated_has_no_intrinsics() -> None:
    assert CameraInfo(None, size=(128, 96)).fit((64, 64), False) is None
    assert CameraInfo(None, P, (128, 96)).fit((128, 96), False) is None
    assert CameraInfo(None, P, (128, 96)).fit((128, 96), True) == P


def test_a_lens_that_cannot_be_used_is_an_error_of_its_images_alone() -> None:
    info = replace(INFO, lens="an unknown model")
    assert info.fit((128, 96), True) == P
    with refuses(BagError, field=("unknown", "model")):
        info.fit((128, 96), False)
    with pytest.raises(BagError, match="no P"):
        replace(INFO, projection="no P").fit((128, 96), True)


@each_row(
    ("size", "binning", "roi", "expected"),
    [
        ((64, 48), (2, 2), (0, 0, 0, 0), (60.0, 60.5, 32.0, 24.0)),
        ((64, 96), (2, 1), (0, 0, 0, 0), (60.0, 121.0, 32.0, 48.0)),
        ((42, 32), (3, 3), (0, 0, 128, 96), (40.0, 121 / 3, 64 / 3, 16.0)),
        ((43, 32), (3, 3), (0, 0, 0, 0), (40.0, 121 / 3, 64 / 3, 16.0)),
        ((64, 48), (1, 1), (40, 20, 64, 48), (120.0, 121.0, 24.0, 28.0)),
        ((32, 24), (2, 2), (40, 20, 64, 48), (60.0, 60.5, 12.0, 14.0)),
        ((28, 76), (1, 1), (100, 20, 0, 0), (120.0, 121.0, -36.0, 28.0)),
        ((128, 96), (2, 2), (0, 0, 0, 0), (120.0, 121.0, 64.0, 48.0)),
    ],
)
def test_binning_and_region_are_those_of_the_full_resolution(
    size: tuple[int, int],
    binning: tuple[int, int],
    roi: tuple[int, int, int, int],
    expected: tuple[float, ...],
) -> None:
    info = replace(INFO, binning=binning, roi=roi)
    assert pinhole(info.fit(size, False)) == pytest.approx(expected)
    rectified = info.fit(size, True)
    assert rectified.fx / P.fx == pytest.approx(expected[0] / K.fx)
    assert K.cx - P.cx == pytest.approx((expected[2] - rectified.cx) * K.fx / expected[0])


@pytest.mark.parametrize(
    ("size", "scale"), [((64, 48), 0.5), ((256, 192), 2.0), ((32, 24), 0.25), ((128, 96), 1.0)]
)
def test_resized_images_of_the_same_aspect_ratio_have_scaled_intrinsics(
    size: tuple[int, int], scale: float
) -> None:
    lens = INFO.fit(size, False)
    assert pinhole(lens) == (120 * scale, 121 * scale, 64 * scale, 48 * scale)
    assert (lens.model, lens.coeffs) == (K.model, K.coeffs)


def test_a_side_may_be_rounded_to_whole_pixels() -> None:
    info = CameraInfo(P, size=(1226, 370))
    assert info.fit((613, 185), False) is not None
    assert info.fit((409, 123), False) is not None
    with refuses(BagError, field=("aspect", "ratio")):
        info.fit((409, 126), False)


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        ((64, 48), {"size": (100, 96)}),
        ((96, 128), {}),
        ((64, 48), {"roi": (0, 0, 100, 80)}),
        ((128, 96), {"roi": (40, 20, 64, 48)}),
        ((64, 48), {"roi": (100, 20, 64, 48)}),
        ((64, 48), {"roi": (40, 20, 64, 48), "binning": (2, 2)}),
    ],
)
def test_intrinsics_that_fit_no_image_of_this_size_are_refused(
    size: tuple[int, int], changes: dict[str, tuple[int, ...]]
) -> None:
    with refuses(BagError, field=(str(size[0]), str(size[1]))):
        replace(INFO, **changes).fit(size, False)  # type: ignore[arg-type]


def test_a_size_that_is_not_given_is_taken_for_the_images() -> None:
    assert CameraInfo(K).fit((64, 48), False) == K
