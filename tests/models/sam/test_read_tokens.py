"""The tokens of the memory read: exact, pooled and sparse."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sam3_node.errors import ModelError
from sam3_node.models import TrackerModel
from sam3_node.models.sam.memory_read import ReadMethod, Tokens
from tests.support.tiny import tiny_model

SLOTS, POINTERS = 3, 4


@pytest.fixture
def model() -> TrackerModel:
    return tiny_model("sam3")


def make_inputs(model: TrackerModel) -> tuple[torch.Tensor, ...]:
    """Memories, offsets, pointers and ages of two objects."""
    generator = torch.Generator().manual_seed(3)
    area = model.grid[0] * model.grid[1]
    return (
        torch.randn(2, SLOTS, area, model.memory_channels, generator=generator),
        torch.tensor([[6, 0, 1], [6, 0, 0]]),
        torch.randn(2, POINTERS, model.hidden, generator=generator),
        torch.arange(2.0 * POINTERS).view(2, POINTERS),
    )


def make_tokens(model: TrackerModel, method: ReadMethod, valid: torch.Tensor | None = None) -> Tokens:
    model.use_read(method)
    tokens: Tokens = model.read_stage.tokens(*make_inputs(model), valid, torch.float32)
    return tokens


def test_pooled_memories_are_averages_of_squares(model: TrackerModel) -> None:
    exact, pooled = make_tokens(model, "exact"), make_tokens(model, "pooled")
    area, (height, width) = model.read_stage.tokens.area, model.grid
    assert (pooled.reduced, pooled.full, pooled.weight) == ((SLOTS - 1) * area // 4, area, 4)
    for mine, whole in ((pooled.keys, exact.keys), (pooled.values, exact.values)):
        images = whole[:, area : SLOTS * area].reshape(-1, height, width, whole.shape[-1]).permute(0, 3, 1, 2)
        averages = F.avg_pool2d(images, 2).flatten(2).transpose(1, 2).reshape(2, -1, whole.shape[-1])
        assert (mine[:, : pooled.reduced] - averages).abs().max() < 1e-5
        assert torch.equal(mine[:, pooled.reduced :][:, :area], whole[:, :area])
        assert torch.equal(mine[:, pooled.reduced + area :], whole[:, SLOTS * area :])


def test_a_pooled_token_is_rotated_by_the_average_of_its_square(model: TrackerModel) -> None:
    tokens, (height, width) = model.read_stage.tokens, model.grid
    table = torch.view_as_complex(tokens.rotation)
    assert (table[tokens.area] == 1).all()
    whole, pooled = table[: tokens.area].view(height, width, -1), table[tokens.area + 1 :]
    square = whole[2:4, 4:6].mean(dim=(0, 1))
    assert (pooled.view(height // 2, width // 2, -1)[1, 2] - square).abs().max() < 1e-6


def test_sparse_memories_are_the_tokens_unlike_the_others(model: TrackerModel) -> None:
    memory, offset, pointers, age = make_inputs(model)
    memory *= 0.1
    objects = torch.tensor([3, 17, 40])
    memory[:, 1:, objects] += 5
    model.use_read("sparse")
    tokens = model.read_stage.tokens(memory, offset, pointers, age, None, torch.float32)
    kept = tokens.reduced // (SLOTS - 1)
    assert kept == model.read_stage.tokens.area // 4
    rows = tokens.rows.view(2, SLOTS - 1, kept)
    assert all(set(objects.tolist()) <= set(chosen.tolist()) for chosen in rows.flatten(0, 1))
    assert torch.equal(tokens.values[1, :kept], memory[1, 1][rows[1, 0]])


@pytest.mark.parametrize("method", ["exact", "pooled", "sparse"])
def test_memories_that_are_not_valid_change_nothing(model: TrackerModel, method: ReadMethod) -> None:
    memory, offset, pointers, age = make_inputs(model)
    model.use_read(method)
    top = torch.randn(1, model.hidden, *model.grid, generator=torch.Generator().manual_seed(4))
    valid = torch.ones(2, SLOTS + POINTERS, dtype=torch.bool)
    valid[:, 2:SLOTS] = valid[:, SLOTS + 1 :] = False
    with torch.inference_mode():
        found = model.read_stage(top, memory, offset, pointers, age, valid)
        expected = model.read_stage(top, memory[:, :2], offset[:, :2], pointers[:, :1], age[:, :1], None)
    assert (found - expected).abs().max() < 1e-4


def test_one_memory_is_read_exactly_by_every_method(model: TrackerModel) -> None:
    memory, offset, pointers, age = make_inputs(model)
    top = torch.randn(1, model.hidden, *model.grid, generator=torch.Generator().manual_seed(4))
    found = []
    for method in ("exact", "pooled", "sparse"):
        model.use_read(method)
        with torch.inference_mode():
            found.append(model.read_stage(top, memory[:, :1], offset[:, :1], pointers, age, None))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_an_odd_grid_is_not_pooled() -> None:
    odd = tiny_model("sam2", size=112)
    with pytest.raises(ModelError, match=r"even sides, found 7 x 7.*--model.image_size"):
        odd.use_read("pooled")
    odd.use_read("sparse")
