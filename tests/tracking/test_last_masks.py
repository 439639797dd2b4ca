"""Following objects by their last masks, with weights that have no memory modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sam3_node.models import TrackerModel
from sam3_node.tracking import ObjectPrompt, Tracker
from tests.support.tiny import noise_clip, random_source

FRAMES = 6


def model_of(presence: float) -> TrackerModel:
    source = random_source("sam2", presence=presence)
    return TrackerModel(source, name="stills", mean=[0.5] * 3, std=[0.5] * 3, has_memory=False)


@pytest.fixture(scope="module")
def model() -> TrackerModel:
    return model_of(60.0)


@pytest.fixture(scope="module")
def clip(model: TrackerModel) -> list[Tensor]:
    return noise_clip(model.image_size, FRAMES)


def prompts(model: TrackerModel) -> list[ObjectPrompt]:
    mask = torch.zeros(model.image_size, model.image_size)
    mask[30:70, 40:90] = 1
    return [
        ObjectPrompt(1, points=[[30.0, 40.0]]),
        ObjectPrompt(2, box=[20.0, 30.0, 70.0, 90.0]),
        ObjectPrompt(3, mask=mask),
    ]


def test_objects_of_all_prompts_are_followed_alone_as_together(
    model: TrackerModel, clip: list[Tensor]
) -> None:
    together = Tracker(model)
    alone = {prompt.object_id: Tracker(model) for prompt in prompts(model)}
    for number, pixels in enumerate(clip):
        tracks = together.step(pixels, prompts(model) if number == 0 else [])
        for prompt, logits in zip(prompts(model), tracks.logits, strict=True):
            one = alone[prompt.object_id].step(pixels, [prompt] if number == 0 else [])
            assert (one.logits[0] - logits).abs().max() < 1e-4


def test_a_mask_prompt_is_its_own_result(model: TrackerModel, clip: list[Tensor]) -> None:
    tracks = Tracker(model).step(clip[0], prompts(model)[2:])
    inside = tracks.logits[0] > 0
    scale = model.image_size // inside.shape[-1]
    assert inside[40 // scale : 60 // scale, 50 // scale : 80 // scale].all()
    assert inside.sum() < 1.2 * 40 * 50 / scale**2
    assert tracks.visible.all()


def test_a_hidden_object_is_looked_for_where_it_was(model: TrackerModel, clip: list[Tensor]) -> None:
    tracker = Tracker(model)
    tracker.step(clip[0], prompts(model)[1:2])
    expected = Tracker(model)
    expected.restore(tracker.state())
    head = model.decode_stage.mask_decoder.presence_head
    bias = head.proj_out.bias
    kept = bias.clone()
    bias.fill_(-60.0)
    assert not tracker.step(clip[1]).visible.any()
    bias.copy_(kept)
    assert torch.equal(tracker.step(clip[2]).logits, expected.step(clip[2]).logits)


def test_a_saved_state_continues_bit_for_bit(model: TrackerModel, clip: list[Tensor]) -> None:
    tracker, again = Tracker(model), Tracker(model)
    tracker.step(clip[0], prompts(model))
    tracker.remove(2)
    tracker.step(clip[1])
    again.restore(tracker.state())
    for pixels in clip[2:]:
        ours, theirs = tracker.step(pixels), again.step(pixels)
        assert ours.ids == theirs.ids == [1, 3]
        assert torch.equal(ours.logits, theirs.logits)
        assert torch.equal(ours.pointers, theirs.pointers)


def test_a_correction_replaces_the_last_mask_and_memory_does_not_grow(
    model: TrackerModel, clip: list[Tensor]
) -> None:
    tracker = Tracker(model, max_objects=2)
    size = tracker.bank.nbytes
    tracker.step(clip[0], prompts(model)[:1])
    features = model.encode(clip[1])
    tracker.step_features(features)
    logits, score = tracker.prompt_at(features, 1, ObjectPrompt(1, box=[20.0, 30.0, 70.0, 90.0]))
    boxed = Tracker(model)
    first = boxed.step_features(features, [ObjectPrompt(1, box=[20.0, 30.0, 70.0, 90.0])])
    assert torch.equal(logits, first.logits[0])
    assert float(score) >= 0
    assert torch.equal(tracker.step(clip[2]).logits, boxed.step(clip[2]).logits)
    assert tracker.bank.nbytes == size
    pointers, valid = tracker.appearance([1])
    assert pointers.shape == (1, 1, model.hidden)
    assert valid.all()


def test_a_mask_that_jumps_is_withheld_and_its_object_is_searched_from_the_last_sure_mask(
    model: TrackerModel, clip: list[Tensor]
) -> None:
    """On noise, random weights decode masks of the whole image, whatever the prompt was."""
    small = torch.zeros(model.image_size, model.image_size)
    small[40:60, 40:60] = 1
    tracker, fresh = Tracker(model), Tracker(model)
    tracker.step(clip[0], [ObjectPrompt(1, mask=small)])
    fresh.restore(tracker.state())
    tracks = tracker.step(clip[1])
    assert not tracks.visible.any()
    assert not (tracks.logits > 0).any()
    assert float(tracks.scores[0]) < 0.01
    prompt = tracker.state()["bank"]["logits"]
    assert torch.equal(prompt, fresh.state()["bank"]["logits"])
    tracker.step(clip[2])
    assert torch.equal(tracker.state()["bank"]["logits"], prompt)


def test_a_prompt_shows_an_object_again_whose_masks_were_withheld(
    model: TrackerModel, clip: list[Tensor]
) -> None:
    small = torch.zeros(model.image_size, model.image_size)
    small[40:60, 40:60] = 1
    tracker = Tracker(model)
    tracker.step(clip[0], [ObjectPrompt(1, mask=small)])
    assert not tracker.step(clip[1]).visible.any()
    assert tracker.step(clip[2], [ObjectPrompt(1, mask=small)]).visible.all()
