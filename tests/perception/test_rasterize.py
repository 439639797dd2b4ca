"""Upsampling the object's region alone equals upsampling the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sam3_node.perception.output_masks import rasterize

SIZES = [(480, 640), (720, 1280), (1080, 1920), (479, 641), (97, 101), (61, 50), (64, 64), (1, 1), (36, 144)]


def smooth_logits(seed: int, size: int, blobs: int) -> np.ndarray:
    """Logits [size, size] of a few round objects, anywhere, also across the border."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:size, :size].astype(np.float32)
    logits = np.full((size, size), -8.0, np.float32)
    for _ in range(blobs):
        centre, radius = random.uniform(-2, size + 2, 2), random.uniform(0.3, size / 3)
        logits = np.maximum(logits, radius - np.hypot(x - centre[0], y - centre[1]))
    return logits + random.normal(scale=0.3, size=logits.shape).astype(np.float32)


def upsampled(logits: np.ndarray, frame_size: tuple[int, int]) -> np.ndarray:
    whole = torch.from_numpy(logits)[None, None]
    return F.interpolate(whole, size=frame_size, mode="bilinear", align_corners=False)[0, 0].numpy()


@pytest.mark.parametrize("frame_size", SIZES)
@pytest.mark.parametrize("low", [72, 63])
@pytest.mark.parametrize("blobs", [1, 4])
def test_equals_the_upsampled_whole(frame_size: tuple[int, int], low: int, blobs: int) -> None:
    for seed in range(5):
        logits = smooth_logits(seed, low, blobs)
        expected = upsampled(logits, frame_size)
        mask = rasterize(logits, frame_size)
        assert mask.size == frame_size
        differs = mask.full() != (expected > 0)
        assert np.abs(expected[differs]).max(initial=0.0) < 1e-4


def test_the_box_is_tight_and_one_pixel_is_enough() -> None:
    logits = np.full((72, 72), -1.0, np.float32)
    logits[71, 0] = 5.0
    mask = rasterize(logits, (720, 720))
    assert mask.crop.any(axis=0).all()
    assert mask.crop.any(axis=1).all()
    assert mask.box[0] == 0
    assert mask.box[3] == 720


@pytest.mark.parametrize("value", [-1024.0, 0.0, float("nan")])
def test_nothing_positive_is_an_empty_mask(value: float) -> None:
    mask = rasterize(np.full((72, 72), value, np.float32), (480, 640))
    assert mask.area == 0
    assert mask.size == (480, 640)
