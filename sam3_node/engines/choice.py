"""Choose arithmetic, kernels, compilation and CUDA graphs that the settings leave open, by what is faster here.

On a GPU, the first start times the tracked bundled recording, and keeps the choice beside the engines. Where nothing is
open, or on a CPU, nothing is timed.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Self

import torch
from pydantic import TypeAdapter, ValidationError

from ..errors import EngineError, Sam3NodeError, summarize_error
from ..files import keep, read_kept
from ..models import TrackerModel
from ..models.weight_files import pick_device
from ..settings import Settings
from ..tracking import Tracker
from .engine_store import FP8
from .fast_torch import compare_fast, find_report
from .oom import find_device_error
from .quantize import load_quantisation
from .slot import read_gate_clip
from .validation import Clock, read_clock

AUTO, DTYPE, REFERENCE = "auto", "model.dtype", "float32"
OPTIONS: Mapping[str, tuple[str | bool, ...]] = {
    DTYPE: ("bfloat16", "float16", REFERENCE),
    "engine.read_kernel": ("torch", "triton"),
    "model.compile": (False, True),
    "engine.graphs": (False, True),
    "engine.precision": ("bfloat16", FP8),
}
"""Values of each option, in the order in which they are tried. The first one serves unless another one is faster."""
MIN_GAIN = 0.97
"""Largest part of the time so far that a value may take: less gain is noise, and no reason for a longer start."""
FOLDER, LOSS = "choices", "options are timed again at the next start"

Load = Callable[[Settings], TrackerModel]
"""Loads a tracker that serves as the settings say."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """The values of the options that were tried, by "section.field", a line about each, and the time of a step so.

    ms: None where none was timed.
    """

    values: dict[str, str | bool]
    reasons: tuple[str, ...]
    ms: float | None

    @classmethod
    def load(cls, path: Path | None) -> Self | None:
        """Read a choice; None where there is none, or the file is damaged."""
        data = read_kept(path, LOSS) if path else None
        with suppress(ValidationError):
            return TypeAdapter(cls).validate_json(data or b"")
        return None

    def add(self, name: str, value: str | bool, reason: str, ms: float | None) -> Choice:
        """Return the choice with one more option."""
        return Choice(self.values | {name: value}, (*self.reasons, f"{name} {value}: {reason}"), ms)

    def save(self, path: Path | None) -> None:
        """Keep the choice for the next start."""
        if path:
            keep(path, TypeAdapter(Choice).dump_json(self, indent=2), LOSS)


def choose(settings: Settings, load: Load, clock: Clock = read_clock) -> Settings:
    """Return the settings with a value in the place of each `auto` of OPTIONS; without a GPU, `model.dtype` stays.

    The first start on a GPU loads the tracker once for each value. Raises the errors of `load` where no value can
    serve, and DeviceError where a trial loses the GPU; the next start goes on without that option.
    """
    if not _is_measured(settings):
        return _replace(
            settings, {name: first for name, (first, *_) in _list_open(settings).items() if name != DTYPE}
        )
    choice = _measure(settings, load, clock)
    for reason in choice.reasons:
        _log.info("%s", reason)
    return _replace(settings, choice.values)


def describe(settings: Settings) -> tuple[str, ...]:
    """Say what was chosen and why, a line for each option; nothing where no option is open."""
    if not _is_measured(settings):
        return ()
    choice = Choice.load(find_path(settings))
    return choice.reasons if choice else ("not chosen yet: the first start of the node times the options",)


def find_path(settings: Settings) -> Path | None:
    """Return where the choice for these weights and settings is kept; None if the weights are no local files."""
    engine = settings.engine
    limits = engine.min_cosine, engine.min_iou, engine.max_time
    return find_report(settings, FOLDER, settings.model.dtype, engine.graphs, *limits)


def _list_open(settings: Settings) -> dict[str, tuple[str | bool, ...]]:
    """Return the values of each open setting, by its name."""
    return {name: values for name, values in OPTIONS.items() if attrgetter(name)(settings) == AUTO}


def _is_measured(settings: Settings) -> bool:
    is_torch = settings.engine.kind == "torch"  # engines have kernels of their own, and nothing to compile
    return is_torch and bool(_list_open(settings)) and pick_device(settings.model.device).type == "cuda"


def _replace(settings: Settings, values: Mapping[str, str | bool]) -> Settings:
    """Return the settings with other values, by "section.field"."""
    for name, value in values.items():
        section, _, field = name.partition(".")
        changed = getattr(settings, section).model_copy(update={field: value})
        settings = settings.model_copy(update={section: changed})
    return settings


def _measure(settings: Settings, load: Load, clock: Clock) -> Choice:
    """Try the values of one option after the other, with what was kept before, and keep the fastest."""
    options = _list_open(settings)
    first = _replace(settings, {name: values[0] for name, values in options.items()})
    choice = Choice.load(find_path(settings))
    if choice is None:
        _log.info("the first start on this GPU times its options: this takes some minutes")
        choice = Choice({}, (), None)
    for name, values in options.items():
        if name in choice.values:
            continue
        kept = _replace(first, choice.values)
        if choice.ms is None and name != DTYPE:
            choice = replace(choice, ms=_time_step(load(kept), clock))
        path = find_path(settings)
        # a process that this trial ends must not try it at each start
        tried = ", ".join(map(str, values[1:]))
        choice.add(name, values[0], f"the trial of {tried} did not end", choice.ms).save(path)
        choice = _try_values(choice, name, kept, load, clock)
        choice.save(path or find_path(settings))  # by now the weights are files
    return choice


def _try_values(choice: Choice, name: str, kept: Settings, load: Load, clock: Clock) -> Choice:
    """Time a step with each value of an option, and add the fastest that can serve to the choice."""
    first, *_ = values = OPTIONS[name]
    strict = _replace(kept, {"engine.fallback": False})  # a refusal is a reason, not a slower step
    best, best_ms, said = first, math.inf, list[str]()
    for value in values:
        torch.cuda.empty_cache()
        known = choice.ms if value == first else None
        try:
            ms = _time_value(strict, name, value, load, clock) if known is None else known
        except Exception as error:  # libraries have errors of their own
            if lost := find_device_error(error):
                raise lost from error
            said.append(f"{value} cannot serve here: {summarize_error(error)}")
            continue
        said.append(f"{value} takes {ms:.3g} ms a step")
        if ms < MIN_GAIN * best_ms:
            best, best_ms = value, ms
    return choice.add(name, best, "; ".join(said), best_ms if math.isfinite(best_ms) else None)


def _time_value(settings: Settings, name: str, value: str | bool, load: Load, clock: Clock) -> float:
    """Load the tracker with a value of an option, and time a step. Raises EngineError where the gate refuses it.

    The gate judges kernels and FP8 while they are loaded. Raises the errors of `load`, too.
    """
    if value == FP8:
        load_quantisation(settings.engine)
    model = load(_replace(settings, {name: value}))
    if name == DTYPE and value != REFERENCE:
        _judge(model, settings, by_default=value == OPTIONS[name][0])
    return _time_step(model, clock)


def _judge(model: TrackerModel, settings: Settings, by_default: bool) -> None:
    """Raise EngineError if the gate refuses a model in its dtype.

    One that serves by default may be one that the gate cannot compare.
    """
    try:
        refusal = compare_fast(model.stages, model, settings, clock=None).refusal()
    except Sam3NodeError as error:
        if not by_default:
            raise
        _log.info("%s was not compared with %s: %s", model.dtype, REFERENCE, error)
        return
    if refusal:
        raise EngineError(f"refused by the gate: {refusal}")


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
