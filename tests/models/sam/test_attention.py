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
