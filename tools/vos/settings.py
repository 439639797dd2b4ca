"""Named settings for an evaluation to compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sam3_node.errors import SettingsError
from sam3_node.models.sam.memory_read import METHODS as READS
from sam3_node.settings import TrackerSettings
from sam3_node.tracking.memory import RULES

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
    """Settings of one model, shared by all settings with the same key."""

    dtype: str
    image_size: int
    read: str


@dataclass(frozen=True, slots=True)
class Setting:
    """A method to follow objects, and its options.

    method: default (the tracker with its bank), copy-first (the first true mask on all frames), bank-off (no memory:
    the box of the mask on the previous frame segments each frame, and an empty mask keeps that box), first-only (memory
    of the prompted frame alone).
    """

    name: str = "default"
    method: str = "default"
    prompt: str = "mask"
    dtype: str = "auto"
    bank_size: int = TrackerSettings().bank_size
    selection: str = TrackerSettings().selection
    image_size: int = 0
    read: str = TrackerSettings().read

    @property
    def model(self) -> ModelKey:
        """The key of its model."""
        return ModelKey(self.dtype, self.image_size, self.read)

    @property
    def uses_model(self) -> bool:
        return self.method != "copy-first"


def parse_settings(text: str, base: Setting) -> list[Setting]:
    """Parse comma-separated settings, each `base` with changes joined by +, such as bank=15+select=confident.

    Changes are a method, bank=N, select=RULE, read=METHOD, dtype=TYPE, size=PIXELS or prompt=KIND. Raises SettingsError
    for anything else, and for a setting that occurs twice.
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


def _number(key: str, minimum: int) -> Callable[[str], int]:
    def read(value: str) -> int:
        if not value.isdigit() or int(value) < minimum:
            raise SettingsError(f"{key}={value}: expected a whole number of {minimum} or more")
        return int(value)

    return read


def _choice(key: str, choices: dict[str, str]) -> Callable[[str], str]:
    def read(value: str) -> str:
        if value not in choices:
            raise SettingsError(f"{key}={value}: expected one of {', '.join(choices)}")
        return choices[value]

    return read


_READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "bank": ("bank_size", _number("bank", 2)),
    "select": ("selection", _choice("select", {name: name for name in RULES})),
    "read": ("read", _choice("read", {name: name for name in READS})),
    "size": ("image_size", _number("size", 0)),
    "dtype": ("dtype", _choice("dtype", DTYPES)),
    "prompt": ("prompt", _choice("prompt", {name: name for name in PROMPTS})),
}
