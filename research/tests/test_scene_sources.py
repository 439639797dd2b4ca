"""Further sources of scenes: photographs and robosuite's meshes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import cv2
import numpy as np
import pytest

from research.scene_sources import robosuite
from research.scene_sources.photos import photo, pictures
from sam3_node.errors import CameraError, MissingExtraError
from tools.scenes.objects import Split
from tools.scenes.objects import make_object


def test_photos_are_shared_out_among_the_splits(tmp_path: Path) -> None:
    for index in range(20):
        cv2.imwrite(str(tmp_path / f"{index:02d}.png"), np.full((30, 40, 3), 10 * index, np.uint8))
    rng = np.random.default_rng(0)
    shares: dict[Split, set[int]] = {"train": set(range(8)), "val": {8}, "test": {9}}
    for split, places in shares.items():
        crops = [photo(rng, split, tmp_path) for _ in range(60)]
        assert {int(crop[0, 0, 0]) // 10 % 10 for crop in crops if crop is not None} == places


def test_a_folder_without_photos_is_said(tmp_path: Path) -> None:
    with pytest.raises(CameraError, match="expected pictures"):
        pictures(tmp_path)


def test_a_missing_robosuite_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    robosuite.makers.cache_clear()
    with pytest.raises(MissingExtraError, match="--no-deps robosuite"):
        robosuite.makers()


@pytest.mark.parametrize("kind", robosuite.FILES)
def test_robosuites_meshes_become_training_objects(kind: str) -> None:
    try:
        makers = robosuite.makers()
    except MissingExtraError as error:
        pytest.skip(str(error))
    model = make_object(1, (kind,), makers)
    assert 0.03 < model.extent < 0.3
    assert kind not in {make_object(identity, more=makers).kind for identity in range(9, 400, 10)}
