"""Muon: orthogonal updates of the size that is asked, against torch's own."""

from __future__ import annotations

import pytest
import torch

from tools.train_nano.muon import LIKE_ADAM, Muon, orthogonalise


@pytest.mark.parametrize("shape", [(2, 16, 64), (2, 64, 16)])
def test_singular_values_come_near_one(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_agrees_with_the_one_in_torch() -> None:
    torch.manual_seed(0)
    ours = [torch.randn(24, 40), torch.randn(24, 40), torch.randn(48, 16)]
    theirs = [matrix.clone() for matrix in ours]
    mine = Muon(ours, lr=0.01)
    reference = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        for matrix, other in zip(ours, theirs, strict=True):
            matrix.grad = torch.randn_like(matrix)
            other.grad = matrix.grad.clone()
        mine.step()
        reference.step()
    for matrix, other in zip(ours, theirs, strict=True):
        assert (matrix - other).abs().max() < 2e-3, "theirs is rounded to bfloat16"


def test_a_matrix_without_gradient_stays() -> None:
    still, moving = torch.ones(16, 16), torch.randn(16, 16)
    moving.grad = torch.randn(16, 16)
    before = moving.clone()
    Muon([still, moving], lr=0.1, weight_decay=0.0).step()
    assert bool((still == 1).all())
    change = (moving - before).square().mean().sqrt()
    assert 0.5 < change / (0.1 * LIKE_ADAM) < 1.5
