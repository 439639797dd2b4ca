"""The base of the sections of the settings tree."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

_WARNED_NAMES: set[str] = set()
_log = logging.getLogger(__name__)


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
