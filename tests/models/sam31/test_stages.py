"""SAM 3.1's stages: the interface, the other implementation's numbers, and what slots must not change."""

import json
from pathlib import Path

import pytest
import torch

from sam3_node.models import load_tracker
from sam3_node.models.sam31 import random_model
from tools.sam31.parity import OwnStages, StageInputs, record

RECORDED = Path(__file__).with_name("recorded.json")
"""Values of muggled_sam on the same weights and inputs, written by `python -m tools.sam31 parity --record`."""


@pytest.fixture(scope="module")
def model():
    return random_model()


def test_the_stages_compute_what_another_implementation_computes(model):
    expected = json.loads(RECORDED.read_text())
    found = record(model, OwnStages(model))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(
            torch.tensor(found[name]),
            torch.tensor(values),
            rtol=1e-3,
            atol=1e-3,
            msg=lambda text, n=name: n + text,
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@torch.inference_mode()
def test_a_model_runs_in_every_dtype(dtype):
    model = random_model(dtype=dtype)
    values = run(model, 2)
    assert {value.dtype for value in values} == {dtype}
    assert all(value.isfinite().all() for value in values)


@torch.inference_mode()
def run(model, groups):
    """Run each stage once; return the conditioned map, masks, pointers and memory."""
    inputs = StageInputs(model, 3)
    features = model.encode(inputs.pixels)
    used = torch.stack([inputs.slots(4) for _ in range(groups)])
    logits, presence, prompted = inputs.masks(used)
    memory = model.stages.remember(features.top, logits, presence, prompted)
    assert memory.shape == (groups, model.memory_tokens, model.memory_channels)
    bank = memory[:, None].expand(-1, 2, -1, -1)
    offset = torch.tensor([[6, 0]]).expand(groups, -1)
    pointers = inputs.normal(groups, 3, model.slots * model.hidden)
    age = torch.tensor([[4.0, 1.0, 2.0]]).expand(groups, -1)
    top = model.stages.read(features.top, bank, offset, pointers, age, None)
    decoded = model.stages.decode(top, features.fine, features.middle, used)
    assert decoded.logits.shape == (groups, model.slots, *model.mask_size)
    assert not decoded.logits[~used].any()
    assert not decoded.pointer[~used].any()
    assert (decoded.presence[~used] == -10).all()
    return top, decoded.logits, decoded.pointer, memory


@torch.inference_mode()
def test_groups_are_decoded_as_if_each_were_alone(model):
    inputs = StageInputs(model, 4)
    features = model.encode(inputs.pixels)
    used = torch.stack([inputs.slots(3), inputs.slots(9)])
    top = inputs.normal(2, *features.top.shape[1:])
    both = model.stages.decode(top, features.fine, features.middle, used)
    for group in range(2):
        single = model.stages.decode(
            top[group : group + 1], features.fine, features.middle, used[group : group + 1]
        )
        for found, expected in zip(both, single, strict=True):
            torch.testing.assert_close(found[group], expected[0], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_masked_memories_and_pointers_are_not_read(model):
    inputs = StageInputs(model, 5)
    features = model.encode(inputs.pixels)
    memory = inputs.normal(2, 3, model.memory_tokens, model.memory_channels)
    pointers = inputs.normal(2, 4, model.slots * model.hidden)
    offset = torch.tensor([[6, 0, 1], [3, 0, 1]])
    age = torch.tensor([[5.0, 1.0, 2.0, 3.0]] * 2)
    valid = torch.tensor([[True, True, False, True, True, False, False]] * 2)
    masked = model.stages.read(features.top, memory, offset, pointers, age, valid)
    short = model.stages.read(features.top, memory[:, :2], offset[:, :2], pointers[:, :2], age[:, :2], None)
    torch.testing.assert_close(masked, short, rtol=1e-4, atol=1e-4)


def test_prompts_are_decoded_on_their_own_pyramid(model):
    features = model.encode(StageInputs(model, 6).pixels)
    prompts = features.for_prompts()
    assert prompts.top is features.prompt_top
    assert prompts.for_prompts() is prompts
    decoded = model.decode_stage.candidates(features, torch.tensor([[40.0, 50.0]]), torch.tensor([1]), None)
    assert decoded.iou.tolist() == sorted(decoded.iou.tolist(), reverse=True)
    assert len(decoded.iou) == model.candidates == 3


def test_a_random_model_makes_masks_of_a_trained_models_size(model):
    _, logits, _, _ = run(model, 2)
    shown = logits[(logits > -1000) & (logits != 0)]
    assert shown.abs().max() > 5
    assert 0.02 < (shown > 0).float().mean() < 0.98


def test_objects_share_a_group_and_detectors_the_trunk(model):
    assert model.trunk is model.share_trunk()
    model.shares_trunk = False
    assert load_tracker("nano").slots == 1
    assert model.slots == 16
