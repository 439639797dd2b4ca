"""Muon: momentum whose matrices are orthogonalised before they are applied (Jordan and others, 2024)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of the published quintic iteration
ITERATIONS = 5
LIKE_ADAM = 0.2  # root mean square of an update, about Adam's (Liu and others, 2025)


class Muon(torch.optim.Optimizer):
    """Steps matrices, and convolutions as matrices [out, in * h * w]; the rest belongs to another optimiser.

    torch's own runs the iteration in bfloat16 and one matrix after another, which on a CPU without bfloat16 arithmetic
    takes longer than the training step. Here it is float32, and matrices of one shape go together.
    """

    def __init__(
        self, matrices: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.05
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply gradients. closure: not used."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    shapes.setdefault(matrix.shape, []).append(matrix)
            for matrices in shapes.values():
                self._step_together(matrices, group)

    def _step_together(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        updates = orthogonalise(
            torch.stack([self._momentum(m, group["momentum"]).flatten(1) for m in matrices])
        )
        size = LIKE_ADAM * max(updates[0].shape) ** 0.5
        for matrix, update in zip(matrices, updates, strict=True):
            matrix.mul_(1 - group["lr"] * group["weight_decay"])
            matrix.add_(update.view_as(matrix), alpha=-group["lr"] * size)

    def _momentum(self, matrix: Tensor, share: float) -> Tensor:
        """Nesterov's: what the momentum will be if the next gradient is like this one."""
        gradient: Any = matrix.grad
        held = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
        held.lerp_(gradient, 1 - share)
        return gradient.lerp(held, share)


def orthogonalise(matrices: Tensor) -> Tensor:
    """[K, M, N] -> the same with singular values near one, by a Newton-Schulz iteration."""
    first, second, third = NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = first * x + (second * square + third * square @ square) @ x
    return x.mT if tall else x
