"""Named settings that an evaluation compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sam3_node.errors import SettingsError
from sam3_node.settings import TrackerSettings
from sam3_node.tracking.selection import RULES

METHODS = ("default", "copy-first", "bank-off", "first-only")
PROMPTS = ("mask", "box", "point")
DTYPES = {
    "auto": "auto",
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
}
COMPARED = "default,copy-first,bank-off,first-only,bank=3,bank=15+select=confident,prompt=box,prompt=point"


class ModelKey(NamedTuple):
    """Settings of one model: the same for all that share it."""

    dtype: str
    image_size: int


@dataclass(frozen=True, slots=True)
class Setting:
    """How objects are followed.

    method: default (the tracker with its bank), copy-first (the true first mask again and again), bank-off (no memory:
    each frame is segmented by the box of the mask on the frame before, an empty mask leaving the box where it was),
    first-only (memory of the prompted frame alone).
    """

    name: str = "default"
    method: str = "default"
    prompt: str = "mask"
    dtype: str = "auto"
    bank_size: int = TrackerSettings().bank_size
    selection: str = TrackerSettings().selection
    image_size: int = 0

    @property
    def model(self) -> ModelKey:
        """What its model is to be loaded with."""
        return ModelKey(self.dtype, self.image_size)

    @property
    def uses_model(self) -> bool:
        return self.method != "copy-first"


def parse_settings(text: str, base: Setting) -> list[Setting]:
    """Settings with commas between, each `base` with changes joined by +, such as bank=15+select=confident.

    Changes are a method, bank=N, select=RULE, dtype=TYPE, size=PIXELS or prompt=KIND. SettingsError for what is none of
    these, and for a setting that is there twice.
    """
    settings = [_parse(name.strip(), base) for name in text.split(",")]
    names = [setting.name for setting in settings]
    if len(set(names)) < len(names):
        raise SettingsError(f"settings: expected each once, found {', '.join(names)}")
    return settings


def _parse(name: str, base: Setting) -> Setting:
    changes: dict[str, Any] = {"name": name}
    for part in name.split("+"):
        key, equals, value = part.partition("=")
        if not equals and part in METHODS:
            changes["method"] = part
        elif equals and key in _READERS:
            field, read = _READERS[key]
            changes[field] = read(value)
        else:
            raise SettingsError(
                f"setting {part!r}: expected one of {', '.join(METHODS)}, or {', '.join(f'{k}=…' for k in _READERS)}"
            )
    return replace(base, **changes)


def _number(key: str, least: int) -> Callable[[str], int]:
    def read(value: str) -> int:
        if not value.isdigit() or int(value) < least:
            raise SettingsError(f"{key}={value}: expected a whole number of {least} or more")
        return int(value)

    return read


def _one_of(key: str, known: dict[str, str]) -> Callable[[str], str]:
    def read(value: str) -> str:
        if value not in known:
            raise SettingsError(f"{key}={value}: expected one of {', '.join(known)}")
        return known[value]

    return read


_READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "bank": ("bank_size", _number("bank", 2)),
    "select": ("selection", _one_of("select", {name: name for name in RULES})),
    "size": ("image_size", _number("size", 0)),
    "dtype": ("dtype", _one_of("dtype", DTYPES)),
    "prompt": ("prompt", _one_of("prompt", {name: name for name in PROMPTS})),
}
