"""Train with a lesson in features: compare the encoder's maps with a trained encoder's maps of the same pixels.

A mask tells the encoder about one outline; the features of a trained encoder tell it about every place of the picture,
and need no labels. Both encoders see the same 256 px, so that their maps have the same places. A linear map for each
level turns the student's channels into the teacher's, and is thrown away after the training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sam3_node.models import load_tracker

from training.nano.network import HIDDEN, SIZE
from training.nano.data import Recipe
from training.nano.steps import Cost
from training.nano.network import Features
from training.nano.train import Trainer

CHANNELS = (HIDDEN // 8, HIDDEN // 4, HIDDEN)
"""of the student's levels: fine, middle, top"""
WEIGHTS = (0.5, 0.5, 1.0)
"""of the levels"""
LIKENESS = 1.0  # weight of the lesson in the loss, on single frames
HURRY = 10.0  # how much faster its maps learn: they begin at zero


class Lesson(nn.Module):
    """Compares features with the tracker `weights`, as `load_tracker` takes them.

    It holds the linear maps; the teacher's weights are no part of its state.
    """

    def __init__(self, weights: str | Path, dtype: str = "auto") -> None:
        super().__init__()
        # in a list, so that it is no part of this module
        self._teacher = [load_tracker(weights, dtype=dtype, image_size=SIZE)]
        wanted = self._teach(torch.zeros(1, 3, SIZE, SIZE))
        self.maps = nn.ModuleList(
            nn.Conv2d(own, level.shape[1], 1) for own, level in zip(CHANNELS, wanted, strict=True)
        )
        for parameter in self.maps.parameters():  # the student is not changed before they say something
            nn.init.zeros_(parameter)

    @torch.no_grad()
    def _teach(self, pixels: Tensor) -> Features:
        """The teacher's features of normalised pixels [M, 3, 256, 256]."""
        teacher = self._teacher[0]
        levels = teacher.stages.encode(pixels.to(teacher.device, teacher.dtype))[:3]
        return Features(*(level.to(pixels.device, torch.float32) for level in levels))

    def forward(self, features: Features, pixels: Tensor) -> Tensor:
        """Return the share of the teacher's variance that the features of these pixels do not explain, over all levels.

        The channels count alike: each is brought to mean 0 and deviation 1 over the batch.
        """
        missed = []
        for own, wanted, to_teacher in zip(features, self._teach(pixels), self.maps, strict=True):
            target = F.batch_norm(wanted, None, None, training=True)
            student = F.batch_norm(own, None, None, training=True)  # the maps learn at one rate then
            missed.append(F.mse_loss(to_teacher(student), target))
        return torch.stack(missed) @ pixels.new_tensor(WEIGHTS) / sum(WEIGHTS)


class LessonTrainer(Trainer):
    """Trains with a lesson on single frames; its maps are kept in `last.pt`."""

    def __init__(self, folder: Path, device: torch.device, lesson: Lesson, *args: Any, **options: Any) -> None:
        self.lesson = lesson.to(device)
        self._seen: tuple[Features, Tensor] = Features(*[torch.empty(0)] * 3), torch.empty(0)
        self._single = False  # whether the batch is of single frames
        super().__init__(folder, device, *args, **options)

    def _make_optimisers(self, source: nn.Module) -> list[torch.optim.Optimizer]:
        optimisers = super()._make_optimisers(source)
        group = {"params": list(self.lesson.parameters()), "weight_decay": 0.0, "hurry": HURRY}
        optimisers[1].add_param_group(group)
        return optimisers

    def _costs(self, stage: Any, recipe: Recipe, *args: Any) -> Any:
        self._single = recipe.frames == 1
        return super()._costs(stage, recipe, *args)

    def _encode(self, pixels: Tensor) -> Features:
        features = super()._encode(pixels)
        self._seen = (features, pixels)
        return features

    def _total(self, costs: list[Cost]) -> tuple[Tensor, dict[str, float]]:
        loss, figures = super()._total(costs)
        if self._single:
            unlike = self.lesson(*self._seen)
            figures["unlike"] = float(unlike.detach())
            loss = loss + LIKENESS * unlike
        return loss, figures

    def _state(self) -> dict[str, Any]:
        return super()._state() | {"lesson": self.lesson.state_dict()}

    def _restore(self, held: dict[str, Any]) -> None:
        self.lesson.load_state_dict(held["lesson"])
        super()._restore(held)
