"""Steps that every training takes: the optimisers, the moving average of the weights, the checkpoint and the log."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

AVERAGE = 0.998
Optimisers = Iterable[torch.optim.Optimizer]


class Batches(IterableDataset[Any]):
    """An endless stream of what `batch` draws; each worker draws its own."""

    def __init__(self, *seed: int) -> None:
        self._seed = seed

    def __iter__(self) -> Iterator[Any]:
        cv2.setNumThreads(0)
        info = torch.utils.data.get_worker_info()
        rng = np.random.default_rng([*self._seed, info.id if info else 0])
        while True:
            yield self.batch(rng)

    def batch(self, rng: np.random.Generator) -> Any:
        """Draw one batch."""
        raise NotImplementedError


def descend(
    loss: Tensor, network: torch.nn.Module, optimisers: Optimisers, rate: float, max_gradient: float
) -> float:
    """Run one step at a learning rate, unless the gradient is not finite. Return the gradient's norm."""
    network.zero_grad(set_to_none=True)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(network.parameters(), max_gradient)
    if torch.isfinite(norm):
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()
    return float(norm)


@torch.no_grad()
def follow(average: Mapping[str, Tensor], network: torch.nn.Module, step: int) -> None:
    """Move the average towards the network's weights; quickly in the first steps."""
    decay = min(AVERAGE, (1 + step) / (10 + step))
    for name, value in network.state_dict().items():
        if value.is_floating_point():
            average[name].lerp_(value, 1 - decay)
        else:
            average[name].copy_(value)


def save(
    path: Path,
    network: torch.nn.Module,
    average: object,
    optimisers: Optimisers,
    progress: Any,
    **more: object,
) -> None:
    """Write a checkpoint completely or not at all."""
    partial = path.with_suffix(".part")
    states = [optimiser.state_dict() for optimiser in optimisers]
    held = {
        "model": network.state_dict(),
        "average": average,
        "optimisers": states,
        "progress": asdict(progress),
    }
    torch.save(held | more, partial)
    os.replace(partial, path)


def log(folder: Path, record: Mapping[str, Any]) -> None:
    """Append a record to `log.jsonl`."""
    rounded = {name: round(v, 5) if isinstance(v, float) else v for name, v in record.items()}
    with (folder / "log.jsonl").open("a") as file:
        file.write(json.dumps(rounded) + "\n")
