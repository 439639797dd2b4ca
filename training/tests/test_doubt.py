"""Tests of the fits of confidence, of moved clips and of pseudo-tracks."""

from pathlib import Path

import numpy as np
import pytest

from sam3_node.tracking.confidence import FEATURES
from tools.doubt.measure import Played
from tools.scenes.clips import Clip
from training.doubt import names
from training.doubt.fit import Fit, choose_threshold, fit_weights, write
from training.doubt.moved import move_clip, open_clips
from training.doubt.pseudo import choose
from training.nano.taught import fit, pack_taught, shard_path, write_shard


def played(confidence: np.ndarray, right: np.ndarray) -> Played:
    features = np.zeros((len(right), len(FEATURES)))
    features[:, FEATURES.index("stability")] = confidence
    features[:, FEATURES.index("area")] = confidence  # a feature that speaks for the mask with the wrong sign
    return Played(features, confidence, np.where(right, 0.9, 0.1), confidence, np.zeros(len(right), np.bool_))


def test_the_fit_keeps_the_signs_of_the_features() -> None:
    rng = np.random.default_rng(0)
    values = rng.uniform(size=2000)
    weights, bias = fit_weights([played(values, rng.uniform(size=2000) < values)], list(FEATURES))
    assert weights[FEATURES.index("stability")] > 2
    assert weights[FEATURES.index("area")] == 0
    assert bias < 0


def test_the_threshold_keeps_the_wrong_masks_below_its_share() -> None:
    values = np.linspace(0, 1, 1001)
    threshold = choose_threshold([played(values, values > 0.8)])
    assert 0.78 <= threshold <= 0.8


def test_the_table_is_a_module_that_names_its_command(tmp_path: Path) -> None:
    weights = np.zeros(len(FEATURES))
    weights[1] = 1.25
    write(tmp_path / "table.py", Fit(weights, -0.5, 0.25, 0.7, []), "python -m training.doubt.fit a")
    table: dict[str, object] = {}
    exec((tmp_path / "table.py").read_text(), table)
    assert (table["MASK_BIAS"], table["MASK_WEIGHTS"], table["SURE_MASK"]) == (-0.5, {FEATURES[1]: 1.25}, 0.7)
    assert "# masks: python -m training.doubt.fit a" in (tmp_path / "table.py").read_text()


def test_objects_of_middle_size_that_do_not_overlap_are_chosen() -> None:
    masks = np.zeros((4, 100, 100), np.bool_)
    masks[0, :90, :90] = True  # too large
    masks[1, 10:30, 10:30] = True
    masks[2, 12:32, 12:32] = True  # overlaps
    masks[3, 60:80, 60:80] = True
    assert choose(masks, 4) == [1, 3]


def test_the_fit_of_names_has_no_weight_below_0_and_what_is_random_has_none() -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(4000, 3))
    right = rng.random(4000) < 1 / (1 + np.exp(-(2 * x[:, 0] - x[:, 1] + 0.5)))
    weights, bias = names.fit(x, right)
    np.testing.assert_allclose(weights, [1.9, 0, 0], atol=0.35)
    assert bias == pytest.approx(0.5, abs=0.2)


def test_the_table_of_names_reads_as_it_was_written_beside_that_of_masks(tmp_path: Path) -> None:
    path = tmp_path / "table.py"
    path.write_text('"""Text."""\n\n# masks: fit\nMASK_BIAS = 1\n\n# names: before\nNAME_BIAS = 2\n')
    names.write(path, np.array([1.0, 2.0, 0.0, 3.0, 4.0, 5.0]), -0.5, np.arange(6.0), 0.9, "fit")
    table: dict[str, object] = {}
    exec(path.read_text(), table)
    assert table["NAME_WEIGHTS"] == {"score": 1, "rival": 2, "look": 3, "thing": 4, "agreement": 5}
    assert (table["NAME_BIAS"], table["SURE_NAME"]) == (-0.5, 0.9)
    assert (table["USUAL_MARGINS"], table["MASK_BIAS"]) == ({"look": 3.0, "thing": 4.0}, 1)


def test_a_moved_clip_carries_its_labels_along(tmp_path: Path) -> None:
    labels = [np.zeros((60, 80), np.uint8) for _ in range(3)]
    for number, label in enumerate(labels):
        label[20:40, 20 + 8 * number : 40 + 8 * number] = 1
    clip = Clip("a", [np.dstack([label * 200] * 3) for label in labels], labels, meta={"fps": 10})
    moved, shown = move_clip(clip, 9)
    assert shown == [0, 1, 2, 1, 0, 1, 2, 1, 0]
    for number in range(9):
        inside = moved.labels(number) == 1
        bright = moved.image(number)[..., 0] > 100
        assert (inside & bright).sum() > 0.8 * (inside | bright).sum()
    assert not np.array_equal(moved.labels(0), moved.labels(8))
    again = move_clip(clip, 9)[0]
    assert all(np.array_equal(moved.image(number), again.image(number)) for number in range(9))


def test_pictures_become_clips_of_joined_neighbours(tmp_path: Path) -> None:
    masks = np.zeros((3, 256, 256), np.bool_)
    masks[0, 50:120, 50:100] = True
    masks[1, 50:120, 102:150] = True
    masks[2, 200:250, 10:60] = True
    picture = pack_taught("a", np.full((120, 160, 3), 90, np.uint8), masks, np.ones(3, np.float32))
    write_shard(shard_path(tmp_path, 0), [picture])
    (clip,) = open_clips(tmp_path)
    assert np.unique(clip.labels(0)).tolist() == [0, 1]
    both = fit(masks[0] | masks[1], clip.image(0)) > 0
    assert ((clip.labels(0) == 1) & both).sum() > 0.9 * both.sum()
