"""Time every combination of the options that settings leave open, and keep the fastest for this machine.

Options help and hurt one another, and what is fastest with 1 object may be slow with 16. So whole combinations are
timed, each on all numbers of objects. `sam3-node tune` runs this; no start does.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from ..errors import EngineError, summarize_error
from ..models import TrackerModel
from ..models.weight_files import pick_device
from ..settings import Settings
from ..tracking import ObjectPrompt, Tracker
from .engine_store import FP8
from .fast_torch import TRITON, keep_launch
from .oom import find_device_error
from .options import (
    COMPILE,
    DTYPE,
    GRAPHS,
    KERNEL,
    PRECISION,
    Trial,
    Tuning,
    Values,
    find_defaults,
    find_path,
    list_open,
    replace_values,
)
from .validation import Clock, read_clock

MIN_GAIN = 0.97
"""Share of the best time so far that a combination may take. A smaller gain is noise."""
FILL_FRAMES = 18
"""Frames that are tracked before timing starts, so that banks are full: 16 pointers, the prompted frame and one
more."""
TIMED_FRAMES = 12
"""Frames that are timed after that. Their median counts."""
ENDED = "the trial ended the process"

_log = logging.getLogger(__name__)

Load = Callable[[Settings], TrackerModel]
"""Loads a tracker that serves as the settings say."""
Report = Callable[[str, int, int], None]
"""Shows the progress: the task, trials that are done, and their number."""


def tune(
    settings: Settings,
    load: Load,
    objects: Sequence[int],
    report: Report | None = None,
    clock: Clock = read_clock,
) -> Tuning:
    """Time all combinations of the open options, keep the result for starts to come, and return it.

    Trials of an earlier call that was stopped are not made again. Raises EngineError where no option is open, or no
    combination can serve, and DeviceError where a trial has lost the GPU: the next call goes on after it.
    """
    combinations = list(list_combinations(settings))
    if len(combinations) < 2:
        raise EngineError(
            "tune: expected settings that leave an option open, found none of model.dtype, model.compile, "
            "engine.read_kernel, engine.graphs and engine.precision at auto, or engine.kind is not torch; leave one out"
        )
    path = find_path(settings)
    # starts go on with what an earlier tuning has found until this one has ended
    part = find_part(path)
    tuning = Tuning.load(part)
    # a tuning that was stopped goes on, unless it was for other numbers of objects
    if tuning is None or tuning.objects != tuple(objects):
        tuning = Tuning(tuple(objects), ())
    # before the trials, so that each of them runs the fastest launch
    if any(values.get(KERNEL) == TRITON for values in combinations):
        _keep_launch(settings)

    # a trial that ends the process is marked before it begins, so that the next call goes on after it
    for number, values in enumerate(combinations):
        if report is not None:
            report(f"{number + 1}. {_shorten(values)}", number, len(combinations))
        if number < len(tuning.trials):
            continue
        before = tuning.trials
        replace(tuning, trials=(*before, Trial(values, refused=ENDED))).save(part)
        try:
            trial = _try(settings, values, load, objects, clock)
        except KeyboardInterrupt:
            # the user has ended the trial, not the trial the process
            tuning.save(part)
            raise
        tuning = replace(tuning, trials=(*before, trial))
        tuning.save(part)
    tuning = replace(tuning, best=find_best(tuning.trials), date=datetime.now(UTC).strftime("%Y-%m-%d"))
    tuning.save(path or find_path(settings))  # by now the weights are files
    if part is not None:
        part.unlink(missing_ok=True)
    return tuning


def find_part(path: Path | None) -> Path | None:
    """Return where the trials of a tuning that has not ended are kept, beside the finished tuning."""
    return None if path is None else path.with_suffix(".part.json")


def _keep_launch(settings: Settings) -> None:
    """Find the fastest launch of the read's attention. Where none runs, trials say why the kernels cannot serve."""
    try:
        keep_launch(pick_device(settings.model.device), settings.engine.folder)
    except Exception as error:  # triton has errors of its own
        if lost := find_device_error(error):
            raise lost from error
        _log.warning("the kernels' launches cannot be timed: %s", summarize_error(error))


def list_combinations(settings: Settings) -> Iterator[Values]:
    """Yield the combinations to try, the simplest first: the defaults' values of all other options stay."""
    device = pick_device(settings.model.device)
    defaults = find_defaults(device)
    is_open = list_open(settings)
    # on a CPU the accuracy check chooses the dtype
    choices: dict[str, tuple[str | bool, ...]] = {COMPILE: (False, True)}
    if device.type == "cuda":
        dtype = defaults[DTYPE] if DTYPE in is_open else settings.model.dtype
        has_triton = importlib.util.find_spec(TRITON) is not None
        kernels = dtype != "float32" and torch.version.hip is None and has_triton
        choices |= {
            DTYPE: (defaults[DTYPE],),
            GRAPHS: (True, False),
            KERNEL: (TRITON, "torch") if kernels else ("torch",),
            PRECISION: ("bfloat16", FP8) if settings.engine.scales else ("bfloat16",),
        }
    if settings.engine.kind != "torch":
        return
    tried = {name: values for name, values in choices.items() if name in is_open}
    for values in itertools.product(*tried.values()):
        combination = dict(zip(tried, values, strict=True))
        compiles = combination.get(COMPILE, settings.model.compile)
        kernel = combination.get(KERNEL, settings.engine.read_kernel)
        # a compiler or our kernel joins the steps of rounding: without, FP8 moves three times the memory of bfloat16
        if combination.get(PRECISION) != FP8 or compiles is True or kernel == TRITON:
            yield combination


def find_best(trials: Sequence[Trial]) -> int:
    """Return the index of the trial whose times have the least geometric mean; an earlier one unless the gain is clear.

    Raises EngineError where none could serve.
    """
    best = -1
    best_ms = math.inf
    for index, trial in enumerate(trials):
        if trial.refused or not trial.ms:
            continue
        mean_ms = statistics.geometric_mean(trial.ms.values())
        if mean_ms < MIN_GAIN * best_ms:
            best = index
            best_ms = mean_ms
    if best < 0:
        reasons = "; ".join(dict.fromkeys(trial.refused for trial in trials))
        raise EngineError(f"tune: expected one combination that can serve, found none: {reasons}")
    return best


def list_rows(tuning: Tuning) -> list[tuple[str, ...]]:
    """Return the rows of a table: options, milliseconds by number of objects, seconds of the trial, and a mark."""
    names = list(dict.fromkeys(name for trial in tuning.trials for name in trial.values))
    header = (*names, *(f"{count} objects" for count in tuning.objects), "trial", "")
    rows = [header]
    for number, trial in enumerate(tuning.trials):
        values = [str(trial.values.get(name, "")).lower() for name in names]
        times = [f"{trial.ms[count]:.1f} ms" if count in trial.ms else "-" for count in tuning.objects]
        mark = "serves from now on" if number == tuning.best else trial.refused
        rows.append((*values, *times, f"{trial.seconds:.0f} s", mark))
    return rows


def _try(settings: Settings, values: Values, load: Load, objects: Sequence[int], clock: Clock) -> Trial:
    """Load the tracker with a combination, and time a step for each number of objects."""
    begin_s = time.monotonic()
    # a refusal of the accuracy check is a reason here, not a reason to serve something slower
    strict = replace_values(settings, values | {"engine.fallback": False})
    # what earlier trials hold and have compiled must not count against this one
    gc.collect()
    if pick_device(settings.model.device).type == "cuda":
        torch.cuda.empty_cache()
    torch._dynamo.reset()
    times: dict[int, float] = {}
    try:
        model = load(strict)
        for count in objects:
            times[count] = time_step(model, count, clock)
    except Exception as error:  # libraries have errors of their own
        # on a lost device every further trial would fail
        if lost := find_device_error(error):
            raise lost from error
        return Trial(values, refused=summarize_error(error), seconds=time.monotonic() - begin_s)
    return Trial(values, times, seconds=time.monotonic() - begin_s)


@torch.inference_mode()
def time_step(model: TrackerModel, objects: int, clock: Clock = read_clock) -> float:
    """Return the median milliseconds of a step with this number of objects and full banks, on random pixels."""
    side = model.image_size
    generator = torch.Generator().manual_seed(0)
    clip = [torch.randn(1, 3, side, side, generator=generator).to(model.device) for _ in range(4)]
    tracker = Tracker(model, max_objects=objects)
    points = [(side * (0.2 + 0.6 * number / objects), side * 0.5) for number in range(objects)]
    prompts = [ObjectPrompt(number, points=[point]) for number, point in enumerate(points)]
    times = []
    for number in range(FILL_FRAMES + TIMED_FRAMES):
        begin_s = clock(model.device)
        tracker.step(clip[number % len(clip)], prompts if number == 0 else ())
        times.append(clock(model.device) - begin_s)
    return 1e3 * statistics.median(times[FILL_FRAMES:])


def _shorten(values: Values) -> str:
    """Name a combination without its sections: "dtype bfloat16, compile, no graphs"."""
    words = []
    for name, value in values.items():
        field_name = name.partition(".")[2]
        if isinstance(value, bool):
            words.append(field_name if value else f"no {field_name}")
        else:
            words.append(f"{field_name} {value}")
    return ", ".join(words)
