"""The training loop: by time, not by steps, so that a slow machine and a fast one both finish; resumes after a kill."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from sam3_node.errors import ModelError

from . import loop
from .data import Batch, Clips, Recipe, Sources
from .export import read_checkpoint, read_weights
from .muon import Muon
from .network import TrainingTracker, nano_config, new_tracker
from .steps import EASE, KINDS, Cost, clip_cost, frame_costs, normalise, second_prompt, total

WARM_UP = 60.0  # s
DECAY = 0.05
MIN_SIDE = 16  # of a matrix, below which it is a set of tokens or of outputs
MAX_GRADIENT = 1.0
# shares of a stage until the outside begins to weigh more, and until it does in full
EASY = 0.25
NORMAL = 0.6
CLIP_KINDS = (0.4, 0.25, 0.35)  # how often the first frame of a clip is prompted by a box, a point, a mask
AGAIN = 0.15
TRUST = 0.5
PICTURE_RATE = 4e-4  # at the peak, on taught pictures
SHOWN = 0.25  # share of light steps with a mask prompt
CORRECTED = 0.3  # share of light steps with corrections
ELSEWHERE = "move it away, or train with another --output"
FLOOR = 0.02  # of the peak learning rate, at the end
SAVE_EVERY = 60.0
SAY_EVERY = 10.0


@dataclass(frozen=True)
class Stage:
    """One part of the training: seconds, learning rate at its peak, and what a batch holds.

    new: it teaches something that the stage before did not. beside: what the steps after one on `recipe` train on, one
    each; a recipe may come up several times. light: frames are prompted by a box and a point, and only sometimes by a
    mask or corrected, so that more pictures are seen.
    """

    name: str
    seconds: float
    rate: float
    recipe: Recipe
    new: bool = False
    beside: tuple[Recipe, ...] = ()
    light: bool = False

    def recipes(self) -> list[Recipe]:
        """Return what it trains on, in turns; one may come up several times."""
        return [self.recipe, *self.beside]

    def get_recipe(self, step: int) -> Recipe:
        """Return the recipe of a step."""
        recipes = self.recipes()
        return recipes[step % len(recipes)]


def stages(frame_minutes: float, clip_minutes: float) -> list[Stage]:
    """Single frames, then clips that grow longer, each at a lower rate than the one before."""
    return [
        Stage("frames", frame_minutes * 60, 1e-3, Recipe(clips=8, frames=1, objects=6), new=True),
        Stage(
            "clips4", clip_minutes * 24, 6e-4, Recipe(clips=5, frames=4, objects=5, encoder=False), new=True
        ),
        Stage("clips6", clip_minutes * 24, 4e-4, Recipe(clips=4, frames=6, objects=4)),
        Stage("clips8", clip_minutes * 12, 2e-4, Recipe(clips=3, frames=8, objects=4)),
    ]


def picture_stages(minutes: float, rate: float = PICTURE_RATE) -> list[Stage]:
    """Pictures that a teacher has labelled, and clips beside them, so that following is not forgotten.

    Every second step is on single frames. The long clips fill the memory: in some, an object is hidden for longer than
    its frames are remembered. In the lasting ones errors add up, as they do in use: a mask that has lost a part of its
    object loses more.
    """
    frames = Recipe(clips=16, frames=1, objects=3, pictures=0.75)
    short = Recipe(clips=4, frames=4, objects=4, pictures=0.6)
    long = Recipe(clips=2, frames=8, objects=4, pictures=0.6)
    lasting = Recipe(clips=2, frames=16, objects=4, pictures=0.6, encoder=False)
    beside = (short, frames, long, frames, lasting)
    return [Stage("pictures", minutes * 60, rate, frames, beside=beside, light=True)]


def motion_stages(minutes: float, rate: float, many: float = 1) -> list[Stage]:
    """Taught pictures, and clips of which two in five are pseudo-tracks of things that move.

    many: times as many clips in a batch, for a GPU. Every third step is on single frames: following real motion is what
    is to be learnt.
    """
    clips = [max(1, round(number * many)) for number in (16, 4, 2)]
    frames = Recipe(clips=clips[0], frames=1, objects=3, pictures=0.7, tracks=0.15)
    short = Recipe(clips=clips[1], frames=4, objects=4, pictures=0.35, tracks=0.4)
    long = Recipe(clips=clips[2], frames=8, objects=4, pictures=0.35, tracks=0.4)
    lasting = Recipe(clips=clips[2], frames=16, objects=4, pictures=0.35, tracks=0.4, encoder=False)
    beside = (short, long, frames, short, lasting)
    return [Stage("motion", minutes * 60, rate, frames, beside=beside, light=True)]


@dataclass
class Progress:
    """Position in the training: stage index, seconds of training in it, steps and seconds in all."""

    stage: int = 0
    seconds: float = 0.0
    step: int = 0
    total: float = 0.0


class Trainer:
    """Trains a tracker and keeps `last.pt`, `log.jsonl` in `folder`.

    clock: seconds by which stages end. By default on a CPU those that this thread had of it, so that on a busy machine
    a stage takes longer. save_every: seconds between checkpoints.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        init: Path | None = None,
        mixed: bool = False,
        seed: int = 0,
        clock: Callable[[], float] | None = None,
        save_every: float = SAVE_EVERY,
    ) -> None:
        self.folder = folder
        self._save_every = save_every
        self._clock = clock or (time.thread_time if device.type == "cpu" else time.monotonic)
        self.device = device
        self.seed = seed
        folder.mkdir(parents=True, exist_ok=True)
        source = new_tracker(nano_config())
        held = read_checkpoint(self.path, device) if self.path.is_file() else None
        if held is not None:
            _load(
                source, held.get("model", {}), f"{self.path} is a checkpoint of another tracker: {ELSEWHERE}"
            )
        elif init is not None:
            _load(source, read_weights(init), f"expected weights of the nano tracker in {init}, found others")
        # the weights come first: it computes maps of positions from them once
        self.net = TrainingTracker(source, mixed).to(device).train()
        self.average = {name: value.detach().clone() for name, value in source.state_dict().items()}
        self.optimisers = self._make_optimisers(source)
        self.progress = Progress()
        if held is not None:
            self._restore(held)

    @property
    def path(self) -> Path:
        return self.folder / "last.pt"

    def run(self, plan: list[Stage], sources: Sources, workers: int) -> None:
        """Train through the stages that are left."""
        while self.progress.stage < len(plan):
            self._run_stage(plan[self.progress.stage], sources, workers)
            self.progress.stage += 1
            self.progress.seconds = 0.0
            self.save()

    def _run_stage(self, stage: Stage, sources: Sources, workers: int) -> None:
        seed = 1_000_000 * self.seed + 1000 * self.progress.stage + self.progress.step
        batches = {
            recipe: iter(load_ahead(Clips(sources, recipe, seed), workers, 3)) for recipe in stage.recipes()
        }
        rng = np.random.default_rng(seed)
        saved = said = time.monotonic()
        begun = self._clock()
        while self.progress.seconds < stage.seconds:
            recipe = stage.get_recipe(self.progress.step)
            record = self._step(stage, recipe, _to(next(batches[recipe]), self.device), rng)
            spent = self._clock() - begun
            begun = self._clock()
            self.progress.seconds += spent
            self.progress.total += spent
            now = time.monotonic()
            loop.log(self.folder, record)
            if now - said >= SAY_EVERY:
                said = now
                self._say(stage, record)
            if now - saved >= self._save_every:
                saved = now
                self.save()

    def _step(self, stage: Stage, recipe: Recipe, batch: Batch, rng: np.random.Generator) -> dict[str, Any]:
        rate = stage.rate * schedule(self.progress.seconds, stage.seconds)
        prompted, followed = self._costs(stage, recipe, batch, rng)
        loss, figures = total([each for costs in prompted.values() for each in costs] + followed)
        norm = loop.descend(loss, self.net, self.optimisers, rate, MAX_GRADIENT)
        self.progress.step += 1
        loop.follow(self.average, self.net.source, self.progress.step)
        record = {**asdict(self.progress), "stage": stage.name, "rate": rate, "gradient": norm, **figures}
        record |= {kind: total(costs[:1])[1]["iou"] for kind, costs in prompted.items()}
        if followed:
            record |= {"followed": total(followed[1:])[1]["iou"], "last": total(followed[-1:])[1]["iou"]}
        return record

    def _costs(
        self, stage: Stage, recipe: Recipe, batch: Batch, rng: np.random.Generator
    ) -> tuple[dict[str, list[Cost]], list[Cost]]:
        """Return the losses of the prompted first frames by prompt, and of the frames of clips."""
        frames = recipe.frames
        with torch.set_grad_enabled(recipe.encoder):
            features = self.net.encode(normalise(batch.images))
        first = features.select(batch.clip * frames)
        ease = easiness(self.progress.seconds / stage.seconds) if stage.new else EASE
        if frames == 1:
            kinds = KINDS if not stage.light or rng.random() < SHOWN else KINDS[:2]
            corrected = not stage.light or rng.random() < CORRECTED
            return frame_costs(self.net, first, batch, kinds, ease, corrected), []
        guide = (ease - EASE) / (1 - EASE)
        kind = KINDS[int(rng.choice(3, p=CLIP_KINDS))]
        other = str(rng.choice([name for name in ("box", "point") if name != kind]))
        again = second_prompt(batch, rng) if rng.random() < AGAIN else 0
        followed = clip_cost(self.net, features, batch, kind, TRUST, again, ease, guide)
        return frame_costs(self.net, first, batch, (other,)), followed

    def _make_optimisers(self, source: torch.nn.Module) -> list[torch.optim.Optimizer]:
        """Return Muon for matrices, AdamW for the rest, with weight decay for convolutions."""
        named = dict(source.named_parameters())
        matrices = [p for p in named.values() if p.ndim == 2 and min(p.shape) >= MIN_SIDE]
        wide = [p for name, p in named.items() if p.ndim == 4 and name.endswith("weight")]
        held = {id(p) for p in (*matrices, *wide)}
        narrow = [p for p in named.values() if id(p) not in held]
        others = [{"params": wide, "weight_decay": DECAY}, {"params": narrow, "weight_decay": 0.0}]
        return [
            Muon(matrices, lr=1e-3, weight_decay=DECAY),
            torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95)),
        ]

    def save(self) -> None:
        """Write `last.pt`, whole or not at all."""
        loop.save(self.path, self.net.source, self.average, self.optimisers, self.progress)

    def _restore(self, held: dict[str, Any]) -> None:
        try:
            self.average = held["average"]
            for optimiser, state in zip(self.optimisers, held["optimisers"], strict=True):
                optimiser.load_state_dict(state)
            self.progress = Progress(**held["progress"])
        except (RuntimeError, KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{self.path} is a checkpoint of another tracker: {ELSEWHERE}") from error

    def _say(self, stage: Stage, record: dict[str, Any]) -> None:
        known = [f"{name} {record[name]:.3f}" for name in (*KINDS, "followed", "presence") if name in record]
        print(
            f"{stage.name} {self.progress.seconds / 60:.1f} of {stage.seconds / 60:.1f} min · step {record['step']} · "
            f"loss {record['loss']:.3f} IoU {' '.join(known)} gradient {record['gradient']:.2f}",
            flush=True,
        )


def _load(source: torch.nn.Module, weights: dict[str, Tensor], otherwise: str) -> None:
    """Load weights in float32. Raises ModelError with the text `otherwise` where they are of another network."""
    try:
        source.load_state_dict({name: value.float() for name, value in weights.items()})
    except RuntimeError as error:
        raise ModelError(otherwise) from error


def load_ahead(batches: IterableDataset[Any], workers: int, ahead: int) -> DataLoader[Any]:
    """Return what reads batches in `workers` processes, `ahead` of them in each."""
    return DataLoader(
        batches, batch_size=None, num_workers=workers, prefetch_factor=ahead if workers else None
    )


def easiness(share: float) -> float:
    """Return the weight of the outside after `share` of a stage that teaches something new, see `losses.cost`."""
    left = min(1.0, max(0.0, (NORMAL - share) / (NORMAL - EASY)))
    return EASE + (1 - EASE) * left


def schedule(seconds: float, of: float) -> float:
    """Share of the peak learning rate: a linear rise, then half a cosine down."""
    rise = min(WARM_UP, of / 10)
    if seconds < rise:
        return max(0.01, seconds / rise)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * (seconds - rise) / max(1e-9, of - rise)))


def _to(batch: Batch, device: torch.device) -> Batch:
    return Batch(*(tensor.to(device, non_blocking=True) for tensor in batch))
