"""The dtype of a model on a CPU where the settings leave it open: bfloat16 where the CPU has it and the gate passes it.

The gate runs when weights are first loaded on a machine, on a few frames of the bundled recording, and its report is
kept beside the engines. Some CPUs' libraries compute wrongly in bfloat16, and some weights lose too much, so capability
alone is no reason to use it.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from ..errors import EngineError, Sam3NodeError
from ..models import TrackerModel
from ..models.weight_files import pick_device
from ..settings import Settings
from .inductor import describe_processor
from .slot import read_gate_clip
from .store import checkpoint_digest
from .validation import Report, compare_stages

MIN_COSINE = 0.99
"""Cosine similarity to float32 of each stage's worst output from which bfloat16 serves where nobody asked for it."""
MIN_IOU = 0.97
"""Mean mask IoU with float32, likewise. Decoded masks of nano have 64 x 64 cells: one that flips at the edge of the
bundled recording's smallest object is 0.02 of its IoU. Wrong arithmetic was seen to reach 0.89."""
MAX_PARAMETERS = 100_000_000
"""Weights beyond this stay in float32: on a CPU their gate would take minutes."""
ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
FOLDER = "bfloat16"
_log = logging.getLogger(__name__)

Load = Callable[[torch.dtype], TrackerModel]


def has_open_dtype(settings: Settings) -> bool:
    """Return True for `model.dtype auto` with eager torch on a CPU that has bfloat16 arithmetic."""
    model = settings.model
    return (
        model.dtype == "auto"
        and not model.compile
        and settings.engine.kind == "torch"
        and pick_device(model.device).type == "cpu"
        and has_bfloat16()
    )


def has_bfloat16() -> bool:
    """Return True if this CPU multiplies bfloat16 in hardware, and oneDNN may use it (ONEDNN_MAX_CPU_ISA)."""
    features = torch.cpu.get_capabilities()
    capable = features.get("avx512_bf16") or features.get("amx_bf16")
    allowed = os.environ.get(ISA_VARIABLE, "ALL").upper()
    return bool(capable) and (allowed in ("ALL", "DEFAULT") or allowed.endswith(("BF16", "FP16", "AMX")))


def load_by_gate(load: Load, settings: Settings) -> TrackerModel:
    """Load a model in bfloat16 if the gate has passed it on this machine, or does so now; else in float32.

    `load` loads the weights of `settings` in a dtype, and its errors pass.
    """
    path = _report_path(settings)
    report = _read_report(path)
    if report is not None:
        return load(torch.bfloat16 if report.passed else torch.float32)
    reference = load(torch.float32)
    if not reference.has_memory or _count_parameters(reference) > MAX_PARAMETERS:
        return reference
    candidate = load(torch.bfloat16)
    try:
        report = compare(reference, candidate)
    except Sam3NodeError as error:
        _log.info("%s stays in float32: bfloat16 could not be compared: %s", reference.name, error)
        return reference
    _write_report(path, report)
    refusal = report.refusal()
    if refusal is not None:
        _log.info("%s stays in float32: bfloat16 was refused by the gate: %s", reference.name, refusal)
        return reference
    _log.info("%s runs in bfloat16: the gate passed it", reference.name)
    return candidate


def compare(reference: TrackerModel, candidate: TrackerModel) -> Report:
    """Compare a model in bfloat16 with the same weights in float32 on the bundled recording.

    Raises EngineError where there is nothing to compare.
    """
    clip = read_gate_clip()
    return compare_stages(
        reference,
        candidate.stages,
        clip.frames,
        MIN_COSINE,
        MIN_IOU,
        dtype=candidate.dtype,
        prompts=clip.prompts(reference.image_size),
        served=candidate,
    )


def _count_parameters(model: TrackerModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _report_path(settings: Settings) -> Path | None:
    """Return where the report on these weights on this machine is kept; None if the weights are no local files."""
    try:
        weights = checkpoint_digest(settings.model.name)
    except EngineError:
        return None
    key = f"{weights} {settings.model.image_size} {describe_processor()} {torch.__version__} {_sources_digest()}"
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    return settings.engine.folder.expanduser() / FOLDER / f"{name}.json"


def _sources_digest() -> str:
    """Return a digest of the code of the stages and of the gate: another arithmetic is judged again."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in [
        *sorted((here.parent / "models" / "sam").glob("*.py")),
        here / "validation.py",
        here / "gate_clip.py",
        Path(__file__),
    ]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _read_report(path: Path | None) -> Report | None:
    try:
        return None if path is None else Report.from_json(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return None
    except (OSError, EngineError) as error:
        _log.warning("%s is ignored: %s", path, error)
        return None


def _write_report(path: Path | None, report: Report) -> None:
    """Keep a report for the next start. A folder that cannot be written costs only time then."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(report.to_json(), encoding="utf-8")
    except OSError as error:
        _log.warning("the gate will run again at the next start: cannot write %s: %s", path, error.strerror)
