"""Fill in the options that settings leave open: by what `sam3-node tune` has measured here, else by defaults.

Nothing is timed and nothing is compiled here, so a start takes seconds. `find_defaults` has the defaults. They come
from an H100 with SAM 3 at 1008 pixels (docs/engines.md has the figures): CUDA graphs save 2 to 8 ms a step and take
seconds to capture, while compiling saves 2 to 6 ms more and takes minutes at the first start.

`engine.read_kernel auto` stays open here: `fast_torch.serve_kernels` decides by the size of the model.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Self

import torch
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from ..files import keep, read_kept
from ..models.weight_files import pick_device
from ..settings import Settings
from .fast_torch import AMPERE, find_report

AUTO = "auto"
Values = dict[str, str | bool]
"""Values of settings, by "section.field"."""

DTYPE = "model.dtype"
KERNEL = "engine.read_kernel"
COMPILE = "model.compile"
GRAPHS = "engine.graphs"
PRECISION = "engine.precision"
OPTIONS = (DTYPE, KERNEL, COMPILE, GRAPHS, PRECISION)

OF_ENGINES: Values = {KERNEL: "torch", COMPILE: False, GRAPHS: False, PRECISION: "bfloat16"}
"""Values of open options with engines, which have kernels of their own and nothing to compile."""
FOLDER = "tuned"
LOSS = "tune again"

_log = logging.getLogger(__name__)


def _check_names(values: Values) -> Values:
    """Raise ValueError for what is no option of OPTIONS."""
    if unknown := sorted(set(values) - set(OPTIONS)):
        raise ValueError(f"expected some of {', '.join(OPTIONS)}, found {', '.join(unknown)!s:.80}")
    return values


@dataclass(frozen=True, slots=True)
class Trial:
    """What one combination of options takes."""

    values: Annotated[Values, AfterValidator(_check_names)]
    ms: dict[int, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = field(default_factory=dict)
    """Median milliseconds of a step, by the number of objects"""
    refused: str = ""
    """Why it cannot serve"""
    seconds: float = 0.0
    """Time of the trial, with all that was compiled"""

    def describe(self) -> str:
        """Return the times in one line: "16.2, 22.1 and 38.0 ms with 1, 4 and 16 objects"."""
        times = [f"{ms:.1f}" for ms in self.ms.values()]
        return f"{_join(times)} ms with {_join(list(map(str, self.ms)))} objects"


@dataclass(frozen=True, slots=True)
class Tuning:
    """The trials of `sam3-node tune` on one machine with one model."""

    objects: tuple[int, ...]
    trials: tuple[Trial, ...]
    best: int | None = None
    """Index of the trial that serves; None while trials are still to come"""
    date: str = ""

    @classmethod
    def load(cls, path: Path | None) -> Self | None:
        """Read a tuning; None where there is none, or the file is damaged."""
        data = read_kept(path, LOSS) if path else None
        try:
            # no file is an empty text, which does not validate
            tuning = TypeAdapter(cls).validate_json(data or b"")
        except ValidationError:
            return None
        is_known = tuning.best is None or 0 <= tuning.best < len(tuning.trials)
        return tuning if is_known else None

    def save(self, path: Path | None) -> None:
        """Keep the tuning for starts to come."""
        if path is not None:
            keep(path, TypeAdapter(Tuning).dump_json(self, indent=2), LOSS)


def resolve(settings: Settings) -> Settings:
    """Return the settings with a value for each open option, and log in one line where they come from.

    On a CPU `model.dtype` stays open, and everywhere `engine.read_kernel`.
    """
    if settings.engine.kind != "torch":
        return replace_values(settings, _only_open(settings, OF_ENGINES))
    if not list_open(settings):
        return settings
    tuning = find_tuning(settings)
    for line in describe(settings, tuning):
        _log.info("%s", line)
    values = find_defaults(_device(settings))
    # a tuning has the options that were open when it ran; the defaults fill in the others
    if tuning is not None and tuning.best is not None:
        values |= tuning.trials[tuning.best].values
    return replace_values(settings, _only_open(settings, values))


def find_tuning(settings: Settings) -> Tuning | None:
    """Return what `sam3-node tune` has kept for these weights and settings on this machine."""
    # the path depends on a digest of the weights, which takes seconds
    if not (settings.engine.folder.expanduser() / FOLDER).is_dir():
        return None
    return Tuning.load(find_path(settings))


def describe(settings: Settings, tuning: Tuning | None) -> tuple[str, ...]:
    """Say which options serve and why, in one line; nothing on a CPU that nobody has tuned for.

    tuning: what `find_tuning` returns.
    """
    if settings.engine.kind != "torch" or not list_open(settings):
        return ()
    if tuning is not None and tuning.best is not None:
        best = tuning.trials[tuning.best]
        return (f"options tuned on {tuning.date}: {name_values(best.values)}; {best.describe()}",)
    if _device(settings).type == "cpu":
        return ()
    values = _only_open(settings, find_defaults(_device(settings)))
    if not values:
        return ()
    return (
        f"default options: {name_values(values)}; `sam3-node tune` looks for faster ones, in some minutes",
    )


def find_defaults(device: torch.device) -> Values:
    """Return the defaults of a device."""
    values: Values = {COMPILE: False, GRAPHS: False, PRECISION: "bfloat16"}
    if device.type != "cuda":
        return (
            values  # the accuracy check chooses the dtype of a CPU: see `fast_torch.load_by_accuracy_check`
        )
    if torch.version.hip is not None:
        # AMD GPUs: nothing is measured
        return values | {DTYPE: "bfloat16" if torch.cuda.is_bf16_supported(False) else "float32"}
    if torch.cuda.get_device_capability(device) >= AMPERE:
        return values | {DTYPE: "bfloat16", GRAPHS: True}
    # no units for bfloat16, and nobody has checked float16
    return values | {DTYPE: "float32", GRAPHS: True}


def list_open(settings: Settings) -> tuple[str, ...]:
    """Return the options that the settings leave open."""
    return tuple(name for name in OPTIONS if attrgetter(name)(settings) == AUTO)


def find_path(settings: Settings) -> Path | None:
    """Return where the tuning for these weights and settings is kept; None if the weights are no local files."""
    # `find_report` itself adds the other options to the key
    return find_report(settings, FOLDER, settings.model.dtype, settings.engine.graphs)


def replace_values(settings: Settings, values: Mapping[str, str | bool]) -> Settings:
    """Return the settings with other values of options."""
    for name, value in values.items():
        section, _, field_name = name.partition(".")
        changed = getattr(settings, section).model_copy(update={field_name: value})
        settings = settings.model_copy(update={section: changed})
    return settings


def name_values(values: Mapping[str, str | bool]) -> str:
    """Name options as a command line does: "model.dtype bfloat16, engine.graphs true"."""
    return ", ".join(f"{name} {str(value).lower()}" for name, value in values.items())


def _device(settings: Settings) -> torch.device:
    return pick_device(settings.model.device)


def _only_open(settings: Settings, values: Values) -> Values:
    is_open = list_open(settings)
    return {name: value for name, value in values.items() if name in is_open}


def _join(words: list[str]) -> str:
    """Join words as in a sentence: "1, 4 and 16"."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
