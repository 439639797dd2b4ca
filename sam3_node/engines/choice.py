"""Choose compilation, kernels and CUDA graphs where the settings leave them open, by what is faster on this machine.

On a GPU, the first start times the tracked bundled recording, and keeps the choice beside the engines. Where nothing is
open, or on a CPU, nothing is timed.
"""

from __future__ import annotations

import hashlib
import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from pydantic import TypeAdapter, ValidationError

from ..errors import EngineError, find_version
from ..files import keep, read_kept
from ..models import TrackerModel
from ..models.weight_files import pick_device
from ..settings import Settings
from ..tracking import Tracker
from .engine_store import identify_setup
from .oom import find_device_error, summarize_error
from .slot import read_gate_clip
from .validation import Clock, read_clock

AUTO = "auto"
OPTIONS: tuple[tuple[str, str, str | bool, str | bool], ...] = (
    ("engine", "read_kernel", "torch", "triton"),
    ("model", "compile", False, True),
    ("engine", "graphs", False, True),
)
"""Section, field, value without and value with each option, in the order in which they are tried."""
MIN_GAIN = 0.97
"""Largest part of the time without an option that it may take: less gain is noise, and no reason for a longer start."""
FOLDER = "choices"

Load = Callable[[Settings], TrackerModel]
"""Loads a tracker that serves as the settings say."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """The values of the options that were tried, by "section.field", a line about each, and the time of a step so."""

    values: dict[str, str | bool]
    reasons: tuple[str, ...]
    ms: float

    @classmethod
    def load(cls, path: Path | None) -> Self | None:
        """Read a choice; None where there is none, or the file is damaged."""
        if path is None or (data := read_kept(path, "options are timed again")) is None:
            return None
        try:
            return TypeAdapter(cls).validate_json(data)
        except ValidationError:
            return None

    def add(self, name: str, value: str | bool, reason: str, ms: float) -> Choice:
        """Return the choice with one more option."""
        return Choice(self.values | {name: value}, (*self.reasons, f"{name} {value}: {reason}"), ms)

    def save(self, path: Path | None) -> None:
        """Keep the choice for the next start."""
        if path:
            keep(
                path,
                TypeAdapter(Choice).dump_json(self, indent=2),
                "options are timed again at the next start",
            )


def choose(settings: Settings, load: Load, clock: Clock = read_clock) -> Settings:
    """Return the settings with a value in the place of each `auto` of OPTIONS.

    The first start on a GPU loads the tracker once for each option. Raises the errors of `load` without any option, and
    DeviceError where a trial loses the GPU; the next start goes on without that option.
    """
    values = {name: without for name, without, _ in _list_open(settings)}
    if _is_measured(settings):
        choice = _measure(settings, load, clock)
        values = choice.values
        for reason in choice.reasons:
            _log.info("%s", reason)
    return _replace(settings, values)


def describe(settings: Settings) -> tuple[str, ...]:
    """Say what was chosen and why, a line for each option; nothing where no option is open."""
    if not _is_measured(settings):
        return ()
    choice = Choice.load(find_path(settings))
    return choice.reasons if choice else ("not chosen yet: the first start of the node times the options",)


def find_path(settings: Settings) -> Path | None:
    """Return where the choice for these weights and settings is kept; None if the weights are no local files."""
    try:
        setup = identify_setup(settings)
    except EngineError:
        return None
    model, engine, read = settings.model, settings.engine, settings.tracker.read
    package = hashlib.sha256(b"".join(path.read_bytes() for path in _list_sources())).hexdigest()
    given = engine.precision, model.dtype, read, engine.read_kernel, model.compile, engine.graphs
    key = " ".join(map(str, (setup, find_version("triton"), package, *given)))
    return engine.folder.expanduser() / FOLDER / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _list_sources() -> list[Path]:
    package = Path(__file__).parents[1]
    return sorted([*package.glob("models/sam/*.py"), *package.glob("tracking/*.py")])


def _list_open(settings: Settings) -> list[tuple[str, str | bool, str | bool]]:
    """Return the name of each open setting, and its values without and with the option."""
    return [
        (f"{section}.{field}", without, with_it)
        for section, field, without, with_it in OPTIONS
        if getattr(getattr(settings, section), field) == AUTO
    ]


def _is_measured(settings: Settings) -> bool:
    is_torch = settings.engine.kind == "torch"  # engines have kernels of their own, and nothing to compile
    return is_torch and bool(_list_open(settings)) and pick_device(settings.model.device).type == "cuda"


def _replace(settings: Settings, values: dict[str, str | bool]) -> Settings:
    """Return the settings with other values, by "section.field"."""
    for name, value in values.items():
        section, _, field = name.partition(".")
        changed = getattr(settings, section).model_copy(update={field: value})
        settings = settings.model_copy(update={section: changed})
    return settings


def _measure(settings: Settings, load: Load, clock: Clock) -> Choice:
    """Add one option after the other to what was kept, and keep each that makes a step faster."""
    options = _list_open(settings)
    without = _replace(settings, {name: value for name, value, _ in options})
    choice = Choice.load(find_path(settings))
    if choice is None:
        _log.info("the first start on this GPU times its options: this takes some minutes")
        choice = Choice({}, (), _time_step(load(without), clock))
    path = find_path(settings)  # by now the weights are files
    strict = _replace(
        without, {"engine.fallback": False}
    )  # a refusal of the gate is a reason, not a slower step
    for name, off, on in options:
        if name in choice.values:
            continue
        # a process that this trial ends must not try it at each start
        choice.add(name, off, f"the trial of {on} did not end", choice.ms).save(path)
        try:
            ms = _time_step(load(_replace(strict, choice.values | {name: on})), clock)
        except Exception as error:  # libraries have errors of their own
            if lost := find_device_error(error):
                raise lost from error
            choice = choice.add(name, off, f"{on} cannot serve here: {summarize_error(error)}", choice.ms)
        else:
            value, best_ms = (on, ms) if ms < MIN_GAIN * choice.ms else (off, choice.ms)
            reason = f"a step takes {ms:.3g} ms with {on}, {choice.ms:.3g} ms without"
            choice = choice.add(name, value, reason, best_ms)
        choice.save(path)
        torch.cuda.empty_cache()
    return choice


@torch.inference_mode()
def _time_step(model: TrackerModel, clock: Clock) -> float:
    """Return the median milliseconds of a step on the second half of the bundled recording's clip.

    By then the steps have compiled and captured what they need.
    """
    clip = read_gate_clip()
    prompts = clip.prompts(model.image_size) or []
    tracker, times = Tracker(model, max_objects=len(prompts)), []
    for number, frame in enumerate(clip.frames):
        pixels = model.preprocess(frame)
        start_s = clock(model.device)
        tracker.step(pixels, () if number else prompts)
        times.append(clock(model.device) - start_s)
    return 1e3 * statistics.median(times[len(times) // 2 :])
