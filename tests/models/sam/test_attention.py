"""Attention with values narrower than keys: every way of computing it equals the definition in float64."""

from __future__ import annotations

import pytest
import torch

from sam3_node.models.sam import algebra
from sam3_node.models.sam.algebra import Attention

COUNT, QUERIES, KEYS, POINTERS = 3, 50, 140, 12


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
    monkeypatch.setattr(algebra, "is_eager_on_cpu", lambda x: way != "fused")
    if way == "plain in three parts":
        monkeypatch.setattr(algebra, "MAX_SCORES", 20 * KEYS)
    inputs, mask = tensors(), make_mask(masked)
    with torch.inference_mode():
        found = Attention()(*inputs, mask)
    assert (found - defined(*inputs, mask)).abs().max() < 1e-5


@pytest.mark.parametrize("masked", [None, POINTERS, KEYS])
@pytest.mark.parametrize("fused", [False, True])
def test_a_key_of_weight_4_counts_as_four(
    masked: int | None, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(algebra, "is_eager_on_cpu", lambda x: not fused)
    (query, key, value), mask, first = tensors(), make_mask(masked), 40
    copies = torch.cat([torch.arange(first).repeat_interleave(4), torch.arange(first, KEYS)])
    if mask is not None and masked == KEYS:
        mask_of_copies: torch.Tensor | None = mask[..., copies]
    else:
        mask_of_copies = mask
    with torch.inference_mode():
        found = Attention()(query, key, value, mask, first, 4)
    assert (found - defined(query, key[:, copies], value[:, copies], mask_of_copies)).abs().max() < 1e-5


def test_pointers_that_are_all_masked_add_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algebra, "is_eager_on_cpu", lambda x: False)
    inputs, mask = tensors(), torch.zeros(COUNT, 1, POINTERS, dtype=torch.bool)
    with torch.inference_mode():
        found = Attention()(*inputs, mask)
    assert (found - defined(*inputs, mask)).abs().max() < 1e-5


@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
def test_a_linear_map_on_a_cpu_equals_torchs(activation: str) -> None:
    torch.manual_seed(2)
    layer, x = torch.nn.Linear(64, 96), torch.randn(2, 33, 64)
    with torch.inference_mode():
        found = algebra.apply_linear(layer, x, activation)
    truth = layer.double()(x.double())
    truth = {"none": truth, "relu": truth.relu(), "gelu": torch.nn.functional.gelu(truth)}[activation]
    assert (found - truth).abs().max() < 1e-5


def test_a_linear_map_of_another_type_than_its_input_is_left_to_autocast() -> None:
    """Training in mixed precision encodes without a gradient where the encoder stays as it is."""
    layer, x = torch.nn.Linear(64, 96), torch.randn(2, 33, 64).bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(algebra.apply_linear(layer, x), layer(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotation_equals_its_definition_up_to_rounding(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    angle, x = torch.rand(20, 8, generator=generator) * 6, torch.randn(2, 5, 20, 16, generator=generator)
    rotation = torch.stack([angle.cos(), angle.sin()], dim=-1)
    x = x.to(dtype)
    even, odd = x.double()[..., ::2], x.double()[..., 1::2]
    cos, sin = angle.double().cos(), angle.double().sin()
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
    layer, x = Rounding(16, 8), torch.randn(3, 16)
    with torch.inference_mode():
        assert torch.equal(algebra.apply_mlp(layer, torch.nn.ReLU(), torch.nn.Identity(), x), layer(x).relu())


def test_a_folded_upscaling_equals_both_maps_up_to_the_edge() -> None:
    torch.manual_seed(4)
    first, second = torch.nn.ConvTranspose2d(6, 5, 2, stride=2), torch.nn.Conv2d(5, 3, 3, padding=1)
    x = torch.randn(1, 6, 7, 7)
    with torch.inference_mode():
        truth = second(first(x))
        found = algebra.fold_upscaling(first, second)(x) + algebra.upscaled_bias(first, second, 14)
    assert (found - truth).abs().max() < 1e-5
