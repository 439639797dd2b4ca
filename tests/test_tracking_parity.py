"""Our batched bank against transformers' streaming inference: the same logits at every frame and object."""

from __future__ import annotations

import pytest
import torch

from sam3_node.models.sam import TrackerModel
from sam3_node.tracking import ObjectPrompt, Tracker
from tests.tiny import Oracle, random_source

FRAMES = 60


def stages(source: torch.nn.Module) -> TrackerModel:
    return TrackerModel(source, name="tiny", mean=[0.5] * 3, std=[0.5] * 3, can_track=True)


def script(size: int) -> dict[int, ObjectPrompt]:
    """Three objects enter by point, box and mask; the first is corrected by two points."""
    mask = torch.zeros(size, size)
    mask[size // 4 : size // 2, size // 3 : size // 2 + 9] = 1
    return {
        0: ObjectPrompt(1, points=[[30.0, 40.0]], labels=[1]),
        10: ObjectPrompt(2, box=[20.0, 30.0, 70.0, 90.0]),
        25: ObjectPrompt(3, mask=mask),
        40: ObjectPrompt(1, points=[[50.0, 44.0], [10.0, 80.0]], labels=[1, 0]),
    }


def oracle_prompt(prompt: ObjectPrompt) -> dict[str, torch.Tensor]:
    if prompt.mask is not None:
        return {"mask": prompt.mask}
    points, labels = prompt.as_points(torch.device("cpu"))
    return {"points": points, "labels": labels}


@pytest.mark.parametrize("family", ["sam3", "sam2"])
def test_equals_transformers_streaming_inference(family: str) -> None:
    source = random_source(family)
    model = stages(source)
    tracker, oracle = Tracker(model, max_objects=4), Oracle(source)
    prompts = script(model.image_size)
    generator = torch.Generator().manual_seed(7)
    pixels = torch.randn(1, 3, model.image_size, model.image_size, generator=generator)
    seen = {True: 0, False: 0}
    for frame in range(FRAMES):
        pixels = 0.8 * pixels + 0.6 * torch.randn(pixels.shape, generator=generator)
        if frame == 50:
            tracker.remove(2)
            oracle.remove(2)
        prompt = prompts.get(frame)
        tracks = tracker.step(pixels, [prompt] if prompt else [])
        truth = oracle.step(pixels, {prompt.object_id: oracle_prompt(prompt)} if prompt else {})
        assert tracks.ids == list(truth)
        for object_id, logits, visible in zip(tracks.ids, tracks.logits, tracks.visible, strict=True):
            error = (logits - truth[object_id]).abs().max().item()
            assert error < 1e-3, f"frame {frame}, object {object_id}: off by {error}"
            seen[bool(visible)] += 1
    assert min(seen.values()) > 5, "the clip must show objects in view and out of view"
