"""J, F and occlusions against other ways to compute them and by hand; the report; and named settings."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from pycocotools import mask as coco

from sam3_node.errors import SettingsError
from sam3_node.settings import TrackerSettings
from tools.vos import metrics, report
from tools.vos.evaluate import SequenceResult
from tools.vos.followers import COMPARED, Setting, parse_settings
from tools.vos.metrics import Bools, MaskScore, OcclusionCount, count, hidden_runs, is_recovered, occlusions

HEIGHT, WIDTH, SIDE = 60, 80, 20


def masks_of(seed: int) -> tuple[Bools, Bools]:
    """Two smooth random masks, in many ways alike."""
    generator = np.random.default_rng(seed)
    noise = generator.standard_normal((2, *generator.integers(12, 60, 2))).astype(np.float32)
    a, b = (cv2.GaussianBlur(layer, (0, 0), 3) for layer in noise)
    return a > 0, a + 0.7 * b > 0


def boundary_f_by_distances(mask: Bools, truth: Bools) -> float:
    """F from the distances of all pairs of contour pixels."""
    reach = np.ceil(0.008 * np.hypot(*mask.shape))
    mask_shares, wanted = np.argwhere(metrics.contour(mask)), np.argwhere(metrics.contour(truth))
    near = np.linalg.norm(mask_shares[:, None] - wanted[None], axis=2) <= reach
    precision, recall = near.any(axis=1).mean(), near.any(axis=0).mean()
    return float(2 * precision * recall / (precision + recall))


@pytest.mark.parametrize("seed", range(8))
def test_j_is_cocos_iou_and_f_that_of_all_pairs_of_contour_pixels(seed: int) -> None:
    mask, truth = masks_of(seed)
    runs = [coco.encode(np.asfortranarray(each.astype(np.uint8))) for each in (mask, truth)]
    assert metrics.region_similarity(mask, truth) == pytest.approx(coco.iou(runs[:1], runs[1:], [0])[0, 0])
    assert metrics.contour_accuracy(mask, truth) == pytest.approx(boundary_f_by_distances(mask, truth))


def test_a_contour_lies_on_the_side_of_the_origin() -> None:
    mask = np.zeros((5, 5), np.bool_)
    mask[2:4, 2:4] = True
    assert metrics.contour(mask).astype(int).tolist() == [
        [0, 0, 0, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 1, 0, 1, 0],
        [0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0],
    ]


def square(y: int, x: int, side: int = SIDE) -> Bools:
    mask = np.zeros((HEIGHT, WIDTH), np.bool_)
    mask[y : y + side, x : x + side] = True
    return mask


def test_empty_masks() -> None:
    nothing, something = square(0, 0, 0), square(5, 5)
    assert metrics.score(nothing, nothing) == (1.0, 1.0)
    assert metrics.score(something, nothing) == (0.0, 0.0)
    assert metrics.score(nothing, something) == (0.0, 0.0)
    assert metrics.score(something, something) == (1.0, 1.0)


def test_a_square_that_is_off_by_its_half() -> None:
    assert metrics.region_similarity(square(10, 10), square(10, 20)) == pytest.approx(1 / 3)
    assert (
        metrics.contour_accuracy(square(10, 10), square(10, 11)) == 1.0
    )  # the contour may be 1 pixel off here
    assert 0.3 < metrics.contour_accuracy(square(10, 10), square(10, 20)) < 0.7


def test_void_pixels_do_not_count() -> None:
    truth, wrong = square(10, 10), square(10, 40)
    assert metrics.score(truth | wrong, truth).j < 0.6
    assert metrics.score(truth | wrong, truth, void=wrong) == (1.0, 1.0)


def by_frame(*runs: tuple[int, float]) -> np.ndarray:
    """Values that each last for some frames."""
    return np.concatenate([np.full(frames, value) for frames, value in runs])


def test_hidden_runs() -> None:
    assert hidden_runs(by_frame((2, 0.0), (3, 0.1), (4, 0.0))) == [(0, 2), (5, 9)]
    assert hidden_runs(by_frame((4, 0.1))) == hidden_runs(np.array([])) == []


def test_an_occlusion_is_long_and_ends() -> None:
    assert occlusions(by_frame((3, 0.1), (10, 0.0), (5, 0.1))) == [(3, 13, 13)]
    assert occlusions(by_frame((10, 0.0), (5, 0.1))) == [(0, 10, 10)]
    assert occlusions(by_frame((3, 0.1), (9, 0.0), (5, 0.1))) == []
    assert occlusions(by_frame((3, 0.1), (10, 0.0), (4, 0.1))) == []
    assert occlusions(by_frame((3, 0.1), (10, 0.0), (4, 0.1), (10, 0.0), (6, 0.1))) == [(17, 27, 27)]


def test_the_object_is_back_once_it_is_large_enough() -> None:
    assert occlusions(by_frame((10, 0.0), (4, 1e-4), (5, 0.1))) == [(0, 10, 14)]
    assert occlusions(by_frame((10, 0.0), (9, 1e-4))) == []


def test_recovered_is_soon_and_for_good() -> None:
    assert is_recovered(by_frame((9, 0.0), (20, 0.9)), back=0)
    assert is_recovered(by_frame((9, 0.0), (1, 0.5)), back=0)  # the clip ends there
    assert not is_recovered(by_frame((10, 0.0), (20, 0.9)), back=0)
    assert not is_recovered(by_frame((3, 0.0), (2, 0.9), (20, 0.0)), back=0)
    assert is_recovered(by_frame((3, 0.0), (2, 0.9), (2, 0.0), (20, 0.9)), back=0)
    assert not is_recovered(by_frame((5, 0.9), (20, 0.1)), back=5)


def test_counts_and_shares() -> None:
    object_shares = by_frame((3, 0.1), (10, 0.0), (12, 0.1), (10, 0.0), (12, 0.1))
    ious = by_frame((3, 0.9), (10, 1.0), (12, 0.9), (10, 0.0), (12, 0.2))
    mask_shares = by_frame((3, 0.1), (10, 0.0), (12, 0.1), (5, 0.0), (5, 0.1), (12, 0.1))
    counted = count(object_shares, mask_shares, ious)
    assert counted == OcclusionCount(cases=2, recovered=1, hidden_frames=20, false_frames=5)
    assert (counted.recovered_share, counted.false_while_hidden) == (0.5, 0.25)
    assert counted + counted == OcclusionCount(4, 2, 40, 10)
    assert OcclusionCount().recovered_share is None
    assert OcclusionCount().false_while_hidden is None


def results() -> dict[str, dict[str, SequenceResult]]:
    a = SequenceResult({1: MaskScore(0.8, 0.6), 2: MaskScore(0.6, 0.4)}, OcclusionCount(2, 1, 20, 5), 10.0)
    b = SequenceResult({1: MaskScore(0.1, 0.2)}, OcclusionCount(), 20.0)
    return {"default": {"cup": a, "jar": b}, "bank=3": {"cup": b, "jar": b}}


def test_json_has_the_first_settings_figures_and_then_all() -> None:
    figures = report.as_json(results())
    assert figures["J"] == pytest.approx(0.5)
    assert figures["F"] == pytest.approx(0.4)
    assert figures["J&F"] == pytest.approx(0.45)
    assert figures["sequences"]["cup"]["J"] == pytest.approx(0.7)
    assert figures["sequences"]["cup"]["objects"]["2"]["F"] == 0.4
    assert figures["occlusions"] == {
        "cases": 2,
        "recovered": 0.5,
        "hidden_frames": 20,
        "false_while_hidden": 0.25,
    }
    assert figures["settings"]["bank=3"]["J"] == pytest.approx(0.1)
    assert "settings" not in report.as_json({"default": results()["default"]})


def test_the_table_has_each_sequence_and_the_difference() -> None:
    lines = report.as_table(results()).splitlines()
    assert lines[1].split() == ["cup", "default", "2", "0.700", "0.500", "0.600", "10.0"]
    assert lines[2].split() == ["bank=3", "1", "0.100", "0.200", "0.150", "20.0"]
    assert lines[-1].split() == ["bank=3", "0.100", "0.200", "0.150", "-0.400", "-", "0", "-", "20.0"]


def test_settings_are_named_changes_of_a_base() -> None:
    text = "default,bank-off,bank=15+select=confident,dtype=bf16,prompt=point,size=160,read=sparse"
    default, bank_off, large, half, point, small, sparse = parse_settings(text, Setting(prompt="box"))
    assert (default.name, default.method, default.prompt) == ("default", "default", "box")
    assert bank_off.method == "bank-off"
    assert (large.bank_size, large.selection, large.dtype) == (15, "confident", "auto")
    assert (half.dtype, half.prompt, point.prompt) == ("bfloat16", "box", "point")
    assert small.model == ("auto", 160, "exact")
    assert sparse.model == ("auto", 0, "sparse")
    assert default.bank_size == TrackerSettings().bank_size


def test_the_settings_of_compare_are_valid() -> None:
    assert len(parse_settings(COMPARED, Setting())) == len(COMPARED.split(","))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "bank=1",
        "bank=x",
        "bank",
        "select=best",
        "dtype=int8",
        "size=x",
        "read=fast",
        "prompt=",
        "default,default",
    ],
)
def test_bad_settings_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="expected"):
        parse_settings(text, Setting())
