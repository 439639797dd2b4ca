"""Memory attention: its numbers, and the tokens that it attends to."""

import pytest
import torch
import torch.nn.functional as F

from sam3_node.errors import ModelError
from sam3_node.models import TrackerModel
from sam3_node.models.sam import algebra, attention
from sam3_node.models.sam.attention import Attention, Regions
from sam3_node.models.sam.memory_attention import ReadMethod, Tokens
from tests.support.refuses import refuses
from tests.support.tiny import tiny_model

COUNT = 3
QUERIES = 50
KEYS = 140
POINTERS = 12


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of a sharp attention: scores reach 30."""
    generator = torch.Generator().manual_seed(5)
    query, key = (torch.randn(COUNT, length, 64, generator=generator) * 2 for length in (QUERIES, KEYS))
    return query, key, torch.randn(COUNT, KEYS, 16, generator=generator)


def defined(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    scores = query.double() @ key.double().transpose(1, 2) * query.shape[-1] ** -0.5
    if mask is not None:
        scores[..., -mask.shape[-1] :].masked_fill_(~mask, float("-inf"))
    return scores.softmax(-1) @ value.double()


def make_mask(length: int | None) -> torch.Tensor | None:
    """Let row 0 attend to all keys, row 1 to the first of the last `length` only, row 2 to every second."""
    if length is None:
        return None
    mask = torch.ones(COUNT, 1, length, dtype=torch.bool)
    mask[1, :, 1:] = False
    mask[2, :, ::2] = False
    return mask


@pytest.mark.parametrize("masked", [None, POINTERS, KEYS])
@pytest.mark.parametrize("way", ["fused", "plain", "plain in three parts"])
def test_attention_equals_its_definition(
    masked: int | None, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "is_eager_on_cpu", lambda x: way != "fused")
    if way == "plain in three parts":
        monkeypatch.setattr(attention, "MAX_SCORES", 20 * KEYS)
    inputs = tensors()
    mask = make_mask(masked)
    with torch.inference_mode():
        found = Attention()(*inputs, Regions(0, KEYS, 1, mask))
    assert (found - defined(*inputs, mask)).abs().max() < 1e-5


@pytest.mark.parametrize("masked", [None, POINTERS, KEYS])
@pytest.mark.parametrize("fused", [False, True])
def test_a_key_of_weight_4_counts_as_four(
    masked: int | None, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "is_eager_on_cpu", lambda x: not fused)
    (query, key, value) = tensors()
    mask = make_mask(masked)
    first = 40
    copies = torch.cat([torch.arange(first).repeat_interleave(4), torch.arange(first, KEYS)])
    mask_of_copies = mask[..., copies] if masked == KEYS else mask
    with torch.inference_mode():
        found = Attention()(query, key, value, Regions(first, KEYS - first, 4, mask))
    assert (found - defined(query, key[:, copies], value[:, copies], mask_of_copies)).abs().max() < 1e-5


def test_pointers_that_are_all_masked_add_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "is_eager_on_cpu", lambda x: False)
    inputs = tensors()
    mask = torch.zeros(COUNT, 1, POINTERS, dtype=torch.bool)
    with torch.inference_mode():
        found = Attention()(*inputs, Regions(0, KEYS, 1, mask))
    assert (found - defined(*inputs, mask)).abs().max() < 1e-5


@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
def test_a_linear_map_on_a_cpu_equals_torchs(activation: str) -> None:
    torch.manual_seed(2)
    layer = torch.nn.Linear(64, 96)
    x = torch.randn(2, 33, 64)
    with torch.inference_mode():
        found = algebra.apply_linear(layer, x, activation)
    truth = layer.double()(x.double())
    truth = {"none": truth, "relu": truth.relu(), "gelu": torch.nn.functional.gelu(truth)}[activation]
    assert (found - truth).abs().max() < 1e-5


def test_a_linear_map_of_another_type_than_its_input_is_left_to_autocast() -> None:
    """Training in mixed precision encodes without a gradient where the encoder stays as it is."""
    layer = torch.nn.Linear(64, 96)
    x = torch.randn(2, 33, 64).bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(algebra.apply_linear(layer, x), layer(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotation_equals_its_definition_up_to_rounding(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    angle = torch.rand(20, 8, generator=generator) * 6
    x = torch.randn(2, 5, 20, 16, generator=generator)
    rotation = torch.stack([angle.cos(), angle.sin()], dim=-1)
    x = x.to(dtype)
    even = x.double()[..., ::2]
    odd = x.double()[..., 1::2]
    cos = angle.double().cos()
    sin = angle.double().sin()
    truth = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
    found = algebra.rotate(x[:, :, :], rotation)
    assert found.dtype == dtype
    assert (found.double() - truth).abs().max() <= torch.finfo(dtype).eps * 8


def test_a_layer_of_another_class_is_called() -> None:
    """A quantised layer keeps the weights of the layer that it replaces, but rounds its inputs first."""

    class Rounding(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.round())

    torch.manual_seed(2)
    layer = Rounding(16, 8)
    x = torch.randn(3, 16)
    with torch.inference_mode():
        assert torch.equal(algebra.apply_mlp(layer, torch.nn.ReLU(), torch.nn.Identity(), x), layer(x).relu())


def test_a_folded_upscaling_equals_both_maps_up_to_the_edge() -> None:
    torch.manual_seed(4)
    first = torch.nn.ConvTranspose2d(6, 5, 2, stride=2)
    second = torch.nn.Conv2d(5, 3, 3, padding=1)
    x = torch.randn(1, 6, 7, 7)
    with torch.inference_mode():
        truth = second(first(x))
        found = algebra.fold_upscaling(first, second)(x) + algebra.upscaled_bias(first, second, 14)
    assert (found - truth).abs().max() < 1e-5


SLOTS = 3
TOKEN_POINTERS = 4


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
        torch.randn(2, TOKEN_POINTERS, model.hidden, generator=generator),
        torch.arange(2.0 * TOKEN_POINTERS).view(2, TOKEN_POINTERS),
    )


def make_tokens(model: TrackerModel, method: ReadMethod, valid: torch.Tensor | None = None) -> Tokens:
    model.use_read(method)
    tokens: Tokens = model.memory_attention.tokens(*make_inputs(model), valid, torch.float32)
    return tokens


def test_pooled_memories_are_averages_of_squares(model: TrackerModel) -> None:
    exact = make_tokens(model, "exact")
    pooled = make_tokens(model, "pooled")
    area = model.memory_attention.tokens.area
    (height, width) = model.grid
    reduced = (SLOTS - 1) * area // 4
    assert pooled.regions == Regions(reduced, area, 4, None)
    for mine, whole in ((pooled.keys, exact.keys), (pooled.values, exact.values)):
        images = whole[:, area : SLOTS * area].reshape(-1, height, width, whole.shape[-1]).permute(0, 3, 1, 2)
        averages = F.avg_pool2d(images, 2).flatten(2).transpose(1, 2).reshape(2, -1, whole.shape[-1])
        assert (mine[:, :reduced] - averages).abs().max() < 1e-5
        assert torch.equal(mine[:, reduced:][:, :area], whole[:, :area])
        assert torch.equal(mine[:, reduced + area :], whole[:, SLOTS * area :])


def test_a_pooled_token_is_rotated_by_the_average_of_its_square(model: TrackerModel) -> None:
    tokens = model.memory_attention.tokens
    (height, width) = model.grid
    table = torch.view_as_complex(tokens.rotation)
    assert (table[tokens.area] == 1).all()
    whole = table[: tokens.area].view(height, width, -1)
    pooled = table[tokens.area + 1 :]
    square = whole[2:4, 4:6].mean(dim=(0, 1))
    assert (pooled.view(height // 2, width // 2, -1)[1, 2] - square).abs().max() < 1e-6


def test_sparse_memories_are_the_tokens_unlike_the_others(model: TrackerModel) -> None:
    memory, offset, pointers, age = make_inputs(model)
    memory *= 0.1
    objects = torch.tensor([3, 17, 40])
    memory[:, 1:, objects] += 5
    model.use_read("sparse")
    tokens = model.memory_attention.tokens(memory, offset, pointers, age, None, torch.float32)
    kept = tokens.regions.reduced // (SLOTS - 1)
    assert kept == model.memory_attention.tokens.area // 4
    rows = tokens.rows.view(2, SLOTS - 1, kept)
    assert all(set(objects.tolist()) <= set(chosen.tolist()) for chosen in rows.flatten(0, 1))
    assert torch.equal(tokens.values[1, :kept], memory[1, 1][rows[1, 0]])


@pytest.mark.parametrize("method", ["exact", "pooled", "sparse"])
def test_memories_that_are_not_valid_change_nothing(model: TrackerModel, method: ReadMethod) -> None:
    memory, offset, pointers, age = make_inputs(model)
    model.use_read(method)
    top = torch.randn(1, model.hidden, *model.grid, generator=torch.Generator().manual_seed(4))
    valid = torch.ones(2, SLOTS + TOKEN_POINTERS, dtype=torch.bool)
    valid[:, 2:SLOTS] = valid[:, SLOTS + 1 :] = False
    with torch.inference_mode():
        found = model.memory_attention(top, memory, offset, pointers, age, valid)
        expected = model.memory_attention(
            top, memory[:, :2], offset[:, :2], pointers[:, :1], age[:, :1], None
        )
    assert (found - expected).abs().max() < 1e-4


def test_one_memory_is_read_exactly_by_every_method(model: TrackerModel) -> None:
    memory, offset, pointers, age = make_inputs(model)
    top = torch.randn(1, model.hidden, *model.grid, generator=torch.Generator().manual_seed(4))
    found = []
    for method in ("exact", "pooled", "sparse"):
        model.use_read(method)
        with torch.inference_mode():
            found.append(model.memory_attention(top, memory[:, :1], offset[:, :1], pointers, age, None))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_an_odd_grid_is_not_pooled() -> None:
    odd = tiny_model("sam2", size=112)
    with refuses(ModelError, field=("7", "sides")):
        odd.use_read("pooled")
    odd.use_read("sparse")
