"""Train for a limited time, as the nano tracker does, and resume after a kill."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sam3_node.errors import ModelError
from training.nano import loop
from training.nano.export import read_checkpoint
from training.nano.muon import Muon
from training.nano.train import load_ahead, schedule

from .data import Batch, Pictures, Scenes
from .losses import losses
from .network import LearntDetector, Words, begin_from

PICTURES = 16  # a batch
RATE = 3e-3
DECAY = 0.05
MIN_SIDE = 16  # of a matrix that Muon trains; a smaller one is a set of outputs
MAX_GRADIENT = 10.0
SAVE_EVERY = 60.0
PRINT_EVERY = 10.0


@dataclass
class TrainProgress:
    """Steps and seconds of training."""

    step: int = 0
    seconds: float = 0.0


class Trainer:
    """Trains a detector of `words`, keeps `last.pt` and `log.jsonl` in `folder`, and resumes from them.

    init: a checkpoint of another training with the same words, or a folder of exported weights, whose vocabulary gives
    the words that it has, for the initial weights.
    """

    def __init__(self, folder: Path, words: Words, device: torch.device, init: Path | None = None) -> None:
        self.folder = folder
        self.words = words
        self.device = device
        folder.mkdir(parents=True, exist_ok=True)
        self.detector = LearntDetector(words).to(device).train()
        self.optimisers = _optimisers(self.detector)
        self.progress = TrainProgress()
        self.average: dict[str, Tensor] = {}
        if self.path.is_file():
            held = self._read(self.path)
            self.average = held["average"]
            self.progress = TrainProgress(**held["progress"])
            for optimiser, state in zip(self.optimisers, held["optimisers"], strict=True):
                optimiser.load_state_dict(state)
        elif init is not None and init.is_dir():
            begin_from(self.detector, words, init)
        elif init is not None:
            self._read(init, "average")
        self.average = self.average or {k: v.detach().clone() for k, v in self.detector.state_dict().items()}

    @property
    def path(self) -> Path:
        return self.folder / "last.pt"

    def run(self, scenes: Scenes, seconds: float, workers: int, rate: float = RATE, seed: int = 0) -> None:
        """Train until `seconds` of training are over, including those before a kill.

        seed: of the pictures that are drawn; two runs from the same weights differ by it.
        """
        pictures = Pictures(scenes, self.words, PICTURES, [seed, self.progress.step])
        loader = load_ahead(pictures, workers, 4)
        begun = saved = printed = time.monotonic()
        for batch in loader:
            if self.progress.seconds >= seconds:
                break
            record = self.step(batch, rate * schedule(self.progress.seconds, seconds))
            now = time.monotonic()
            self.progress.seconds = self.progress.seconds + now - begun
            begun = now
            loop.log(self.folder, record)
            if now - printed >= PRINT_EVERY:
                printed = now
                self._print(record, seconds)
            if now - saved >= SAVE_EVERY:
                saved = now
                self.save()
        self.save()

    def step(self, batch: Batch, rate: float) -> dict[str, Any]:
        """Run one step at a learning rate; return its log record."""
        images, boxes, words, fits = (tensor.to(self.device) for tensor in batch)
        terms = losses(self.detector(images, words), boxes, fits)
        loss = terms["similarity"] + terms["box"] + terms["distribution"]
        norm = loop.descend(loss, self.detector, self.optimisers, rate, MAX_GRADIENT)
        self.progress.step += 1
        loop.follow(self.average, self.detector, self.progress.step)
        figures = {name: float(term.detach()) for name, term in {"loss": loss, **terms}.items()}
        return {**asdict(self.progress), "rate": rate, "gradient": norm, **figures}

    def save(self) -> None:
        """Write `last.pt` completely or not at all."""
        words = {"kinds": list(self.words.kinds), "colours": list(self.words.colours)}
        loop.save(self.path, self.detector, self.average, self.optimisers, self.progress, **words)

    def _read(self, path: Path, what: str = "model") -> dict[str, Any]:
        """Read a checkpoint and load its weights."""
        held = read_checkpoint(path, self.device)
        try:
            if (tuple(held["kinds"]), tuple(held["colours"])) != (self.words.kinds, self.words.colours):
                raise ValueError("other words")
            self.detector.load_state_dict(held[what])
        except (RuntimeError, KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"{path} is a checkpoint of another detector or other words ({str(error)[:200]}): move it away, or "
                "train with another --output"
            ) from error
        return held

    def _print(self, record: dict[str, Any], seconds: float) -> None:
        names = ("similarity", "box", "distribution", "iou")
        terms = " ".join(f"{name} {record[name]:.3f}" for name in names)
        print(
            f"{self.progress.seconds / 60:.1f} of {seconds / 60:.1f} min · step {record['step']} · "
            f"loss {record['loss']:.3f} {terms} gradient {record['gradient']:.1f}",
            flush=True,
        )


def _optimisers(detector: LearntDetector) -> list[torch.optim.Optimizer]:
    """Return Muon for convolutions and matrices, and AdamW for words, norms, biases and the convolution of pixels."""
    heavy: list[torch.nn.Parameter] = []
    light: list[torch.nn.Parameter] = []
    for name, parameter in detector.named_parameters():
        wide = parameter.ndim > 1 and min(parameter.shape[:2]) >= MIN_SIDE
        (heavy if wide and not name.startswith("vectors") else light).append(parameter)
    adam = torch.optim.AdamW(light, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(heavy, lr=RATE, weight_decay=DECAY), adam]
