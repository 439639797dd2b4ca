"""Confidence of masks and of names: scripted masks, pointers and detections in, probabilities out."""

import numpy as np
import pytest

from sam3_node.settings import DetectorSettings, TrackerSettings
from sam3_node.tracking import confidence_weights, names
from sam3_node.tracking.confidence import DEPARTURES, FEATURES, ConfidenceEstimator, Evidence
from sam3_node.tracking.names import FEATURES as NAME_FEATURES
from sam3_node.tracking.track_history import find_level_sets, has_rival
from sam3_node.types import Detection
from tests.support.saving import reload

SIDE = 64
CHANNELS = 8
RADIUS = 4.0
RNG = np.random.default_rng(3)
POINTERS = RNG.normal(size=(4, CHANNELS)).astype(np.float32)


def disc(x: float, y: float, radius: float = RADIUS) -> np.ndarray:
    """Logits of a disc, sharp at its edge."""
    rows, columns = np.mgrid[:SIDE, :SIDE] + 0.5
    return np.clip(4 * (radius - np.hypot(columns - x, rows - y)), -9, 9).astype(np.float32)


class Scene:
    """An estimator and its objects, stepped together."""

    def __init__(self) -> None:
        self.estimator = ConfidenceEstimator(4, SIDE, CHANNELS)

    def step(
        self, *logits: np.ndarray, score: float = 0.93, visible: bool = True, pointers: np.ndarray = POINTERS
    ) -> list[float]:
        count = len(logits)
        presence = np.full(count, 6.0 if visible else -6.0, np.float32)
        ids = list(range(1, count + 1))
        levels = find_level_sets(np.stack(logits))
        return self.estimator.observe(
            Evidence(ids, levels, [score] * count, [visible] * count, presence, pointers[:count])
        )


@pytest.mark.parametrize("distance", range(15, 30, 3))
def test_a_rival_is_what_reaches_beyond_the_box_of_the_mask(distance: int) -> None:
    mask = disc(16, 30, 12) > 0
    other = disc(16 + distance, 30, 2) > 0
    own, both = (np.prod([np.ptp(axis) + 1 for axis in np.nonzero(each)]) for each in (mask, mask | other))
    assert has_rival(mask, mask | other) == (own / both <= 0.7) == (distance > 20)  # DAM4SAM's rule
    assert not has_rival(mask, mask | (disc(50.5, 50.5, 0.8) > 0)), "a speck"


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_steady_mask_is_sure(scene):
    assert min(scene.step(disc(20 + 0.5 * n, 30))[0] for n in range(60)) >= confidence_weights.SURE_MASK


def test_a_mask_that_moves_fast_and_steadily_is_sure(scene):
    assert min(scene.step(disc(8 + 3 * n, 30))[0] for n in range(16)) >= confidence_weights.SURE_MASK


def test_a_mask_that_grows_slowly_is_sure(scene):
    """The object comes closer: its area becomes nine times as large in 75 frames."""
    found = [scene.step(disc(30, 30, RADIUS * 3 ** (n / 75)))[0] for n in range(75)]
    assert min(found) >= confidence_weights.SURE_MASK


def test_an_object_that_enters_the_image_grows_without_doubt(scene):
    """The first mask is a sliver at the edge, of a twentieth of the object."""
    whole = [scene.step(disc(-7 + 0.5 * n, 30, 10))[0] for n in range(60)][35:]
    assert min(whole) >= confidence_weights.SURE_MASK


JUMPS = {
    # a ball's mask jumps onto the player beside it, of seven times its area, and the decoder stays certain
    "larger": (20, [disc(28 + 0.05 * n, 32, 2.6 * RADIUS) for n in range(215)], {}, (30, 0.05)),
    "as large": (15, [disc(45 + 0.02 * n, 34) for n in range(100)], {"pointers": POINTERS[1:]}, (18, 0.02)),
}


@pytest.mark.parametrize("to", JUMPS)
def test_a_jump_to_another_object_is_doubtful_while_it_lasts(scene, to):
    start, jump, how, (again, drift) = JUMPS[to]
    for n in range(13):
        scene.step(disc(start + 0.2 * n, 30))
    assert max(scene.step(mask, **how)[0] for mask in jump) < confidence_weights.SURE_MASK
    back = [scene.step(disc(again + drift * n, 30))[0] for n in range(30)]
    assert min(back[15:]) >= confidence_weights.SURE_MASK


def test_a_correction_ends_the_doubt(scene):
    for _ in range(13):
        scene.step(disc(20, 30))
    for _ in range(20):
        assert scene.step(disc(28, 32, 2.6 * RADIUS))[0] < confidence_weights.SURE_MASK
    scene.estimator.start(1, find_level_sets(disc(28, 32, 2.6 * RADIUS)[None]))
    assert scene.step(disc(28, 32, 2.6 * RADIUS))[0] >= confidence_weights.SURE_MASK


def test_an_occlusion_has_no_confidence_and_leaves_the_history(scene):
    for _ in range(13):
        scene.step(disc(20, 30))
    assert {scene.step(disc(20, 30) - 30, score=0.01, visible=False)[0] for _ in range(30)} == {0.0}
    assert min([scene.step(disc(22, 31))[0] for _ in range(10)][3:]) >= confidence_weights.SURE_MASK


def test_low_scores_and_blurred_masks_are_doubtful(scene):
    scene.step(disc(20, 30))
    blurred = 0.1 * disc(20, 30, 2)
    assert [scene.step(blurred, score=0.2)[0] for _ in range(20)][-1] < confidence_weights.SURE_MASK


def test_objects_share_nothing_but_their_overlap(scene):
    alone = Scene()
    for n in range(20):
        (expected,) = alone.step(disc(15 + n, 20))
        assert scene.step(disc(15 + n, 20), disc(40, 50), disc(20, 55))[0] == expected
    assert scene.step(disc(34, 20), disc(35, 20, 6), disc(20, 55))[0] < alone.step(disc(34, 20))[0]


def test_an_id_that_is_removed_leaves_its_row_without_history(scene):
    for _ in range(13):
        scene.step(disc(20, 30))
    scene.estimator.remove(1)
    assert scene.step(disc(50, 10, 9))[0] == Scene().step(disc(50, 10, 9))[0]


def test_what_is_saved_goes_on_bit_for_bit(scene):
    frames = [(disc(20 + n, 30), disc(40, 20 + n)) for n in range(30)]
    for frame in frames[:10]:
        scene.step(*frame)
    saved = reload(scene.estimator.state())
    expected = [scene.step(*frame) for frame in frames[10:]]
    other = Scene()
    other.step(disc(1, 1), disc(2, 2), disc(3, 3))
    other.estimator.restore(saved)
    assert [other.step(*frame) for frame in frames[10:]] == expected


def test_values_that_are_no_numbers_harm_only_their_frame(scene):
    scene.step(disc(20, 30))
    assert scene.step(np.full((SIDE, SIDE), np.nan, np.float32), score=0.0) == [0.0]
    assert 0 <= scene.step(disc(20, 30), pointers=np.full_like(POINTERS, np.nan))[0] <= 1
    assert scene.step(disc(20, 30))[0] >= confidence_weights.SURE_MASK


@pytest.mark.parametrize("side", [64, 256, 288])
def test_finer_logits_give_about_the_same_confidence(side):
    estimator = ConfidenceEstimator(1, side, CHANNELS)
    scale = side // SIDE if side % SIDE == 0 else side / SIDE
    scene = Scene()
    for n in range(20):
        rows, columns = (np.mgrid[:side, :side] + 0.5) / scale
        fine = np.clip(4 * (RADIUS - np.hypot(columns - 20 - n, rows - 30)), -9, 9).astype(np.float32)
        levels = find_level_sets(fine[None])
        presence = np.full(1, 6.0, np.float32)
        (found,) = estimator.observe(Evidence([1], levels, [0.93], [True], presence, POINTERS[:1]))
        assert found == pytest.approx(scene.step(disc(20 + n, 30))[0], abs=0.03)


def test_more_evidence_never_lowers_the_confidence():
    assert set(confidence_weights.MASK_WEIGHTS) <= set(FEATURES)
    for name, weight in confidence_weights.MASK_WEIGHTS.items():
        assert weight < 0 if name in (*DEPARTURES, "overlap") else weight > 0


def test_the_default_threshold_is_the_calibrated_one():
    assert TrackerSettings().min_confidence == confidence_weights.SURE_MASK


HERE = (0.0, 0.0, 10.0, 10.0)
NEAR = (1.0, 0.0, 11.0, 10.0)
THERE = (50.0, 0.0, 60.0, 10.0)
RIGHT = [1.5, 3.7, 3.7, 3.8, 0.7, 1.0]
WRONG = [-1.3, -2.0, 0.9, 0.5, -1.4, 1.0]


def measure(*detections: Detection, with_margins: bool = True) -> list[list[float]]:
    return [[round(value, 3) for value in row] for row in names.measure_names(detections, with_margins)]


def test_the_features_of_one_detection() -> None:
    assert measure(Detection("mug", 0.5, HERE, (1.0, 9.0))) == [
        [0.0, -names.LOWEST, -names.LOWEST, 1.0, names.MAX_MARGIN]
    ]
    usual = list(confidence_weights.USUAL_MARGINS.values())
    assert measure(Detection("mug", 0.5, HERE))[0][3:] == usual
    assert measure(Detection("mug", 0.5, HERE, (1.0, 1.0)), with_margins=False)[0][3:] == usual
    assert measure(Detection("mug", 0.0, HERE))[0][0] == pytest.approx(-6.907)
    assert measure() == []


def test_the_same_phrase_elsewhere_is_a_rival_and_another_in_the_same_place_an_other() -> None:
    mug = Detection("mug", 0.8, HERE)
    ball = Detection("mug", 0.5, THERE)
    can = Detection("can", 0.5, NEAR)
    first, second, third = measure(mug, ball, can)
    assert first[1:3] == [1.386, 1.386]
    assert second[1:3] == [-1.386, -names.LOWEST]
    assert third[1:3] == [-names.LOWEST, -1.386]
    assert measure(mug, Detection("mug", 0.5, NEAR))[0][1] == pytest.approx(3.586)  # the same thing twice


def test_no_feature_that_grows_lowers_the_confidence() -> None:
    assert set(confidence_weights.NAME_WEIGHTS) <= set(NAME_FEATURES)
    assert min(confidence_weights.NAME_WEIGHTS.values()) >= 0
    assert (
        names.BUNDLED.estimate(WRONG) < 0.5 < confidence_weights.SURE_NAME < names.BUNDLED.estimate(RIGHT) < 1
    )
    assert DetectorSettings().min_name_confidence == confidence_weights.SURE_NAME


def test_the_evidence_is_a_mean_in_which_old_detections_fade() -> None:
    evidence = names.NameEvidence()
    for value in (1.0, 2.0, 6.0):
        evidence.add([value] * names.MEASURED)
    means = [3.0] * names.MEASURED
    assert evidence.means == means
    assert names.list_features(evidence, 4) == [*means, 0.75]
    assert names.list_features(evidence, 2) == [*means, 1.0]  # never more often than the detector ran
    for _ in range(10 * names.MEMORY):
        evidence.add([0.0] * names.MEASURED)
    assert evidence.means[0] < 1e-3
