"""Policies with and without masks: the rules of the task, the intervals, and the whole measurement at a tiny size."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tools.bench.accuracy import mask_policy
from tools.bench.tiny_weights import save_tiny_checkpoint
from tools.scenes.reach import GRIPPER_ID, LIMIT, SPEED, TARGET_ID, ReachWorld


@pytest.mark.parametrize("test", mask_policy.TESTS)
def test_the_expert_reaches_the_target_of_every_test(test: str) -> None:
    for seed in range(20):
        world = ReachWorld(seed, *mask_policy.TESTS[test])
        while world.outcome is None:
            world.move(world.find_move())
        assert world.outcome == "reached"


def test_a_gripper_that_stays_is_late_and_one_over_another_object_is_wrong() -> None:
    world = ReachWorld(3)
    for _ in range(LIMIT):
        assert world.outcome is None
        world.move(np.zeros(2))
    assert world.outcome == "late"
    # the expert of a world whose first two objects have changed places
    world = ReachWorld(3)
    other = ReachWorld(3)
    other._places[[0, 1]] = other._places[[1, 0]]
    while world.outcome is None:
        move = other.find_move()
        world.move(move)
        other.move(move)
    assert world.outcome == "wrong"


@pytest.mark.parametrize("alike", [False, True])
def test_a_name_tells_the_target_from_all_others(alike: bool) -> None:
    for seed in range(20):
        world = ReachWorld(seed, alike=alike)
        names = list(zip(world.kinds, world.colours, strict=True))
        assert names.count(names[0]) == 1
        same_kind = sum(kind == names[0][0] for kind, _ in names[1:])
        assert same_kind == (2 if alike else 0)


def test_the_truth_follows_the_gripper_and_a_cover_changes_the_table_alone() -> None:
    world = ReachWorld(4)
    covered = ReachWorld(4, covered=True)
    image, ids = world.render()
    other, same = covered.render()
    assert np.array_equal(ids, same)
    assert (image != other).any(-1)[ids == 0].mean() > 0.9
    assert np.array_equal(image[ids > 0], other[ids > 0])
    assert {TARGET_ID, GRIPPER_ID} <= set(np.unique(ids).tolist())
    before = np.argwhere(ids == GRIPPER_ID)[:, 1].mean()
    world.move(np.array([SPEED if world.gripper[0] < 0.5 else -SPEED, 0.0]))
    after = np.argwhere(world.render()[1] == GRIPPER_ID)[:, 1].mean()
    assert abs(after - before) > 0.5 * SPEED * mask_policy.SIDE


def test_noise_replaces_the_table_of_most_pictures_and_nothing_else() -> None:
    torch.manual_seed(0)
    images = torch.ones(200, 3, 4, 4)
    things = torch.zeros(200, 4, 4, dtype=torch.bool)
    things[:, :2] = True
    covered = mask_policy.cover_table(images, things)
    assert (covered[:, :, :2] == 1).all()
    changed = (covered[:, :, 2:] != 1).flatten(1).all(1)
    assert 0.8 < changed.float().mean() < 0.97


def test_each_way_shows_what_it_may_show() -> None:
    target = np.zeros((1, 4, 4), np.bool_)
    target[:, 1] = True
    views = mask_policy.View(
        np.full((1, 4, 4, 3), 255, np.uint8), target, target, np.zeros((1, 10), np.float32)
    )
    shown = {way: mask_policy.to_images(way, views) for way in mask_policy.WAYS}
    assert torch.equal(shown[mask_policy.PICTURES], torch.full((1, 3, 4, 4), 0.5))
    assert torch.equal(shown[mask_policy.NOISE], shown[mask_policy.PICTURES])
    assert torch.equal(shown[mask_policy.MASK][:, :3], shown[mask_policy.PICTURES])
    assert torch.equal(shown[mask_policy.MASK][:, 3].bool(), torch.from_numpy(target))
    assert torch.equal(shown[mask_policy.CUT][0, 0] > 0, torch.from_numpy(target[0]))


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"), [(5, 10, 23.7, 76.3), (0, 10, 0.0, 27.8), (10, 10, 72.2, 100.0)]
)
def test_wilsons_interval(successes: int, count: int, low: float, high: float) -> None:
    assert mask_policy.bound_rate(successes, count) == pytest.approx((low, high), abs=0.05)


def test_a_difference_of_the_same_scenes_has_an_interval_about_it() -> None:
    one = np.ones((3, 40), np.bool_)
    other = one.copy()
    assert mask_policy.bound_difference(one, other) == (0.0, 0.0)
    other[:, ::4] = False
    low, high = mask_policy.bound_difference(one, other)
    assert 10 < low < 25 < high < 40


def test_the_whole_measurement_at_a_tiny_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny_checkpoint(tmp_path / "tiny")
    out = tmp_path / "figures.json"
    picture = tmp_path / "plot.png"
    sizes = ["--threads", "0", "--seeds", "1", "--demos", "1", "--updates", "2", "--episodes", "1"]
    options = ["--model", model, *sizes, "--json", out, "--plot", picture]
    monkeypatch.setattr(mask_policy, "TESTS", {"both": (True, True)})
    monkeypatch.setattr("sys.argv", ["mask_policy", *map(str, options)])
    pytest.importorskip("matplotlib")
    mask_policy.main()
    records = {record["figure"]: record for record in json.loads(out.read_text())}
    for way in (*mask_policy.WAYS, mask_policy.TRUE):
        record = records[f"reached, both, {way}"]
        assert 0 <= record["interval"]["low"] <= record["value"] <= record["interval"]["high"] <= 100
    assert records["masks of the tracker that are doubtful"]["unit"] == "%"
    assert picture.stat().st_size > 1000
