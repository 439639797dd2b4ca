"""One run of nano from a pack, on a GPU or a CPU: seeds side by side, validation each minute, a table of candidates.

    python -m training.pack out/pack.zip --run out/run --minutes 9

Each seed is a process of its own that trains from the weights in the package for `--minutes` of wall-clock time, and
keeps `last.pt` each minute. This process exports what each seed has so far, once a minute, and measures J by a mask on
some clips of every part of the pack (`validation.jsonl`). At the end it exports each seed's weights (`seed-N/export`)
and their mean (`mean`), and measures all candidates on all clips (`candidates.json`).

It can be killed at any time: the processes of the seeds end with it, and the same command goes on from the last minute.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sam3_node.errors import ModelError
from sam3_node.models import TrackerModel, load_tracker
from sam3_node.models.checkpoints import NANO
from tools.command import choose_device, set_up_cpu
from tools.scenes.clips import list_clips
from tools.vos.evaluate import evaluate
from tools.vos.followers import Setting
from tools.vos.sequences import open_sequences
from training.nano.data import Sources
from training.nano.export import export, mix, read_checkpoint, read_weights
from training.nano.train import Trainer, motion_stages

from .read import unpack

GPU_CLIPS = 4
"""Times as many clips in a batch on a GPU, whose time for small batches is that of starting kernels."""
QUICK_CLIPS = 3
"""Clips of each part that are measured then, and their frames. More take time from the training on a CPU."""
QUICK_FRAMES = 10
RENDERED = "rendered"
"""The part that is not real."""
# when weights are replaced
MOST_LOST = 0.01
"""J that no part may lose."""
MIN_GAINED = 0.05
"""Gain of the mean of the real parts from which any part may lose."""
PACKAGE = "in the package"
Scores = Mapping[str, float]


@dataclass(frozen=True)
class Run:
    """A pack, a folder, and how to train.

    workers: processes for each kind of batch and seed; None: by the cores. many: times as many clips in a batch; None:
    1 on a CPU, GPU_CLIPS on a GPU. every: seconds between checkpoints, and between validations.
    """

    pack: Path
    folder: Path
    minutes: float = 9.0
    seeds: int = 2
    device: str | None = None
    rate: float = 2e-4
    workers: int | None = None
    many: float | None = None
    every: float = 60.0
    table: bool = True

    @property
    def data(self) -> Path:
        return self.folder / "pack"

    @property
    def cores(self) -> int:
        """CPU cores of a seed."""
        return max(1, len(os.sched_getaffinity(0)) // self.seeds)

    def seed_folder(self, seed: int) -> Path:
        return self.folder / f"seed-{seed}"

    def parts(self) -> list[Path]:
        """Return the folders of the parts of the validation."""
        return sorted(path for path in (self.data / "parts").glob("*") if path.is_dir())


def run(plan: Run) -> int:
    """Train all seeds, validate, export; return the exit status. Goes on where a run in this folder was killed."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    unpack(plan.pack, plan.data)
    children = [_start_seed(plan, seed) for seed in range(plan.seeds)]
    try:
        _watch(plan, children)
    finally:
        for child in children:
            child.kill()
            child.wait()
    failed = [seed for seed, child in enumerate(children) if child.returncode]
    if failed:
        print(f"error: the training of seeds {failed} has failed; the same command goes on", file=sys.stderr)
        return 1
    for path in export_all(plan):
        print(path, flush=True)
    if plan.table:
        make_table(plan)
    return 0


def _start_seed(plan: Run, seed: int) -> subprocess.Popen[bytes]:
    root = Path(__file__).parents[2]
    words = [plan.pack, "--run", plan.folder, "--seed", seed, "--seeds", plan.seeds]
    words += ["--minutes", plan.minutes, "--rate", plan.rate, "--every", plan.every]
    words += ["--device", plan.device] if plan.device else []
    words += ["--workers", plan.workers] if plan.workers else []
    words += ["--many", plan.many] if plan.many else []
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "training.pack", *map(str, words)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})


def train_seed(plan: Run, seed: int) -> None:
    """Train one seed, from the package's weights or from its last checkpoint, until its time is over."""
    _end_with_parent()
    set_up_cpu(plan.cores)
    device = choose_device(plan.device)
    gpu = device.type == "cuda"
    stages = motion_stages(plan.minutes, plan.rate, plan.many or (GPU_CLIPS if gpu else 1))
    kinds = len(set(stages[0].recipes()))
    folder = plan.seed_folder(seed)
    # seconds of the wall clock: a run on a lent machine has to end in time
    trainer = Trainer(
        folder,
        device,
        NANO / "model.safetensors",
        mixed=gpu,
        seed=seed,
        clock=time.monotonic,
        save_every=plan.every,
    )
    sources = Sources(
        plan.data / "train",
        plan.folder / f"cache-{seed}",
        cutouts=_existing(plan.data / "cutouts"),
        videos=_existing(plan.data / "videos"),
        taught=_existing(plan.data / "taught"),
        tracks=_existing(plan.data / "tracks"),
    )
    trainer.run(stages, sources, plan.workers or max(1, plan.cores // kinds))


def _existing(folder: Path) -> Path | None:
    return folder if folder.is_dir() else None


def _end_with_parent() -> None:
    """End this process once its parent is gone: two processes that train one seed would overwrite each other."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _watch(plan: Run, children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Validate once a minute until all children have ended, or one has failed."""
    measured: dict[int, int] = {}
    due = time.monotonic() + plan.every
    while any(child.poll() is None for child in children):
        if any(child.poll() for child in children):
            return
        time.sleep(0.5)
        if time.monotonic() < due:
            continue
        due = time.monotonic() + plan.every
        for seed in range(plan.seeds):
            _validate_seed(plan, seed, measured)
    for seed in range(plan.seeds):
        _validate_seed(plan, seed, measured)


def _validate_seed(plan: Run, seed: int, measured: dict[int, int]) -> None:
    """Measure a seed's checkpoint, if it is newer than the one measured before; log it with its minutes of training."""
    path = plan.seed_folder(seed) / "last.pt"
    written = path.stat().st_mtime_ns if path.is_file() else 0
    if written == measured.get(seed, 0):
        return
    measured[seed] = written
    weights = export(path, plan.seed_folder(seed) / "export").parent
    scores = measure(plan, weights, QUICK_CLIPS, QUICK_FRAMES)
    minute = read_checkpoint(path)["progress"]["total"] / 60
    line = {"minute": round(minute, 2), "seed": seed, **scores}
    with (plan.folder / "validation.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    told = " ".join(f"{part} {j:.3f}" for part, j in scores.items())
    print(f"minute {minute:.1f} seed {seed}: J {told}", flush=True)


def export_all(plan: Run) -> list[Path]:
    """Export each seed's weights and their mean; return their paths."""
    checkpoints = [plan.seed_folder(seed) / "last.pt" for seed in range(plan.seeds)]
    paths = [export(path, path.parent / "export") for path in checkpoints]
    return [*paths, export(checkpoints[0], plan.folder / "mean", checkpoints[1:])]


def measure(plan: Run, weights: Path, clips: int = 0, frames: int = 0) -> dict[str, float]:
    """Return the mean J by a mask on each part of the pack; on the first clips and frames only, if given."""
    model = load_tracker(weights, device=choose_device(plan.device), dtype="float32")
    return {part.name: measure_part(model, part, clips, frames) for part in plan.parts()}


def measure_part(model: TrackerModel, part: Path, clips: int = 0, frames: int = 0) -> float:
    """Return the mean J over the clips of a part; a clip's J is the mean of its objects'."""
    setting = Setting()
    names = list_clips(part)[: clips or None]
    found = []
    for sequence in open_sequences(part, names, frames):
        (result,) = evaluate(sequence, [setting], {setting.model: model}, _look_away)
        if result.scores:
            found.append(np.mean([score.j for score in result.scores.values()]))
    return round(float(np.mean(found)), 4)


def _look_away(*_: object) -> None:
    """Watch nothing."""


class Candidate(NamedTuple):
    """Weights by name: the mean of these files."""

    name: str
    files: Sequence[Path]


def list_candidates(plan: Run) -> list[Candidate]:
    """Return the package's weights, each seed's, their mean, and mixtures with the package's and the packed ones."""
    package = NANO / "model.safetensors"
    mean = plan.folder / "mean" / "model.safetensors"
    seeds = [plan.seed_folder(seed) / "export" / "model.safetensors" for seed in range(plan.seeds)]
    found = [Candidate(PACKAGE, [package])]
    found += [Candidate(f"seed {number}", [path]) for number, path in enumerate(seeds)]
    found += [Candidate("mean of the seeds", [mean]), Candidate("half mean, half package", [mean, package])]
    for path in sorted((plan.data / "weights").glob("*.safetensors")):
        found.append(Candidate(path.stem, [path]))
        found.append(Candidate(f"half mean, half {path.stem}", [mean, path]))
        found.append(Candidate(f"half package, half {path.stem}", [package, path]))
        found.append(Candidate(f"thirds of mean, package and {path.stem}", [mean, package, path]))
    return found


def make_table(plan: Run) -> None:
    """Measure all candidates on all parts, and print and keep the table. Those measured before are not again."""
    unpack(plan.pack, plan.data)
    path = plan.folder / "candidates.json"
    rows: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.is_file() else {}
    for candidate in list_candidates(plan):
        if candidate.name in rows:
            continue
        folder = plan.folder / "candidate"
        mix([read_weights(file) for file in candidate.files], folder)
        rows[candidate.name] = measure(plan, folder)
        path.write_text(json.dumps(rows, indent=1) + "\n")
    print(describe(rows), flush=True)


def describe(rows: Mapping[str, Scores]) -> str:
    """Return the candidates as a table in Markdown, with what the rule says of each."""
    base = rows[PACKAGE]
    lines = [f"| J by a mask | {' | '.join(base)} | mean | ships |", f"|---|{'---|' * (len(base) + 2)}"]
    for name, scores in rows.items():
        values = " | ".join(f"{scores[part]:.3f}" for part in base)
        says = "" if name == PACKAGE else ("yes" if ships(base, scores) else "no")
        lines.append(f"| {name} | {values} | {_mean(scores.values()):.3f} | {says} |")
    return "\n".join(lines)


def ships(base: Scores, candidate: Scores) -> bool:
    """Return True if weights with these J may replace those with `base`.

    Their mean is better, and no part falls by more than MOST_LOST unless the mean of the real parts gains MIN_GAINED.
    """
    if base.keys() != candidate.keys():
        raise ModelError(
            f"expected J of the parts {list(base)}, found {list(candidate)}: make the table anew"
        )
    real = [part for part in base if part != RENDERED]
    gained = _mean(candidate[part] for part in real) - _mean(base[part] for part in real)
    lost = max(base[part] - candidate[part] for part in base)
    return _mean(candidate.values()) > _mean(base.values()) and (lost <= MOST_LOST or gained >= MIN_GAINED)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
