"""What the tracker says of a frame, on the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class OnHost(NamedTuple):
    """N objects on one frame."""

    logits: npt.NDArray[np.float32]  # [N, h, w]
    scores: list[float]  # N in 0..1
    visible: list[bool]  # N


def to_host(logits: Tensor, scores: Tensor, visible: Tensor) -> OnHost:
    """Logits [N, h, w], scores [N] and visible [N] in one copy: the one that synchronises with the device."""
    if logits.device.type == "cpu":
        return OnHost(logits.float().numpy(), _bounded(scores.float().numpy()), visible.bool().tolist())
    columns = [logits.float().flatten(1), scores.float()[:, None], visible.float()[:, None]]
    rows = torch.cat(columns, dim=1).cpu().numpy()
    return OnHost(rows[:, :-2].reshape(logits.shape), _bounded(rows[:, -2]), (rows[:, -1] > 0).tolist())


def _bounded(scores: npt.NDArray[np.float32]) -> list[float]:
    """Scores in 0..1, whatever the model gave."""
    return [min(max(score, 0.0), 1.0) if score == score else 0.0 for score in scores.tolist()]
