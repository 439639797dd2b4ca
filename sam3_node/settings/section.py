"""The base of the sections of the settings tree."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic.fields import FieldInfo

_WARNED_NAMES: set[str] = set()
_log = logging.getLogger(__name__)


def join_path(folder: Path | None, text: str) -> str:
    """Return a path with ~ as the home folder; a relative one of a profile starts at its `folder`. Empty stays so."""
    path = os.path.expanduser(text)
    return path if folder is None or not text else str(folder / path)


def _join_weights(folder: Path | None, text: str) -> str:
    """Resolve ./weights, ../weights and ~/weights of a profile. Others are names, or whole paths."""
    return join_path(folder, text) if text.startswith(("./", "../", "~")) else text


def _join_source(folder: Path | None, text: str) -> str:
    """Resolve the path in the source of a camera. A name of a device stays."""
    scheme, _, path = text.partition(":")
    is_file = scheme in ("bag", "video", "images") or (
        scheme == "realsense" and path.endswith((".db3", ".bag"))
    )
    return f"{scheme}:{join_path(folder, path)}" if is_file else text


@dataclass(frozen=True, slots=True)
class InProfile:
    """Marks a field that holds paths. `join` returns one in full: (folder of the profile or None, text)."""

    join: Callable[[Path | None, str], str] = join_path


ProfilePath = Annotated[Path, InProfile()]
"""A path. In a profile, a relative one starts at the folder of the profile; elsewhere, at the working directory."""
OptionalProfilePath = Annotated[Path | None, BeforeValidator(lambda value: value or None), InProfile()]
"""The same; an empty text is None."""
WeightsName = Annotated[str, InProfile(_join_weights)]
"""A name of weights, or a path to them."""
SourceName = Annotated[str, InProfile(_join_source)]
"""A source of a camera, such as bag:FILE."""


class Section(BaseModel):
    """One section of the tree. A renamed field accepts its old name as an alias, see `renamed`."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, validate_default=True, frozen=True
    )
    renamed: ClassVar[Mapping[str, str]] = {}
    """Maps the old name of each renamed field to its present name."""

    @model_validator(mode="before")
    @classmethod
    def _accept_old_names(cls, fields: object) -> object:
        return cls.with_current_names(fields) if isinstance(fields, Mapping) else fields

    @classmethod
    def with_current_names(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields under their current names. Log a warning once for each old name."""
        for old in fields.keys() & cls.renamed.keys() - _WARNED_NAMES:
            _WARNED_NAMES.add(old)
            _log.warning("setting %r was renamed: use %r", old, cls.renamed[old])
        return {cls.renamed.get(name, name): value for name, value in fields.items()}

    @classmethod
    def with_full_paths(cls, fields: object, folder: Path | None) -> object:
        """Return the fields as a layer gives them, with their paths in full; `folder` is that of a profile."""
        if not isinstance(fields, Mapping):
            return fields
        return {
            name: _complete(value, cls.model_fields[name], folder) if name in cls.model_fields else value
            for name, value in fields.items()
        }


def _complete(value: object, field: FieldInfo, folder: Path | None) -> object:
    for kind in (*field.metadata, *_list_kinds(field.annotation)):
        if isinstance(kind, InProfile):
            if isinstance(value, str) and get_origin(field.annotation) is tuple:
                value = [item for item in value.split(",") if item]
            return _map_texts(value, partial(kind.join, folder))
        if isinstance(kind, type) and issubclass(kind, Section):
            return (
                [kind.with_full_paths(item, folder) for item in value] if isinstance(value, list) else value
            )
    return value


def _list_kinds(annotation: object) -> Iterator[object]:
    """Yield a type, and the types and markers inside it."""
    yield annotation
    for inner in get_args(annotation):
        yield from _list_kinds(inner)


def _map_texts(value: object, change: Callable[[str], str]) -> object:
    """Apply a function to a text or path, or to each one in a list or map. Other values stay, to be refused later."""
    if isinstance(value, str | Path):
        return change(str(value))
    if isinstance(value, list | tuple):
        return [_map_texts(item, change) for item in value]
    if isinstance(value, Mapping):
        return {name: _map_texts(item, change) for name, item in value.items()}
    return value
